"""Memory of vLLM on a GPU besides weights and cache: captured CUDA graphs, buffers and communicators of its ``tp``.

No figure is our own. Sizes of graphs and communicators are published logs of vLLM, buffers of all-reduces are those in
the code of vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.memory.states import State
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.decoder_sizes import Sizes
from flexrlhf.weights.model_shape import ModelShape

GRAPH_BYTES = 0.3e6
"""Of one captured pass, for each layer: 1.50 GB of Kimi-K2.6 (61 layers, 51 sizes in pieces and 35 whole; vLLM issue
47654) are 0.29 MB, 0.62 GB of Llama-3-70B (80 layers, 35 sizes; vLLM PR 5515) 0.22, 0.21 GiB of Llama-3.2-1B (16, 35;
vLLM PR 11349) 0.40; of Llama-3.1-8B 0.2 with few tokens and 0.9 with many (vLLM PR 23184)."""
MOST_CAPTURED = 512
"""Most tokens of a captured pass, or twice the rows decoded at a time, if that is less (``_set_cudagraph_sizes``)."""
ALL_REDUCE_BYTES = 0.3e9
"""Buffers for all-reduces within a node, at most: 32 MiB of vLLM's own, 64 of symmetric memory, three times 64 of
FlashInfer's, on two H100; others have less."""


def on_gpu(state: State, model: PlacedModel, shape: ModelShape, rows: int) -> State:
    """Return ``state`` of a rollout engine with all its memory of a GPU. ``rows``: most that are decoded at a time."""
    rollout = model.rollout
    if rollout is None or shape.sizes is None:
        return state
    graphs = graph_bytes(shape.sizes, model.settings.pp, rows) if rollout.cuda_graphs else 0
    buffers = state.buffers + int(ALL_REDUCE_BYTES) * (model.settings.tp > 1)
    if rollout.offloads_graphs:
        return replace(state, buffers=buffers, graphs=graphs)
    return replace(state, buffers=buffers + graphs)


def graph_bytes(sizes: Sizes, pp: int, rows: int) -> int:
    """Return the bytes of captured passes: of the pieces between attentions for each size, and whole up to ``rows``."""
    captured = _captured_sizes(min(2 * rows, MOST_CAPTURED))
    passes = len(captured) + sum(size <= rows for size in captured)
    return int(GRAPH_BYTES * passes * -(-sizes.layers // pp))


def _captured_sizes(most: int) -> list[int]:
    """Return the numbers of tokens whose passes vLLM captures."""
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, MOST_CAPTURED + 1, 16)) if size <= most]
