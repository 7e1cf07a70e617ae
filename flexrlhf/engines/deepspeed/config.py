"""DeepSpeed configuration of one placed model: from our settings, merged with the user's ``config``, which is checked
here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexrlhf.api import ModelSpec, UserError, nearest, shown

ELEMENTS = {
    "reduce_bucket_size": 50_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
"""Settings under ``zero_optimization`` that cost memory, in elements: as our configuration leaves them."""
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
    "zero_optimization.compute_grad_norm": "optimizer.max_grad_norm",
    "bf16.check_grad_overflow": "dtype",
    "zero_allow_untested_optimizer": "optimizer.name",
    "zero_force_ds_cpu_optimizer": "offload_optimizer",
    "data_types": "dtype",
    "communication_data_type": "dtype",
    "tensor_parallel": "tp",
    "activation_checkpointing": "activation_checkpointing",
}
"""DeepSpeed keys that our own settings set: DeepSpeed key → key of ours, of the model or of the run."""

_OTHER_KEYS = """
aio bf16 checkpoint comms_logger compile compression_training csv_monitor curriculum_learning data_efficiency
dataloader_drop_last disable_allgather disable_python_gc dump_state eigenvalue elasticity flops_profiler fp16
gradient_allreduce_op gradient_predivide_factor log_level memory_breakdown monitor_config prescale_gradients
progressive_layer_drop sparse_gradients steps_per_print tensorboard timers wall_clock_breakdown wandb
zero_optimization
"""
_OTHER_ZERO_KEYS = """
allgather_bucket_size allgather_partitions contiguous_gradients cpu_offload_use_pin_memory elastic_checkpoint
enable_sanity_checks ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
log_trace_cache_warnings memory_efficient_linear overlap_comm override_module_apply parameter_alignment
pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients
save_muon_momentum_buffer_in_memory stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save
stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance
stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_prefetch_bucket_size
stage3_use_all_reduce_for_fetch_params sub_group_size use_multi_rank_bucket_allreduce zenflow
zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
"""
OTHER_KEYS, OTHER_ZERO_KEYS = frozenset(_OTHER_KEYS.split()), frozenset(_OTHER_ZERO_KEYS.split())
"""Other keys of DeepSpeed 0.19.8, at the top and under ``zero_optimization``. It ignores unknown top-level keys."""

_OTHER_PARTITIONS = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights")


def deepspeed_config(settings: ModelSpec, trained: bool) -> dict[str, Any]:
    """Return the ``config`` of ``deepspeed.initialize``.

    Micro-batches are ours, so DeepSpeed counts one per call. ``trained``: whether the placed model is trained.
    """
    # without an optimizer there is nothing for stages 1 and 2 to shard, and DeepSpeed refuses them
    stage = settings.zero if trained or settings.zero == 3 else 0
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, "overlap_comm": False}
    zero["reduce_bucket_size"] = ELEMENTS["reduce_bucket_size"]
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


def check_config(key: str, config: Mapping[str, Any]) -> None:
    """Raise UserError for a setting that a key of ours sets, or that DeepSpeed does not have.

    ``key``: the model's place in the YAML, for the message.
    """
    for name, owner in OWNED.items():
        section, _, entry = name.partition(".")
        value = config.get(section)
        if entry and section in config and not isinstance(value, Mapping):
            raise UserError(f"{key}.config.{section}: expected a mapping, found {shown(value)}")
        if (entry and isinstance(value, Mapping) and entry in value) or (not entry and section in config):
            ours = owner if owner.startswith("algorithm.") else f"{key}.{owner}"
            raise UserError(f"{key}.config.{name}: conflicts with {ours}, which sets it; remove it from config")

    _check_known(f"{key}.config", config, OTHER_KEYS)
    zero = config.get("zero_optimization", {})
    _check_known(f"{key}.config.zero_optimization", zero, OTHER_ZERO_KEYS)
    for name in ELEMENTS:
        # 5e8 is a float in YAML
        if name in zero and not _is_count(zero[name]):
            raise UserError(
                f"{key}.config.zero_optimization.{name}: expected a whole number of elements, found {shown(zero[name])}"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 and value % 1 == 0


def _check_known(where: str, section: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise UserError for a key of ``section`` that is not in ``known``."""
    for name in section:
        if name not in known:
            raise UserError(f"{where}: unknown or unsupported setting {name!r} of DeepSpeed{nearest(str(name), known)}")
