"""Runs side by side: differences of metrics, and where the seconds of a step go."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import plan_of
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.config.number_settings import SettingDifference
from flexrlhf.report.metric_table import MetricTable
from flexrlhf.report.side_by_side import MOST_LISTED, MetricDifference, mean_times, metric_differences, setting_lines
from flexrlhf.timeline import Span, Trace

KINDS: Any = {"generate": "generate", "scores": "forward", "train_actor": "train"}
SPANS = [
    # a step to warm up, and two of 10 s each: rank 1 waits for rank 0 at the end, and moves 100 bytes
    *(Span(rank, "run", "generate on actor", 0, None, 0.0, 5.0) for rank in (0, 1)),
    *(Span(rank, "run", "generate on actor", 1, None, 5.0, 9.0) for rank in (0, 1)),
    Span(1, "move", "tokens actor -> reward", 1, None, 9.0, 9.5, bytes_sent=100),
    Span(0, "run", "train_actor on actor", 1, None, 9.0, 15.0),
    *(Span(rank, "run", "generate on actor", 2, None, 15.0, 19.0) for rank in (0, 1)),
    Span(1, "sync", "weights actor -> actor.shadow", 2, None, 19.0, 20.0, bytes_sent=60),
    Span(0, "run", "train_actor on actor", 2, None, 19.0, 25.0),
]


def rows_of(*values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"step": step, "seconds": 1.0, **row} for step, row in enumerate(values)]


def differences(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[MetricDifference]:
    return metric_differences(MetricTable(first), MetricTable(second))


def write_run(
    directory: Path, *rows: dict[str, Any], spans: Sequence[Span] = SPANS, overrides: Sequence[str] = ()
) -> Path:
    plan = plan_of([1, 1, 1, 1], 2, *overrides)
    directory.mkdir()
    (directory / "config.yaml").write_text(plan.spec.dump())
    (directory / "plan.txt").write_text("run: ppo, co-located on 2 devices, 9 steps\nthe rest\n")
    lines = [json.dumps(row) for row in rows_of(*rows)]
    (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if spans:
        Trace(spans, {}).write(directory / "timeline.json")
    return directory


def compared(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    assert result.exit_code == 2
    return result.output


def test_the_largest_difference_is_of_the_steps_that_both_have() -> None:
    first = rows_of({"reward_mean": 2.0}, {"reward_mean": -4.0}, {"reward_mean": 9.0})
    second = rows_of({"reward_mean": 2.5}, {"reward_mean": -5.0})
    (found,) = differences(first, second)
    assert (found.first, found.second, found.largest, found.step, found.scale) == (-4.0, -5.0, 1.0, 1, 5.0)
    assert (found.values, found.relative, found.is_same) == ((-4.0, -5.0), 0.2, False)


def test_a_share_that_is_small_in_one_run_differs_by_less_than_its_value() -> None:
    (found,) = differences(rows_of({"value_clipped": 0.01}), rows_of({"value_clipped": 0.31}))
    assert found.relative == pytest.approx(0.3 / 0.31) and found.of_scale == found.relative
    (found,) = differences(rows_of({"value_clipped": 0.0}), rows_of({"value_clipped": 0.0}))
    assert (found.relative, found.is_same) == (0.0, True)


@pytest.mark.parametrize(
    ("one", "other", "largest"), [(math.nan, math.nan, 0.0), (math.inf, math.inf, 0.0), (math.nan, 1.0, math.inf)]
)
def test_no_number_is_the_same_as_itself_alone(one: float, other: float, largest: float) -> None:
    (found,) = differences(rows_of({"kl": one}), rows_of({"kl": other}))
    assert found.largest == largest


def test_differences_of_what_is_rounding_alone_are_small() -> None:
    """The KL divergence of a policy from itself, in the first step."""
    (found,) = differences(rows_of({"kl": -3e-7}), rows_of({"kl": 2e-7}))
    assert found.largest == pytest.approx(5e-7) and found.of_scale == pytest.approx(5e-5) and found.is_same


def test_times_are_no_results_and_own_metrics_are() -> None:
    first = rows_of({"seconds": 1.0, "time_wait": 0.1, "tokens_per_second": 9.0, "train_actor/own": 1.0})
    second = rows_of({"seconds": 2.0, "time_wait": 0.2, "tokens_per_second": 8.0, "train_actor/own": 1.0})
    assert [each.name for each in differences(first, second)] == ["train_actor/own"]


def test_texts_and_what_one_run_lacks_are_left_out() -> None:
    first, second = rows_of({"kl": 0.0, "rollout_engine": 1}), rows_of({"kl": 0.0, "entropy": 1.0})
    assert [each.name for each in differences(first, second)] == ["kl"]


def test_seconds_by_kind_of_work_and_what_each_rank_waits() -> None:
    times = mean_times(SPANS, KINDS)
    assert times is not None
    assert (times.steps, times.seconds) == (range(1, 3), 10.0)
    assert times.work == {"generation": 4.0, "training": 3.0, "moves of rows": 0.125, "weight syncs": 0.25}
    assert times.waiting == {0: 0.0, 1: pytest.approx(10 - 4 - 0.75)}
    assert sum(times.work.values()) + times.mean_waiting == pytest.approx(times.seconds)
    assert (times.moved_bytes, times.synced_bytes) == (50.0, 30.0)


def test_one_step_is_not_left_out_and_none_is_no_time() -> None:
    times = mean_times(SPANS[:2], KINDS)
    assert times is not None and (times.steps, times.seconds) == (range(0, 1), 5.0)
    assert mean_times([], KINDS) is None


def test_the_same_numbers_and_times_next_to_each_other(tmp_path: Path) -> None:
    first = write_run(
        tmp_path / "one", {"reward_mean": 1.0, "value_mean": 1.0}, {"reward_mean": 2.0, "value_mean": 1.0}
    )
    second = write_run(
        tmp_path / "two", {"reward_mean": 1.0, "value_mean": 1.0}, {"reward_mean": 2.0, "value_mean": 1.0}
    )
    text = compared(first, second)
    assert f"A  {first}: ppo, co-located on 2 devices, 9 steps" in text
    assert "numbers of A and B over 2 steps: the same to the last digit, all 2 metrics" in text
    assert "value_mean" not in text and "and 1 metric that differ by less than" in text
    assert "value_mean" in compared(first, second, "--all")
    assert "0.0e+00" not in text
    found = {tuple(line.split()) for line in text.splitlines()}
    assert ("generation", "4.000", "40%", "4.000", "40%") in found
    assert ("of", "rank", "1", "5.250", "52%", "5.250", "52%") in found
    assert ("bytes", "of", "columns", "moved", "50", "B", "50", "B") in found


def test_other_numbers_and_the_settings_that_explain_them(tmp_path: Path) -> None:
    first = write_run(tmp_path / "one", {"reward_mean": 1.0})
    second = write_run(tmp_path / "two", {"reward_mean": 1.5}, spans=(), overrides=("seed=3",))
    third = write_run(tmp_path / "three", {"reward_mean": 1.00001})
    text = compared(first, second, third)
    assert "numbers of A and B over 1 step: not the same: reward_mean of step 0 is 1 and 1.5" in text
    assert "a setting that numbers depend on differs: seed is 0 and 3" in text
    same = "the same but for rounding (reward_mean of step 0 is 1 and 1.00001)"
    assert f"numbers of A and C over 1 step: {same}" in text
    assert "no timeline of B" in text


def test_of_nested_settings_those_that_differ_are_shown(tmp_path: Path) -> None:
    evaluated = ["eval={path: held-out.jsonl, every: 2, samples_per_prompt: 1}"]
    one = write_run(tmp_path / "one", {"reward_mean": 1.0}, overrides=evaluated)
    two = write_run(tmp_path / "two", {"reward_mean": 1.0}, overrides=[*evaluated, "eval.samples_per_prompt=3"])
    none = write_run(tmp_path / "none", {"reward_mean": 1.0}, overrides=["eval=null"])
    start = "a setting that numbers depend on differs: eval"
    assert f"{start}.samples_per_prompt is 1 and 3\n" in compared(one, two)
    text = " ".join(compared(one, none).split())
    assert f"{start} is {{" in text and '"samples_per_prompt": 1' in text and "} and null" in text
    assert " ... " not in text and ": null" not in text


@pytest.mark.parametrize(
    ("first", "second", "lines"),
    [
        ([{"name": "a", "weight": 1}], [{"name": "a", "weight": 2}, {"name": "b"}], [".0.weight is 1 and 2", ".1 is"]),
        (None, {"name": "b", "path": None}, [' is null and {"name": "b"}']),
        ([1, 2], [1], [" is [1, 2] and [1]"]),
    ],
)
def test_lists_are_compared_by_place(first: object, second: object, lines: list[str]) -> None:
    found = list(setting_lines(SettingDifference("reward", first, second)))
    assert len(found) == len(lines)
    for line, expected in zip(found, lines, strict=True):
        assert f"differs: reward{expected}" in line


def test_damaged_lines_are_named(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, {"reward_mean": 1.0}) for name in ("one", "two")]
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write('{half\n[1]\n{"step": 1, "kl"')
    assert compared(*runs).endswith(f"\n2 damaged lines of {runs[1] / 'metrics.jsonl'} are left out\n")


def test_of_very_many_differences_the_largest_are_listed(tmp_path: Path) -> None:
    names = range(MOST_LISTED + 5)
    one = write_run(tmp_path / "one", {f"own/{number}": 1.0 for number in names})
    two = write_run(tmp_path / "two", {f"own/{number}": 2.0 + number for number in names})
    text = compared(one, two)
    assert "and 5 metrics that differ by less than these of their size" in text
    assert "own/4 " not in text and "own/5 " in text and "own/4 " in compared(one, two, "--all")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "quickstart", {"reward_mean": 1.0})
    empty = write_run(tmp_path / "empty")
    assert "expected two runs or more, found" in refused(run)
    assert f"no such directory (did you mean '{run}'?)" in refused(run, tmp_path / "quickstrat")
    assert "no step in its metrics.jsonl" in refused(run, empty)
    (empty / "config.yaml").write_text("name: [")
    assert "its config.yaml is missing or cannot be read" in refused(run, empty)
