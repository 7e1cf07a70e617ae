"""Jobs of AReaL: YAML files of its trainers, with a backend and its devices for each engine."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexrlhf.api import DeviceClass, Spec, UserError
from flexrlhf.imports import device_parts, model_parts, parts, run_parts, score_parts
from flexrlhf.imports.areal.algorithm import put_algorithm
from flexrlhf.imports.areal.reasons import WITH_EFFECT, WITHOUT_EFFECT
from flexrlhf.imports.settings import JobSettings, Setting
from flexrlhf.imports.translation import Translation

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
    "actor.max_new_tokens": 1024,
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
    """An engine with its parallelism, as ``fsdp:d4p1t2``.

    sizes:    ranks by letter: d(ata), p(ipeline), t(ensor), c(ontext).
    experts:  ranks that share the experts of a layer.
    """

    engine: str
    sizes: Mapping[str, int]
    experts: int = 1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes.values())


def read_backend(text: str) -> Backend:
    """Return the engine that ``fsdp:d4p1t2`` describes; of a text with experts, their attention's part."""
    engine, _, sizes = text.partition(":") if ":" in text else ("fsdp", "", text)
    attention = re.search(r"attn:([^|)]*)", sizes)
    found = re.findall(r"([dptc])(\d+)", attention[1] if attention else sizes)
    experts = re.search(r"e(\d+)", sizes)
    ranks = dict.fromkeys("dptc", 1) | {key: int(number) for key, number in found}
    return Backend(engine, ranks, int(experts[1]) if experts else 1)


def translate(out: Translation, job: JobSettings) -> None:
    """Translate a job. Raises UserError for one without any counterpart."""
    job.defaults = DEFAULTS
    if job.starts("teacher."):
        raise UserError(f"{out.file}: distillation from a teacher has no counterpart")
    generates = job.starts("gconfig.")
    name = put_algorithm(out, job) if generates else _supervised(out, job)
    out.note("AReaL's defaults are no preset here: settings that the file and this YAML leave out have this project's")
    role = "reward" if name == "reward" else "actor"
    out.put_same("algorithm.prompts_per_step", job.count("train_dataset.batch_size"))
    model = parts.put_needed_model(out, job, role, "actor.path", "model.path")
    if name == "ppo":
        parts.put_model(out, "critic", job.named("critic.path") or model)
    length = job.count("train_dataset.max_length") or Setting("train_dataset.max_length: none", 1024)
    if generates:
        tokens = sum(parts.put_lengths(out, length, job.count("gconfig.max_new_tokens")))
    else:
        tokens = parts.split_length(out, length)
    parts.put_data(out, job.get("train_dataset.path"), "data/train.jsonl")
    run_parts.put_length(out, job.count("total_train_steps"), job.number("total_train_epochs"), "total_train_epochs=1")
    _run(out, job)
    parts.put_optimizer(out, job, role, _OPTIMIZER)
    if name == "ppo":
        keys = {key: tuple(each.replace("actor.", "critic.") for each in names) for key, names in _OPTIMIZER.items()}
        parts.put_optimizer(out, job, "critic", keys)
    if generates:
        score_parts.put_scored_by_code(out, job.get("reward_fn_path", "reward_fn"))
    generator, trainer = job.get("rollout.backend"), job.get("actor.backend")
    if (allocation := job.get("allocation_mode")) is not None:
        first, *_, last = str(allocation.value).split("+") * 2
        generator, trainer = Setting(allocation.key, first), Setting(allocation.key, last)
    training = read_backend(str(trainer.value) if trainer else f"fsdp:d{DeviceClass.PER_NODE}")
    generating = read_backend(str(generator.value)) if generator is not None and generates else None
    _devices(out, job, training, generating, trainer, generator)
    _engine(out, job, role, training, trainer)
    if name == "ppo":
        parts.put_micro_batch(out, None, tokens, job.count("critic.mb_spec.max_tokens_per_mb"), "critic")
    if generating is not None and generator is not None:
        _rollout(out, job, generating, generator, tokens)
    job.pass_over("machines follow from the ranks of the engines", "cluster.n_nodes", "cluster.n_gpus_per_node")
    run_parts.drop_uses_of_rows(out, job)
    out.finish(job, WITHOUT_EFFECT, WITH_EFFECT)


def _run(out: Translation, job: JobSettings) -> None:
    """Write the run's name, seed, loggers, evaluation, saved models and checkpoints."""
    run_parts.put_run_name(out, job, "trial_name", "experiment_name")
    run_parts.put_seed(out, job, "seed")
    mode = job.found.get("stats_logger.wandb.mode")
    switches = {
        "wandb": mode if mode is not None and mode.value != "disabled" else None,
        "tensorboard": job.get("stats_logger.tensorboard.path"),
    }
    own = {key: f"stats_logger.wandb.{key}" for key in ("project", "entity", "group", "mode")}
    run_parts.put_loggers(out, job, switches, {"wandb": own})
    job.pass_over("it is off", *(["stats_logger.wandb."] if switches["wandb"] is None else []))
    run_parts.put_evaluation(out, job.get("valid_dataset.path"), job.count("evaluator.freq_steps"), {})
    out.put_same("save.every", job.count("saver.freq_steps"))
    run_parts.put_checkpoints(out, job.count("recover.freq_steps"), None)


