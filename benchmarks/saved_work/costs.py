"""FLOPs and time of the same work done in two ways."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

Work = Callable[[], object]
Shape = Sequence[int]


@dataclass(frozen=True)
class Cost:
    """Cost of one piece of work.

    flops:    of matrix products and attention, or of attention alone
    seconds:  the median
    """

    flops: float
    seconds: float


@dataclass(frozen=True)
class SavedWork:
    """Cost of a piece of work with something computed, and with it left out.

    saved:     saved work
    work:      that was measured
    computed:  with it
    left_out:  without it
    """

    saved: str
    work: str
    computed: Cost
    left_out: Cost

    def line(self) -> str:
        """Return a line of the table: GFLOPs and seconds both ways, and their ratios."""
        pairs = (
            (self.computed.flops / 1e9, self.left_out.flops / 1e9, ".1f"),
            (self.computed.seconds, self.left_out.seconds, ".2f"),
        )
        cells = [f"{both[0]:{form}} | {both[1]:{form}} | {both[0] / both[1]:.2f}" for *both, form in pairs]
        return f"| {self.saved} | {self.work} | {' | '.join(cells)} |"


HEADER = (
    "| left out | work | GFLOPs with it | without | ratio | seconds with it | without | ratio |\n"
    "|---|---|---|---|---|---|---|---|"
)


BLOCK = 512
"""Keys that the attention kernel of CPUs computes at a time: causality leaves out later blocks."""


def count_flops(work: Work, attention_alone: bool = False) -> float:
    """Run ``work`` and return the FLOPs of its matrix products and its attention, of backward too.

    torch's counter has no formula for the attention kernel of CPUs; the other kernels' formula is used: all rows of
    queries with all keys, also if a mask leaves products out, without the blocks that causality leaves out.
    """
    aten = torch.ops.aten
    kernels = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    with FlopCounterMode(display=False, custom_mapping=kernels) as counter:
        work()
    if not attention_alone:
        return float(counter.get_total_flops())
    return float(sum(count for kernel, count in counter.get_flop_counts()["Global"].items() if kernel in kernels))


def _attention(query: Shape, key: Shape, value: Shape, dropout: float = 0, causal: bool = False, **_: object) -> int:
    return int(_share(key[2], causal) * sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(
    gradient: Shape,
    query: Shape,
    key: Shape,
    value: Shape,
    out: Shape,
    lse: Shape,
    dropout: float,
    causal: bool,
    **_: object,
) -> int:
    flops = sdpa_backward_flop_count(gradient, query, key, value)  # type: ignore[no-untyped-call]
    return int(_share(key[2], causal) * flops)


def _share(keys: int, causal: bool) -> float:
    """Return the share of pairs of as many queries and keys that the kernel computes."""
    return min(1.0, (1 + BLOCK / keys) / 2) if causal else 1.0


def compare(
    saved: str, work: str, computed: Work, left_out: Work, rounds: int, attention_alone: bool = False
) -> SavedWork:
    """Measure both ways in turns, ``rounds`` times. FLOPs are counted in a run before, which warms up.

    ``attention_alone``: FLOPs of attention are counted, no others.
    """
    ways = (computed, left_out)
    flops = [count_flops(way, attention_alone) for way in ways]
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for way, found in zip(ways, seconds, strict=True):
            found.append(_seconds(way))
    return SavedWork(saved, work, *(Cost(each, median(found)) for each, found in zip(flops, seconds, strict=True)))


def _seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
