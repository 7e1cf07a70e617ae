"""Time calls on all ranks at once, in rounds over all of them, so that a slow moment of the machine affects every call
alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup

TimedCall = Callable[[], object]
WARM_UP_ROUNDS = 2
MIN_ROUNDS, MAX_ROUNDS = 3, 40


@dataclass(frozen=True)
class Timing:
    """Repetitions of one call: median seconds, and the interquartile range relative to the median."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Stopwatch:
    """A clock over all ranks, which begin every repetition together. All are on one machine, and so have one clock.

    all_ranks:       the group of all ranks
    rank:            this rank
    device:          device of this rank
    oversubscribed:  whether ranks share cores: a rank may then wait before its own clock starts, so a repetition lasts
                     from the first rank's start to the last one's end
    """

    all_ranks: RankGroup
    rank: int
    device: torch.device
    oversubscribed: bool

    def time(
        self, calls: Mapping[str, TimedCall], budget: float, skipped: frozenset[str] = frozenset()
    ) -> dict[str, Timing]:
        """Return the timing of each call, the same on every rank.

        ``budget``: seconds for all repetitions. ``skipped``: names of calls that other ranks make without this one.
        """
        start = time.perf_counter()
        for _ in range(WARM_UP_ROUNDS):
            self._round(calls, skipped)
        milliseconds = int(1000 * (time.perf_counter() - start) / WARM_UP_ROUNDS) + 1
        slowest = self.all_ranks.largest(milliseconds, self.device) / 1000
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(budget / slowest)))
        return self._summary(list(calls), torch.stack([self._round(calls, skipped) for _ in range(rounds)]))

    def _round(self, calls: Mapping[str, TimedCall], skipped: frozenset[str]) -> Tensor:
        """Return (calls, 2): start and end of each call on this rank, in seconds; nan for skipped ones."""
        times = [self._once(None if name in skipped else call) for name, call in calls.items()]
        return torch.tensor(times, dtype=torch.float64)

    def _once(self, call: TimedCall | None) -> tuple[float, float]:
        # all ranks begin together
        self.all_ranks.sum(torch.zeros(1, device=self.device))
        self._synchronize_device()
        if call is None:
            return math.nan, math.nan
        start = time.perf_counter()
        call()
        self._synchronize_device()
        return start, time.perf_counter()

    def _synchronize_device(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _summary(self, names: list[str], local: Tensor) -> dict[str, Timing]:
        """Summarise (repetitions, calls, 2) of this rank over repetitions and, unless oversubscribed, over ranks."""
        table = torch.zeros(len(self.all_ranks.ranks), *local.shape, dtype=torch.float64, device=self.device)
        table[self.all_ranks.ranks.index(self.rank)] = local.to(self.device)
        starts, ends = self.all_ranks.sum(table).cpu().unbind(-1)
        if self.oversubscribed:
            starts, ends = starts.nan_to_num(math.inf).amin(0), ends.nan_to_num(-math.inf).amax(0)
        seconds = (ends - starts).view(-1, len(names))
        timings = {}
        for name, column in zip(names, seconds.unbind(1), strict=True):
            low, median, high = statistics.quantiles(column[~column.isnan()].tolist(), n=4)
            timings[name] = Timing(median, (high - low) / median)
        return timings
