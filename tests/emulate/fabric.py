"""Communication of emulated ranks: parcels, meetings, and waits with a deadline that name waiting and missing ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from threading import Condition


class Stopped(Exception):
    """Another rank has failed; this one ends silently."""


class Fabric:
    """Meetings and parcels of the ranks. The first failure wakes and ends everyone."""

    def __init__(self, deadline_seconds: float) -> None:
        self.failure: str | None = None
        self._deadline = deadline_seconds
        self._changed = Condition()
        self._parcels: dict[object, object] = {}
        self._present: dict[object, dict[int, object]] = defaultdict(dict)
        self._waiting: dict[int, Callable[[], str]] = {}

    def fail(self, message: str) -> None:
        with self._changed:
            self.failure = self.failure or message
            self._changed.notify_all()

    def send(self, key: object, parcel: object) -> None:
        with self._changed:
            assert key not in self._parcels, f"parcel {key} sent twice"
            self._parcels[key] = parcel
            self._changed.notify_all()

    def receive(self, rank: int, key: object, wait: str) -> object:
        self._wait(rank, lambda: key in self._parcels, lambda: wait)
        return self._parcels[key]

    def arrive(self, rank: int, key: object, ranks: tuple[int, ...], gift: object = None) -> None:
        """Say that ``rank`` is at ``key``; waits for nobody."""
        with self._changed:
            assert rank in ranks, f"rank {rank} is not one of {ranks}"
            assert rank not in self._present[key], f"rank {rank} comes to {key} twice"
            self._present[key][rank] = gift
            self._changed.notify_all()

    def meet(self, rank: int, key: object, ranks: tuple[int, ...], at: str, gift: object = None) -> dict[int, object]:
        """Wait until all of ``ranks`` are at ``key``; return each rank's gift."""
        self.arrive(rank, key, ranks, gift)
        self.await_presence(rank, key, ranks, at)
        return self._present[key]

    def await_presence(self, rank: int, key: object, ranks: tuple[int, ...], at: str) -> None:
        def late() -> list[int]:
            return [other for other in ranks if other not in self._present[key]]

        self._wait(rank, lambda: not late(), lambda: f"{at} waits for rank {', '.join(map(str, late()))}")

    def _wait(self, rank: int, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        with self._changed:
            self._waiting[rank] = describe
            in_time = self._changed.wait_for(lambda: ready() or self.failure is not None, self._deadline)
            if not in_time:
                blocked = "\n".join(f"  rank {other}: {text()}" for other, text in sorted(self._waiting.items()))
                self.failure = f"blocked for {self._deadline:g} s:\n{blocked}"
                self._changed.notify_all()
            del self._waiting[rank]
            if self.failure is not None:
                raise Stopped
