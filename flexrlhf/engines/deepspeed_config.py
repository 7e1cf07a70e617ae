"""The DeepSpeed configuration of one placed model: ours from the YAML, the user's further settings beside it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexrlhf.errors import UserError, shown
from flexrlhf.placement.states import DEEPSPEED_ELEMENTS
from flexrlhf.spec import ModelSpec

OWNED = {
    "train_batch_size": "algorithm.prompts_per_step",
    "train_micro_batch_size_per_gpu": "micro_batch_tokens",
    "gradient_accumulation_steps": "micro_batch_tokens",
    "managed_gradient_accumulation": "micro_batch_tokens",
    "gradient_clipping": "optimizer.max_grad_norm",
    "optimizer": "optimizer",
    "scheduler": "optimizer.schedule",
    "bf16.enabled": "dtype",
    "fp16.enabled": "dtype",
    "fp16.auto_cast": "dtype",
    "torch_autocast": "dtype",
    "bfloat16": "dtype",
    "amp": "dtype",
    "zero_optimization.stage": "zero",
    "zero_optimization.offload_optimizer": "offload_optimizer",
    "zero_optimization.offload_param": "offload_parameters",
    "zero_optimization.cpu_offload": "offload_optimizer",
    "zero_optimization.cpu_offload_param": "offload_parameters",
    "zero_optimization.stage3_param_persistence_threshold": "zero",
    "zero_optimization.param_persistence_threshold": "zero",
    "zero_allow_untested_optimizer": "optimizer.name",
    "zero_force_ds_cpu_optimizer": "offload_optimizer",
    "data_types": "dtype",
    "communication_data_type": "dtype",
    "tensor_parallel": "tp",
    "sequence_parallel_size": "cp",
    "activation_checkpointing": "activation_checkpointing",
}
"""What a YAML says in its own words: DeepSpeed key → our key of the model, or of the run."""


def check_deepspeed_config(key: str, config: Mapping[str, Any]) -> None:
    """Raise UserError for a setting that the YAML already makes. ``key``: the model, for the message."""
    for name, owner in OWNED.items():
        section, _, entry = name.partition(".")
        value = config.get(section)
        if entry and section in config and not isinstance(value, Mapping):
            raise UserError(f"{key}.config.{section}: expected a mapping, found {shown(value)}")
        if (entry and isinstance(value, Mapping) and entry in value) or (not entry and section in config):
            ours = owner if owner.startswith("algorithm.") else f"{key}.{owner}"
            raise UserError(f"{key}.config.{name}: conflicts with {ours}, which says it here; remove it from config")


def deepspeed_config(settings: ModelSpec, trained: bool) -> dict[str, Any]:
    """What ``deepspeed.initialize`` is given. Micro-batches are ours, so DeepSpeed counts one per call."""
    # without an optimizer there is nothing for stages 1 and 2 to shard, and DeepSpeed refuses them
    stage = settings.zero if trained or settings.zero == 3 else 0
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, "overlap_comm": False}
    zero["reduce_bucket_size"] = DEEPSPEED_ELEMENTS["reduce_bucket_size"]
    if settings.offload_optimizer and trained:
        zero["offload_optimizer"] = {"device": "cpu"}
    if settings.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if clips_itself(settings) else settings.optimizer.max_grad_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    if settings.dtype == "bfloat16":
        ours["bf16"] = {"enabled": True}
    if settings.dtype == "float16":
        ours["fp16"] = {"enabled": True}
    if settings.dtype != "float32" and trained:
        ours["data_types"] = {"grad_accum_dtype": "fp32"}
        ours["communication_data_type"] = "fp32"
    return _merged(ours, settings.config)


def clips_itself(settings: ModelSpec) -> bool:
    """Whether the engine clips: stage 0 in float32 is a bare optimizer, whose gradient norm DeepSpeed does not tell."""
    return settings.zero == 0 and settings.dtype == "float32"


def _merged(ours: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(ours)
    for key, value in further.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merged(out[key], value) if both else value
    return out
