"""Settings of a rollout engine's copy of the weights, and the tokens that its cache has room for."""

from __future__ import annotations

from functools import lru_cache

from flexrlhf.config.spec import ModelSpec, Spec
from flexrlhf.errors import UserError
from flexrlhf.placement.layout import BatchShape, Layout

KV_BLOCK_TOKENS = 32
"""Tokens of a block of vLLM's cache, a size that its attention supports on CPUs and on GPUs."""


def padded_row(spec: Spec) -> int:
    """Return the tokens of the longest prompt and response, in whole blocks."""
    width = spec.data.max_prompt_tokens + spec.data.max_response_tokens
    return -(-width // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS


def rollout_settings(model: ModelSpec, layout: Layout, spec: Spec) -> ModelSpec:
    """Return the settings of ``model`` for an engine that only generates.

    ``generate_tokens``: capacity of its cache, at most all rows of a step on one rank. Raises UserError for a cache
    smaller than one row.
    """
    rollout, row = spec.rollout, padded_row(spec)
    if rollout.kv_tokens is not None and rollout.kv_tokens < row:
        raise UserError(
            f"rollout.kv_tokens: {rollout.kv_tokens} are less than one row of {row} tokens (prompt and response, in "
            f"blocks of {KV_BLOCK_TOKENS}); use at least {row}"
        )
    tokens = rollout.kv_tokens or max(model.generate_tokens, row)
    return ModelSpec(
        path=model.path,
        init=model.init,
        engine=rollout.engine,
        tp=rollout.tp,
        dtype=rollout.dtype or model.dtype,
        generate_tokens=min(tokens, row * _most_rows(layout, spec)),
    )


def rollout_warnings(spec: Spec, role: str) -> list[str]:
    """Return warnings for an engine that samples in another dtype than the policy has."""
    model, dtype = spec.models.of(role), spec.rollout.dtype
    is_corrected = getattr(spec.algorithm, "importance", None) is not None
    if model is None or dtype in (None, model.dtype) or is_corrected:
        return []
    return [
        f"rollout.dtype {dtype} with {model.dtype} of models.{role} samples from a policy that differs by rounding; "
        f"algorithm.importance: {{}} corrects for it"
    ]


def _most_rows(layout: Layout, spec: Spec) -> int:
    """Return the rows of a step on the replica with most."""
    batch = BatchShape.of(spec)
    return batch.samples_per_prompt * _most_prompts(batch, layout)


@lru_cache(maxsize=1024)
def _most_prompts(batch: BatchShape, layout: Layout) -> int:
    return max(1, *(len(batch.prompts_on(layout, ranks[0], batch.mini_batches)) for ranks in layout.tp_sets))
