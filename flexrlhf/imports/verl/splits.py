"""Split of the models of a verl job over ranks: engine, shards, tensor and pipeline parallelism, sequences, experts."""

from __future__ import annotations

import math

from flexrlhf.imports import device_parts, model_parts, parts
from flexrlhf.imports.settings import JobSettings, Setting, is_true
from flexrlhf.imports.translation import Translation

_A, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
TYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float32": "float32",
}
_OTHER_ENGINES = ("veomni", "torchtitan", "automodel", "mlite", "turbo")


def put_engine(out: Translation, job: JobSettings) -> str:
    """Write the engine of all models and return it."""
    keys = ("model_engine", "engine", f"{_A}strategy", f"{_A}fsdp_config.strategy", "config-name")
    words = [each for key in keys if (each := job.get(key)) is not None]
    other = next((each for each in words if any(name in str(each.value) for name in _OTHER_ENGINES)), None)
    source = next((each for each in words if "megatron" in str(each.value)), None)
    if other is not None:
        out.drop(other, "an engine that is not here; torch with shards stands for it")
    elif source is not None or any(".megatron.tensor_model" in key or ".megatron.pipeline" in key for key in job.found):
        if model_parts.has_experts(out):
            out.drop(source or Setting("actor.megatron", "settings"), model_parts.NO_MEGATRON)
            return "torch"
        out.put("models.all.engine", "megatron", source or "settings of actor.megatron")
        out.put("models.all.zero", 1, "use_distributed_optimizer (verl's default)")
        out.put("models.all.dtype", "bfloat16", "Megatron's type in verl")
        return "megatron"
    return "torch"


def put_splits(out: Translation, job: JobSettings, engine: str, prefix: str) -> None:
    """Write how the actor, or the model of an SFT, is split, and its adapters."""
    recomputes = job.truth(f"{_M}enable_gradient_checkpointing", "model.enable_gradient_checkpointing")
    if engine == "megatron":
        for name, own in model_parts.SPLITS.items():
            out.put_same(f"models.all.{name}", job.count(f"{prefix}megatron.{own}", f"{prefix}{own}"))
        granularity = job.get(f"{prefix}megatron.override_transformer_config.recompute_granularity")
        recomputes = granularity if granularity is not None and granularity.value == "full" else None
        if recomputes is None:
            out.drop(granularity, "activations of whole layers are computed again")
    else:
        out.put("models.all.engine", "torch", "FSDP")
        reshards = job.get(f"{prefix}fsdp_config.reshard_after_forward")
        shard = job.real(f"{prefix}fsdp_config.fsdp_size")
        stays = reshards is not None and not is_true(reshards.value)
        out.put("models.all.zero", 2 if stays else 3, reshards if stays else "FSDP shards parameters")
        _types(out, job, prefix)
        if shard is not None and 0 < shard.value < device_parts.num_devices(out):
            if shard.value == out.value("cluster.nodes")[0]["devices"]:
                out.put("models.all.shard", "node", shard)
            else:
                out.drop(shard, "shards are over all devices of a model or of a node")
        _split_sequences(out, job, prefix)
        _experts(out, job, prefix)
    parts.put_recomputation(out, recomputes, "no recompute_granularity" if engine == "megatron" else "it is false")
    if engine != "megatron":
        put_saved_activations(out, job, "actor", _M, "model.")
    names = [(f"{_M}{key}", f"model.{key}") for key in ("lora_rank", "lora.rank", "lora_alpha", "lora.alpha")]
    targets = job.listed(f"{_M}target_modules", "model.target_modules", f"{_M}lora.target_modules")
    rank = job.count(f"{prefix}lora_rank", *names[0]) or job.count(*names[1])
    excluded = job.listed(f"{_M}exclude_modules", "model.exclude_modules", f"{_M}lora.exclude_modules")
    model_parts.put_lora(out, "actor", rank, job.number(*names[2], *names[3]), targets, excluded)


