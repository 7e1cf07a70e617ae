"""Concurrency, read from timeline.json: models on different ranks run at the same time. Every Run sleeps for 0.3 s."""

from __future__ import annotations

from typing import Any

import pytest
from cases import Case
from launcher import Launches, Outcome

SLEEP = 0.3
Interval = tuple[float, float]

INTERLEAVING = Case("slow", "halves", 2)
PIPELINE = Case("slow-streaming", "six-apart", 4)
LAGGING = Case("slow", "lag", 2)


def interval(outcome: Outcome, operator: str, step: int, chunk: int | None = None) -> Interval:
    """Seconds at which the first rank began an operator and the last ended it."""

    def matches(span: dict[str, Any]) -> bool:
        args = span["args"]
        return span["name"].startswith(operator + " on ") and (args["step"], args.get("chunk")) == (step, chunk)

    spans = [span for span in outcome.spans if span["cat"] == "run" and matches(span)]
    return min(span["ts"] for span in spans) / 1e6, max(span["ts"] + span["dur"] for span in spans) / 1e6


def shared(first: Interval, second: Interval) -> float:
    """Seconds that two intervals have in common."""
    return max(0.0, min(first[1], second[1]) - max(first[0], second[0]))


def length(interval: Interval) -> float:
    return interval[1] - interval[0]


@pytest.mark.parametrize("case", [pytest.param(INTERLEAVING, id=INTERLEAVING.name)])
def test_interleaving_runs_ref_and_reward_at_the_same_time(launches: Launches, case: Case) -> None:
    outcome = launches.outcome(case)
    # the first step also warms up the kernels of both ranks
    for step in (1, 2):
        ref, reward = interval(outcome, "ref_logprobs", step), interval(outcome, "scores", step)
        assert shared(ref, reward) >= 0.8 * min(length(ref), length(reward)), f"step {step}: {ref} {reward}"


@pytest.mark.parametrize("case", [pytest.param(PIPELINE, id=PIPELINE.name)])
def test_chunks_travel_through_the_pipeline(launches: Launches, case: Case) -> None:
    """Three forward runs keep a rank busier than one generation, so generation runs ahead: from the third chunk on it
    meets the forward of the chunk before the last."""
    outcome = launches.outcome(case)

    def forward_during(other: Interval, chunk: int) -> float:
        return sum(shared(interval(outcome, name, 1, chunk), other) for name in ("ref_logprobs", "scores", "values"))

    for chunk in range(3):
        generation = interval(outcome, "generate", 1, chunk + 1)
        assert sum(forward_during(generation, earlier) for earlier in range(chunk + 1)) >= SLEEP / 2, chunk
        assert forward_during(interval(outcome, "train_actor", 1, chunk), chunk + 1) >= SLEEP / 2, chunk
    assert forward_during(interval(outcome, "generate", 1, 1), 0) >= SLEEP / 2


@pytest.mark.parametrize("case", [pytest.param(LAGGING, id=LAGGING.name)])
def test_with_lag_the_next_batch_is_generated_during_training(launches: Launches, case: Case) -> None:
    outcome = launches.outcome(case)
    for step in range(1, outcome.plan.spec.steps):
        generation = interval(outcome, "generate", step)
        late = ("advantages", "train_actor", "train_critic")
        during = sum(shared(interval(outcome, name, step - 1), generation) for name in late)
        assert during >= 0.5 * length(generation), f"step {step}"
