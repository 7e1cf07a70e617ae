"""Jobs of AReaL: YAML files of its trainers, with a backend and its devices for each engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from flexrlhf.errors import UserError
from flexrlhf.imports.areal.reasons import REASONS
from flexrlhf.imports.device_parts import put_apart, put_cache, put_cluster
from flexrlhf.imports.parts import (
    put_data,
    put_lengths,
    put_lora,
    put_model,
    put_optimizer,
    put_recomputation,
    put_scored_by_code,
    split_length,
)
from flexrlhf.imports.settings import JobSettings, Setting
from flexrlhf.imports.translation import Translation
from flexrlhf.placement.devices import GPUS_PER_NODE

DEFAULTS: dict[str, Any] = {
    "gconfig.n_samples": 1,
    "gconfig.max_new_tokens": 16384,
    "gconfig.temperature": 1.0,
    "actor.ppo_n_minibatches": 4,
    "actor.eps_clip": 0.2,
    "actor.kl_ctl": 0.1,
    "actor.kl_estimator": "k1",
    "actor.discount": 1.0,
    "actor.gae_lambda": 1.0,
    "actor.reward_clip": 20.0,
    "critic.eps_clip": 0.5,
    "actor.lora_rank": 32,
    "actor.lora_alpha": 16,
    "cluster.n_nodes": 1,
    "cluster.n_gpus_per_node": 8,
}
_OPTIMIZER = {
    "learning_rate": ("actor.optimizer.lr",),
    "weight_decay": ("actor.optimizer.weight_decay",),
    "eps": ("actor.optimizer.eps",),
    "beta1": ("actor.optimizer.beta1",),
    "beta2": ("actor.optimizer.beta2",),
    "schedule": ("actor.optimizer.lr_scheduler_type",),
    "final_ratio": ("actor.optimizer.min_lr_ratio",),
    "max_grad_norm": ("actor.optimizer.gradient_clipping",),
    "warmup_ratio": ("actor.optimizer.warmup_steps_proportion",),
}


@dataclass(frozen=True)
class Backend:
    """An engine with its parallelism, as ``fsdp:d4p1t2``."""

    engine: str
    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.pipeline * self.tensor * self.context


def read_backend(text: str) -> Backend:
    """Return the engine that ``fsdp:d4p1t2`` describes; of a text with experts, their attention's part."""
    engine, _, sizes = text.rpartition(":") if not text.startswith("megatron:(") else ("megatron", "", text)
    attention = re.search(r"attn:([^|)]*)", text)
    sizes = attention[1] if attention else sizes
    found = {key: int(number) for key, number in re.findall(r"([dptce])(\d+)", sizes)}
    names = {"d": "data", "p": "pipeline", "t": "tensor", "c": "context"}
    return Backend(engine or "fsdp", **{names[key]: number for key, number in found.items() if key in names})


def translate(out: Translation, job: JobSettings, device_class: tuple[str, str] | None) -> None:
    """Translate a job. Raises UserError for one without any counterpart."""
    job.defaults = DEFAULTS
    if any(key.startswith("teacher.") for key in job.found):
        raise UserError(f"{out.file}: distillation from a teacher has no counterpart")
    generates = any(key.startswith("gconfig.") for key in job.found)
    name = _algorithm(out, job, generates)
    out.note("AReaL's defaults are no preset here: settings that the file and this YAML leave out have this project's")
    role = "reward" if name == "reward" else "actor"
    model = job.named("actor.path") or job.named("model.path")
    if model is None:
        raise UserError(f"{out.file}: actor.path: a job needs a model, and the file has none")
    out.put_same("algorithm.prompts_per_step", job.count("train_dataset.batch_size"))
    put_model(out, role, model)
    if name == "ppo":
        put_model(out, "critic", job.named("critic.path") or model)
    length = job.count("train_dataset.max_length")
    if generates:
        response = job.count("gconfig.max_new_tokens")
        tokens = sum(put_lengths(out, length or Setting("train_dataset.max_length: none", 1024), response))
    else:
        tokens = split_length(out, length or Setting("train_dataset.max_length: none", 1024))
    put_data(out, job.get("train_dataset.path"), "data/train.jsonl")
    out.put_same("seed", job.count("seed"))
    out.put_same("steps", job.count("total_train_steps"))
    put_optimizer(out, job, role, _OPTIMIZER)
    if name == "ppo":
        keys = {key: tuple(each.replace("actor.", "critic.") for each in names) for key, names in _OPTIMIZER.items()}
        put_optimizer(out, job, "critic", keys)
    if generates:
        put_scored_by_code(out, None)
    allocation = job.get("allocation_mode")
    texts = str(allocation.value).split("+") if allocation is not None else []
    generator = job.get("rollout.backend") if not texts else Setting(allocation.key, texts[0]) if allocation else None
    trainer = job.get("actor.backend") if not texts else Setting("allocation_mode", texts[-1])
    training = read_backend(str(trainer.value)) if trainer else Backend("fsdp", 8)
    generating = read_backend(str(generator.value)) if generator is not None and generates else None
    _devices(out, job, training, generating, device_class, trainer, generator)
    _engine(out, job, role, training, trainer, tokens)
    if generating is not None and generates:
        _rollout(out, job, generating, generator, tokens)
    out.finish(job, REASONS)


