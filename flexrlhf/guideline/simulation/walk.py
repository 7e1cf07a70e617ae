"""When every instruction begins and ends, if each takes a known time: the trainer's loop, played on paper.

Ranks with the same models do the same at the same time, so they are one *block*. The simulator walks the instructions
of a plan, the search those of a candidate: both through here. Left out is back-pressure: that a sender waits before the
third Move on an edge whose first has not arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

PERIODS = 3
"""Periods that are walked before one is measured: by then what is in flight is so in every step."""


@dataclass(frozen=True, slots=True)
class Node:
    """One instruction of the list.

    ``blocks``: those that do it. ``after``: positions of instructions of the same batch whose results it reads;
    ``delays``: seconds that each of these travels. ``together``: its blocks begin at the same time. ``holds``: False
    for a Move, which goes on beside whatever its blocks do next.
    """

    blocks: tuple[int, ...]
    seconds: float
    after: tuple[int, ...] = ()
    together: bool = True
    holds: bool = True
    lag: int = 0
    every: int = 1
    delays: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Visit:
    """``node`` (its position) for batch ``step`` on ``block``, in seconds from the start of the run.

    ``came``: when the block came to it. ``ready``: when there was all that it reads.
    """

    node: int
    step: int
    block: int
    start: float
    end: float
    came: float = 0.0
    ready: float = 0.0


@dataclass(frozen=True)
class Walked:
    """``ends``: when each batch was through, by step."""

    visits: tuple[Visit, ...]
    ends: tuple[float, ...]


Due = Callable[[int, int], bool]
"""Whether the node at a position is done for a batch (its step may lie outside the run)."""


@dataclass
class _Clock:
    """``free``: when each block is through with what it does. ``done``: when results of (step, position) are there."""

    nodes: Sequence[Node]
    free: list[float]
    done: dict[tuple[int, int], float] = field(default_factory=dict)
    visits: list[Visit] = field(default_factory=list)

    def play(self, index: int, step: int) -> float:
        """Do the node at ``index`` for batch ``step``; when the last of its blocks is through."""
        node = self.nodes[index]
        if not node.holds:
            last = self._travel(index, node, step)
        elif node.together:
            last = self._join(index, node, step)
        else:
            last = max(self._work(index, node, step, block) for block in node.blocks)
        self.done[step, index] = last
        return last

    def _travel(self, index: int, node: Node, step: int) -> float:
        ready = self._ready(node, step)
        start = max(ready, *(self.free[block] for block in node.blocks))
        end = start + node.seconds
        for block in node.blocks:
            self.visits.append(Visit(index, step, block, start, end, self.free[block], ready))
        return end

    def _join(self, index: int, node: Node, step: int) -> float:
        ready = self._ready(node, step)
        start = max(ready, *(self.free[block] for block in node.blocks))
        end = start + node.seconds
        for block in node.blocks:
            self.visits.append(Visit(index, step, block, start, end, self.free[block], ready))
            self.free[block] = end
        return end

    def _work(self, index: int, node: Node, step: int, block: int) -> float:
        came, ready = self.free[block], self._ready(node, step)
        start = max(came, ready)
        self.free[block] = end = start + node.seconds
        self.visits.append(Visit(index, step, block, start, end, came, ready))
        return end

    def _ready(self, node: Node, step: int) -> float:
        """When all that ``node`` reads is there."""
        ready = 0.0
        for place, earlier in enumerate(node.after):
            delay = node.delays[place] if node.delays else 0.0
            ready = max(ready, self.done.get((step, earlier), 0.0) + delay)
        return ready


def walk_nodes(nodes: Sequence[Node], num_blocks: int, steps: int, due: Due | None = None) -> Walked:
    """Play ``steps`` batches. ``due``: when nodes are done, if not all as their ``every`` says."""
    lag = max((node.lag for node in nodes), default=0)
    clock, ends = _Clock(nodes, [0.0] * num_blocks), [0.0] * steps
    is_due = due or (lambda index, step: 0 <= step < steps and not (step + 1) % nodes[index].every)
    for turn in range(steps + lag):
        for index, node in enumerate(nodes):
            step = turn - node.lag
            if is_due(index, step):
                end, batch = clock.play(index, step), min(step, steps - 1)
                ends[batch] = max(ends[batch], end)
    return Walked(tuple(clock.visits), tuple(ends))


def period_of(nodes: Sequence[Node]) -> int:
    """Steps after which what is due repeats."""
    return math.lcm(*(node.every for node in nodes)) if nodes else 1


def steady_seconds(nodes: Sequence[Node], num_blocks: int) -> float:
    """Seconds of one step when the run has settled.

    With a lag long and short steps may alternate for ever: as many are measured as are in flight.
    """
    lag = max((node.lag for node in nodes), default=0)
    period = (1 + lag) * period_of(nodes)
    ends = walk_nodes(nodes, num_blocks, PERIODS * period_of(nodes) + period + lag).ends
    # while the last batches drain nothing new is generated beside them
    last = len(ends) - 1 - lag
    return (ends[last] - ends[last - period]) / period
