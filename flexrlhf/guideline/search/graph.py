"""The calls of a step as numbers: what waits for what, whatever the placement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from flexrlhf.guideline.search.problem import LinkSeconds, Problem, Sync, Task


@dataclass(frozen=True)
class Edge:
    """``reader`` waits for ``writer`` of the same batch, done ``turns`` turns earlier; ``rows``: index of what travels
    between, -1: nothing."""

    writer: int
    reader: int
    turns: int
    rows: int


@dataclass(frozen=True)
class Link:
    """Something that travels from part ``source`` to part ``to``. ``call``: of the sync, -1 for rows."""

    source: int
    to: int
    seconds: LinkSeconds
    call: int


@dataclass(frozen=True, eq=False)
class Graph:
    """``parts``: whose meshes each call occupies. ``column``: which of its part's seconds each call takes (-1: a sync).

    ``links``: rows first, in the problem's order, then syncs.
    """

    parts: tuple[tuple[int, ...], ...]
    column: tuple[int, ...]
    lags: tuple[int, ...]
    every: tuple[int, ...]
    edges: tuple[Edge, ...]
    links: tuple[Link, ...]
    num_parts: int

    @property
    def num_calls(self) -> int:
        return len(self.parts)

    @property
    def lag(self) -> int:
        return max(self.lags, default=0)

    @property
    def period(self) -> int:
        return math.lcm(*self.every) if self.every else 1

    @cached_property
    def _edges_to(self) -> tuple[tuple[Edge, ...], ...]:
        return tuple(tuple(edge for edge in self.edges if edge.reader == call) for call in range(self.num_calls))

    def edges_to(self, call: int) -> tuple[Edge, ...]:
        return self._edges_to[call]


@lru_cache(maxsize=16)
def graph_of(problem: Problem) -> Graph:
    parts = {part.name: index for index, part in enumerate(problem.parts)}
    calls = {call.name: index for index, call in enumerate(problem.calls) if isinstance(call, Task)}
    part_of = {name: parts[task.part] for name, task in problem.tasks.items()}
    links = [Link(part_of[rows.writer], part_of[rows.reader], rows.seconds, -1) for rows in problem.rows]
    occupied: list[tuple[int, ...]] = []
    column, lags, every, seen = [], [], [], [0] * len(parts)
    for index, call in enumerate(problem.calls):
        match call:
            case Task():
                part = parts[call.part]
                occupied.append((part,))
                column.append(seen[part])
                seen[part] += 1
            case Sync():
                link = Link(part_of[call.task], parts[call.to], call.seconds, index)
                links.append(link)
                occupied.append((link.source, link.to))
                column.append(-1)
        lags.append(call.lag if isinstance(call, Task) else problem.tasks[call.task].lag)
        every.append(call.every if isinstance(call, Sync) else 1)
    edges = _edges(problem, calls, lags)
    return Graph(
        tuple(occupied), tuple(column), tuple(lags), tuple(every), tuple(edges), tuple(links), len(problem.parts)
    )


def _edges(problem: Problem, calls: dict[str, int], lags: list[int]) -> list[Edge]:
    rows = {(item.writer, item.reader): index for index, item in enumerate(problem.rows)}
    found = []
    for index, call in enumerate(problem.calls):
        for name in call.reads if isinstance(call, Task) else (call.task,):
            writer, reader = calls[name], call.name if isinstance(call, Task) else ""
            turns = lags[index] - lags[writer]
            if turns < 0 or (turns == 0 and writer >= index):
                raise ValueError(f"{reader or 'a sync'} stands before {name}, which it reads")
            found.append(Edge(writer, index, turns, rows.get((name, reader), -1)))
    return found
