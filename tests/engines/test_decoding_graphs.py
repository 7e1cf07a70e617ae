"""Captures of decoding passes on a stand-in for CUDA, which counts waits for the whole device."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from flexrlhf.engines.decoding_graphs import DecodingGraphs


class StandIn:
    """``torch.cuda`` with captures that run on the CPU. ``calls``: how often each function is called; ``room``: whether
    a capture finds memory before ``empty_cache``."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.capturing = 0
        self.room = True

    def install(self, patch: pytest.MonkeyPatch) -> None:
        stand_in = self

        class Graph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                assert (pool, capture_error_mode) == ("pool", "thread_local")
                stand_in.capturing += 1

            def capture_end(self) -> None:
                stand_in.capturing -= 1

            def replay(self) -> None:
                stand_in.calls["replay"] += 1

        class Stream:
            def wait_stream(self, other: object) -> None:
                stand_in.calls["wait_stream"] += 1

        replaced: dict[str, Any] = {
            "CUDAGraph": Graph,
            "Stream": Stream,
            "current_stream": Stream,
            "graph_pool_handle": lambda: "pool",
            "stream": lambda _: nullcontext(),
            "synchronize": lambda *_: self.calls.update(["synchronize"]),
            "empty_cache": self.empty_cache,
        }
        for name, value in replaced.items():
            patch.setattr(torch.cuda, name, value)

    def empty_cache(self) -> None:
        assert not self.capturing
        self.calls["empty_cache"] += 1
        self.room = True


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    made.install(monkeypatch)
    return made


@pytest.mark.parametrize("room", [True, False])
def test_a_capture_waits_for_the_device_only_if_memory_is_short(stand_in: StandIn, room: bool) -> None:
    """The device may have receives outstanding that end when another rank has trained."""
    passes: list[tuple[int, int]] = []

    def decode(rows: int, width: int) -> Tensor:
        passes.append((rows, width))
        if stand_in.capturing and not stand_in.room:
            raise torch.OutOfMemoryError("the stand-in has no memory")
        return torch.full((rows, 3), float(len(passes)))

    graphs = DecodingGraphs()
    stand_in.room = room
    first = graphs.logits(decode, 4, 8).clone()
    second = [graphs.logits(decode, 4, 8).clone() for _ in range(3)]
    assert stand_in.calls["synchronize"] == 0 and not stand_in.capturing
    assert stand_in.calls["empty_cache"] == (not room)
    assert passes == [(4, 8)] * (2 + (not room)) and stand_in.calls["replay"] == 3
    assert (first == 1).all() and all((each == len(passes)).all() for each in second)
