"""Seconds of a step under one assignment, by the walk of the simulation."""

from __future__ import annotations

from collections.abc import Sequence

from flexrlhf.guideline.search.graph import CallGraph, Link, call_graph
from flexrlhf.guideline.search.problem import Assignment, Choice, LinkEnd, SearchProblem
from flexrlhf.guideline.simulation.walk import TimedInstruction, steady_seconds
from flexrlhf.placement.routes import mesh_relation


def evaluate(problem: SearchProblem, assignment: Assignment) -> float:
    """Seconds of a settled step."""
    graph, blocks = call_graph(problem), _blocks(assignment)
    links = [link_seconds(problem, link, assignment) for link in graph.links]
    seconds = call_seconds(graph, assignment, links)
    calls = [_timed(graph, call, seconds[call], links, blocks) for call in range(graph.num_calls)]
    return steady_seconds(calls, len(set().union(*blocks)))


def _timed(
    graph: CallGraph, call: int, seconds: float, links: Sequence[float], blocks: Sequence[set[int]]
) -> TimedInstruction:
    """Return ``call`` as the walk takes it."""
    edges = graph.edges_to(call)
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
    """Seconds of each call. ``links``: seconds of each link."""
    seconds = [
        assignment[parts[0]].option.seconds[column] if column >= 0 else 0.0
        for parts, column in zip(graph.parts, graph.column, strict=True)
    ]
    for link, taken in zip(graph.links, links, strict=True):
        if link.call >= 0:
            seconds[link.call] = taken
    return seconds


def link_seconds(problem: SearchProblem, link: Link, assignment: Assignment) -> float:
    """Seconds of ``link`` between the meshes of ``assignment``."""
    source, to = assignment[link.source], assignment[link.to]
    relation = mesh_relation(source.start, source.size, to.start, to.size)
    return link.seconds(_end(problem, source), _end(problem, to), relation)


def _end(problem: SearchProblem, choice: Choice) -> LinkEnd:
    return LinkEnd(problem.shape_of(choice.start, choice.size), choice.option.layout)


def _blocks(assignment: Assignment) -> list[set[int]]:
    """Blocks of each part, one for all devices with the same parts: runs of devices between ends of meshes."""
    ends = sorted({end for choice in assignment for end in (choice.start, choice.start + choice.size)})
    crowds = {
        tuple(i for i, choice in enumerate(assignment) if choice.start <= end < choice.start + choice.size)
        for end in ends
    } - {()}
    return [{block for block, parts in enumerate(sorted(crowds)) if i in parts} for i in range(len(assignment))]
