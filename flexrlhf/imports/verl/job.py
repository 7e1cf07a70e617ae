"""Jobs of verl: Hydra's overrides of ``main_ppo`` and of the SFT trainer, on a command line or in a YAML."""

from __future__ import annotations

from typing import Any

from flexrlhf.errors import UserError
from flexrlhf.imports.device_parts import num_devices, put_apart, put_cache, put_cluster, ranks_of
from flexrlhf.imports.parts import (
    mini_batches,
    put_data,
    put_lengths,
    put_lora,
    put_model,
    put_optimizer,
    put_recomputation,
    split_length,
)
from flexrlhf.imports.settings import JobSettings, Setting
from flexrlhf.imports.translation import DOT, Translation
from flexrlhf.imports.verl.algorithm import put_algorithm, put_scores
from flexrlhf.imports.verl.reasons import REASONS
from flexrlhf.placement.devices import GPUS_PER_NODE

TITLE = "verl"
_A, _R, _F = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{_A}ppo_mini_batch_size": 256,
    f"{_A}ppo_max_token_len_per_gpu": 16384,
    f"{_R}n": 1,
    f"{_R}tensor_model_parallel_size": 2,
    f"{_R}gpu_memory_utilization": 0.5,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "critic.model.enable_gradient_checkpointing": True,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
"""Of ``verl/trainer/config/_generated_ppo_trainer.yaml``; the algorithm has its own by ``like: verl``."""
SFT_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "data.max_token_len_per_gpu": 8192,
    "data.use_dynamic_bsz": True,
    "model.enable_gradient_checkpointing": True,
}
_OPTIMIZER = {
    "learning_rate": ("optim.lr",),
    "weight_decay": ("optim.weight_decay",),
    "betas": ("optim.betas",),
    "schedule": ("optim.lr_scheduler_type", "optim.warmup_style", "optim.lr_decay_style"),
    "warmup_steps": ("optim.lr_warmup_steps",),
    "warmup_ratio": ("optim.lr_warmup_steps_ratio",),
    "final_ratio": ("optim.min_lr_ratio",),
    "max_grad_norm": ("grad_clip", "optim.clip_grad"),
}
_OTHER_ENGINES = ("veomni", "torchtitan", "automodel", "mlite", "turbo")


def translate(out: Translation, job: JobSettings, program: str, device_class: tuple[str, str] | None) -> None:
    """Translate a job. ``program``: the module that it starts, or ``sft``. Raises UserError for one without any
    counterpart."""
    if program == "sft":
        _sft(out, job, device_class)
    else:
        _reinforced(out, job, program, device_class)
    out.finish(job, REASONS)


def _reinforced(out: Translation, job: JobSettings, program: str, device_class: tuple[str, str] | None) -> None:
    job.defaults = DEFAULTS
    if job.truth("distillation.enabled") is not None:
        raise UserError(f"{out.file}: distillation from a teacher (distillation.enabled) has no counterpart")
    _steps(out, job)
    samples = put_algorithm(out, job)
    prompts = _batch(out, job, program)
    prompt, response = put_lengths(out, job.count("data.max_prompt_length"), job.count("data.max_response_length"))
    path = _model(out, job, "actor_rollout_ref.model.path", "actor")
    _critic(out, job, path)
    put_data(out, job.listed("data.train_files"), "data/train.parquet")
    keys = {key: tuple(_A + each for each in own) for key, own in _OPTIMIZER.items()}
    put_optimizer(out, job, "actor", keys, _updates(out))
    _long_prompts(out, job)
    put_scores(out, job)
    engine = _engine(out, job, program)
    _devices(out, job, program, device_class)
    _parallel(out, job, engine, _A, "actor", prompt + response)
    _of_roles(out, job, engine)
    _rollout(out, job, prompts * samples, prompt + response)


def _long_prompts(out: Translation, job: JobSettings) -> None:
    leaves_out, cut = job.truth("data.filter_overlong_prompts"), job.get("data.truncation")
    if leaves_out is not None:
        out.put("data.long_prompts", "drop", leaves_out)
    elif cut is not None and cut.value in ("left", "right"):
        out.put("data.long_prompts", f"truncate-{cut.value}", cut)


def _updates(out: Translation) -> int:
    """Return the optimizer steps of a step."""
    return (out.value("algorithm.num_mini_batches") or 1) * (out.value("algorithm.epochs") or 1)


