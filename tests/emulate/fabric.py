"""Communication of emulated ranks: parcels, meetings, and waits with a deadline that name waiting and missing ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Lock, RLock
from typing import Any


class Stopped(Exception):
    """Another rank has failed; this one ends silently."""


@dataclass(frozen=True)
class Wait:
    """Wait of a rank.

    is_over:   whether it has come to its end.
    describe:  who waits for whom.
    changed:   wakes the rank.
    """

    is_over: Callable[[], bool]
    describe: Callable[[], str]
    changed: Condition


class Fabric:
    """Meetings and parcels of the ranks. The first failure wakes and ends everyone."""

    def __init__(self, deadline_seconds: float) -> None:
        self.failure: str | None = None
        self._deadline = deadline_seconds
        self._lock, self._making = RLock(), Lock()
        self._parcels: dict[object, object] = {}
        self._present: dict[object, dict[int, object]] = defaultdict(dict)
        # by key and rank
        self._waits: dict[object, dict[int, Wait]] = defaultdict(dict)
        self._made: dict[object, Any] = {}

    def fail(self, message: str) -> None:
        with self._lock:
            self.failure = self.failure or message
            for key in self._waits:
                self._wake(key)

    def shared(self, key: object, make: Callable[[], Any]) -> Any:
        """Return the result of ``make``, which is the same for all ranks, from the first of them."""
        with self._making:
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]

    def send(self, key: object, parcel: object) -> None:
        with self._lock:
            assert key not in self._parcels, f"parcel {key} sent twice"
            self._parcels[key] = parcel
            self._wake(key)

    def receive(self, rank: int, key: object, wait: str) -> object:
        self._wait(rank, key, lambda: key in self._parcels, lambda: wait)
        return self._parcels[key]

    def arrive(self, rank: int, key: object, ranks: tuple[int, ...], gift: object = None) -> None:
        """Say that ``rank`` is at ``key``; waits for nobody."""
        with self._lock:
            assert rank in ranks, f"rank {rank} is not one of {ranks}"
            assert rank not in self._present[key], f"rank {rank} comes to {key} twice"
            self._present[key][rank] = gift
            self._wake(key)

    def meet(self, rank: int, key: object, ranks: tuple[int, ...], at: str, gift: object = None) -> dict[int, object]:
        """Wait until all of ``ranks`` are at ``key``; return each rank's gift."""
        self.arrive(rank, key, ranks, gift)
        self.await_presence(rank, key, ranks, at)
        return self._present[key]

    def await_presence(self, rank: int, key: object, ranks: tuple[int, ...], at: str) -> None:
        def late() -> list[int]:
            return [other for other in ranks if other not in self._present[key]]

        self._wait(rank, key, lambda: not late(), lambda: f"{at} waits for rank {', '.join(map(str, late()))}")

    def _wake(self, key: object) -> None:
        """Wake the ranks that wait at ``key`` and need not any more: waking all of them each time takes longest."""
        for wait in self._waits.get(key, {}).values():
            if self.failure is not None or wait.is_over():
                wait.changed.notify()

    def _wait(self, rank: int, key: object, is_over: Callable[[], bool], describe: Callable[[], str]) -> None:
        with self._lock:
            if not is_over() and self.failure is None:
                waits, changed = self._waits[key], Condition(self._lock)
                waits[rank] = Wait(is_over, describe, changed)
                if not changed.wait_for(lambda: is_over() or self.failure is not None, self._deadline):
                    blocked = {other: wait.describe() for each in self._waits.values() for other, wait in each.items()}
                    lines = "\n".join(f"  rank {other}: {text}" for other, text in sorted(blocked.items()))
                    self.fail(f"blocked for {self._deadline:g} s:\n{lines}")
                del waits[rank]
            if self.failure is not None:
                raise Stopped
