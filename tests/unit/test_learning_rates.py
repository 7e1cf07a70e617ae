"""Learning-rate schedules that do not end at 0, against those of transformers."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from flexrlhf.config.model_settings import OptimizerSpec
from flexrlhf.engines.optimizers import ScheduledOptimizer, make_optimizer

UPDATES = 20


def rates(scheduler: LRScheduler) -> list[float]:
    found = []
    for _ in range(UPDATES + 1):
        found += scheduler.get_last_lr()
        scheduler.optimizer.step()
        scheduler.step()
    return [float(rate) for rate in found]


def made(settings: OptimizerSpec, num_updates: int = UPDATES) -> ScheduledOptimizer:
    optimizer = make_optimizer(settings, [torch.zeros(1, requires_grad=True)])
    return ScheduledOptimizer(settings, optimizer, num_updates)


def rates_of(optimizer: ScheduledOptimizer) -> list[float]:
    found = []
    for _ in range(UPDATES + 1):
        found.append(float(optimizer.learning_rate))
        optimizer.optimizer.step()
        optimizer.end_update()
    return found


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_cosine_to_a_tenth_is_that_of_transformers(warmup: int) -> None:
    """Which OpenRLHF 0.11.2 uses by default: ``cosine_with_min_lr``."""
    settings = OptimizerSpec(learning_rate=2.0, schedule="cosine", warmup_steps=warmup, final_ratio=0.1)
    other = make_optimizer(settings, [torch.zeros(1, requires_grad=True)])
    further: dict[str, Any] = {"num_warmup_steps": warmup, "num_training_steps": UPDATES}
    theirs = get_scheduler("cosine_with_min_lr", other, **further, scheduler_specific_kwargs={"min_lr_rate": 0.1})
    found = rates_of(made(settings))
    assert found == pytest.approx(rates(theirs))
    assert (min(found[warmup:]), max(found)) == (pytest.approx(0.2), pytest.approx(2.0))


def test_a_line_to_a_quarter() -> None:
    found = rates_of(made(OptimizerSpec(learning_rate=1.0, schedule="linear", final_ratio=0.25)))
    assert found == pytest.approx([1 - 0.75 * update / UPDATES for update in range(UPDATES + 1)])


def test_the_end_of_a_schedule_is_behind_its_last_update() -> None:
    settings = OptimizerSpec(learning_rate=1.0, schedule="cosine", final_ratio=0.1)
    found = rates_of(made(settings, 6))
    assert found[5:7] == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * 5 / 6)) / 2, 0.1], abs=1e-6)
    assert found[5] == pytest.approx(0.1603, abs=1e-4)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_that_goes_on_has_the_rate_of_its_update(schedule: Literal["constant", "linear", "cosine"]) -> None:
    settings = OptimizerSpec(learning_rate=1.0, schedule=schedule, warmup_steps=2, final_ratio=0.3)
    expected = rates_of(made(settings))
    optimizer = made(settings)
    optimizer.num_updates = 7
    assert float(optimizer.learning_rate) == pytest.approx(expected[7])
