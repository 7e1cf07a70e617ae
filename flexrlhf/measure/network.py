"""Messages between all ranks over the back end of the run: groups of the plans, all pairs, bandwidths of links."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.api import Plan, RunStopped
from flexrlhf.api.engine import BareRank, RankGroup
from flexrlhf.measure.facts import GroupFacts, HostFacts, LinkFacts

MESSAGE_BYTES = {"gloo": 2**24, "nccl": 2**27}
"""Bytes of a message whose time is the link's, by back end."""
NUM_MESSAGES = 4
"""Messages in a direction, after a first one that is not timed."""


class Network:
    """Messages of this rank in a preflight."""

    def __init__(self, rank: BareRank, store: dist.Store, hosts: Sequence[HostFacts]) -> None:
        """Send nothing yet."""
        self._rank, self._world, self._store, self._hosts = rank, rank.world, store, hosts
        self._seconds = rank.progress.timeout_seconds

    def check_groups(self, plans: Sequence[Plan]) -> GroupFacts:
        """Sum over every group of ``plans``, one plan after the other. ``check_pairs`` comes first.

        Raises DeadlineError with the ranks that are missing.
        """
        began, number, most_open = time.monotonic(), 0, 0
        for plan in plans:
            self._rank.report(f"the groups of {plan.spec.name}")
            self._rank.connect(groups=plan.groups)
            for group in self._rank.own_groups():
                self._sum(group)
            number, most_open = number + len(plan.groups), max(most_open, _open_files())
            self._rank.disconnect()
        seconds = time.monotonic() - began
        pairs = self._world.size * (self._world.size - 1) // 2
        return GroupFacts(number, seconds, pairs, self._largest(most_open), self._world.backend)

    def check_pairs(self) -> list[LinkFacts]:
        """Exchange a message with every other rank, then measure the links of all machines.

        Raises DeadlineError with the ranks that are missing.
        """
        self._rank.report("the group of all ranks")
        self._rank.connect("preflight")
        everyone = self._rank.all_ranks("preflight")
        assert (handle := everyone.group) is not None, "one rank has no pairs"
        self._sum(everyone)
        self._rank.report("messages between all pairs of ranks")
        for pairs in rounds_of_pairs(self._world.size):
            if (partner := partner_of(self._world.rank, pairs)) is not None:
                self._exchange(handle, partner)
        links = self._measure_links(handle)
        self._rank.disconnect()
        return links

    def _measure_links(self, group: dist.ProcessGroup) -> list[LinkFacts]:
        """Measure within every node at the same time, then between all nodes, in rounds of disjoint pairs."""
        self._rank.report("the bandwidth within machines")
        within = [(host.node, host.node) for host in self._hosts if len(host.ranks) > 1]
        self._measure(group, within)
        self._rank.report("the bandwidth between machines")
        across = rounds_of_pairs(len(self._hosts))
        for pairs in across:
            self._measure(group, pairs)
        self._world.meet("the end of the measurements", self._seconds)
        return [self._link(ends) for ends in (*within, *(pair for pairs in across for pair in pairs))]

    def _measure(self, group: dist.ProcessGroup, pairs: Sequence[tuple[int, int]]) -> None:
        """Measure the link of this rank among ``pairs`` of nodes, if it has one, in both directions."""
        for ends in pairs:
            for index, (first, second) in enumerate(self._rank_pairs(ends)):
                if self._world.rank in (first, second):
                    both = [self._stream(group, first, second), self._stream(group, second, first)]
                    if self._world.rank == first:
                        self._store.set(f"link/{ends[0]}/{ends[1]}/{index}", json.dumps(both))

    def _rank_pairs(self, ends: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the ranks that send to each other at the same time: the first two of a node, or all of two nodes."""
        first, second = (self._hosts[node].ranks for node in ends)
        return [(first[0], first[1])] if ends[0] == ends[1] else list(zip(first, second, strict=False))

    def _stream(self, group: dist.ProcessGroup, source: int, destination: int) -> float:
        """Return the GB/s of messages from one rank to another, as the receiver's last word comes back."""
        is_source, peer = self._world.rank == source, destination if self._world.rank == source else source
        data = torch.zeros(MESSAGE_BYTES[self._world.backend], dtype=torch.uint8, device=self._world.device)
        word = torch.zeros(1, dtype=torch.uint8, device=self._world.device)
        began = 0.0
        for number in range(NUM_MESSAGES + 1):
            self._message(group, data, peer, is_source)
            if number in (0, NUM_MESSAGES):
                self._message(group, word, peer, not is_source)
            if number == 0:
                began = time.perf_counter()
        return NUM_MESSAGES * data.nbytes / (time.perf_counter() - began) / 1e9

    def _link(self, ends: tuple[int, int]) -> LinkFacts:
        pairs = self._rank_pairs(ends)
        found = [json.loads(self._store.get(f"link/{ends[0]}/{ends[1]}/{index}")) for index in range(len(pairs))]
        return LinkFacts(ends, len(pairs), min(sum(direction) for direction in zip(*found, strict=True)))

    def _exchange(self, group: dist.ProcessGroup, partner: int) -> None:
        mine = torch.full((1,), self._world.rank, dtype=torch.int64, device=self._world.device)
        theirs = torch.full_like(mine, -1)
        sends = dist.P2POp(dist.isend, mine, partner, group), dist.P2POp(dist.irecv, theirs, partner, group)
        self._finish(dist.batch_isend_irecv(list(sends)), (partner,))
        self._expect(theirs, partner, f"a message from rank {partner}")

    def _message(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, is_sender: bool) -> None:
        operation = dist.P2POp(dist.isend if is_sender else dist.irecv, tensor, peer, group)
        self._finish(dist.batch_isend_irecv([operation]), (peer,))

    def _sum(self, group: RankGroup) -> None:
        total = torch.full((1,), self._world.rank, dtype=torch.int64, device=self._world.device)
        self._expect(group.sum(total), sum(group.ranks), f"the sum over {len(group.ranks)} ranks")

    def _expect(self, found: Tensor, expected: int, what: str) -> None:
        if int(found) != expected:
            raise RunStopped(f"{self._rank.progress.here}: {what} was {int(found)}, and should be {expected}")

    def _finish(self, works: Sequence[dist.Work], ranks: tuple[int, ...]) -> None:
        """Wait until ``works`` are done. Raises DeadlineError."""
        for work in works:
            self._rank.progress.wait(work, ranks)

    def _largest(self, number: int) -> int:
        """Return the largest number of any rank."""
        self._store.set(f"open files/{self._world.rank}", str(number))
        keys = {f"open files/{rank}": f"rank {rank}" for rank in range(self._world.size)}
        self._world.wait_for(self._store, keys, "the end of the groups", self._seconds)
        return max(int(self._store.get(key)) for key in keys) if self._world.rank == 0 else number


def _open_files() -> int:
    return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))


def rounds_of_pairs(number: int) -> list[list[tuple[int, int]]]:
    """Return rounds in which each of ``number`` members meets every other once, each at most once a round.

    The circle method of tournaments: one member stays in place, the others turn.
    """
    circle: list[int | None] = list(range(number))
    if number % 2:
        circle.append(None)
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in rounds if pairs]


def partner_of(member: int, pairs: list[tuple[int, int]]) -> int | None:
    """Return the partner of ``member`` in a round; None without one."""
    return next((a if b == member else b for a, b in pairs if member in (a, b)), None)