def _steps(out: Translation, job: JobSettings) -> None:
    steps, epochs = job.count("trainer.total_training_steps"), job.get("trainer.total_epochs")
    if steps is not None:
        out.put("steps", steps.value, steps)
        out.drop(epochs, f"{steps.key} ends the run", matters=False)
    else:
        out.drop(epochs, "epochs over data whose size is not in the file: write steps", matters=False)


def _batch(out: Translation, job: JobSettings, program: str) -> int:
    """Write the prompts of a step and its mini-batches; return the prompts."""
    size, epochs = job.count(f"{_A}ppo_mini_batch_size"), job.count(f"{_A}ppo_epochs")
    if epochs is not None:
        out.put("algorithm.epochs", epochs.value, epochs)
    batches = job.count("async_training.require_batches")
    if "fully_async" in program and size is not None:
        number = 1 if batches is None else batches.value
        out.put("algorithm.prompts_per_step", size.value * number, size, batches)
        out.put("algorithm.num_mini_batches", number, batches)
        whole = job.count("rollout.total_rollout_steps")
        if whole is not None and "steps" not in out.lines:
            out.put("steps", max(1, whole.value // (size.value * number)), whole, "over the prompts of a step")
        job.read |= {"data.train_batch_size", "data.gen_batch_size"}
        return int(size.value * number)
    prompts = job.count("data.train_batch_size")
    if prompts is None:
        return 1024
    out.put("algorithm.prompts_per_step", prompts.value, prompts)
    mini_batches(out, prompts, size)
    return int(prompts.value)


def _model(out: Translation, job: JobSettings, key: str, role: str) -> Setting:
    setting = job.named(key)
    if setting is None:
        missing = ", ".join(job.unresolved[key].missing) if key in job.unresolved else ""
        where = f"its value {missing} is not in the file: give it by --var" if missing else "the file has none"
        raise UserError(f"{out.file}: {key}: a job needs a model, and {where}")
    put_model(out, role, setting)
    trust = job.truth("actor_rollout_ref.model.trust_remote_code", "model.trust_remote_code")
    if trust is not None and f"models.{role}.path" in out.lines:
        out.put(f"models.{role}.trust_remote_code", True, trust)
    return setting


def _critic(out: Translation, job: JobSettings, actor: Setting) -> None:
    if out.value("algorithm.name") != "ppo":
        return
    path = job.named("critic.model.path")
    put_model(out, "critic", actor if path is None else path)
    keys = {key: tuple(f"critic.{each}" for each in own) for key, own in _OPTIMIZER.items()}
    put_optimizer(out, job, "critic", keys, _updates(out))
    rank, alpha = job.number("critic.model.lora_rank"), job.number("critic.model.lora_alpha")
    put_lora(out, "critic", rank, alpha, job.listed("critic.model.target_modules"))


def _engine(out: Translation, job: JobSettings, program: str) -> str:
    """Write the engine of all models and return it."""
    named = [
        job.get(key) for key in ("model_engine", "engine", f"{_A}strategy", f"{_A}fsdp_config.strategy", "config-name")
    ]
    words = [each for each in named if each is not None]
    uses_megatron = any("megatron" in str(each.value) for each in words) or any(
        ".megatron.tensor_model" in key or ".megatron.pipeline" in key for key in job.found
    )
    other = next((each for each in words if any(name in str(each.value) for name in _OTHER_ENGINES)), None)
    source = next((each for each in words if "megatron" in str(each.value)), None)
    if uses_megatron and other is None:
        out.put("models.all.engine", "megatron", source or "settings of actor.megatron")
        out.put("models.all.zero", 1, "use_distributed_optimizer (verl's default)")
        out.put("models.all.dtype", "bfloat16", "Megatron's type in verl")
        return "megatron"
    if other is not None:
        out.drop(other, "an engine that is not here; torch with shards stands for it")
    return "torch"


def _parallel(out: Translation, job: JobSettings, engine: str, prefix: str, role: str, tokens: int) -> None:
    """Write how the actor, or the model of an SFT, is split, and its passes."""
    recomputes = job.truth(
        "actor_rollout_ref.model.enable_gradient_checkpointing", "model.enable_gradient_checkpointing"
    )
    if engine == "megatron":
        for name, own in (("tp", "tensor_model_parallel_size"), ("pp", "pipeline_model_parallel_size")):
            out.put_same(f"models.all.{name}", job.count(f"{prefix}megatron.{own}", f"{prefix}{own}"))
        granularity = job.get(f"{prefix}megatron.override_transformer_config.recompute_granularity")
        recomputes = granularity if granularity is not None and granularity.value == "full" else None
        if recomputes is None:
            out.drop(granularity, "activations of whole layers are computed again")
    else:
        out.put("models.all.engine", "torch", "FSDP")
        reshards, shard = (
            job.get(f"{prefix}fsdp_config.reshard_after_forward"),
            job.number(f"{prefix}fsdp_config.fsdp_size"),
        )
        stays = reshards is not None and str(reshards.value).lower() == "false"
        out.put("models.all.zero", 2 if stays else 3, reshards if stays else "FSDP shards parameters")
        out.put("models.all.dtype", "bfloat16", "FSDP's mixed precision")
        nodes = out.value("cluster.nodes")
        if shard is not None and shard.value < num_devices(out):
            if nodes and shard.value == nodes[0]["devices"]:
                out.put("models.all.shard", "node", shard)
            else:
                out.drop(shard, "shards are over all devices of a model or of a node")
    put_recomputation(out, recomputes, "no recompute_granularity" if engine == "megatron" else "it is false")
    lora = job.number(f"{prefix}lora_rank", "actor_rollout_ref.model.lora_rank", "model.lora_rank")
    lora = lora or job.number("actor_rollout_ref.model.lora.rank", "model.lora.rank")
    alpha = job.number(
        "actor_rollout_ref.model.lora_alpha",
        "model.lora_alpha",
        "actor_rollout_ref.model.lora.alpha",
        "model.lora.alpha",
    )
    targets = job.listed(
        "actor_rollout_ref.model.target_modules", "model.target_modules", "actor_rollout_ref.model.lora.target_modules"
    )
    if lora is not None and engine == "megatron":
        out.drop(lora, "Megatron trains no adapters here; without them all weights are trained")
    else:
        put_lora(out, role, lora, alpha, targets)
    if prefix == _A:
        dynamic = job.truth(f"{_A}use_dynamic_bsz")
        most, rows = job.count(f"{_A}ppo_max_token_len_per_gpu"), job.count(f"{_A}ppo_micro_batch_size_per_gpu")
        if dynamic is not None and most is not None:
            out.put("models.all.micro_batch_tokens", most.value, most)
        elif rows is not None:
            out.put("models.all.micro_batch_tokens", rows.value * tokens, rows, f"times {tokens} tokens")


def _of_roles(out: Translation, job: JobSettings, engine: str) -> None:
    """Write settings in which the reference and the critic differ from the actor."""
    roles = {
        "ref": (_F, "algorithm.kl.place" in out.lines),
        "critic": ("critic.", out.value("algorithm.name") == "ppo"),
    }
    for role, (prefix, is_there) in roles.items():
        for name, own in (("tp", "tensor_model_parallel_size"), ("pp", "pipeline_model_parallel_size")):
            size = job.count(f"{prefix}megatron.{own}")
            if size is not None and is_there and engine == "megatron" and size.value != out.value(f"models.all.{name}"):
                out.put(f"models.{role}.{name}", size.value, size)
        if not is_there:
            job.read |= {key for key in job.found if key.startswith(prefix)}
    dynamic, most = job.truth("critic.use_dynamic_bsz"), job.count("critic.ppo_max_token_len_per_gpu")
    if dynamic is not None and most is not None and most.value != out.value("models.all.micro_batch_tokens"):
        out.put("models.critic.micro_batch_tokens", most.value, most)


def _devices(out: Translation, job: JobSettings, program: str, device_class: tuple[str, str] | None) -> None:
    """Write the machines, and which devices train and generate."""
    nodes, per_node = job.count("trainer.nnodes"), job.count("trainer.n_gpus_per_node")
    if nodes is None or per_node is None:
        out.note("the number of devices is not in the file: one node of eight is assumed")
    count, devices = 1 if nodes is None else nodes.value, 8 if per_node is None else per_node.value
    more, others = (
        job.count("rollout.nnodes", f"{_R}nnodes"),
        job.count("rollout.n_gpus_per_node", f"{_R}n_gpus_per_node"),
    )
    is_apart = ("off_policy" in program or "fully_async" in program) and others is not None
    hybrid = job.truth("actor_rollout_ref.hybrid_engine") is not None
    if not is_apart or others is None or hybrid:
        put_cluster(out, count, devices, device_class, nodes, per_node)
        out.put("placement", None, "every model on all devices: verl's hybrid engine")
    else:
        more_nodes = count if more is None else more.value
        put_apart(out, (count, devices), (more_nodes, others.value), device_class, nodes, per_node, more, others)
    if "off_policy" in program or "fully_async" in program:
        threshold = job.number("async_training.staleness_threshold")
        if is_apart and not hybrid and ("off_policy" in program or threshold is not None):
            out.put("schedule.lag", 1, threshold or "one step off-policy")
        every = job.count("async_training.trigger_parameter_sync_step")
        if every is not None and not hybrid:
            out.put("sync.every", every.value, every)


def _rollout(out: Translation, job: JobSettings, rows: int, tokens: int) -> None:
    name, tp = job.get(f"{_R}name"), job.count(f"{_R}tensor_model_parallel_size")
    share, size = job.number(f"{_R}gpu_memory_utilization"), 1 if tp is None else tp.value
    if name is not None and name.value == "hf":
        out.put("rollout.engine", "transformers", name)
        return
    out.put("rollout.engine", "vllm", name)
    if name is not None and name.value != "vllm":
        out.note(f"{name.value} generates there ({name.key}), vLLM here")
    devices = (
        num_devices(out)
        if "placement.actor.ranks" not in out.lines
        else len(ranks_of(out.value(f"placement.actor{DOT}rollout.ranks")))
    )
    if size > GPUS_PER_NODE and tp is not None:
        out.drop(tp, f"an engine's tensor-parallel ranks are on one node: {GPUS_PER_NODE} here")
        size = GPUS_PER_NODE
        out.put("rollout.tp", size, tp)
    elif devices % size and tp is not None:
        out.drop(tp, f"engines of {size} ranks do not divide {devices} devices")
        size = 1
    elif tp is not None and size > 1:
        out.put("rollout.tp", size, tp)
    stages = job.count(f"{_R}pipeline_model_parallel_size")
    if stages is not None and stages.value > 1:
        out.put("rollout.pp", stages.value, stages)
        size *= stages.value
    put_cache(out, share, size, -(-rows * size // max(1, devices)), tokens)
    bypass = job.truth("algorithm.rollout_correction.bypass_mode")
    if bypass is not None and "algorithm.importance.level" not in out.lines:
        out.put("rollout.logprobs", "reuse", bypass)
    else:
        out.drop(bypass, "importance weights compare with log-probs of their own pass")


def _sft(out: Translation, job: JobSettings, device_class: tuple[str, str] | None) -> None:
    job.defaults = SFT_DEFAULTS
    out.put("algorithm.name", "sft", "the SFT trainer")
    out.put("algorithm.like", "verl", "what is not written")
    _steps(out, job)
    out.put_same("algorithm.prompts_per_step", job.count("data.train_batch_size"))
    key = next((each for each in ("model.partial_pretrain", "model.path") if job.has(each)), "model.path")
    _model(out, job, key, "actor")
    tokens = split_length(out, job.count("data.max_length"))
    put_data(out, job.listed("data.train_files"), "data/train.parquet")
    put_optimizer(out, job, "actor", _OPTIMIZER)
    nodes, per_node = job.count("--nnodes", "trainer.nnodes"), job.count("--nproc_per_node", "trainer.n_gpus_per_node")
    if per_node is None:
        out.note("the number of devices is not in the file: one node of eight is assumed")
    put_cluster(
        out,
        1 if nodes is None else nodes.value,
        8 if per_node is None else per_node.value,
        device_class,
        nodes,
        per_node,
    )
    engine = _engine(out, job, "sft")
    _parallel(out, job, engine, "engine.", "actor", tokens)
    rows, most = job.count("data.micro_batch_size_per_gpu"), job.count("data.max_token_len_per_gpu")
    if job.truth("data.use_dynamic_bsz") is not None and most is not None:
        out.put("models.all.micro_batch_tokens", most.value, most)
        out.drop(rows, f"with use_dynamic_bsz {most.key} is the size", matters=False)
    elif rows is not None:
        out.put("models.all.micro_batch_tokens", rows.value * tokens, rows, f"times {tokens} tokens")
    out.put("placement", None, "the model on all devices")
