"""Seconds of a step under one assignment, to the bit what ``walk`` says of the same instructions, but fast.

On paper a device is free when its last call has ended. Ends on one device never go back, so a call begins when every
earlier call that shares a device with it has ended: which *parts* overlap is all that has to be known of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexrlhf.guideline.search.graph import Graph, Link, graph_of
from flexrlhf.guideline.search.problem import Assignment, Choice, End, Problem, relation_of
from flexrlhf.guideline.simulation.walk import PERIODS, TimedInstruction, walk_steps


def evaluate(problem: Problem, assignment: Assignment) -> float:
    """Seconds of a settled step."""
    graph = graph_of(problem)
    links = [_link_seconds(problem, link, assignment) for link in graph.links]
    spans = [(choice.start, choice.start + choice.size) for choice in assignment]
    return play(graph, _call_seconds(graph, assignment, links), links, overlaps_of(spans))


def overlaps_of(spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Parts that share a device with each part, itself among them."""
    return [[i for i, (low, high) in enumerate(spans) if low < end and start < high] for start, end in spans]


def play(graph: Graph, seconds: Sequence[float], links: Sequence[float], overlaps: Sequence[Sequence[int]]) -> float:
    """The trainer's loop. A part's ``free``: when the last call that shares a device with its mesh has ended."""
    plan = [_visit(graph, call, seconds[call], links, overlaps) for call in range(graph.num_calls)]
    steps = num_steps(graph)
    free, ends = [0.0] * graph.num_parts, [0.0] * steps
    ready = [[0.0] * graph.num_calls for _ in range(steps)]
    for turn in range(steps + graph.lag):
        for call, lag, every, first, second, touched, reads, taken in plan:
            step = turn - lag
            if not 0 <= step < steps or (every > 1 and (step + 1) % every):
                continue
            # comparisons instead of max: this is the innermost loop
            start = free[first] if free[first] > free[second] else free[second]
            row = ready[step]
            for writer, wait in reads:
                there = row[writer] + wait
                if there > start:
                    start = there
            row[call] = end = start + taken
            for part in touched:
                if free[part] < end:
                    free[part] = end
            if ends[step] < end:
                ends[step] = end
    return settled(ends, graph)


Visit = tuple[int, int, int, int, int, Sequence[int], list[tuple[int, float]], float]
"""(call, lag, every, its parts, the parts that share a device with them, (writer, wait) of what it reads, seconds)."""


def _visit(graph: Graph, call: int, seconds: float, links: Sequence[float], overlaps: Sequence[Sequence[int]]) -> Visit:
    parts = graph.parts[call]
    touched = overlaps[parts[0]] if len(parts) == 1 else sorted({q for part in parts for q in overlaps[part]})
    reads = [(edge.writer, links[edge.rows] if edge.rows >= 0 else 0.0) for edge in graph.edges_to(call)]
    return call, graph.lags[call], graph.every[call], parts[0], parts[-1], touched, reads, seconds


def num_steps(graph: Graph) -> int:
    """Batches that are played: some to settle, those that are measured, those that drain."""
    return (PERIODS + 1 + graph.lag) * graph.period + graph.lag


def measured(graph: Graph) -> tuple[int, int]:
    """(batch, batches): seconds are the mean of so many batches up to that one.

    Of ``lag`` + 1 periods, before the last batches drain beside nothing: with a lag long and short steps may take turns
    for ever, since the cycle of waits goes through as many batches.
    """
    return num_steps(graph) - 1 - graph.lag, (1 + graph.lag) * graph.period


def settled(ends: Sequence[float], graph: Graph) -> float:
    """Seconds of a step, of the ends of all batches."""
    last, length = measured(graph)
    return (ends[last] - ends[last - length]) / length


def _call_seconds(graph: Graph, assignment: Assignment, links: Sequence[float]) -> list[float]:
    seconds = [
        assignment[parts[0]].option.seconds[column] if column >= 0 else 0.0
        for parts, column in zip(graph.parts, graph.column, strict=True)
    ]
    for link, taken in zip(graph.links, links, strict=True):
        if link.call >= 0:
            seconds[link.call] = taken
    return seconds


def _link_seconds(problem: Problem, link: Link, assignment: Assignment) -> float:
    source, to = assignment[link.source], assignment[link.to]
    relation = relation_of(source.start, source.size, to.start, to.size)
    return link.seconds(_end(problem, source), _end(problem, to), relation)


def _end(problem: Problem, choice: Choice) -> End:
    return End(problem.shape_of(choice.start, choice.size), choice.option.layout)


@dataclass(frozen=True)
class Instructions:
    """What ``walk`` plays."""

    nodes: tuple[TimedInstruction, ...]
    num_blocks: int

    def seconds(self, graph: Graph) -> float:
        """What ``evaluate`` says, by the walk."""
        return settled(walk_steps(self.nodes, self.num_blocks, num_steps(graph)).ends, graph)


def instructions_of(problem: Problem, assignment: Assignment) -> Instructions:
    """The same step as the simulator sees it: one block for all devices with the same parts."""
    graph = graph_of(problem)
    links = [_link_seconds(problem, link, assignment) for link in graph.links]
    seconds = _call_seconds(graph, assignment, links)
    blocks = _blocks(problem, assignment)
    nodes: list[TimedInstruction] = []
    for call, parts in enumerate(graph.parts):
        mine = tuple(sorted({block for part in parts for block in blocks[part]}))
        edges = graph.edges_to(call)
        after = tuple(edge.writer for edge in edges)
        delays = tuple(links[edge.rows] if edge.rows >= 0 else 0.0 for edge in edges)
        nodes.append(
            TimedInstruction(mine, seconds[call], after, delays=delays, lag=graph.lags[call], every=graph.every[call])
        )
    return Instructions(tuple(nodes), sum(1 for _ in set().union(*blocks)))


def _blocks(problem: Problem, assignment: Assignment) -> list[set[int]]:
    """Blocks of each part: one for every run of devices between ends of meshes, those with equal parts put together."""
    cuts = sorted({end for choice in assignment for end in (choice.start, choice.start + choice.size)})
    members = {
        tuple(i for i, choice in enumerate(assignment) if choice.start <= cut < choice.start + choice.size)
        for cut in cuts
    } - {()}
    return [{block for block, parts in enumerate(sorted(members)) if i in parts} for i in range(len(assignment))]
