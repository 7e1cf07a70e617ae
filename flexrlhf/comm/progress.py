"""Position of every rank in the list that all ranks walk, and the waits of this rank."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from flexrlhf.comm.deadlines import STORE_CLOSED, Cause, Waiting, await_device, deadline
from flexrlhf.comm.world import InOrder, Waitable, World
from flexrlhf.errors import some_of

Sign = Literal["silent", "waits", "runs"]
ENDING_SECONDS = 6.0
"""Time in which a rank that has closed its connections reports its end."""
SILENT_SECONDS = 3.0
"""Time in which a rank that runs writes a beat."""


@dataclass(frozen=True)
class Position:
    """Report of a rank, its last one.

    at:     number in the list that all ranks walk; -1 before the first.
    what:   what it does there.
    host:   its machine.
    ended:  sentence of its end; empty while it runs.
    """

    at: int = -1
    what: str = "has not started"
    host: str = ""
    ended: str = ""


@dataclass(frozen=True)
class Beat:
    """Sign of life that the watch of a rank writes every second. ``is_waiting``: whether its main thread waits."""

    number: int
    is_waiting: bool

    @staticmethod
    def key(rank: int) -> str:
        """Return the key of the job's store under which a rank writes its beats."""
        return f"beat/{rank}"


class RankProgress:
    """Position of each rank in the list that all ranks walk, in the job's store, and the waits of this rank."""

    def __init__(self, world: World, run: str, models: Mapping[int, str], timeout_seconds: float) -> None:
        """Start before the first instruction. ``models``: names of the placed models of each rank."""
        self.timeout_seconds = timeout_seconds
        self._world = world
        self._run = run
        self._models = models
        self.position = Position()
        self._set(Position(what="start-up", host=world.host))

    def report(self, position: int, what: str) -> None:
        """Store that this rank has come to ``position``, which grows along the list; ``what`` it does there."""
        with deadline(f"{self.here}, now at {what}", lambda _: STORE_CLOSED):
            self._set(Position(position, what, self._world.host))

    def report_end(self, sentence: str) -> None:
        """Store that this rank ends, and why, so that ranks whose connections to it close can name it."""
        at = self.position
        # the failure may be the store's
        with suppress(RuntimeError):
            self._set(Position(at.at, at.what, at.host, sentence))

    @property
    def waiting(self) -> Waiting | None:
        """Wait of this rank now."""
        return self._world.waits.current

    def wait(self, work: Waitable, ranks: tuple[int, ...]) -> None:
        """Wait for ``work`` with ``ranks``. Raises DeadlineError."""
        with self._world.waits.on(ranks, self.timeout_seconds), self.deadline(ranks):
            if isinstance(work, InOrder) and not self._world.switches.device_waits:
                work = work.work
            if self._world.polls and isinstance(work, dist.Work):
                await_device(work, self.timeout_seconds)
            work.wait()

    def deadline(self, ranks: tuple[int, ...]) -> AbstractContextManager[None]:
        """Return a context that names a failed wait for ``ranks`` by this rank's instruction."""
        return deadline(self.here, lambda cause: self.explain(cause, ranks))

    @property
    def name(self) -> str:
        """Name of this rank, with its models and host."""
        return self._name(self._world.rank, self.position)

    @property
    def here(self) -> str:
        """Name of this rank, and its instruction."""
        return f"{self.name} at {self.position.what}"

    def where(self, rank: int, store: dist.Store) -> str:
        """Return ``rank 1 (reward; host b; at step 3, ...)`` by its last report; for another thread."""
        return self._where(rank, self._seen(rank, store))

    def explain(self, cause: Cause, ranks: Iterable[int], seconds: float | None = None) -> str:
        """Return who of ``ranks`` has arrived at this rank's position and who has not, or whose connection closed.

        ``seconds``: limit of the wait; None: the one of the run.
        """
        seconds = seconds or self.timeout_seconds
        others = [rank for rank in ranks if rank != self._world.rank]
        seen = self._await_ends(others) if cause == "closed" else {rank: self._seen(rank) for rank in others}
        if ended := [f"{self._name(*each)} ended ({each[1].ended})" for each in seen.items() if each[1].ended]:
            return f"{_reason(cause, seconds)}, {some_of(ended)}"
        if cause == "closed":
            return f"the connection to {' or '.join(self._where(*each) for each in seen.items())} closed"
        return self._missing(seen, seconds)

    def _await_ends(self, ranks: Sequence[int]) -> dict[int, Position]:
        """Return the reports of ``ranks``, once one reports its end: one that closes connections may do so later."""
        limit = time.monotonic() + ENDING_SECONDS
        while True:
            seen = {rank: self._seen(rank) for rank in ranks}
            if any(position.ended for position in seen.values()) or time.monotonic() > limit:
                return seen
            time.sleep(0.2)

    def _missing(self, seen: Mapping[int, Position], seconds: float) -> str:
        """Return which ranks do not come.

        First ranks without a sign of life, also ahead of this one: their messages may be incomplete. If all have one,
        ranks behind it; if none is, ranks level with it that do not wait themselves.
        """
        behind = [rank for rank, position in seen.items() if position.at < self.position.at]
        level = [rank for rank, position in seen.items() if position.at == self.position.at]
        signs = self._signs(list(seen))
        stuck = [rank for rank, sign in signs.items() if sign == "silent"]
        missing = stuck or behind or [rank for rank in level if signs[rank] != "waits"] or level or list(seen)
        named = [self._where(rank, seen[rank], "does not respond" if rank in stuck else "") for rank in missing]
        arrived = [self._name(rank, seen[rank]) for rank in seen if rank not in missing]
        return (
            f"{_reason('expired', seconds)}, waiting for {some_of(named)}; "
            f"arrived: {some_of(arrived) or 'none of the others'}"
        )

    def _signs(self, ranks: Sequence[int]) -> dict[int, Sign]:
        """Return the signs of the watches of ``ranks``; a stopped process writes nothing."""
        before = {rank: self._beat(rank) for rank in ranks}
        time.sleep(SILENT_SECONDS)
        after = {rank: self._beat(rank) for rank in ranks}
        return {rank: _sign(before[rank], after[rank]) for rank in ranks}

    def _beat(self, rank: int) -> Beat | None:
        key = Beat.key(rank)
        return Beat(*json.loads(self._world.store.get(key))) if self._world.store.check([key]) else None

    def _name(self, rank: int, position: Position) -> str:
        """Return ``rank 1 (reward; host b)``."""
        host = f"host {position.host}" if position.host else ""
        return f"rank {rank} ({'; '.join(filter(None, (self._models.get(rank, ''), host)))})"

    def _where(self, rank: int, position: Position, state: str = "") -> str:
        """Return ``rank 1 (reward; host b; at step 3, ...)``."""
        level = " too" if position.at == self.position.at else ""
        place = f"at {position.what}{level}" if position.host else position.what
        return f"{self._name(rank, position)[:-1]}; {'; '.join(filter(None, (place, state)))})"

    def _set(self, position: Position) -> None:
        self.position = position
        values = [position.at, position.what, position.host, position.ended]
        self._world.store.set(self._key(self._world.rank), json.dumps(values))

    def _key(self, rank: int) -> str:
        return f"{self._run}/at/{rank}"

    def _seen(self, rank: int, store: dist.Store | None = None) -> Position:
        """Return the last report of ``rank``."""
        store = store or self._world.store
        if not store.check([self._key(rank)]):
            return Position()
        return Position(*json.loads(store.get(self._key(rank))))


def _reason(cause: Cause, seconds: float) -> str:
    return f"the deadline of {seconds:g} s passed" if cause == "expired" else "the connection closed"


def _sign(before: Beat | None, after: Beat | None) -> Sign:
    if before is None or after is None:
        return "runs"
    if before == after:
        return "silent"
    return "waits" if before.is_waiting and after.is_waiting else "runs"
