"""Times of the replies of environments, by step, in the job's store: ranks that call environments add to them as they
arrive, and rank 0 reads them when it writes the step's row of metrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from flexrlhf.comm.world import World
from flexrlhf.metrics import REPLY_PERCENTS, Triple
from flexrlhf.plan.plan import Plan


class ReplyTimes:
    """Times of the replies to turns of each step, of all ranks, and times of waiting for them."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._store = dist.PrefixStore(f"replies/{plan.spec.name}", world.store)

    def add(self, step: int, seconds: Sequence[float]) -> None:
        """Add replies that have arrived on this rank; not those of an evaluation."""
        if step >= 0 and seconds:
            times = "".join(f"{round(1e6 * each)} " for each in seconds)
            self._store.append(f"{step}", times)  # type: ignore[attr-defined]

    def add_wait(self, step: int, seconds: float) -> None:
        """Add a time for which this rank had nothing to decode and awaited replies; not that of an evaluation."""
        if step >= 0:
            self._store.append(f"{step}/waited", f"{round(1e6 * seconds)} ")  # type: ignore[attr-defined]

    def add_refused(self, step: int, calls: int) -> None:
        """Add calls of programs that were refused; not those of an evaluation."""
        if step >= 0 and calls:
            self._store.add(f"{step}/refused", calls)

    def take(self, step: int) -> dict[str, Triple]:
        """Return the statistics of a step, which are then forgotten."""
        times, waits = (self._take(key) for key in (f"{step}", f"{step}/waited"))
        if not times:
            return {}
        found = {"reply_seconds": (len(times), sum(times), 0.0), "reply_seconds_longest": (1.0, times[-1], 0.0)}
        places = {percent: min(len(times) - 1, percent * len(times) // 100) for percent in REPLY_PERCENTS}
        found["reply_wait"] = (1.0, sum(waits), 0.0)
        if self._store.check([f"{step}/refused"]):
            found["refused_calls"] = (1.0, float(self._store.add(f"{step}/refused", 0)), 0.0)
            self._store.delete_key(f"{step}/refused")
        return found | {f"reply_seconds_p{percent}": (1.0, times[place], 0.0) for percent, place in places.items()}

    def _take(self, key: str) -> list[float]:
        """Return the times of a key in order, which are then forgotten."""
        if not self._store.check([key]):
            return []
        times = sorted(int(each) / 1e6 for each in self._store.get(key).split())
        self._store.delete_key(key)
        return times
