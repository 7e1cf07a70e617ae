"""A step in words: durations, rates, time left, shares of time, and parts that fit into a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexrlhf.display.events import Doing, EventFile, EventReader, Note, RunBegins, RunEnds, StepDone
from flexrlhf.display.plain_lines import (
    PlainLines,
    duration,
    fitting,
    rate,
    seconds_left,
    shares_by_kind,
    shares_text,
    step_lines,
    throughput,
)

ROW = {
    "step": 4,
    "seconds": 2.0,
    "reward_mean": 1.25,
    "kl": 0.5,
    "response_length": 17.0,
    "policy_loss": -0.01,
    "value_loss": 0.125,
    "entropy": 3.0,
    "samples_per_second": 32.0,
    "tokens_per_second": 1240.0,
}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1:00"), (65, "1:05"), (7390, "2:03:10")],
)
def test_a_duration_has_the_unit_that_a_person_would_use(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.515, "0.515"), (64.0, "64"), (999.4, "999"), (999.9, "1k"), (1240.0, "1.24k")],
)
def test_a_rate_has_three_digits(value: float, text: str) -> None:
    assert rate(value) == text


def test_the_time_left_leaves_out_the_first_step_where_there_are_others() -> None:
    assert seconds_left([], 3) is None
    assert seconds_left([10.0], 3) == 30.0
    assert seconds_left([10.0, 1.0, 3.0], 3) == 6.0
    # the mean of the last twenty
    assert seconds_left([100.0] * 30 + [1.0] * 20, 2) == 2.0


def test_throughput_is_what_was_done_over_the_time_of_all_rows() -> None:
    rows = [
        {"seconds": 1.0, "samples_per_second": 10.0, "tokens_per_second": 100.0},
        {"seconds": 3.0, "samples_per_second": 30.0},
    ]
    assert throughput(rows) == "25 samples/s, 100 tokens/s"
    assert throughput([]) == throughput([{"seconds": 1.0}]) == ""


def test_shares_are_weighted_with_the_seconds_of_their_steps() -> None:
    rows = [
        {"seconds": 1.0, "time_generate": 1.0},
        {"seconds": 3.0, "time_generate": 0.2, "time_train": 0.798, "time_wait": 0.002},
        {"seconds": 9.0},
    ]
    shares = shares_by_kind(rows)
    assert shares == pytest.approx({"generate": 0.4, "train": 0.5985})
    assert shares_text(shares) == "generate 40 %, train 60 %"
    assert shares_by_kind([{"seconds": 1.0}]) == {}


def test_as_many_parts_as_fit_are_kept_in_order() -> None:
    assert fitting(10, ["12345678", "123", "1"], 22) == ["12345678"]
    assert fitting(10, ["12345678", "123", "1"], 25) == ["12345678", "123"]
    assert fitting(30, ["1"], 22) == []


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_line_of_a_step_fits_and_has_times(width: int) -> None:
    event = StepDone("first", 4, 10, ROW)
    (line,) = step_lines(event, [{**ROW, "seconds": 9.0}, ROW], width)
    assert len(line) <= width
    assert line.startswith("first  step 5/10  reward_mean 1.25")
    assert line.endswith("  2.0 s, 32 samples/s, 1.24k tokens/s, 10 s left" if width > 80 else "  2.0 s, 10 s left")
    assert ("value_loss 0.125" in line) == (width == 200) and "entropy" not in line


def test_the_last_step_leaves_no_time() -> None:
    (line,) = step_lines(StepDone("first", 9, 10, ROW), [ROW], 120)
    assert line.endswith("1.24k tokens/s")


@pytest.mark.parametrize(("failed", "shown"), [(0.0, False), (0.25, True), (1.0, True)])
def test_failed_scores_come_first_where_there_are_any(failed: float, shown: bool) -> None:
    (line,) = step_lines(StepDone("first", 4, 10, {**ROW, "score_failed": failed}), [ROW], 80)
    assert line.startswith("first  step 5/10  score_failed") == shown


def test_an_evaluation_has_a_line_of_its_own() -> None:
    _, line = step_lines(StepDone("first", 4, 10, {**ROW, "eval_reward_mean": 0.5}), [ROW], 80)
    assert line == "first  step 5/10  eval_reward_mean 0.5"


def test_plain_lines_of_a_run() -> None:
    lines: list[str] = []
    clock = [0.0]
    plain = PlainLines(lines.append, 90, lambda: clock[0])
    for now, event in (
        (0.0, RunBegins("first", "first: ppo", (("actor", "ranks 0-1", "trained"), ("ref", "rank 0", "frozen")), 10)),
        (0.0, Doing("first", "reading the data")),
        (0.5, Note("first", "512 rows")),
        (0.5, Doing("first", "loading the models")),
        (4.0, Doing("first", "generate on actor", 0, rare=False)),
        (8.0, Doing("first", "evaluating actor", 0)),
        (13.0, StepDone("first", 0, 10, ROW)),
        (13.0, RunEnds("first", 1)),
    ):
        clock[0] = now
        plain(event)
    assert lines == [
        "\nfirst: ppo\n  actor  ranks 0-1  trained\n  ref    rank 0     frozen",
        "first: reading the data",
        "first: 512 rows",
        "first: loading the models",
        "first: loading the models: 3.5 s",
        "first: step 0: evaluating actor: 5.0 s",
        "first  step 1/10  reward_mean 1.25  kl 0.5  2.0 s, 32 samples/s, 1.24k tokens/s, 18 s left",
    ]


def test_events_survive_the_way_through_a_file(tmp_path: Path) -> None:
    reader = EventReader(tmp_path / "events")
    assert reader.read() == []
    events = [RunBegins("a", "t", (("x", "y"),), 3), Note("a", "b"), StepDone("a", 0, 3, {"kl": float("nan")})]
    send = EventFile(tmp_path / "events")
    for event in events[:2]:
        send(event)
    assert reader.read() == events[:2]
    with (tmp_path / "events").open("a") as file:
        file.write('{"kind": "RunEnds", "run": "a", ')
        file.flush()
        assert reader.read() == []
        file.write('"next_step": 3}\n')
    assert reader.read() == [RunEnds("a", 3)]
    send(events[2])
    (found,) = reader.read()
    assert isinstance(found, StepDone) and repr(found) == repr(events[2])
    reader.close()


def test_a_file_of_events_does_not_grow_without_end(tmp_path: Path) -> None:
    path = tmp_path / "events"
    reader, send = EventReader(path), EventFile(path)
    events = [Doing("first", "x" * 1000, step) for step in range(1200)]
    found = []
    for part in range(0, 1200, 100):
        for event in events[part : part + 100]:
            send(event)
        found += reader.read()
    assert found == events
    assert path.stat().st_size < 400_000
