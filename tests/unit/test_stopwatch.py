"""The budget of a profile: slow calls are made three times, quick ones for their share, and further ones if there is
time."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.measure import stopwatch
from flexrlhf.measure.stopwatch import MAX_ROUNDS, Estimate, Stopwatch, Timing

STOPWATCH = Stopwatch(RankGroup(None, (0,), lambda *_: None), 0, torch.device("cpu"), oversubscribed=False)
SECONDS = {"quick": 2**-13, "slow": 2**-7, "slower": 2**-6, "slowest": 2**-5}


@pytest.mark.parametrize(
    ("budget", "counts"), [(2**-9, dict(quick=9, slow=3)), (0.5, dict(quick=41, slow=17, slower=9, slowest=5))]
)
def test_calls_share_a_budget(budget: float, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One call to warm up, and at least two that count; further ones if the budget has their time."""
    made, now = Counter[str](), [0.0]
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def call(name: str) -> None:
        made[name] += 1
        now[0] += SECONDS[name]

    calls = {name: partial(call, name) for name in SECONDS}
    further = {"slowest": Estimate("slow", 4), "slower": Estimate("slow", 2)}
    timings = STOPWATCH.time(calls, budget, further=further)
    assert made == counts and counts["quick"] <= MAX_ROUNDS + 1
    assert timings == {name: Timing(SECONDS[name], 0.0, SECONDS[name]) for name in counts}
