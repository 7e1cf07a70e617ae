"""DeepSpeed configuration of one placed model: from our settings, merged with the user's ``config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.memory.engine_bytes import DEEPSPEED_ELEMENTS

_OTHER_PARTITIONS = (
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
)


def deepspeed_config(settings: ModelSpec, trained: bool) -> dict[str, Any]:
    """Return the ``config`` of ``deepspeed.initialize``.

    Micro-batches are ours, so DeepSpeed counts one per call. ``trained``: whether the placed model is trained.
    """
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
    """Return whether our engine clips the gradients, instead of DeepSpeed.

    It does at stage 0 in float32, where DeepSpeed has a bare optimizer and does not report the gradient norm.
    """
    return settings.zero == 0 and settings.dtype == "float32"


def partitions_plainly(settings: ModelSpec) -> bool:
    """Return whether the user's ``config`` leaves partitions as they are: over all ranks, and not quantised."""
    return not set(_OTHER_PARTITIONS) & set(settings.config.get("zero_optimization", {}))


def _merged(ours: Mapping[str, Any], users: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; ``users`` overrides ``ours``."""
    out = dict(ours)
    for key, value in users.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merged(out[key], value) if both else value
    return out
