"""When every instruction begins and ends, if each takes a known time: the trainer's loop, played on paper.

Ranks with the same models do the same at the same time, so they are one *block*. The simulator walks the instructions
of a plan, the search those of a candidate: both through here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PERIODS = 3
"""Periods that are walked before one is measured: by then what is in flight is so in every step."""


@dataclass(frozen=True, slots=True)
class Node:
    """One instruction of the list.

    ``blocks``: those that do it. ``after``: positions of earlier instructions of the same batch whose results it reads.
    ``together``: its blocks begin at the same time, since they communicate inside. ``holds``: False for a Move, which
    goes on beside whatever its blocks do next. ``gate``: blocks that must have come to it before it begins, when not
    all of ``blocks``: the senders of point-to-point messages.
    """

    blocks: tuple[int, ...]
    seconds: float
    after: tuple[int, ...] = ()
    together: bool = True
    holds: bool = True
    gate: tuple[int, ...] = ()
    lag: int = 0
    every: int = 1


@dataclass(frozen=True, slots=True)
class Visit:
    """``node`` (its position) for batch ``step`` on ``block``, in seconds from the start of the run."""

    node: int
    step: int
    block: int
    start: float
    end: float


@dataclass(frozen=True)
class Walked:
    """``ends``: when each batch was through, by step."""

    visits: tuple[Visit, ...]
    ends: tuple[float, ...]


def walk_nodes(nodes: Sequence[Node], num_blocks: int, steps: int) -> Walked:
    """Play ``steps`` batches."""
    lag = max((node.lag for node in nodes), default=0)
    free = [0.0] * num_blocks
    ready: dict[tuple[int, int], float] = {}
    visits: list[Visit] = []
    ends = [0.0] * steps
    for turn in range(steps + lag):
        for index, node in enumerate(nodes):
            step = turn - node.lag
            if not 0 <= step < steps or (step + 1) % node.every:
                continue
            arrived = max((ready.get((step, earlier), 0.0) for earlier in node.after), default=0.0)
            last = 0.0
            if node.holds and not node.together:
                for block in node.blocks:
                    start = max(free[block], arrived)
                    free[block] = end = start + node.seconds
                    last = max(last, end)
                    visits.append(Visit(index, step, block, start, end))
            else:
                start = max(arrived, *(free[block] for block in node.gate or node.blocks))
                last = start + node.seconds
                for block in node.blocks:
                    if node.holds:
                        free[block] = last
                    visits.append(Visit(index, step, block, start, last))
            ready[step, index] = last
            ends[step] = max(ends[step], last)
    return Walked(tuple(visits), tuple(ends))


def period_of(nodes: Sequence[Node]) -> int:
    """Steps after which what is due repeats."""
    return math.lcm(*(node.every for node in nodes)) if nodes else 1


def steady_seconds(nodes: Sequence[Node], num_blocks: int) -> float:
    """Seconds of one step when the run has settled."""
    period = period_of(nodes)
    ends = walk_nodes(nodes, num_blocks, (PERIODS + 1) * period).ends
    return (ends[-1] - ends[-1 - period]) / period
