"""Seconds of collectives and point-to-point messages."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2, sqrt
from pathlib import Path

from flexrlhf.guideline.costs.constants import named_rows, read_rows
from flexrlhf.guideline.costs.cost_model import Cost, Links, Traffic
from flexrlhf.placement.routes import Primitive


@dataclass(frozen=True)
class LinkFigures:
    """Part of a link's bandwidth that is reached (``links.csv``), fitted by ``benchmarks/calibration/links.py``.

    message_seconds:     start of a message between two ranks
    collective_seconds:  start of a collective
    hop_seconds:         delay of a hop from one rank of a ring, or node of a tree, to the next
    share:               share of the bandwidth that long messages reach
    slow_bytes:          collectives of as many bytes take twice as long as at that share
    """

    message_seconds: float
    collective_seconds: float
    hop_seconds: float
    share: float
    slow_bytes: float

    def collective(self, size: float, gb_s: float) -> float:
        """Return the seconds of ``size`` bytes through a link of ``gb_s``, without hops; the square root's term: short
        collectives fill the link less."""
        return self.collective_seconds + (size + sqrt(size * self.slow_bytes)) / (self.share * gb_s * 1e9)

    def message(self, size: float, gb_s: float) -> float:
        """Return the seconds of a message without its start."""
        return size / (self.share * gb_s * 1e9)


_FIGURES = named_rows(LinkFigures, read_rows(Path(__file__).with_suffix(".csv")))
WITHIN, ACROSS = _FIGURES["within"], _FIGURES["across"]
AS_GIVEN = LinkFigures(message_seconds=0.0, collective_seconds=0.0, hop_seconds=0.0, share=1.0, slow_bytes=0.0)
"""A link whose bandwidth is given as it is reached."""
Figures = tuple[LinkFigures, LinkFigures]


def all_reduce_seconds(
    size: float, ranks: int, per_node: int, links: Links, groups: int = 1, figures: Figures = (WITHIN, ACROSS)
) -> float:
    """Return the seconds of ``size`` bytes on each of ``ranks``, ``per_node`` of them in a node: reduce-scatter and
    all-gather. ``groups`` such collectives run at once and share each node's link. Nodes are a tree, up and down."""
    if ranks <= 1:
        return 0.0
    hops = 2 * ceil(log2(_nodes(ranks, per_node))) * figures[1].hop_seconds
    return hops + _bytes_seconds(2 * size, ranks, per_node, links, groups, figures)


def gather_seconds(
    size: float,
    ranks: int,
    per_node: int,
    links: Links,
    groups: int = 1,
    pieces: int = 1,
    figures: Figures = (WITHIN, ACROSS),
) -> float:
    """Return the seconds of all-gathers or reduce-scatters of ``size`` bytes in total, otherwise as an all-reduce.

    ``pieces``: collectives of equal parts, one after the other, as of the layers of a model. Each goes through a ring
    of all ranks.
    """
    if ranks <= 1:
        return 0.0
    within, across = figures
    nodes = _nodes(ranks, per_node)
    hops = (ranks - nodes) * within.hop_seconds + (nodes if nodes > 1 else 0) * across.hop_seconds
    return pieces * (hops + _bytes_seconds(size / pieces, ranks, per_node, links, groups, figures))


def _nodes(ranks: int, per_node: int) -> int:
    return ceil(ranks / per_node)


def _bytes_seconds(size: float, ranks: int, per_node: int, links: Links, groups: int, figures: Figures) -> float:
    """Return the seconds in which ranks pass on ``(n - 1) / n`` of the bytes, and nodes as much through their own
    links; the slower of both counts."""
    within, across = figures
    inside = within.collective((ranks - 1) / ranks * size, links.device_gb_s) if per_node > 1 else 0.0
    if ranks <= per_node:
        return inside
    nodes = _nodes(ranks, per_node)
    return max(inside, across.collective((nodes - 1) / nodes * size, links.node_gb_s / groups))


def travel_seconds(traffic: Traffic, links: Links, figures: Figures = (WITHIN, ACROSS)) -> float:
    """Return the seconds of point-to-point messages."""
    within, across = figures
    start = across.message_seconds if traffic.across else within.message_seconds
    inside = within.message(traffic.within, links.device_gb_s)
    return traffic.messages * start + max(inside, across.message(traffic.across, links.node_gb_s))


def move_cost(primitive: Primitive, traffic: Traffic, links: Links) -> Cost:
    """Return the seconds of ``traffic`` of a Move, by primitive."""
    return Cost({} if primitive == "none" else {primitive: travel_seconds(traffic, links)})


def sync_cost(traffic: Traffic, gathered: Traffic, num_tensors: int, links: Links) -> Cost:
    """Return the seconds of a Sync: ``gathered`` by the source, ``traffic`` sent, and a launch for each tensor."""
    gather = max(WITHIN.message(gathered.within, links.device_gb_s), ACROSS.message(gathered.across, links.node_gb_s))
    return Cost({"gather": gather, "send": travel_seconds(traffic, links), "launch": num_tensors * 20e-6})