def _algorithm(out: Translation, job: JobSettings, generates: bool) -> str:
    if not generates:
        name = (
            "reward"
            if any("reward" in str(job.value(key)) for key in ("train_dataset.type",)) or "rw" in out.file
            else "sft"
        )
        name = "dpo" if "dpo" in out.file or job.has("actor.beta") else name
        out.put("algorithm.name", name, job.get("train_dataset.type") or "the file's name")
        if name == "dpo" and (beta := job.number("actor.beta")) is not None:
            out.put("algorithm.beta", float(beta.value), beta)
        return name
    mean, std = job.get("actor.reward_norm.mean_level"), job.get("actor.reward_norm.std_level")
    others, level = job.truth("actor.reward_norm.mean_leave1out"), job.get("actor.importance_sampling_level")
    samples = job.count("gconfig.n_samples")
    number = samples.value if samples else 1
    compares = mean is not None and mean.value == "group" and number > 1
    has_critic = any(key.startswith("critic.") for key in job.found)
    name = "ppo" if has_critic else "grpo" if compares else "reinforce++"
    if compares and level is not None and level.value == "sequence":
        name = "gspo"
    out.put(
        "algorithm.name",
        name,
        "critic:" if has_critic else mean or "no actor.reward_norm",
        level if name == "gspo" else None,
    )
    out.put("algorithm.samples_per_prompt", number, samples)
    if name in ("grpo", "gspo"):
        out.put(
            "algorithm.scale", "group" if std is not None and std.value == "group" else "none", std or "std_level: null"
        )
        out.put("algorithm.baseline", "others" if others else "mean", others or mean)
        whitened = job.get("actor.adv_norm.mean_level")
        out.drop(whitened, "advantages of a group are not whitened over the batch again")
    elif name in ("ppo", "reinforce++"):
        whitened = job.get("actor.adv_norm.std_level")
        out.put("algorithm.whiten", "batch" if whitened is not None else "none", whitened or "no actor.adv_norm")
        for key, own in (("gamma", "actor.discount"), ("gae_lambda", "actor.gae_lambda")):
            setting = job.number(own)
            if setting is not None and (name == "ppo" or key == "gamma"):
                out.put(f"algorithm.{key}", float(setting.value), setting)
        clip = job.number("critic.eps_clip")
        if clip is not None and name == "ppo":
            out.put("algorithm.value_clip", float(clip.value), clip)
    job.read |= {key for key in job.found if re.match(r"actor\.(reward_norm|adv_norm)\.", key)}
    out.put_same("algorithm.num_mini_batches", job.count("actor.ppo_n_minibatches"))
    penalty, estimator = job.number("actor.kl_ctl"), job.get("actor.kl_estimator")
    if penalty is None:
        out.put("algorithm.kl", None, job.get("actor.kl_ctl"))
    else:
        out.put("algorithm.kl.place", "reward", "AReaL's place")
        out.put("algorithm.kl.coefficient", float(penalty.value), penalty)
        out.put("algorithm.kl.estimator", estimator.value if estimator else "k1", estimator)
    low, high, dual = job.number("actor.eps_clip"), job.number("actor.eps_clip_higher"), job.number("actor.c_clip")
    if low is not None:
        out.put("algorithm.clip_low", float(low.value), low)
        out.put("algorithm.clip_high", float((high or low).value), high or low)
    if dual is not None:
        out.put("algorithm.dual_clip", float(dual.value), dual)
    out.put_real("algorithm.reward_clip", job.number("actor.reward_clip"))
    out.put_real("algorithm.temperature", job.number("gconfig.temperature"))
    if (decoupled := job.truth("actor.use_decoupled_loss")) is not None:
        out.put("algorithm.importance.level", "token", decoupled)
        job.read.add("actor.recompute_logprob")
    return name