def _supervised(out: Translation, job: JobSettings) -> str:
    """Write an algorithm that trains on given responses; return its name."""
    kind = job.get("train_dataset.type")
    name = "reward" if "rw" in out.file or (kind is not None and "reward" in str(kind.value)) else "sft"
    name = "dpo" if "dpo" in out.file or job.has("actor.beta") else name
    out.put("algorithm.name", name, kind or "the file's name")
    if name == "dpo":
        parts.put_reals(out, job, {"beta": "actor.beta"})
    return name


def _devices(
    out: Translation, job: JobSettings, training: Backend, generating: Backend | None, *sources: Setting | None
) -> None:
    nodes, per_node = job.count("cluster.n_nodes"), job.count("cluster.n_gpus_per_node")
    count, devices = device_parts.machines(out, job, nodes, per_node)
    lag = job.number("rollout.max_head_offpolicyness")
    if generating is None:
        device_parts.put_cluster(out, [(max(1, training.devices // devices), min(devices, training.devices))], *sources)
        out.put("placement", None, "the model on all devices")
        return
    sizes = [training.devices, generating.devices]
    if sum(sizes) > count * devices:
        device_parts.put_cluster(out, [(count, devices)], nodes, per_node)
        why = f"{sum(sizes)} devices of both are more than {count * devices}: every model on all of them"
        out.put("placement", None, why)
        return
    numbers = [1 if sum(sizes) <= DeviceClass.PER_NODE else max(1, size // devices) for size in sizes]
    first, second = ((number, size // number) for number, size in zip(numbers, sizes, strict=True))
    device_parts.put_apart(out, first, second, *sources)
    if lag is not None:
        out.put("schedule.lag", min(Spec.MAX_LAG, int(lag.value)), lag)
        if lag.value > Spec.MAX_LAG:
            out.drop(lag, f"a lag is at most {Spec.MAX_LAG} steps")


def _engine(out: Translation, job: JobSettings, role: str, training: Backend, source: Setting | None) -> None:
    mixes = model_parts.has_experts(out)
    is_megatron = training.engine == "megatron" and not mixes
    if training.engine == "megatron" and mixes:
        out.drop(source, model_parts.NO_MEGATRON)
    out.put("models.all.engine", "megatron" if is_megatron else "torch", source)
    if training.engine not in ("megatron", "fsdp"):
        out.drop(source, f"{training.engine} is not here; torch with shards stands for it")
    shards = (1, "its distributed optimizer") if is_megatron else (3, "FSDP shards parameters")
    out.put("models.all.zero", *shards)
    for key, size in (("tp", training.sizes["t"]), ("pp", training.sizes["p"] if is_megatron else 1)):
        if size > 1 and not mixes:
            out.put(f"models.all.{key}", size, source)
    if source is not None:
        model_parts.put_expert_ranks(out, Setting(f"{source.key}={source.value}", training.experts))
    if training.sizes["c"] > 1:
        out.drop(source, "a sequence is on one device, or on tensor-parallel ranks")
    dtype = job.get("actor.dtype")
    out.put("models.all.dtype", "bfloat16" if dtype is None else dtype.value, dtype or "bfloat16 (AReaL's default)")
    parts.put_recomputation(out, job.truth("actor.gradient_checkpointing"), "no actor.gradient_checkpointing")
    if job.truth("actor.use_lora") is not None:
        rank, alpha = job.count("actor.lora_rank"), job.number("actor.lora_alpha")
        model_parts.put_lora(out, role, rank, alpha, job.listed("actor.target_modules"))
    out.put_same("models.all.micro_batch_tokens", job.count("actor.mb_spec.max_tokens_per_mb"))


def _rollout(out: Translation, job: JobSettings, generating: Backend, source: Setting, tokens: int) -> None:
    out.put("rollout.engine", "vllm", source)
    if generating.engine != "vllm":
        out.note(f"{generating.engine} generates there, vLLM here")
    share = "vllm.gpu_memory_utilization" if generating.engine == "vllm" else "sglang.mem_fraction_static"
    rows = (out.value("algorithm.prompts_per_step") or 1) * (out.value("algorithm.samples_per_prompt") or 1)
    tp, pp = (Setting(f"{source.key}={source.value}", generating.sizes[key]) for key in "tp")
    device_parts.put_vllm(out, tp, pp, job.number(share), rows, tokens, generating.sizes["d"])
