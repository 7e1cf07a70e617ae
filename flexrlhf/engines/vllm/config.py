"""Arguments of vLLM's engine, from a placed model that is not loaded. Pure."""

from __future__ import annotations

from typing import Any

from flexrlhf.config.model_settings import LoraSpec
from flexrlhf.operators.columns import Lengths
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.rollout import (
    FREE_PAGES,
    OFFLOADS_GRAPHS,
    most_rows_at_once,
    most_step_tokens,
    offloads_graphs,
)
from flexrlhf.weights.lora import rank_in_vllm
from flexrlhf.weights.shards import COLUMNWISE, ROWWISE


def engine_arguments(model: PlacedModel, lengths: Lengths, kv_bytes: int, device: str) -> dict[str, Any]:
    """Return arguments of vLLM's EngineArgs, except those that depend on files and processes.

    ``kv_bytes``: of the KV cache; ``device``: ``cpu`` or ``cuda``.
    """
    rollout, settings = model.rollout, model.settings
    assert rollout is not None, f"{model.name} is no rollout engine"
    texts = settings.generate_tokens, lengths.prompt, lengths.response
    defaults = {"max_num_seqs": most_rows_at_once(*texts), "max_num_batched_tokens": most_step_tokens(*texts)}
    return {
        **defaults,
        # vLLM's check of free memory assumes that the device is not shared
        "gpu_memory_utilization": 0.01,
        "watermark": FREE_PAGES,
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
        OFFLOADS_GRAPHS: device != "cpu" and offloads_graphs(rollout),
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
    targets = lora.targets or (*COLUMNWISE, *ROWWISE)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": rank_in_vllm(role, lora),
        "lora_target_modules": list(targets),
    }