def _devices(
    out: Translation,
    job: JobSettings,
    training: Backend,
    generating: Backend | None,
    device_class: tuple[str, str] | None,
    *sources: Setting | None,
) -> None:
    nodes, per_node = job.count("cluster.n_nodes"), job.count("cluster.n_gpus_per_node")
    count, devices = nodes.value if nodes else 1, per_node.value if per_node else 8
    lag = job.number("rollout.max_head_offpolicyness")
    if generating is None:
        put_cluster(out, max(1, training.devices // devices), min(devices, training.devices), device_class, *sources)
        out.put("placement", None, "the model on all devices")
        return
    total = training.devices + generating.devices
    if total > count * devices:
        put_cluster(out, count, devices, device_class, nodes, per_node)
        out.put(
            "placement", None, f"{total} devices of both are more than {count * devices}: every model on all of them"
        )
        return
    if total <= GPUS_PER_NODE:
        put_apart(out, (1, training.devices), (1, generating.devices), device_class, *sources)
    else:
        first, second = (max(1, each.devices // devices) for each in (training, generating))
        put_apart(
            out, (first, training.devices // first), (second, generating.devices // second), device_class, *sources
        )
    if lag is not None:
        out.put("schedule.lag", min(16, int(lag.value)), lag)


def _engine(
    out: Translation, job: JobSettings, role: str, training: Backend, source: Setting | None, tokens: int
) -> None:
    is_megatron = training.engine == "megatron"
    out.put("models.all.engine", "megatron" if is_megatron else "torch", source)
    if training.engine not in ("megatron", "fsdp"):
        out.drop(source, f"{training.engine} is not here; torch with shards stands for it")
    out.put(
        "models.all.zero",
        1 if is_megatron else 3,
        "its distributed optimizer" if is_megatron else "FSDP shards parameters",
    )
    for key, size in (("tp", training.tensor), ("pp", training.pipeline if is_megatron else 1)):
        if size > 1:
            out.put(f"models.all.{key}", size, source)
    if training.context > 1:
        out.drop(source, "a sequence is on one device, or on tensor-parallel ranks")
    dtype = job.get("actor.dtype")
    out.put("models.all.dtype", "bfloat16" if dtype is None else dtype.value, dtype or "bfloat16 (AReaL's default)")
    put_recomputation(out, job.truth("actor.gradient_checkpointing"), "no actor.gradient_checkpointing")
    adapters = job.truth("actor.use_lora")
    if adapters is not None and not is_megatron:
        put_lora(
            out, role, job.count("actor.lora_rank"), job.number("actor.lora_alpha"), job.listed("actor.target_modules")
        )
    else:
        out.drop(adapters, "Megatron trains no adapters here; without them all weights are trained")
    out.put_same("models.all.micro_batch_tokens", job.count("actor.mb_spec.max_tokens_per_mb"))


def _rollout(out: Translation, job: JobSettings, generating: Backend, source: Setting | None, tokens: int) -> None:
    out.put("rollout.engine", "vllm", source)
    if generating.engine != "vllm":
        out.note(f"{generating.engine} generates there, vLLM here")
    if generating.tensor > 1:
        out.put("rollout.tp", generating.tensor, source)
    if generating.pipeline > 1:
        out.put("rollout.pp", generating.pipeline, source)
    share = (
        job.number("vllm.gpu_memory_utilization")
        if generating.engine == "vllm"
        else job.number("sglang.mem_fraction_static")
    )
    rows = (out.value("algorithm.prompts_per_step") or 1) * (out.value("algorithm.samples_per_prompt") or 1)
    put_cache(out, share, generating.tensor * generating.pipeline, -(-rows // generating.data), tokens)
