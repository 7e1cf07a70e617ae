"""Which runs compare the log-probs of the first step as sampled with those that are computed, and up to what limit."""

from __future__ import annotations

import pytest
from small_runs import RECOMPUTE, plan_of

from flexrlhf.config.model_settings import ModelSpec, ShadowSpec
from flexrlhf.trainer.operator_guards import make_sampled_check, mean_limit

SIX = [0.5] * 6


@pytest.mark.parametrize(
    ("placement", "overrides", "models"),
    [
        (None, (), {"actor"}),
        (SIX, (), {"actor.shadow"}),
        (None, ("algorithm.importance={cap: 2}",), {"actor"}),
        # the trained copy computes what the shadow has sampled: compared before training
        (SIX, ("algorithm.importance={cap: 2}", RECOMPUTE), set()),
        # log-probs that need no forward pass are computed for the comparison alone, where they were sampled
        (SIX, ("algorithm.importance={cap: 2}",), {"actor.shadow"}),
        (None, ("algorithm.kl=null", "models.actor.dtype=bfloat16"), {"actor"}),
        (None, (RECOMPUTE,), {"actor"}),
        (None, ("rollout.engine=vllm",), None),
        (None, ("algorithm.importance={cap: 2}", "algorithm.top_p=0.9"), None),
        (None, ("guards.sampled_logprobs=off",), None),
        (None, ("debug.replay=runs/other",), None),
        (None, ("environment={path: game.py:Game}",), {"actor"}),
        # while an episode is played, log-probs of all its turns are kept
        (None, ("environment={path: game.py:Game}", RECOMPUTE), {"actor"}),
        (None, ("algorithm={name: reward, prompts_per_step: 8}", "models.actor=null"), None),
    ],
)
def test_what_is_compared(placement: list[float] | None, overrides: tuple[str, ...], models: set[str] | None) -> None:
    check = make_sampled_check(plan_of(placement, 2, *overrides), str)
    assert (None if check is None else {str(name) for name in check.models}) == models


def test_the_limit_follows_from_the_type_and_the_temperature() -> None:
    exact, half = ModelSpec(path="a"), ModelSpec(path="a", dtype="bfloat16")
    mixed = ModelSpec(path="a", shadow=ShadowSpec(dtype="bfloat16"))
    assert [mean_limit(model, 1.0) for model in (exact, half, mixed)] == [1e-3, 0.05, 0.05]
    assert mean_limit(exact, 2.0) == 1e-3 and mean_limit(exact, 0.5) == 2e-3
