"""The calls of a step by number, which wait for which, and the time of a step under one assignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from flexrlhf.guideline.costs.relations import mesh_relation
from flexrlhf.guideline.search.problem import (
    Assignment,
    LinkEnd,
    LinkSeconds,
    LinkSide,
    SearchProblem,
    SearchSync,
    SearchTask,
    whole_end,
)
from flexrlhf.guideline.simulation.walk import TimedInstruction, steady_seconds


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
    """A transfer from part ``source`` to part ``to``.

    call:  index of the sync; -1 for rows.
    side:  what ``seconds`` depend on of each end.
    """

    source: int
    to: int
    seconds: LinkSeconds
    call: int
    side: LinkSide = whole_end


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
    def edges_to(self) -> tuple[tuple[Edge, ...], ...]:
        """Waits of each call."""
        return tuple(tuple(edge for edge in self.edges if edge.reader == call) for call in range(self.num_calls))


@lru_cache(maxsize=16)
def call_graph(problem: SearchProblem) -> CallGraph:
    """Number the calls of ``problem``. Raises ValueError where a call stands before one that it reads."""
    parts = {part.name: index for index, part in enumerate(problem.parts)}
    calls = {call.name: index for index, call in enumerate(problem.calls) if isinstance(call, SearchTask)}
    part_of = {name: parts[task.part] for name, task in problem.tasks.items()}
    links = [Link(part_of[rows.writer], part_of[rows.reader], rows.seconds, -1, rows.side) for rows in problem.rows]
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
                link = Link(part_of[call.task], parts[call.to], call.seconds, index, call.side)
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
            if isinstance(call, SearchSync) and writer > index:
                # the weights of the step before, whose training has ended since the sync occupies its devices
                continue
            turns = lags[index] - lags[writer]
            if turns < 0 or (turns == 0 and writer >= index):
                raise ValueError(f"{reader or 'a sync'} stands before {name}, which it reads")
            edges.append(Edge(writer, index, turns, rows.get((name, reader), -1)))
    return edges


def evaluate(problem: SearchProblem, assignment: Assignment) -> float:
    """Return the time of a settled step, by the walk of the simulation."""
    graph, blocks = call_graph(problem), _blocks(assignment)
    links = [link_seconds(problem, link, assignment) for link in graph.links]
    seconds = call_seconds(graph, assignment, links)
    calls = [_timed(graph, call, seconds[call], links, blocks) for call in range(graph.num_calls)]
    return steady_seconds(calls, len(set().union(*blocks)))


def _timed(
    graph: CallGraph, call: int, seconds: float, links: Sequence[float], blocks: Sequence[set[int]]
) -> TimedInstruction:
    """Return ``call`` as the walk takes it."""
    edges = graph.edges_to[call]
    return TimedInstruction(
        blocks=tuple(sorted({block for part in graph.parts[call] for block in blocks[part]})),
        seconds=seconds,
        after=tuple(edge.writer for edge in edges),
        delays=tuple(links[edge.rows] if edge.rows >= 0 else 0.0 for edge in edges),
        lag=graph.lags[call],
        every=graph.every[call],
        fills=graph.fills[call],
        uses=tuple(part for part in graph.parts[call] if part in graph.fills),
    )


def call_seconds(graph: CallGraph, assignment: Assignment, links: Sequence[float]) -> list[float]:
    """Return the time of each call. ``links``: time of each link."""
    seconds = [
        assignment[parts[0]].option.seconds[column] if column >= 0 else 0.0
        for parts, column in zip(graph.parts, graph.column, strict=True)
    ]
    for link, taken in zip(graph.links, links, strict=True):
        if link.call >= 0:
            seconds[link.call] = taken
    return seconds


def link_seconds(problem: SearchProblem, link: Link, assignment: Assignment) -> float:
    """Return the time of ``link`` between the meshes of ``assignment``."""
    source, to = assignment[link.source], assignment[link.to]
    relation = mesh_relation(source.start, source.size, to.start, to.size)
    first, second = (LinkEnd(problem.shape_of(each.start, each.size), each.option.layout) for each in (source, to))
    return link.seconds(first, second, relation)


def _blocks(assignment: Assignment) -> list[set[int]]:
    """Blocks of each part, one for all devices with the same parts: runs of devices between ends of meshes."""
    ends = sorted({end for choice in assignment for end in (choice.start, choice.start + choice.size)})
    crowds = {
        tuple(i for i, choice in enumerate(assignment) if choice.start <= end < choice.start + choice.size)
        for end in ends
    } - {()}
    return [{block for block, parts in enumerate(sorted(crowds)) if i in parts} for i in range(len(assignment))]
