"""Warnings of metrics: what is large or jumps is reported, once in a while, and a healthy run never is."""

from __future__ import annotations

import math
import random

import pytest

from flexrlhf.config.guards import GuardsSpec
from flexrlhf.execution.finite_guard import RareWarnings
from flexrlhf.execution.step_warnings import LEAST, StepWarnings

Rows = list[dict[str, float]]


def lines_of(rows: Rows, capsys: pytest.CaptureFixture[str], **guards: float | None) -> list[str]:
    warnings = StepWarnings(GuardsSpec.model_validate(guards), "run")
    for step, row in enumerate(rows):
        warnings.observe(step, row)
    return capsys.readouterr().err.splitlines()


def healthy(steps: int = 300) -> Rows:
    """Noise as wide as a factor of 4 in either direction, around numbers that fall to a tenth."""
    rng = random.Random(3)

    def around(value: float, step: int) -> float:
        return value * 0.1 ** (step / steps) * 4 ** rng.uniform(-1, 1)

    return [
        {
            **{"kl_token": rng.uniform(-0.1, 0.4), "update_kl": rng.uniform(0, 0.05)},
            **{"policy_loss": rng.gauss(0, 0.003), "value_loss": around(3, step), "actor_grad_norm": around(5, step)},
            **{"pair_loss": around(0.7, step)},
        }
        for step in range(steps)
    ]


def test_a_healthy_run_has_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of(healthy(), capsys) == []


@pytest.mark.parametrize("metric", ["value_loss", "actor_grad_norm", "pair_loss"])
def test_a_jump_is_reported_where_it_is(metric: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = healthy()
    rows[200][metric] = 30 * max(row[metric] for row in rows)
    (line,) = lines_of(rows, capsys)
    assert line.startswith(f"flexrlhf: run: step 200: {metric} ") and "guards.loss_spike 20 times its median" in line
    assert lines_of(rows, capsys, loss_spike=None) == []


@pytest.mark.parametrize(
    ("metric", "value", "setting"),
    [("kl_token", 2.5, "max_kl 2"), ("kl_token", -2.5, "max_kl 2"), ("kl_token", math.nan, "max_kl 2")]
    + [("update_kl", 0.6, "max_update_kl 0.5")],
)
def test_a_kl_that_explodes_is_reported_once_in_a_while(
    metric: str, value: float, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = healthy(100)
    for row in rows[30:]:
        row[metric] = value
    lines = lines_of(rows, capsys)
    assert len(lines) == math.ceil(70 / RareWarnings.INTERVAL_STEPS)
    assert lines[0].startswith(f"flexrlhf: run: step 30: {metric} ") and lines[0].endswith(f"guards.{setting}")
    assert lines_of(rows, capsys, max_kl=None, max_update_kl=None) == []


def test_a_first_gradient_after_many_of_zero_is_no_jump(capsys: pytest.CaptureFixture[str]) -> None:
    rows: Rows = [{"actor_grad_norm": 0.0, "value_loss": 0.0} for _ in range(30)]
    assert lines_of([*rows, {"actor_grad_norm": 5.0, "value_loss": 5.0}], capsys) == []


def test_small_losses_in_nats_may_jump(capsys: pytest.CaptureFixture[str]) -> None:
    """A pair loss of 0.001 for long, and then one pair that is wrong."""
    rows: Rows = [{"pair_loss": 0.001, "value_loss": 0.001} for _ in range(LEAST)]
    assert lines_of([*rows, {"pair_loss": 0.9, "value_loss": 0.001}], capsys) == []
    assert len(lines_of([*rows, {"pair_loss": 1.1, "value_loss": 0.9}], capsys)) == 2
    assert lines_of([*rows[1:], {"pair_loss": 1.1, "value_loss": 0.9}], capsys) == [], "too few steps before"
