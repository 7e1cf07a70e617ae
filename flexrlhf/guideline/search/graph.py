"""The calls of a step as numbers: which call waits for which, whatever the placement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from flexrlhf.guideline.search.problem import LinkSeconds, SearchProblem, SearchSync, SearchTask


@dataclass(frozen=True)
class Edge:
    """A wait of one call for another of the same batch.

    writer:  the call that is waited for.
    reader:  the call that waits.
    turns:   turns from the writer to the reader.
    rows:    index of the row transfer between them; -1: nothing travels.
    """

    writer: int
    reader: int
    turns: int
    rows: int


@dataclass(frozen=True)
class Link:
    """A transfer from part ``source`` to part ``to``. ``call``: index of the sync; -1 for rows."""

    source: int
    to: int
    seconds: LinkSeconds
    call: int


@dataclass(frozen=True, eq=False)
class CallGraph:
    """The calls of a problem by number.

    parts:      the parts whose meshes each call occupies; none where it overlaps other calls.
    column:     which of its part's seconds each call takes; -1 for a sync.
    lags:       batches by which each call is behind the newest.
    every:      steps from one run of each call to the next.
    edges:      the waits between calls.
    links:      transfers: rows first, in the problem's order, then syncs.
    num_parts:  number of parts of the problem.
    fills:      the part whose next call waits for each call, a sync that overlaps others; -1: none.
    """

    parts: tuple[tuple[int, ...], ...]
    column: tuple[int, ...]
    lags: tuple[int, ...]
    every: tuple[int, ...]
    edges: tuple[Edge, ...]
    links: tuple[Link, ...]
    num_parts: int
    fills: tuple[int, ...]

    @property
    def num_calls(self) -> int:
        return len(self.parts)

    @property
    def lag(self) -> int:
        return max(self.lags, default=0)

    @cached_property
    def _edges_to(self) -> tuple[tuple[Edge, ...], ...]:
        return tuple(tuple(edge for edge in self.edges if edge.reader == call) for call in range(self.num_calls))

    def edges_to(self, call: int) -> tuple[Edge, ...]:
        return self._edges_to[call]


@lru_cache(maxsize=16)
def call_graph(problem: SearchProblem) -> CallGraph:
    """Number the calls of ``problem``. Raises ValueError where a call stands before one that it reads."""
    parts = {part.name: index for index, part in enumerate(problem.parts)}
    calls = {call.name: index for index, call in enumerate(problem.calls) if isinstance(call, SearchTask)}
    part_of = {name: parts[task.part] for name, task in problem.tasks.items()}
    links = [Link(part_of[rows.writer], part_of[rows.reader], rows.seconds, -1) for rows in problem.rows]
    occupied: list[tuple[int, ...]] = []
    column, lags, every, fills, num_tasks = [], [], [], [], [0] * len(parts)
    for index, call in enumerate(problem.calls):
        match call:
            case SearchTask():
                part = parts[call.part]
                occupied.append((part,))
                column.append(num_tasks[part])
                num_tasks[part] += 1
            case SearchSync():
                link = Link(part_of[call.task], parts[call.to], call.seconds, index)
                links.append(link)
                occupied.append(() if call.overlaps else (link.source, link.to))
                column.append(-1)
        lags.append(call.lag if isinstance(call, SearchTask) else problem.tasks[call.task].lag)
        every.append(call.every if isinstance(call, SearchSync) else 1)
        fills.append(parts[call.to] if isinstance(call, SearchSync) and call.overlaps else -1)
    edges = _edges(problem, calls, lags)
    columns = (tuple(occupied), tuple(column), tuple(lags), tuple(every))
    return CallGraph(*columns, tuple(edges), tuple(links), len(problem.parts), tuple(fills))


def _edges(problem: SearchProblem, calls: dict[str, int], lags: list[int]) -> list[Edge]:
    rows = {(item.writer, item.reader): index for index, item in enumerate(problem.rows)}
    edges = []
    for index, call in enumerate(problem.calls):
        for name in call.reads if isinstance(call, SearchTask) else (call.task,):
            writer, reader = calls[name], call.name if isinstance(call, SearchTask) else ""
            turns = lags[index] - lags[writer]
            if turns < 0 or (turns == 0 and writer >= index):
                raise ValueError(f"{reader or 'a sync'} stands before {name}, which it reads")
            edges.append(Edge(writer, index, turns, rows.get((name, reader), -1)))
    return edges
