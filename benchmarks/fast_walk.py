"""Step time of one assignment, fast, and equal to the search's and the simulation's to the last bit.

A device is free when its last call has ended. Ends on one device never go back, so a call begins when every earlier
call that shares a device with it has ended: all that matters of devices is which *parts* overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexrlhf.guideline.search.evaluate import CallGraph
from flexrlhf.guideline.simulation.walk import SteadySteps


def overlaps_of(spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Parts that share a device with each part, the part itself among them. ``spans``: (first device, end) of each."""
    return [[i for i, (low, high) in enumerate(spans) if low < end and start < high] for start, end in spans]


def play(
    graph: CallGraph, seconds: Sequence[float], links: Sequence[float], overlaps: Sequence[Sequence[int]]
) -> float:
    """Time of a settled step by the trainer's loop.

    seconds:   time of each call.
    links:     time of each link.
    overlaps:  parts that share a device with each part.
    """
    visits = [_visit(graph, call, seconds[call], links, overlaps) for call in range(graph.num_calls)]
    steady = SteadySteps.of(graph.lags, graph.every)
    steps = steady.walked
    # of a part: when the last call that shares a device with its mesh has ended
    free, ends = [0.0] * graph.num_parts, [0.0] * steps
    # of a part: when its newest weights are there; of the link that brings them: when it is free
    filled, link = [0.0] * graph.num_parts, 0.0
    ready = [[0.0] * graph.num_calls for _ in range(steps)]
    for turn in range(steps + graph.lag):
        for call, lag, every, first, second, touched, reads, taken, fills in visits:
            step = turn - lag
            if not 0 <= step < steps or (every > 1 and (step + 1) % every):
                continue
            busy = max(free[first], free[second], filled[first], filled[second])
            start = busy if fills < 0 else link
            row = ready[step]
            for writer, wait in reads:
                arrival = row[writer] + wait
                if arrival > start:
                    start = arrival
            row[call] = end = start + taken
            if fills >= 0:
                link = filled[fills] = end
            for part in touched:
                if free[part] < end:
                    free[part] = end
            if ends[step] < end:
                ends[step] = end
    return (ends[steady.last] - ends[steady.last - steady.measured]) / steady.measured


Visit = tuple[int, int, int, int, int, Sequence[int], list[tuple[int, float]], float, int]
"""(call, lag, every, its first part, its last part, the parts that share a device with them, (writer, wait) of its
inputs, seconds, the part that it fills in the background)."""


def _visit(
    graph: CallGraph, call: int, seconds: float, links: Sequence[float], overlaps: Sequence[Sequence[int]]
) -> Visit:
    parts, fills = graph.parts[call], graph.fills[call]
    touched = overlaps[parts[0]] if len(parts) == 1 else sorted({q for part in parts for q in overlaps[part]})
    first, last = (parts[0], parts[-1]) if parts else (fills, fills)
    reads = [(edge.writer, links[edge.rows] if edge.rows >= 0 else 0.0) for edge in graph.edges_to[call]]
    return call, graph.lags[call], graph.every[call], first, last, touched, reads, seconds, fills
