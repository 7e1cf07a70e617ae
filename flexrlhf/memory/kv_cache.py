"""Bytes of the keys and values that a rollout engine stores."""

from __future__ import annotations

from flexrlhf.memory.activations import Blocks
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.rollout import KV_BLOCK_TOKENS
from flexrlhf.weights.shapes import DTYPE_BYTES, ModelShape


def kv_cache_bytes(model: PlacedModel, shape: ModelShape) -> int:
    """Return the bytes of keys and values of ``generate_tokens`` tokens on each rank of ``model``.

    One block more is counted: vLLM never allocates its first one.
    """
    assert shape.sizes is not None, "planning refuses a rollout engine for families without known sizes"
    blocks = -(-model.settings.generate_tokens // KV_BLOCK_TOKENS) + 1
    settings = model.settings
    blocks_of_stage = Blocks(shape.sizes, DTYPE_BYTES[settings.dtype], settings.tp, False, pp=settings.pp)
    per_token = blocks_of_stage.kv_bytes_per_token()
    return blocks * KV_BLOCK_TOKENS * per_token
