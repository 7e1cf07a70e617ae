"""CUDA graphs of decoding passes: the kernels of a pass are launched as one, instead of layer by layer from Python.

Passes of the same number of rows and columns run the same kernels at the same addresses. The first one runs as usual,
which also lets libraries prepare what a capture cannot; the second one is captured; after that it is replayed. Graphs
live as long as the cache that they read: weights may be elsewhere in the next call.

``torch.cuda.graph`` would wait for the whole device before each capture, so also for weights and rows of other models
that are on their way to this rank. A capture runs nothing, so it needs no such wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class DecodingGraphs:
    """Captured passes by (rows, columns), which share their memory, as one runs at a time."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # memory of the pool is reused by captures on one stream alone
        self._stream = torch.cuda.Stream()
        self._logits: Tensor | None = None

    def logits(self, decode: Callable[[int, int], Tensor], rows: int, width: int) -> Tensor:
        """Return the logits (rows, vocabulary) of ``decode(rows, width)``, which the next call overwrites."""
        key = rows, width
        if key not in self._graphs:
            self._graphs[key] = None
            found = decode(rows, width)
            if self._logits is None:
                # the first call has the most rows
                self._logits = torch.empty_like(found)
            return found
        assert self._logits is not None, "the first pass made them"
        graph, target = self._graphs[key], self._logits[:rows]
        if graph is None:
            graph = self._graphs[key] = self._captured(lambda: target.copy_(decode(rows, width)))
        graph.replay()
        return target

    def _captured(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Return the graph of ``run``."""
        try:
            return self._capture(run)
        except torch.OutOfMemoryError:
            # a capture cannot free what torch keeps for later tensors; that waits for the device
            torch.cuda.empty_cache()
            return self._capture(run)

    def _capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # other threads, such as one that watches collectives, may call CUDA meanwhile
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph
