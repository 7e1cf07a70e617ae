"""The way of weights between nodes: to each once, in pieces to different ranks there, which send them on.

Receiving nodes form chains, each fed by another node of the source where there are several: every node then sends what
it has received once, however many nodes there are. Few lots pass a long chain slowly, so they go through more and
shorter ones, which the source feeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil, gcd, sqrt


@dataclass(frozen=True)
class Hop:
    """One message of the way.

    stage:      number of messages before it on its way.
    piece:      what is sent.
    senders:    ranks that have it, of which one sends, each in turn.
    receivers:  ranks that it is sent to.
    """

    stage: int
    piece: int
    senders: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """Messages that bring ``num_pieces`` pieces of equal size to all receivers."""

    num_pieces: int
    hops: tuple[Hop, ...]


def way_to(
    sources: Sequence[tuple[int, ...]], receivers: Sequence[tuple[int, ...]], num_lots: int | None, pieces: range
) -> Way:
    """Return the way from ranks that have the same to ranks of other nodes that need it, both by node.

    num_lots:  lots that go this way, one after the other; None: no node sends to another one what it has received.
    pieces:    in which it is sent, numbered among all that cross at a time: the next one arrives at the next rank.
    """
    chains = min(len(receivers), len(sources) * _fan_out(ceil(len(receivers) / len(sources)), num_lots))
    # one of each node, then the next of each
    order = [rank for turn in zip_longest(*sources) for rank in turn if rank is not None]
    step = len(pieces) * chains
    turns = len(order) // gcd(step, len(order))
    found: list[Hop] = []
    for chain in range(chains):
        for piece, place in enumerate(pieces):
            first = chain + piece * chains
            senders = tuple(order[(first + turn * step) % len(order)] for turn in range(turns))
            found += _along(receivers[chain::chains], piece, place, senders)
    return Way(len(pieces), tuple(found))


def _fan_out(longest: int, num_lots: int | None) -> int:
    """Return the chains that one node of the source feeds. ``longest``: nodes of one chain if that is all.

    With f chains each lot takes f times as long, and the last one has to pass longest / f nodes, two lots behind at
    each: f * num_lots + 2 * longest / f is least here.
    """
    return longest if num_lots is None else min(longest, max(1, round(sqrt(2 * longest / num_lots))))


def _along(nodes: Sequence[tuple[int, ...]], piece: int, place: int, senders: tuple[int, ...]) -> Iterator[Hop]:
    """Yield the messages of a piece along a chain. ``place``: number of the rank of each node at which it arrives."""
    receivers = [ranks[place % len(ranks)] for ranks in nodes]
    yield Hop(0, piece, senders, (receivers[0],))
    for stage, (ranks, receiver) in enumerate(zip(nodes, receivers, strict=True), 1):
        others = (*(rank for rank in ranks if rank != receiver), *receivers[stage : stage + 1])
        if others:
            yield Hop(stage, piece, (receiver,), others)
