"""What vLLM is told, worked out from a placed model without loading it: the arguments of its engine."""

from __future__ import annotations

from typing import Any

from flexrlhf.operators.columns import Lengths
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.rollout import KV_BLOCK_TOKENS

OWN_ARGUMENTS = frozenset(
    {
        "additional_config",
        "async_scheduling",
        "block_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "disable_log_stats",
        "distributed_executor_backend",
        "dtype",
        "enable_prefix_caching",
        "enable_sleep_mode",
        "enforce_eager",
        "generation_config",
        "hf_overrides",
        "kv_cache_memory_bytes",
        "load_format",
        "logits_processors",
        "logprobs_mode",
        "max_logprobs",
        "max_model_len",
        "model",
        "model_impl",
        "nnodes",
        "num_gpu_blocks_override",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "quantization",
        "runner",
        "seed",
        "skip_tokenizer_init",
        "speculative_config",
        "tensor_parallel_size",
        "tokenizer",
        "use_tqdm_on_load",
        "worker_cls",
        "worker_extension_cls",
    }
)
"""Arguments that ``rollout.config`` may not give: the placement says them, or the same numbers everywhere need them."""
PREFILL_TOKENS = 8192
"""Prompt tokens that one step of the engine computes, where prompts are not longer and rows not more."""


def max_rows(model: PlacedModel, lengths: Lengths) -> int:
    """Rows that the engine decodes at a time: as many as fit its cache at full length, so that none is put back."""
    blocks_of_row = -(-(lengths.prompt + lengths.response) // KV_BLOCK_TOKENS)
    return max(1, model.settings.generate_tokens // KV_BLOCK_TOKENS // blocks_of_row)


def step_tokens(model: PlacedModel, lengths: Lengths) -> int:
    """The most tokens of one step of the engine: whole prompts of many rows, or one token of each row."""
    rows = max_rows(model, lengths)
    return max(lengths.prompt, rows, min(rows * lengths.prompt, PREFILL_TOKENS))


def engine_arguments(model: PlacedModel, lengths: Lengths, kv_bytes: int, device: str) -> dict[str, Any]:
    """Arguments of vLLM's engine by its own names, but what depends on files and processes."""
    rollout, settings = model.rollout, model.settings
    assert rollout is not None, f"{model.name} is no rollout engine"
    defaults = {"max_num_seqs": max_rows(model, lengths), "max_num_batched_tokens": step_tokens(model, lengths)}
    return {
        **defaults,
        # its check of free memory assumes that nobody else uses the device
        "gpu_memory_utilization": 0.01,
        **rollout.config,
        "runner": "generate",
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.tp,
        "max_model_len": lengths.prompt + lengths.response,
        "block_size": KV_BLOCK_TOKENS,
        "kv_cache_memory_bytes": kv_bytes,
        "enable_prefix_caching": rollout.prefix_caching,
        "enforce_eager": device == "cpu" or not rollout.cuda_graphs,
        # a child's memory is open to its rank, which memory that sleeps cannot be
        "enable_sleep_mode": device != "cpu" and rollout.process == "inline",
        "logprobs_mode": "processed_logprobs",
        # answers end where this program says, and its tokens are all that it wants
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        # ranks of one set decide alike what they compute next only if they know what was drawn before
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
