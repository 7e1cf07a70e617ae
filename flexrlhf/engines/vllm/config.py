"""Arguments of vLLM's engine, from a placed model that is not loaded. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexrlhf.api import Lengths, LoraSpec, PagedCache, ParameterName, PlacedModel, UserError

_ARGUMENTS = """
additional_config async_scheduling block_size data_parallel_size decode_context_parallel_size
disable_log_stats distributed_executor_backend dtype enable_eplb enable_expert_parallel enable_lora
enable_prefix_caching enable_sleep_mode enforce_eager expert_placement_strategy fully_sharded_loras
generation_config hf_overrides kv_cache_memory_bytes load_format logits_processors logprobs_mode
lora_dtype lora_target_modules max_cpu_loras max_logprobs max_lora_rank max_loras max_model_len model
model_impl moe_backend nnodes num_gpu_blocks_override pipeline_parallel_size
prefill_context_parallel_size quantization runner seed skip_tokenizer_init speculative_config
tensor_parallel_size tokenizer use_tqdm_on_load worker_cls worker_extension_cls
"""
ARGUMENTS = frozenset(_ARGUMENTS.split())
"""Arguments that ``rollout.config`` may not set: they follow from the placement, or must be alike on all ranks."""


def check_config(key: str, config: Mapping[str, Any]) -> None:
    """Raise UserError for an argument that the run sets. ``key``: the section of the YAML, for the message."""
    for name in sorted(ARGUMENTS & set(config)):
        reason = "quantised weights are not supported" if name == "quantization" else "is set by the run"
        raise UserError(f"{key}.config.{name}: {reason}; remove it")


def engine_arguments(model: PlacedModel, lengths: Lengths, kv_bytes: int, device: str) -> dict[str, Any]:
    """Return arguments of vLLM's EngineArgs, except those that depend on files and processes.

    ``kv_bytes``: of the KV cache; ``device``: ``cpu`` or ``cuda``.
    """
    rollout, settings = model.rollout, model.settings
    assert rollout is not None, f"{model.name} is no rollout engine"
    cache = PagedCache.of(model, lengths.prompt, lengths.response)
    defaults = {"max_num_seqs": cache.most_rows, "max_num_batched_tokens": cache.most_step_tokens}
    return {
        **defaults,
        # vLLM's check of free memory assumes that the device is not shared
        "gpu_memory_utilization": 0.01,
        "watermark": cache.FREE,
        **rollout.config,
        **({} if settings.lora is None else _adapter_arguments(model.role, settings.lora)),
        "runner": "generate",
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.tp,
        "pipeline_parallel_size": settings.pp,
        "max_model_len": lengths.prompt + lengths.response,
        "block_size": model.facts.cache_block,
        "kv_cache_memory_bytes": kv_bytes,
        "enable_prefix_caching": True,
        "enforce_eager": device == "cpu" or not rollout.cuda_graphs,
        # memory of sleep mode cannot be shared with the rank of a child
        "enable_sleep_mode": device != "cpu" and rollout.process == "inline",
        rollout.OFFLOADS_GRAPHS: device != "cpu" and rollout.offloads_graphs,
        "logprobs_mode": "processed_logprobs",
        # responses end as Sampling defines, and only their tokens are read
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        # ranks of a replica schedule alike only after they have the tokens of the step before
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
    }


def _adapter_arguments(role: str, lora: LoraSpec) -> dict[str, Any]:
    """Return arguments for room of the adapters of ``lora``, next to the layers that they change."""
    targets = lora.targets or (*ParameterName.COLUMNWISE, *ParameterName.ROWWISE)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": lora.rank_in_vllm(role),
        "lora_target_modules": list(targets),
    }
