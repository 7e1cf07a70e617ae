"""Ranges of measured over predicted time that ``benchmarks/calibration`` derives."""

from __future__ import annotations

import pytest

from benchmarks.calibration.cross_validation import CheckedRow, LinearRow, fit
from benchmarks.calibration.ranges import LEAST_ROWS, part_of, range_of, trained_family, widened
from benchmarks.calibration.rlhf import CALLS, STEPS
from benchmarks.calibration.rows import Prediction
from benchmarks.calibration.shared import ASSUMED

COLUMNS = ("lora", "placement", "version", "grad_ckpt", "model", "offload")


def row(ratio: float, system: str = "NeMo-RL", call: str = "", **cells: str) -> CheckedRow:
    """A row that took ``ratio`` times its prediction; a step unless ``call`` is given."""
    known = dict.fromkeys(COLUMNS, "") | {"system": system, "group": system.lower(), "call": call, "id": "x"}
    return CheckedRow(known | cells, Prediction(CALLS if call else STEPS, "", "x", ratio, 1.0, 1.0, 1.0))


def test_a_system_with_many_rows_counts_as_a_few() -> None:
    many = [row(1.0, "ReaL") for _ in range(100)]
    few = [row(1.5) for _ in range(LEAST_ROWS)]
    assert range_of([*many, *few], "torch and megatron", "step") == (1.0, 1.5)
    # nor does a single row decide
    assert range_of([*many, *few, row(9.0, "verl")], "torch and megatron", "step") == (1.0, 1.5)


def test_a_publication_with_many_rows_does_not_decide_a_fit() -> None:
    """Rows of one publication take 1.5 times as long as predicted, of nine others as long."""
    many = [LinearRow(row(1.0).row | {"group": "one/a100"}, 1.5, 1.0, {"passes": -1.0}) for _ in range(100)]
    few = [
        LinearRow(row(1.0).row | {"group": f"{name}/a100"}, 1.0, 1.0, {"passes": -1.0})
        for name in "abcdefghi"
        for _ in range(2)
    ]
    assert fit([*many, *few], ASSUMED)["passes"] == pytest.approx(1.0, abs=0.02)
    assert fit(many, ASSUMED)["passes"] < 0.75


def test_too_few_rows_have_the_wider_range() -> None:
    steps = [row(ratio) for ratio in (0.8, *(1.0 for _ in range(10)), 1.4)]
    calls = [row(0.5, call="actor_generate"), row(1.1, call="actor_generate")]
    low, high = range_of(steps, "torch and megatron", "step") or (0, 0)
    assert range_of([*steps, *calls], "torch and megatron", "generation") == (min(low, 0.5), max(high, 1.1))
    assert range_of([*steps, *calls], "torch and megatron", "training") == (low, high)
    assert range_of(steps[:3], "torch and megatron", "step") is None
    assert widened((0.84, 1.59)) == pytest.approx((0.8, 1.6))


def test_rows_are_of_the_family_that_they_train() -> None:
    assert trained_family(row(1.0)) == "torch and megatron"
    assert trained_family(row(1.0, "trlX", lora="no")) == "deepspeed"
    assert trained_family(row(1.0, "DeepSpeed-Chat", group="dschat")) == "deepspeed"  # with kernels of its own era
    assert trained_family(row(1.0, "trlX", lora="dim 4")) == "adapters"
    calls = ("gen (incl. reshard)", "update_actor", "ref_log_prob", "weight reshard", "actor transition")
    assert [part_of(row(1.0, call=call)) for call in calls] == ["generation", "training", "other calls", None, None]
