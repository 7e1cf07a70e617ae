"""Seconds of collectives and of bytes that travel."""

from __future__ import annotations

from flexrlhf.guideline.calls import Cost, Links, Traffic
from flexrlhf.placement.routes import Primitive

WITHIN_SECONDS, ACROSS_SECONDS = 20e-6, 60e-6
WITHIN_SHARE, ACROSS_SHARE = 0.75, 0.6


def all_reduce_seconds(size: float, ranks: int, per_node: int, links: Links) -> float:
    """``size`` bytes on each of ``ranks``, ``per_node`` of them in a node (ring: 2 (n - 1) / n of the bytes)."""
    return 2 * gather_seconds(size, ranks, per_node, links)


def gather_seconds(size: float, ranks: int, per_node: int, links: Links) -> float:
    """All-gather or reduce-scatter of ``size`` bytes in all."""
    if ranks <= 1:
        return 0.0
    share = (ranks - 1) / ranks * size
    if ranks <= per_node:
        return WITHIN_SECONDS + share / (WITHIN_SHARE * links.device_gb_s * 1e9)
    return ACROSS_SECONDS + share / (ACROSS_SHARE * links.node_gb_s * 1e9)


def travel_seconds(traffic: Traffic, links: Links) -> float:
    """Point to point."""
    within = traffic.within / (WITHIN_SHARE * links.device_gb_s * 1e9)
    across = traffic.across / (ACROSS_SHARE * links.node_gb_s * 1e9)
    latency = ACROSS_SECONDS if traffic.across else WITHIN_SECONDS
    return traffic.messages * latency + max(within, across)


def move_cost(primitive: Primitive, traffic: Traffic, links: Links) -> Cost:
    return Cost({} if primitive == "none" else {primitive: travel_seconds(traffic, links)})


def sync_cost(traffic: Traffic, gathered: int, num_tensors: int, links: Links) -> Cost:
    gather = gathered / (WITHIN_SHARE * links.device_gb_s * 1e9)
    return Cost({"gather": gather, "send": travel_seconds(traffic, links), "launch": num_tensors * 20e-6})
