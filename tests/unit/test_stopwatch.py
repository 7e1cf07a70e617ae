"""The budget of a profile: slow calls are made three times, quick ones for their share, and further ones if there is
time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.measure.stopwatch import MAX_ROUNDS, Estimate, Stopwatch

STOPWATCH = Stopwatch(RankGroup(None, (0,), lambda *_: None), 0, torch.device("cpu"), oversubscribed=False)


@pytest.mark.parametrize(
    ("budget", "made"), [(0.002, {"quick", "slow"}), (0.6, {"quick", "slow", "slower", "slowest"})]
)
def test_calls_share_a_budget(budget: float, made: set[str]) -> None:
    counts: Counter[str] = Counter()

    def sleeping(name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            counts[name] += 1
            time.sleep(seconds)

        return call

    seconds = {"quick": 0.0001, "slow": 0.01, "slower": 0.02, "slowest": 0.04}
    calls = {name: sleeping(name, each) for name, each in seconds.items()}
    further = {"slowest": Estimate("slow", 4), "slower": Estimate("slow", 2)}
    timings = STOPWATCH.time(calls, budget, further=further)
    assert list(timings) == [name for name in calls if name in made] and counts.keys() == made
    # one call to warm up, and at least two that count
    assert [*counts.values()] == sorted(counts.values(), reverse=True) and counts["quick"] <= MAX_ROUNDS + 1
    assert min(counts.values()) >= 3 and (budget > 0.1 or counts["slow"] == 3)
    assert all(seconds[name] <= timing.seconds for name, timing in timings.items())
