"""Time pieces of work on all ranks at once, in rounds, so that a slow moment of the machine is shared by all pieces."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup

Work = Callable[[], object]
WARM_UP = 2
FEWEST, MOST = 3, 40


@dataclass(frozen=True)
class Timed:
    """Median ``seconds``. ``spread``: of the middle half of the repetitions, over the median."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Stopwatch:
    """``everyone``: all ranks, which begin every repetition together.

    ``crowded``: they are more than cores, so a rank may have to wait before its own clock starts: then a repetition
    lasts from the first rank's start to the last one's end. All are on one machine, and so have one clock.
    """

    everyone: RankGroup
    rank: int
    device: torch.device
    crowded: bool

    def time(self, works: Mapping[str, Work], budget: float, idle: frozenset[str] = frozenset()) -> dict[str, Timed]:
        """The same on every rank. ``budget``: seconds for all repetitions. ``idle``: what this rank looks on at."""
        began = time.perf_counter()
        for _ in range(WARM_UP):
            self._round(works, idle)
        milliseconds = int(1000 * (time.perf_counter() - began) / WARM_UP) + 1
        slowest = self.everyone.largest(milliseconds, self.device) / 1000
        rounds = max(FEWEST, min(MOST, int(budget / slowest)))
        return self._summarise(list(works), torch.stack([self._round(works, idle) for _ in range(rounds)]))

    def _round(self, works: Mapping[str, Work], idle: frozenset[str]) -> Tensor:
        """(works, 2): when this rank began and ended each, by the machine's clock; nan where it looks on."""
        times = [self._once(None if name in idle else work) for name, work in works.items()]
        return torch.tensor(times, dtype=torch.float64)

    def _once(self, work: Work | None) -> tuple[float, float]:
        self._meet()
        if work is None:
            return math.nan, math.nan
        start = time.perf_counter()
        work()
        self._finish()
        return start, time.perf_counter()

    def _meet(self) -> None:
        self.everyone.sum(torch.zeros(1, device=self.device))
        self._finish()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _summarise(self, names: list[str], mine: Tensor) -> dict[str, Timed]:
        """``mine``: (repetitions, works, 2). Over repetitions, and over ranks unless they wait for cores."""
        table = torch.zeros(len(self.everyone.ranks), *mine.shape, dtype=torch.float64, device=self.device)
        table[self.everyone.ranks.index(self.rank)] = mine.to(self.device)
        starts, ends = self.everyone.sum(table).cpu().unbind(-1)
        if self.crowded:
            starts, ends = starts.nan_to_num(math.inf).amin(0), ends.nan_to_num(-math.inf).amax(0)
        seconds = (ends - starts).view(-1, len(names))
        return {name: _timed(seconds[:, i][~seconds[:, i].isnan()].tolist()) for i, name in enumerate(names)}


def _timed(seconds: list[float]) -> Timed:
    low, middle, high = statistics.quantiles(seconds, n=4)
    return Timed(middle, (high - low) / middle)
