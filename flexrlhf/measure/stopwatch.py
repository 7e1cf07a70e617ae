"""Time calls on all ranks at once, in rounds over all of them, so that a slow moment of the machine affects every call
alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from flexrlhf.api.engine import RankGroup

TimedCall = Callable[[], object]
MIN_ROUNDS, MAX_ROUNDS = 2, 40


@dataclass(frozen=True)
class Timing:
    """Repetitions of one call: median seconds, the interquartile range relative to the median, and the lower quartile,
    which other work on the machine affects least."""

    seconds: float
    spread: float
    low: float


@dataclass(frozen=True)
class Estimate:
    """Time of a call before it is made: ``times`` as long as the call ``like``."""

    like: str
    times: float


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
        self,
        calls: Mapping[str, TimedCall],
        budget: float,
        skipped: frozenset[str] = frozenset(),
        further: Mapping[str, Estimate] = MappingProxyType({}),
    ) -> dict[str, Timing]:
        """Return the timing of each call, the same on every rank, in the order of ``calls``.

        Each call is repeated for an equal share of the budget, slow ones ``MIN_ROUNDS`` times.

        budget:   seconds for all repetitions
        skipped:  names of calls that other ranks make without this one
        further:  estimates of calls that are left out if the others leave no time for them
        """
        samples: dict[str, list[Tensor]] = {}

        def begin(names: Iterable[str]) -> dict[str, float]:
            """Make each call once to warm up, and once more; return the time of that."""
            for name in names:
                samples[name] = [self._once(None if name in skipped else calls[name]) for _ in range(2)][1:]
            return {name: self._timing(samples[name]).seconds for name in names}

        seconds = begin([name for name in calls if name not in further])
        left = budget - (1 + MIN_ROUNDS) * sum(seconds.values())
        chosen = []
        for name, each in sorted(further.items(), key=lambda item: seconds[item[1].like] * item[1].times):
            left -= (1 + MIN_ROUNDS) * seconds[each.like] * each.times
            if left >= 0:
                chosen.append(name)
        seconds |= begin(chosen)
        share = budget / len(samples)
        rounds = {name: max(MIN_ROUNDS, min(MAX_ROUNDS, int(share / each))) for name, each in seconds.items()}
        for number in range(1, max(rounds.values())):
            for name in (name for name, count in rounds.items() if count > number):
                samples[name].append(self._once(None if name in skipped else calls[name]))
        return {name: self._timing(samples[name]) for name in calls if name in samples}

    def _once(self, call: TimedCall | None) -> Tensor:
        """Return start and end of a call on this rank, in seconds; nan if it is None."""
        # all ranks begin together
        self.all_ranks.sum(torch.zeros(1, device=self.device))
        self._synchronize_device()
        if call is None:
            return torch.full((2,), math.nan, dtype=torch.float64)
        start = time.perf_counter()
        call()
        self._synchronize_device()
        return torch.tensor([start, time.perf_counter()], dtype=torch.float64)

    def _synchronize_device(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _timing(self, local: Sequence[Tensor]) -> Timing:
        """Summarise the starts and ends of a call on this rank, each (2,), over repetitions and, unless oversubscribed,
        over ranks."""
        table = torch.zeros(len(self.all_ranks.ranks), len(local), 2, dtype=torch.float64, device=self.device)
        table[self.all_ranks.ranks.index(self.rank)] = torch.stack(list(local)).to(self.device)
        starts, ends = self.all_ranks.sum(table).cpu().unbind(-1)
        if self.oversubscribed:
            starts, ends = starts.nan_to_num(math.inf).amin(0), ends.nan_to_num(-math.inf).amax(0)
        seconds = (ends - starts).flatten()
        values = seconds[~seconds.isnan()].tolist()
        if len(values) == 1:
            return Timing(values[0], 0.0, values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Timing(median, (high - low) / median, low)
