"""Times of the replies of environments, by step, in the job's store: ranks that call environments add to them as they
arrive, and rank 0 reads them when it writes the step's row of metrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from flexrlhf.comm.world import World
from flexrlhf.metrics import Triple
from flexrlhf.plan.plan import Plan


class ReplyTimes:
    """Number of the replies to turns, sum of their times, and the longest one of each rank."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._store = dist.PrefixStore(f"replies/{plan.spec.name}", world.store)
        self._rank, self._callers = world.rank, sorted(plan.processes.by_rank())
        self._longest: dict[int, int] = {}
        """Microseconds of the longest reply so far, by step."""

    def add(self, step: int, seconds: Sequence[float]) -> None:
        """Count replies that have arrived on this rank; not those of an evaluation."""
        times = [round(1e6 * each) for each in seconds]
        if step < 0 or not times:
            return
        self._store.add(f"{step}/number", len(times))
        self._store.add(f"{step}/total", sum(times))
        longest = max(self._longest.pop(step, 0), *times)
        # the step before may still have replies under way
        self._longest = {each: time for each, time in self._longest.items() if each == step - 1} | {step: longest}
        self._store.set(f"{step}/longest/{self._rank}", str(longest))

    def take(self, step: int) -> dict[str, Triple]:
        """Return the statistics of a step, which are then forgotten."""
        number, total = (self._store.add(f"{step}/{name}", 0) for name in ("number", "total"))
        keys = [f"{step}/longest/{rank}" for rank in self._callers]
        longest = [int(self._store.get(key)) / 1e6 for key in keys if self._store.check([key])]
        for key in (f"{step}/number", f"{step}/total", *keys):
            self._store.delete_key(key)
        if not number:
            return {}
        return {"reply_seconds": (number, total / 1e6, 0.0), "reply_seconds_longest": (1.0, max(longest), 0.0)}
