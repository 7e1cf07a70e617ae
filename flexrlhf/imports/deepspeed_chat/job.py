"""Jobs of DeepSpeed-Chat: command lines of the ``main.py`` of its three steps and of DPO."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flexrlhf.imports import device_parts, model_parts, parts, run_parts
from flexrlhf.imports.deepspeed_chat.reasons import WITH_EFFECT, WITHOUT_EFFECT
from flexrlhf.imports.launches import Launch, flags
from flexrlhf.imports.settings import JobSettings, Setting, read_scalar
from flexrlhf.imports.translation import Translation

DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 16,
    "per_device_training_batch_size": 16,
    "per_device_generation_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "max_seq_len": 512,
    "max_prompt_seq_len": 256,
    "max_answer_seq_len": 256,
    "zero_stage": 0,
    "actor_zero_stage": 0,
    "critic_zero_stage": 0,
}


def translate(out: Translation, launch: Launch, folders: Sequence[str]) -> None:
    """Translate a command line. ``folders``: the parts of the script's path. Raises UserError for a job without a
    model."""
    step = next((each for each in reversed(folders) if re.match(r"step\d|dpo|reward|sft", each)), "")
    job = JobSettings(
        {name: Setting(f"--{name}", read_scalar(value)) for name, value in flags(launch.arguments).items()}, DEFAULTS
    )
    nodes, per_node = launch.devices()
    devices = (nodes.value if nodes else 1) * (per_node.value if per_node else 8)
    if per_node is None:
        devices = 1 if "single_gpu" in folders else devices
        out.note(f"deepspeed takes all GPUs of the machine, whose number is not in the file: {devices} assumed")
    is_rlhf = job.has("actor_model_name_or_path")
    name = "ppo" if is_rlhf else "dpo" if "dpo" in step else "reward" if "step2" in step or "reward" in step else "sft"
    parts.put_name(out, "deepspeed-chat", name, "its main.py" if is_rlhf or not step else f"the folder {step}")
    run_parts.put_length(out, None, job.number("num_train_epochs"), "num_train_epochs=1")
    run_parts.put_seed(out, job, "seed")
    run_parts.put_loggers(out, job, {"tensorboard": job.truth("enable_tensorboard")}, {})
    tokens = _rlhf(out, job, devices) if is_rlhf else _supervised(out, job, devices, name)
    data, count = job.get("data_path"), nodes.value if nodes else 1
    parts.put_data(out, data and Setting(data.key, str(data.value).split()), "data/train.jsonl")
    device_parts.put_cluster(out, [(count, devices // count)], nodes, per_node or "assumed")
    out.put("placement", None, "every model in every process")
    _engine(out, job, is_rlhf, "reward" if name == "reward" else "actor", tokens)
    run_parts.drop_uses_of_rows(out, job)
    out.finish(job, WITHOUT_EFFECT, WITH_EFFECT)


def _rlhf(out: Translation, job: JobSettings, devices: int) -> int:
    rows, accumulated = (job.known(key) for key in ("per_device_generation_batch_size", "gradient_accumulation_steps"))
    batches = job.count("generation_batches")
    rounds = batches.value if batches else 1
    size = rows.value * devices * rounds
    out.put("algorithm.prompts_per_step", size, rows, batches, f"{devices} devices")
    training = job.count("per_device_training_batch_size")
    if training is not None:
        number = max(1, size // (training.value * accumulated.value * devices))
        out.put("algorithm.num_mini_batches", min(number, size), training, accumulated, rows)
    out.put_same("algorithm.epochs", job.count("ppo_epochs"))
    parts.put_needed_model(out, job, "actor", "actor_model_name_or_path")
    parts.put_needed_model(out, job, "reward", "critic_model_name_or_path")
    tokens = sum(parts.put_lengths(out, job.count("max_prompt_seq_len"), job.count("max_answer_seq_len")))
    for role in ("actor", "critic"):
        parts.put_optimizer(out, job, role, _optimizer(f"{role}_"))
    tp = job.count("inference_tp_size")
    if (hybrid := job.truth("enable_hybrid_engine")) is not None:
        out.put("rollout.engine", "torch", hybrid)
        if tp is not None and tp.value > 1:
            out.put("rollout.tp", tp.value, tp)
    else:
        out.put("rollout.engine", "transformers", "no --enable_hybrid_engine")
    parts.put_decoded(out, rows, out.value("rollout.tp") or 1)
    return tokens


def _supervised(out: Translation, job: JobSettings, devices: int, name: str) -> int:
    rows, accumulated = (job.known(key) for key in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    size = rows.value * accumulated.value * devices
    out.put("algorithm.prompts_per_step", size, rows, accumulated, f"{devices} devices")
    role = "reward" if name == "reward" else "actor"
    parts.put_needed_model(out, job, role, "model_name_or_path")
    tokens = parts.split_length(out, job.count("max_seq_len"))
    parts.put_optimizer(out, job, role, _optimizer(""))
    if name == "dpo":
        parts.put_reals(out, job, {"beta": "beta"})
    return tokens


def _optimizer(prefix: str) -> Mapping[str, tuple[str, ...]]:
    keys = {"learning_rate": (f"{prefix}learning_rate",), "weight_decay": (f"{prefix}weight_decay",)}
    return keys | {"schedule": ("lr_scheduler_type",), "warmup_steps": ("num_warmup_steps",)}


def _engine(out: Translation, job: JobSettings, is_rlhf: bool, role: str, tokens: int) -> None:
    prefix = "actor_" if is_rlhf else ""
    stage, dtype = job.get(f"{prefix}zero_stage"), job.get("dtype")
    out.put("models.all.engine", "deepspeed", "its engine")
    if stage is not None and stage.value in (0, 1, 2, 3):
        least = max(1, stage.value)
        out.put("models.all.zero", least, stage, *(["16-bit weights need 1 here"] if least != stage.value else []))
    critic = job.get("critic_zero_stage")
    if critic is not None and not critic.default and critic.value in {1, 2, 3} - {out.value("models.all.zero")}:
        out.put_same("models.critic.zero", critic)
    job.pass_over("as of all models", "critic_zero_stage")
    name = "bfloat16" if dtype is not None and dtype.value == "bf16" else "float16"
    out.put("models.all.dtype", name, dtype or "fp16 (its default)")
    recomputes = f"{prefix}gradient_checkpointing"
    parts.put_recomputation(out, job.truth(recomputes), f"no --{recomputes}")
    others = job.truth("critic_gradient_checkpointing") is not None
    if is_rlhf and others != out.value("models.all.activation_checkpointing"):
        source = f"{'' if others else 'no '}--critic_gradient_checkpointing"
        out.put("models.critic.activation_checkpointing", others, source)
    if (offload := job.truth("offload")) is not None:
        out.put("models.all.offload_optimizer", True, offload)
        for each in ("models.all", "models.critic"):
            if out.value(f"{each}.zero") == 3:
                out.put(f"{each}.offload_parameters", True, offload)
    alpha, alone = Setting("lora_scaling", 1, default=True), job.truth("only_optimize_lora")
    roles = {"actor": "actor_lora_dim", "critic": "critic_lora_dim"} if is_rlhf else {role: "lora_dim"}
    for own, name in roles.items():
        rank = job.number(name)
        model_parts.put_lora(out, own, rank, alpha, None)
        if alone is None:
            out.drop(rank, "norms and embeddings are trained there, too: here the adapters alone")
    key = "per_device_training_batch_size" if is_rlhf else "per_device_train_batch_size"
    parts.put_micro_batch(out, job.known(key), tokens)
