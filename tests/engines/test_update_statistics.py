"""Statistics of an update: a step that overflows in float16 has no gradient norm, and spoils no mean."""

from __future__ import annotations

import torch

from flexrlhf.engines.base import add_moments
from flexrlhf.engines.optimizers import ScheduledOptimizer
from flexrlhf.metrics import METRICS

RATE = torch.tensor([0.5], dtype=torch.float64)


def test_an_overflow_counts_as_skipped_and_leaves_the_norm_of_the_others() -> None:
    total = ScheduledOptimizer.statistics(RATE, torch.tensor(float("inf")), is_scaled=True, skipped=True)
    add_moments(total, ScheduledOptimizer.statistics(RATE, torch.tensor(3.0), is_scaled=True, skipped=False))
    named = {METRICS.statistic_name("train_actor", name): tuple(value.tolist()) for name, value in total.items()}
    row = METRICS.evaluate(named)
    assert row == {"actor_grad_norm": 3.0, "actor_learning_rate": 0.5, "actor_skipped": 0.5}


def test_without_a_loss_scale_skipping_is_not_reported() -> None:
    assert set(ScheduledOptimizer.statistics(RATE, torch.tensor(2.0), is_scaled=False, skipped=False)) == {
        "learning_rate",
        "grad_norm",
    }
