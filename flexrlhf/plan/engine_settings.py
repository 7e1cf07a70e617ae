"""Names of the settings that a user may pass on to DeepSpeed and vLLM, and of those that follow from our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flexrlhf.config.engines import DEEPSPEED
from flexrlhf.errors import UserError, nearest, shown
from flexrlhf.memory.engine_bytes import DEEPSPEED_ELEMENTS

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


def check_deepspeed_config(key: str, config: Mapping[str, Any]) -> None:
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
    for name in DEEPSPEED_ELEMENTS:
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


CONFIG_CHECKS: Mapping[str, Callable[[str, Mapping[str, Any]], None]] = {DEEPSPEED.name: check_deepspeed_config}
"""Check of ``models.*.config`` by engine, which takes the place of the model in the YAML and the settings."""

_VLLM_ARGUMENTS = """
additional_config async_scheduling block_size data_parallel_size decode_context_parallel_size
disable_log_stats distributed_executor_backend dtype enable_eplb enable_expert_parallel enable_lora
enable_prefix_caching enable_sleep_mode enforce_eager expert_placement_strategy fully_sharded_loras
generation_config hf_overrides kv_cache_memory_bytes load_format logits_processors logprobs_mode
lora_dtype lora_target_modules max_cpu_loras max_logprobs max_lora_rank max_loras max_model_len model
model_impl moe_backend nnodes num_gpu_blocks_override pipeline_parallel_size
prefill_context_parallel_size quantization runner seed skip_tokenizer_init speculative_config
tensor_parallel_size tokenizer use_tqdm_on_load worker_cls worker_extension_cls
"""
VLLM_ARGUMENTS = frozenset(_VLLM_ARGUMENTS.split())
"""Arguments that ``rollout.config`` may not set: they follow from the placement, or must be alike on all ranks."""
