"""Comparison of recorded runs: limits, ties, rows that are missing, numbers that are none, and the command's errors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import yaml
from small_runs import PPO, plan_of, spec_of
from torch import Tensor
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.config.output_settings import DebugSpec
from flexrlhf.engines.sampling import gumbel_noise
from flexrlhf.metrics import METRICS
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.runs.recorded_columns import RecordedColumn
from flexrlhf.verify.comparison import _column as compare_column
from flexrlhf.verify.comparison_text import format_table
from flexrlhf.verify.deviations import (
    BFLOAT16,
    BITWISE,
    COUNTED,
    DEEPSPEED,
    FLOAT16,
    FLOAT32,
    IN_NATS,
    NOT_COMPARED,
    THRESHOLDS,
    Deviation,
    Limits,
    first_beyond,
    limits_for,
)
from flexrlhf.verify.sides import short_spec, side_text
from flexrlhf.verify.verify import find_tie


def column(values: Tensor, operator: str = "values") -> RecordedColumn:
    rows = dict(enumerate(values))
    return RecordedColumn(operator, rows, dict.fromkeys(rows, 0))


def compared(one: Tensor, other: Tensor, name: str = "values") -> Deviation:
    return compare_column(0, name, column(one), column(other), len(one), FLOAT32)


# --- columns


def test_differences_are_relative_to_the_largest_number_of_the_column() -> None:
    one = torch.tensor([[1e-3, 100.0], [0.0, -5.0]])
    near, far = one.clone(), one.clone()
    near[0, 0] += 9e-4
    far[1, 0] += 2e-3
    assert not compared(one, near).is_beyond
    found = compared(one, far)
    assert found.is_beyond and found.entry is not None
    assert (found.entry.row, found.entry.position) == (1, 0)
    assert found.size == pytest.approx(2e-5) and found.absolute == pytest.approx(2e-3)


def test_the_first_entry_beyond_the_limit_is_named_not_the_largest() -> None:
    one = torch.ones(4)
    other = torch.tensor([1.0, 1.0 + 2e-5, 9.0, 1.0])
    found = compared(one, other, "scores")
    assert found.entry is not None and (found.entry.row, found.entry.position) == (1, None)
    assert found.absolute == 8


def test_whole_numbers_may_not_differ() -> None:
    one = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    found = compared(one, torch.tensor([[1, 2], [3, 5]], dtype=torch.int32), "tokens")
    assert (found.size, found.limit, found.is_beyond) == (1, 0, True)


@pytest.mark.parametrize(
    ("one", "other", "size"),
    [
        (math.nan, math.nan, 0),
        (math.inf, math.inf, 0),
        (math.inf, -math.inf, math.inf),
        (math.nan, 1.0, math.inf),
        (1.0, math.inf, math.inf),
    ],
)
def test_numbers_that_are_none_are_so_in_both(one: float, other: float, size: float) -> None:
    found = compared(torch.tensor([2.0, one]), torch.tensor([2.0, other]), "scores")
    assert (found.size, found.is_beyond) == (size, size > 0)


def test_missing_and_repeated_rows_are_named() -> None:
    whole, part = column(torch.ones(3)), column(torch.ones(3))
    del part.values[1]
    assert compare_column(0, "scores", whole, part, 3, FLOAT32).note == "row 1 missing"
    twice = column(torch.ones(3))
    twice.repeated.add(2)
    found = compare_column(0, "scores", twice, whole, 3, FLOAT32)
    assert found.note == "row 2 written twice" and found.is_beyond


# --- ties


def tokens_at_a_place(
    margin: float, step: int = 2, row: int = 1
) -> tuple[dict[str, RecordedColumn], dict[str, RecordedColumn]]:
    """Two runs whose row 1 parts at response position 1 by ``margin`` nats: tokens 4 and 6. Its noise is that of
    ``row`` in ``step``."""
    noise = gumbel_noise(3, step, torch.tensor([row]), 1, 10)[0]
    tokens = torch.tensor([[9, 9, 5, 5], [9, 9, 5, 4]], dtype=torch.int32)
    others = tokens.clone()
    others[1, 3] = 6
    logprobs = torch.full((2, 2), -1.0, dtype=torch.float64)
    theirs = logprobs.clone()
    logprobs[1, 1] = -2.0 - float(noise[4])
    theirs[1, 1] = -2.0 - float(noise[6]) - margin
    return (
        {"tokens": column(tokens), "logprobs": column(logprobs)},
        {"tokens": column(others), "logprobs": column(theirs)},
    )


TIED = plan_of(None, 1, "seed=3", "data.max_prompt_tokens=2")
CARRIED = plan_of(None, 1, "seed=3", "data.max_prompt_tokens=2", "rollout.segment_tokens=4")


def test_a_tie_is_where_perturbed_logits_are_near() -> None:
    tie = find_tie(*tokens_at_a_place(3e-5), plan=TIED, step=2, limit=FLOAT32.tie)
    assert tie is not None and tie.rows == (1,) and tie.margin == pytest.approx(3e-5)
    assert find_tie(*tokens_at_a_place(3e-4), plan=TIED, step=2, limit=FLOAT32.tie) is None


def test_a_row_that_is_carried_has_the_noise_of_the_step_that_took_it() -> None:
    """In segments, row 1 of step 2 is the first prompt of the step before."""
    tie = find_tie(*tokens_at_a_place(3e-5, step=1, row=0), plan=CARRIED, step=2, limit=FLOAT32.tie)
    assert tie is not None and tie.rows == (1,) and tie.margin == pytest.approx(3e-5)
    assert find_tie(*tokens_at_a_place(3e-5), plan=CARRIED, step=2, limit=FLOAT32.tie) is None


def test_another_prompt_is_no_tie() -> None:
    one, other = tokens_at_a_place(0.0)
    other["tokens"].values[0] = torch.tensor([8, 9, 5, 5], dtype=torch.int32)
    assert find_tie(one, other, plan=TIED, step=2, limit=FLOAT32.tie) is None


# --- limits


@pytest.mark.parametrize(
    ("overrides", "limits"),
    [
        ((), FLOAT32),
        (("models.reward.engine=deepspeed",), DEEPSPEED),
        (("models.reward.dtype=float16",), FLOAT16),
        (("models.reward.dtype=float16", "models.ref={dtype: bfloat16}"), BFLOAT16),
    ],
)
def test_limits_are_those_of_the_coarsest_model(overrides: tuple[str, ...], limits: Limits) -> None:
    assert limits_for(plan_of([1, 1, 1, 1], 2, *overrides).placement.models) is limits


def test_limits_rise_with_the_rounding() -> None:
    ordered = (BITWISE, FLOAT32, DEEPSPEED, FLOAT16, BFLOAT16)
    for field in ("numbers", "weights", "shares", "tie"):
        sizes = [getattr(limits, field) for limits in ordered]
        assert sizes == sorted(sizes)


def test_every_metric_that_is_treated_apart_exists() -> None:
    names = {metric.name for metric in METRICS} | {*METRICS.definitions}
    assert names >= COUNTED | THRESHOLDS | IN_NATS | NOT_COMPARED
    assert not COUNTED & THRESHOLDS


def deviation(name: str, size: float, limit: float, source: str, kind: str = "metric") -> Deviation:
    return Deviation(0, kind, name, source, size, size, limit)  # type: ignore[arg-type]


def test_of_metrics_reported_at_once_the_furthest_is_named() -> None:
    found = [
        deviation("advantage_mean", 1e-7, 1e-5, "advantages"),
        deviation("policy_loss", 2e-5, 1e-5, "train_actor"),
        deviation("actor_grad_norm", 0.5, 1e-5, "train_actor"),
        deviation("critic_grad_norm", 0.9, 1e-5, "train_critic"),
    ]
    first = first_beyond(found)
    assert first is not None and first.name == "actor_grad_norm"
    assert first_beyond(found[:1]) is None


# --- short runs


def test_a_short_run_keeps_what_numbers_depend_on(tmp_path: Path) -> None:
    optimizer = "models.actor.optimizer={warmup_steps: 50, learning_rate: 0.5}"
    long = spec_of([1, 1, 1, 1], 2, "steps=100", optimizer, "algorithm.freeze_actor_steps=7", "save.every=2")
    short = short_spec(long, "side", tmp_path, 2)
    assert (short.steps, short.save.every, short.debug.record_columns) == (2, None, True)
    # a mechanism that is turned off stays so
    mended = spec_of([1, 1, 1, 1], 2, "debug={cudnn_attention: true, replay: runs/other}")
    debug = short_spec(mended, "side", tmp_path, 2).debug
    assert debug == DebugSpec(record_columns=True, cudnn_attention=True)
    assert short.directory == tmp_path / "side"
    assert short.algorithm.freeze_actor_steps == 1  # type: ignore[union-attr]
    assert short.models.actor is not None
    assert (short.models.actor.optimizer.warmup_steps, short.models.actor.optimizer.learning_rate) == (0, 0.5)
    of_all = spec_of([1, 1, 1, 1], 2, "models.all.optimizer.warmup_steps=50")
    critic = make_plan(short_spec(of_all, "side", tmp_path, 2)).spec.models.critic
    assert critic is not None and critic.optimizer.warmup_steps == 1
    same = short_spec(spec_of([1, 1, 1, 1], 2), "side", tmp_path, 2)
    assert same.algorithm == spec_of([1, 1, 1, 1], 2).algorithm


# --- the command's errors, before a rank starts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("nothing to compare with", "--against", "--determinism")),
        (("--against", "halves"), ("--against halves", "neither a vector", "YAML")),
        (("--against", "[1,1,1]"), ("4 [actor", "3 entries")),
        (("--against", "[1,1,0.3,1]"), ("0.3", "0.5")),
        (("--against-set", "seed=9"), ("--against-set", "seed is 0 and 9", "same value")),
        (("--against-set", "schedule.lag=1", "--against", "[0.5,0.5,0.5,0.5,0.5,0.5]"), ("schedule.lag is 0 and 1",)),
        (("--against", "b.yaml"), ("--against b.yaml", "algorithm.gamma is 1.0 and 0.5")),
        (("--determinism", "--keep", "a.yaml"), ("--keep a.yaml", "is a file")),
    ],
)
def test_errors_are_one_sentence(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = {**PPO, "cluster": {"devices": 2}, "placement": [1, 1, 1, 1]}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(raw))
    (tmp_path / "b.yaml").write_text(yaml.safe_dump({**raw, "algorithm": {**PPO["algorithm"], "gamma": 0.5}}))
    result = CliRunner().invoke(app, ["verify", "a.yaml", *arguments])
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and result.stderr.count("\n") == 1
    assert [part for part in words if part not in result.stderr] == [], result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.yaml", "b.yaml"]


def test_the_quick_start_has_random_weights_before_it_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the seed is wrong; the models that are not there are none of the user's problem."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["verify", "--against-set", "seed=9"])
    assert result.exit_code == 2 and "seed is 0 and 9" in result.stderr


# --- text


def test_the_table_has_a_line_for_each_column_and_differing_metric() -> None:
    found = [
        Deviation(0, "column", "tokens", "generate", 0.0, 0.0, 0.0),
        Deviation(0, "column", "values", "values", 2e-7, 1e-7, 1e-5),
        Deviation(0, "move", "values", "advantages", 0.0, 0.0, 0.0, run="against"),
        Deviation(0, "metric", "kl", "advantages", 0.0, 0.0, 1e-5),
        Deviation(0, "metric", "policy_loss", "train_actor", 0.5, 0.25, 1e-5),
        Deviation(1, "column", "tokens", "generate", 3.0, 3.0, 0.0),
        Deviation(None, "weights", "actor", "", 0.1, 2e-6, 1e-5),
    ]
    assert "\n".join(format_table(found, FLOAT32, 2)) == "\n".join(
        [
            "largest differences, relative (float32: at most 1e-05); whole numbers: how many differ",
            "  column       written by  absolute  limit    step 0  step 1",
            "  tokens       generate     3.0e+00      0         0      3*",
            "  values       values       2.0e-07  1e-05   1.0e-07",
            "",
            "  metric                   absolute  limit    step 0  step 1",
            "  policy_loss               5.0e-01  1e-05  2.5e-01*",
            "",
            "  1 metrics are the same to the last bit",
            "  1 columns arrived by moves as they were written",
            "  weights of actor after the last step: norm of the difference / norm 2.0e-06, limit 1e-05",
            "  * beyond the limit",
        ]
    )


def test_a_side_is_shown_with_the_settings_that_differ() -> None:
    first = plan_of([1, 1, 1, 1], 2)
    other = plan_of([1, 1, 0.5, 0.5], 4, "models.actor.zero=3", "name=other")
    assert side_text(other, first) == (
        "other: interleaving on 4 devices: actor 0-3, critic 0-3, ref 0-1, reward 2-3; "
        "models.actor.zero: 3; cluster.devices: 4"
    )