def _types(out: Translation, job: JobSettings, prefix: str) -> None:
    """Write the type of passes; weights that are trained have 32 bits."""
    kept = job.get(f"{prefix}fsdp_config.model_dtype", f"{prefix}model_dtype")
    used = job.get(f"{prefix}fsdp_config.dtype", f"{prefix}fsdp_config.mixed_precision.param_dtype", f"{prefix}dtype")
    name = TYPES.get("bf16" if used is None else str(used.value))
    if name is None:
        out.drop(used, "types are bfloat16, float16 and float32")
    out.put("models.all.dtype", name or "bfloat16", used if name else None, "FSDP's mixed precision")
    is_same = kept is None or TYPES.get(str(kept.value)) == "float32"
    out.drop(kept, "weights that are trained have 32 bits", matters=not is_same)


def _experts(out: Translation, job: JobSettings, prefix: str) -> None:
    """Write the ranks that share experts, and the losses of routers; Megatron's other splits are listed."""
    sections = [f"{prefix}{each}" for each in ("megatron.", "veomni.", "", "fsdp_config.")]
    sizes = ("expert_model_parallel_size", "expert_parallel_size", "ep_size")
    model_parts.put_expert_ranks(out, job.count(*(section + size for section in sections for size in sizes)))
    references = (f"actor_rollout_ref.ref.{section}expert_" for section in ("megatron.", "veomni.", ""))
    job.pass_over("the reference is split as the actor is", *references)
    for section in sections[::2]:
        model_parts.put_megatron_losses(out, job, f"{section}override_transformer_config.")
        for own in model_parts.SPLITS.values() if model_parts.has_experts(out) else ():
            size = job.count(section + own)
            if size is not None and size.value > 1:
                out.drop(size, model_parts.NO_SPLIT)


def put_saved_activations(out: Translation, job: JobSettings, role: str, *prefixes: str) -> None:
    """Write activations of a role in host memory, and MLPs in tiles, which the reference has with the actor."""
    parts.put_offloaded_activations(
        out, job.truth(*(f"{prefix}enable_activation_offload" for prefix in prefixes)), role
    )
    tiles = [f"{prefix}tiled_mlp." for prefix in prefixes]
    if (tiled := job.truth(*(f"{prefix}enabled" for prefix in tiles))) is not None:
        out.put(f"models.{role}.tiled_mlp", True, tiled)
        shards = job.get(*(f"{prefix}num_shards" for prefix in tiles))
        out.drop(shards, "a tile has about as many tokens as the model has hidden features")


def _split_sequences(out: Translation, job: JobSettings, prefix: str) -> None:
    """Write ranks that share a sequence as context-parallel ones, as far as heads and the ranks of a node divide."""
    key, known = "ulysses_sequence_parallel_size", out.known_model("actor")
    setting, per_node = job.count(prefix + key, key), job.count("--nproc_per_node", "trainer.n_gpus_per_node")
    if setting is None:
        return
    heads = setting.value if known is None else known.config.get("num_attention_heads", setting.value)
    size = math.gcd(setting.value, heads, per_node.value if per_node else 8)
    if size > 1:
        out.put("models.all.cp", size, setting)
        out.put("models.all.context_parallel", "ulysses", setting)
        job.pass_over("other roles are split as the actor is", f"actor_rollout_ref.ref.{key}", f"critic.{key}")
    elif setting.value > 1:
        job.read.discard(setting.key)


def put_other_roles(out: Translation, job: JobSettings, engine: str) -> None:
    """Write settings in which the reference and the critic differ from the actor."""
    roles = {
        "ref": ("actor_rollout_ref.ref.", "algorithm.kl.place" in out.lines),
        "critic": ("critic.", out.value("algorithm.name") == "ppo"),
    }
    for role, (prefix, is_there) in roles.items():
        sizes = {key: job.count(f"{prefix}megatron.{own}") for key, own in model_parts.SPLITS.items()}
        for key, size in sizes.items() if is_there and engine == "megatron" else ():
            if size is not None and size.value != out.value(f"models.all.{key}"):
                out.put(f"models.{role}.{key}", size.value, size)
        job.pass_over("as of all models", *(f"{prefix}megatron.{own}" for own in model_parts.SPLITS.values()))
        if not is_there:
            job.pass_over(f"there is no {role}", prefix)
