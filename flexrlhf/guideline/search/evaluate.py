"""Seconds of a step under one assignment: to the bit those of ``simulation.walk`` for the same instructions, but fast.

In the simulation a device is free when its last call has ended. Ends on one device never go back, so a call begins when
every earlier call that shares a device with it has ended: all that matters of devices is which *parts* overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexrlhf.guideline.search.graph import CallGraph, Link, call_graph
from flexrlhf.guideline.search.problem import Assignment, Choice, LinkEnd, SearchProblem
from flexrlhf.guideline.simulation.walk import PERIODS, TimedInstruction, walk_steps
from flexrlhf.placement.relation import mesh_relation


def evaluate(problem: SearchProblem, assignment: Assignment) -> float:
    """Seconds of a settled step."""
    graph = call_graph(problem)
    links = [_link_seconds(problem, link, assignment) for link in graph.links]
    spans = [(choice.start, choice.start + choice.size) for choice in assignment]
    return play(graph, _call_seconds(graph, assignment, links), links, overlaps_of(spans))


def overlaps_of(spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Parts that share a device with each part, the part itself among them. ``spans``: (first device, end) of each."""
    return [[i for i, (low, high) in enumerate(spans) if low < end and start < high] for start, end in spans]


def play(
    graph: CallGraph, seconds: Sequence[float], links: Sequence[float], overlaps: Sequence[Sequence[int]]
) -> float:
    """Seconds of a settled step, by the trainer's loop.

    seconds:   of each call.
    links:     seconds of each link.
    overlaps:  parts that share a device with each part.
    """
    visits = [_visit(graph, call, seconds[call], links, overlaps) for call in range(graph.num_calls)]
    steps = num_steps(graph)
    # of a part: when the last call that shares a device with its mesh has ended
    free, ends = [0.0] * graph.num_parts, [0.0] * steps
    ready = [[0.0] * graph.num_calls for _ in range(steps)]
    for turn in range(steps + graph.lag):
        for call, lag, every, first, second, touched, reads, taken in visits:
            step = turn - lag
            if not 0 <= step < steps or (every > 1 and (step + 1) % every):
                continue
            # comparisons instead of max: this is the innermost loop
            start = free[first] if free[first] > free[second] else free[second]
            row = ready[step]
            for writer, wait in reads:
                arrival = row[writer] + wait
                if arrival > start:
                    start = arrival
            row[call] = end = start + taken
            for part in touched:
                if free[part] < end:
                    free[part] = end
            if ends[step] < end:
                ends[step] = end
    return settled(ends, graph)


Visit = tuple[int, int, int, int, int, Sequence[int], list[tuple[int, float]], float]
"""(call, lag, every, its first part, its last part, the parts that share a device with them, (writer, wait) of what it
reads, seconds)."""


def _visit(
    graph: CallGraph, call: int, seconds: float, links: Sequence[float], overlaps: Sequence[Sequence[int]]
) -> Visit:
    parts = graph.parts[call]
    touched = overlaps[parts[0]] if len(parts) == 1 else sorted({q for part in parts for q in overlaps[part]})
    reads = [(edge.writer, links[edge.rows] if edge.rows >= 0 else 0.0) for edge in graph.edges_to(call)]
    return call, graph.lags[call], graph.every[call], parts[0], parts[-1], touched, reads, seconds


def num_steps(graph: CallGraph) -> int:
    """Number of batches that are played: some to settle, those that are measured, those that drain."""
    return (PERIODS + 1 + graph.lag) * graph.period + graph.lag


def measured(graph: CallGraph) -> tuple[int, int]:
    """Return (batch, batches): seconds are the mean of so many batches up to that one.

    They are ``lag`` + 1 periods, before the last batches drain alone: with a lag long and short steps may alternate for
    ever, since the cycle of waits goes through as many batches.
    """
    return num_steps(graph) - 1 - graph.lag, (1 + graph.lag) * graph.period


def settled(ends: Sequence[float], graph: CallGraph) -> float:
    """Seconds of a settled step. ``ends``: when each batch ends."""
    last, length = measured(graph)
    return (ends[last] - ends[last - length]) / length


def _call_seconds(graph: CallGraph, assignment: Assignment, links: Sequence[float]) -> list[float]:
    seconds = [
        assignment[parts[0]].option.seconds[column] if column >= 0 else 0.0
        for parts, column in zip(graph.parts, graph.column, strict=True)
    ]
    for link, taken in zip(graph.links, links, strict=True):
        if link.call >= 0:
            seconds[link.call] = taken
    return seconds


def _link_seconds(problem: SearchProblem, link: Link, assignment: Assignment) -> float:
    source, to = assignment[link.source], assignment[link.to]
    relation = mesh_relation(source.start, source.size, to.start, to.size)
    return link.seconds(_end(problem, source), _end(problem, to), relation)


def _end(problem: SearchProblem, choice: Choice) -> LinkEnd:
    return LinkEnd(problem.shape_of(choice.start, choice.size), choice.option.layout)


@dataclass(frozen=True)
class WalkInput:
    """Arguments of ``walk_steps``: one node a call."""

    nodes: tuple[TimedInstruction, ...]
    num_blocks: int

    def seconds(self, graph: CallGraph) -> float:
        """Seconds of a settled step, by the walk: those of ``evaluate``."""
        return settled(walk_steps(self.nodes, self.num_blocks, num_steps(graph)).ends, graph)


def walk_input_of(problem: SearchProblem, assignment: Assignment) -> WalkInput:
    """Return the same step as the simulator receives it: one block for all devices with the same parts."""
    graph = call_graph(problem)
    links = [_link_seconds(problem, link, assignment) for link in graph.links]
    seconds = _call_seconds(graph, assignment, links)
    blocks = _blocks(assignment)
    nodes: list[TimedInstruction] = []
    for call, parts in enumerate(graph.parts):
        mine = tuple(sorted({block for part in parts for block in blocks[part]}))
        edges = graph.edges_to(call)
        after = tuple(edge.writer for edge in edges)
        delays = tuple(links[edge.rows] if edge.rows >= 0 else 0.0 for edge in edges)
        lag, every = graph.lags[call], graph.every[call]
        nodes.append(TimedInstruction(mine, seconds[call], after, delays=delays, lag=lag, every=every))
    return WalkInput(tuple(nodes), sum(1 for _ in set().union(*blocks)))


def _blocks(assignment: Assignment) -> list[set[int]]:
    """Blocks of each part: one for every run of devices between ends of meshes, those with equal parts put together."""
    ends = sorted({end for choice in assignment for end in (choice.start, choice.start + choice.size)})
    crowds = {
        tuple(i for i, choice in enumerate(assignment) if choice.start <= end < choice.start + choice.size)
        for end in ends
    } - {()}
    return [{block for block, parts in enumerate(sorted(crowds)) if i in parts} for i in range(len(assignment))]
