"""The figures of a report have the points, shares and bytes of the run; what a run lacks is named, not fatal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import plan_of
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.config.output_path import OutputPath
from flexrlhf.errors import UserError
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.simulation.simulate import Simulation, simulate, write_timeline
from flexrlhf.metrics import METRICS
from flexrlhf.plan.plan import Plan
from flexrlhf.report.bytes_picture import between_nodes, edge_bytes
from flexrlhf.report.curves import MOST_OWN, MOST_POINTS, curves_of, further_curves, left_out, main_curves
from flexrlhf.report.look import InstructionStyles
from flexrlhf.report.memory_picture import memory_pictures, peak_parts
from flexrlhf.report.metric_table import MetricTable
from flexrlhf.report.pages import PlanPage, write_report
from flexrlhf.report.placement_picture import columns_of, placement_picture
from flexrlhf.report.reported_run import Prediction, plan_of_run, predict_run
from flexrlhf.report.rows_picture import rows_picture, staleness_picture
from flexrlhf.report.run_contents import RunContents, read_contents
from flexrlhf.report.samples_table import sample_groups, spread
from flexrlhf.report.sections import settings_rows
from flexrlhf.report.step_times import SHARES, WAITING, StepTime, last_steps, step_times, time_shares
from flexrlhf.report.timeline_picture import lanes_of
from flexrlhf.runs.flight_log import FlightLog, FlightLogs
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.strategies.instructions import Move, Sync
from flexrlhf.timeline import Span, Trace

HALVES = [0.5] * 6
NODES = "cluster={nodes: [{devices: 2, class: A100-80G}]}"
CALL = (
    '{"step": 5, "calls": [{"operator": "generate", "mini_batches": [0, 1000000000000], "loss": "", "part": "", '
    '"parts": []}]}'
)
SCRIPT = "<script>alert(1)</script>"


def fast_plan(placement: object = None, *overrides: str) -> Plan:
    """A plan on devices with known figures, so that it is simulated."""
    return plan_of(placement, 2, NODES, *overrides)


def simulated(plan: Plan) -> Simulation:
    return simulate(plan, AnalyticCosts())


def leave_run(directory: Path, plan: Plan, steps: int = 6, **status: Any) -> Path:
    """The files of a run of ``plan``, in their own formats; its timeline is the predicted one."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(plan.spec.dump())
    rows = [
        {"step": step, "reward_mean": step / 2, "kl": 0.1, "response_length": 6.0, "seconds": 0.5}
        for step in range(steps)
    ]
    rows[-1]["eval_reward_mean"] = 1.5
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [
        {
            "rows": kind,
            "step": step,
            "row": 0,
            "prompt": f"prompt {kind}",
            "response": SCRIPT,
            "length": 4,
            "score": 0.5,
        }
        for step in range(steps)
        for kind in ("training", "evaluation")
    ]
    (directory / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    write_timeline(simulated(plan), directory / "timeline.json", steps)
    RunDirectory(directory).write_status(**{"state": "finished", "next_step": steps, "steps": steps, **status})
    return directory


# --- curves


def test_a_curve_has_a_point_for_each_step_numbered_as_in_its_file(tmp_path: Path) -> None:
    run = read_contents(leave_run(tmp_path / "a", fast_plan()))
    (curve,) = curves_of([run], "reward_mean")
    assert (curve.steps, curve.values) == ((0, 1, 2, 3, 4, 5), (0.0, 0.5, 1.0, 1.5, 2.0, 2.5))
    (point,) = curves_of([run], "eval_reward_mean")
    assert (point.steps, point.values) == ((5,), (1.5,))


def test_every_metric_is_in_one_figure() -> None:
    names = [metric.name for metric in METRICS]
    row = {"step": 0, "seconds": 1.0, **dict.fromkeys(names, 1.0), "own": 2.0, "words": "no number"}
    run = RunContents(Path("run"), rows=MetricTable([row]))
    shown = [name for each in (*main_curves([run]), *further_curves([run])) for name in each.title.split(", ")]
    picture = rows_picture(run, "rows")
    assert picture is not None
    outcomes = [trace.name.split(": ")[-1].replace(" ", "_") for trace in picture.figure.data]
    stale = staleness_picture(run, "staleness")
    assert stale is not None
    ages = [f"staleness_{trace.name.split()[0]}" for trace in stale.figure.data]
    assert sorted([*shown, *(f"rows_{name}" for name in outcomes), *ages]) == sorted([*names, "seconds", "own"])


def test_outcomes_of_rows_are_stacked_and_add_up(tmp_path: Path) -> None:
    """A run of an older version has none of them."""
    assert rows_picture(read_contents(leave_run(tmp_path / "a", fast_plan())), "rows") is None
    rows = (
        {"step": 0, "rows_trained": 6.0, "rows_alike": 2.0, "rows_in_flight": 8.0},
        {"step": 1, "rows_trained": 7.0, "rows_rejected": 1.0, "rows_in_flight": 0.0},
    )
    picture = rows_picture(RunContents(Path("run"), rows=MetricTable(rows)), "rows")
    assert picture is not None and picture.caption.endswith(
        "The run: 16 taken = 13 trained + 2 filtered (2 alike) + 1 not counted (1 rejected)."
    )
    stacked = [trace for trace in picture.figure.data if trace.stackgroup]
    assert {trace.name: sum(trace.y) for trace in stacked} == {
        "trained": 13.0,
        "filtered: alike": 2.0,
        "not counted: rejected": 1.0,
    }


def test_staleness_is_a_histogram_over_steps() -> None:
    """A share that a step lacks is 0; a run without stale tokens has no figure."""
    assert (
        staleness_picture(RunContents(Path("fresh"), rows=MetricTable([{"step": 0, "kl": 1.0}])), "staleness") is None
    )
    rows = ({"step": 0, "staleness_0": 1.0}, {"step": 1, "staleness_1": 0.25, "staleness_16": 0.75})
    picture = staleness_picture(RunContents(Path("stale"), rows=MetricTable(rows)), "staleness")
    assert picture is not None
    found = {trace.name: (list(trace.x), list(trace.y)) for trace in picture.figure.data}
    assert found == {"0": ([0, 1], [1.0, 0.0]), "1": ([0, 1], [0.0, 0.25]), "16 or more": ([0, 1], [0.0, 0.75])}


def test_all_runs_are_in_a_figure_also_where_one_lacks_the_metric() -> None:
    one = RunContents(Path("one"), rows=MetricTable([{"step": 0, "kl": 1.0}, {"step": 1, "kl": float("nan")}]))
    two = RunContents(Path("two"), rows=MetricTable([{"step": 0, "kl": 2.0, "nll": 1.0}]))
    kl, nll = main_curves([one, two])
    assert [(trace.name, trace.x, trace.y) for trace in kl.figure.data] == [
        ("one", (0,), (1.0,)),
        ("two", (0,), (2.0,)),
    ]
    assert [trace.name for trace in nll.figure.data] == ["two"]


def test_long_curves_are_thinned_and_keep_their_last_point() -> None:
    rows = tuple({"step": step, "kl": float(step)} for step in range(5 * MOST_POINTS + 3))
    (curve,) = curves_of([RunContents(Path("long"), rows=MetricTable(rows))], "kl")
    assert len(curve.steps) <= MOST_POINTS + 1
    assert (curve.steps[0], curve.steps[-1]) == (0, len(rows) - 1)


def test_a_thinned_curve_has_the_lowest_and_the_highest_points() -> None:
    values = [0.0] * 9 * MOST_POINTS
    values[4321], values[12345] = 7.5, -3.25
    rows = [{"step": step, "kl": value} for step, value in enumerate(values)]
    (curve,) = curves_of([RunContents(Path("long"), rows=MetricTable(rows))], "kl")
    points = dict(zip(curve.steps, curve.values, strict=True))
    assert (points[4321], points[12345]) == (7.5, -3.25)
    assert all(values[step] == value for step, value in points.items())


def test_of_very_many_metrics_some_have_figures_and_the_others_are_named() -> None:
    row = {"step": 0, "kl": 1.0, **{f"own/{number}": 1.0 for number in range(MOST_OWN + 60)}}
    run = RunContents(Path("run"), rows=MetricTable([row]))
    assert [each.title for each in further_curves([run])] == [f"own/{number}" for number in range(MOST_OWN)]
    sentence = left_out([run])
    assert sentence.startswith(f"60 further metrics without a figure, in metrics.jsonl alone: own/{MOST_OWN}, ")
    assert sentence.endswith(" and 10 more")


def test_metrics_are_by_step_and_of_a_repeated_step_the_last_ones() -> None:
    rows = [
        {"step": 3, "kl": 3.0},
        {"step": 1, "kl": 1.0, "nll": 2.0},
        {"step": 3, "kl": 4.0},
        {"step": 2, "kl": "text"},
    ]
    table = MetricTable(rows)
    assert [*table.steps] == [1, 2, 3]
    assert [*table.rows(range(3))] == [{"step": 1, "kl": 1.0, "nll": 2.0}, {"step": 2}, {"step": 3, "kl": 4.0}]
    assert (table.last("kl"), table.last("nll"), len(table.series("none"))) == (4.0, None, 0)


@pytest.mark.parametrize(
    ("values", "title", "text"),
    [
        ([-2.258e-07], "kl", "0"),
        ([-2.258e-07, 1.2934], "kl, first → last step", "0 → 1.293"),
        ([0.0, 3e-6, -9e-6, 4.0, 1.0, 2.0, 3.5], "kl, first 3 → last 3 steps", "0 → 2.167"),
    ],
)
def test_the_header_has_means_of_the_first_and_the_last_steps(
    values: list[float], title: str, text: str, tmp_path: Path
) -> None:
    directory = leave_run(tmp_path / "a", fast_plan())
    rows = [json.dumps({"step": step, "kl": value}) + "\n" for step, value in enumerate(values)]
    (directory / "metrics.jsonl").write_text("".join(rows))
    html = write_report([directory], tmp_path / "report.html", None).path.read_text()
    assert f"<dt>{title}</dt><dd>{text}</dd>" in html


# --- placement


@pytest.mark.parametrize("placement", [None, [1, 1, 0.5, 0.5], HALVES], ids=str)
def test_the_placement_has_a_cell_for_each_model_on_each_rank(placement: object) -> None:
    plan = fast_plan(placement)
    picture = placement_picture(plan, "placement")
    (trace,) = picture.figure.data
    assert list(trace.y) == [str(model.name) for model in plan.placement.models]
    for model, row in zip(plan.placement.models, trace.z, strict=True):
        assert [value is not None for value in row] == [rank in model.ranks for rank in (0, 1)]
    assert [each.text for each in picture.figure.layout.annotations] == ["node 0 · A100-80G"]


def test_alike_ranks_of_a_large_cluster_share_a_column() -> None:
    nodes = "cluster={nodes: [{count: 32, devices: 8, class: A100-80G}, {count: 2, devices: 8, class: V100-32G}]}"
    placement = {"actor": 1, "critic": 1, "ref": 0.5, "reward": 0.5, "span_classes": True}
    plan = plan_of(placement, 2, nodes, "algorithm.prompts_per_step=1024")
    columns = columns_of(plan)
    assert [rank for column in columns for rank in column.ranks] == list(range(272))
    assert [column.where for column in columns] == [
        "nodes 0-16 · A100-80G",
        "nodes 17-31 · A100-80G",
        "nodes 32-33 · V100-32G",
    ]
    assert len(lanes_of(plan, ())) < 272


# --- timeline and shares


def test_steps_follow_each_other_and_their_mean_is_that_of_the_simulation() -> None:
    simulation = simulated(fast_plan(HALVES))
    spans = list(simulation.spans(8))
    times = step_times(spans, is_complete=True)
    assert [time.step for time in times] == list(range(8))
    assert all(one.end == other.start for one, other in zip(times, times[1:], strict=False))
    # a save after every third step is part of the next one
    settled = times[4:6]
    assert (settled[-1].end - settled[0].start) / len(settled) == pytest.approx(simulation.seconds, rel=1e-6)


def test_the_last_step_of_a_run_that_goes_on_is_left_out() -> None:
    spans = list(simulated(fast_plan()).spans(4))
    assert [time.step for time in step_times(spans, is_complete=False)] == [0, 1, 2]
    # a timeline that begins later may lack instructions of its first step
    later = [span for span in spans if span.step > 0]
    assert [time.step for time in step_times(later, is_complete=True)] == [2, 3]


def test_as_many_steps_are_shown_as_there_is_room_for() -> None:
    spans = [Span(0, "run", "generate on actor", step, None, step, step + 1) for step in range(30) for _ in range(10)]
    times = step_times(spans, is_complete=True)
    assert [time.step for time in last_steps(times, spans, 3, 1000)] == [27, 28, 29]
    assert [time.step for time in last_steps(times, spans, 20, 45)] == [26, 27, 28, 29]
    assert [time.step for time in last_steps(times, spans, 20, 1)] == [29]


@pytest.mark.parametrize("placement", [None, [1, 1, 0.5, 0.5], HALVES], ids=str)
def test_shares_of_every_rank_add_up(placement: object) -> None:
    plan = fast_plan(placement)
    spans = list(simulated(plan).spans(6))
    times = step_times(spans, is_complete=True)[2:]
    shares = time_shares(spans, times[0].start, times[-1].end, InstructionStyles(plan))
    assert set(shares) == {0, 1}
    for of_rank in shares.values():
        assert tuple(of_rank) == SHARES
        assert sum(of_rank.values()) == pytest.approx(1)
        assert all(share >= 0 for share in of_rank.values())


def test_waiting_is_the_time_without_an_instruction() -> None:
    spans = [
        Span(0, "run", "generate on actor", 0, None, 0.0, 6.0),
        Span(0, "eval", "actor on held-out rows", 0, None, 6.0, 7.0),
        # within the evaluation: counted once
        Span(0, "run", "generate on actor", 0, None, 6.2, 6.8),
        Span(1, "run", "train_actor on actor", 0, None, 4.0, 5.0, waited=4.0),
        Span(1, "move", "tokens actor -> ref", 0, None, 5.0, 5.5),
    ]
    shares = time_shares(spans, 0.0, 10.0, InstructionStyles(None, spans))
    assert shares[0] == pytest.approx(
        dict.fromkeys(SHARES, 0.0) | {"generation": 0.6, "evaluation and saving": 0.1, WAITING: 0.3}
    )
    assert shares[1] == pytest.approx(
        dict.fromkeys(SHARES, 0.0) | {"training": 0.1, "moves and syncs": 0.05, WAITING: 0.85}
    )


def test_operators_have_the_colour_of_their_role_in_the_placement() -> None:
    plan = fast_plan(HALVES)
    styles = InstructionStyles(plan)
    names = {
        styles.of("run", f"{each.name} on {each.role}").colour for each in plan.graph.operators if each.role == "actor"
    }
    assert len(names) > 1
    assert styles.of("run", "generate on actor.shadow").colour == styles.colours["actor"]
    # without a plan the kinds follow from names
    bare = InstructionStyles(None, [Span(0, "run", "train_actor on actor", 0, None, 0.0)])
    assert bare.of("run", "train_actor on actor") == styles.of("run", "train_actor on actor")


# --- bytes and memory


def test_bytes_are_those_of_the_plan_and_of_the_timeline() -> None:
    plan = fast_plan(HALVES)
    spans = [replace(span) for span in simulated(plan).spans(4)]
    edges = edge_bytes(plan, spans, [StepTime(step, 0.0, 1.0) for step in (1, 2)])
    moves = {each.label: plan.traffic.move_bytes(each) for each in plan.schedule.instructions if isinstance(each, Move)}
    assert {each.label: each.planned for each in edges if each.kind == "move"} == moves
    assert {each.label: each.measured for each in edges if each.kind == "move"} == pytest.approx(moves)
    syncs = {each.label: plan.traffic.sync_bytes(each) for each in plan.schedule.instructions if isinstance(each, Sync)}
    assert {each.label: each.planned for each in edges if each.kind == "sync"} == syncs
    assert edge_bytes(None, spans, [StepTime(1, 0.0, 1.0)])[0].planned is None
    assert between_nodes(plan) == []


def test_planned_memory_is_the_peak_and_measured_memory_is_next_to_it() -> None:
    plan = fast_plan([1, 1, 0.5, 0.5])
    facts = {
        "device": "cpu",
        "peak_bytes": {"0": 5000, "1": 7000},
        "held_bytes": {"0": {"actor": {"weights": 10, "host": 5}}},
    }
    peaks, phases = memory_pictures(plan, facts, "memory")
    for rank, memory in enumerate(plan.memories):
        assert sum(peak_parts(memory).values()) == memory.peak_bytes
        shown = [trace.y[rank] for trace in peaks.figure.data if trace.type == "bar"]
        assert sum(shown) == memory.peak_bytes
    marks = {trace.name: trace.y for trace in peaks.figure.data if trace.type == "scatter"}
    assert marks == {"measured peak": (5000, 7000), "counted tensors": (10,)}
    (heat,) = phases.figure.data
    assert max(value for row in heat.z for value in row if value) == max(each.peak_bytes for each in plan.memories)


# --- samples and settings


def test_responses_to_a_prompt_are_shown_over_steps(tmp_path: Path) -> None:
    evaluation, *training = sample_groups(read_contents(leave_run(tmp_path / "a", fast_plan(), steps=30)))
    assert evaluation.title == "prompt evaluation"
    assert [line.step for line in evaluation.lines][:2] + [evaluation.lines[-1].step] == [0, 2, 29]
    assert len(evaluation.lines) == len(training) == 12
    assert (training[0].title, training[-1].title) == ("step 0", "step 29")


@pytest.mark.parametrize(("values", "most", "expected"), [([1, 2], 3, [1, 2]), ([*range(9)], 3, [0, 4, 8])])
def test_steps_are_spread_evenly(values: list[int], most: int, expected: list[int]) -> None:
    assert spread(values, most) == expected


def test_settings_that_differ_are_listed() -> None:
    texts = [fast_plan(placement, f"name={name}").spec.dump() for name, placement in (("a", None), ("b", HALVES))]
    found = {key: values for key, *values in settings_rows(texts)}
    assert found["name"] == ["'a'", "'b'"]
    # a cache that is not written takes the memory that a placement leaves
    assert set(found) == {"name", "placement", "rollout.kv_tokens"}


# --- runs in every state


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    run = read_contents(leave_run(tmp_path / "a", fast_plan()))
    assert (run.state, run.next_step, run.steps, run.notes) == ("finished", 6, 6, ())
    plan, notes = plan_of_run(run)
    assert plan is not None and notes == ()
    prediction = predict_run(plan, run, None)
    assert isinstance(prediction, Prediction)
    assert prediction.simulation.lengths.mean_response == 6


def test_a_run_that_goes_on_has_steps_so_far_and_the_spans_of_its_logs(tmp_path: Path) -> None:
    plan = fast_plan()
    directory = leave_run(tmp_path / "a", plan, state="running", next_step=0)
    (directory / "timeline.json").unlink()
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "kl"')
    log = FlightLog(directory, {"rank": 0, "host": "here", "pid": 1}, keep_steps=1000)
    spans = [span for span in simulated(plan).spans(4) if span.rank == 0]
    for span in spans:
        log.begin(span)
        log.end(span)
    log.begin(Span(0, "run", "generate on actor", 4, None, 100.0))
    with RunDirectory(directory).lock():
        run = read_contents(directory)
        page = write_report([directory], tmp_path / "report.html", None)
    assert (run.state, run.next_step, run.steps, run.notes) == ("running", 6, 6, ())
    assert len(run.rows) == 6
    assert list(run.spans) == spans
    assert "running: 6 of 6 steps" in page.path.read_text()


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    directory = leave_run(tmp_path / "a", fast_plan(), state="running")
    FlightLogs(directory).write_record(
        0, {"rank": 0, "reason": "RuntimeError: no more", "at": "step 3, run scores on reward"}
    )
    FlightLogs(directory).write_record(1, {"rank": 1, "reason": "ended by the launcher", "at": ""})
    run = read_contents(directory)
    assert run.state == "failed"
    assert run.failures == ("rank 0: RuntimeError: no more (at step 3, run scores on reward)",)
    text = write_report([directory], tmp_path / "report.html", None).path.read_text()
    assert "failed after 6 of 6 steps" in text and "RuntimeError: no more" in text


def test_a_run_without_steps_or_timeline_still_has_a_page(tmp_path: Path) -> None:
    directory = leave_run(tmp_path / "a", fast_plan(), state="running", next_step=0)
    for name in ("metrics.jsonl", "samples.jsonl", "timeline.json"):
        (directory / name).unlink()
    page = write_report([directory], tmp_path / "report.html", None)
    assert page.notes == (
        "test: there is no timeline: neither timeline.json, nor logs in flight/ or timeline/",
        "test: no step has been recorded yet, so there are no curves",
    )


def test_damaged_files_cost_what_is_in_them_alone(tmp_path: Path) -> None:
    directory = leave_run(tmp_path / "a", fast_plan())
    (directory / "timeline.json").write_text("{")
    (directory / "status.json").write_text("[]")
    text = (directory / "metrics.jsonl").read_text()
    (directory / "metrics.jsonl").write_text("{half\n" + text)
    (directory / "config.yaml").write_text("name: [")
    page = write_report([directory], tmp_path / "report.html", None)
    assert [note.partition(": ")[2][:40] for note in page.notes] == [
        f"the plan cannot be made again: config {tmp_path}"[:40],
        f"1 damaged line of {directory}"[:40],
        f"{directory / 'timeline.json'} cannot be read"[:40],
        "there is no timeline: neither timeline.j",
        f"{directory / 'status.json'}: damaged"[:40],
    ]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("samples.jsonl", '{"step": 5, "prompt": "a \\ud800 b", "response": "c"}', ""),
        ("samples.jsonl", '{"step": 5, "turns": [3]}\n{"step": 5, "score": "high"}', "2 damaged lines"),
        ("replans.jsonl", '{"step": 1}', "1 damaged line"),
        ("calls.jsonl", "[]", "1 damaged line"),
        ("calls.jsonl", CALL, "the schedule is as planned, not as called: "),
        ("timeline.json", "[" * 100_000, "timeline.json cannot be read (ValueError: nested too deeply)"),
        (
            "timeline.json",
            '{"traceEvents": [{"ph": "X"}], "otherData": {}}',
            "timeline.json cannot be read (KeyError: ",
        ),
        ("metrics.jsonl", '{"step": 1e3}\n{"step": true}\n{"step": 9, "kl": 1' + "0" * 400 + "}", "2 damaged lines"),
    ],
)
def test_rows_of_another_form_are_left_out(name: str, content: str, sentence: str, tmp_path: Path) -> None:
    directory = leave_run(tmp_path / "a", fast_plan())
    (directory / name).write_text(content + "\n")
    page = write_report([directory], tmp_path / "report.html", None)
    assert page.path.read_text().rstrip().endswith("</html>")
    assert [note for note in page.notes if sentence in note] or not sentence
    assert ("a \ufffd b" in page.path.read_text()) == ("ud800" in content)


def test_a_run_of_one_rank_without_a_config_has_a_timeline(tmp_path: Path) -> None:
    directory = leave_run(tmp_path / "a", fast_plan())
    (directory / "config.yaml").unlink()
    Trace([Span(0, "run", "generate on actor", 0, None, 1.0, 2.0)], {}).write(directory / "timeline.json")
    assert 'id="timeline-0"' in write_report([directory], tmp_path / "report.html", None).path.read_text()


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    OutputPath(path, "--output").write("before")

    def fail(self: Path, content: bytes) -> int:
        self.open("wb").write(content[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(UserError, match="No space left on device"):
        OutputPath(path, "--output").write("after")
    assert path.read_text() == "before" and [*tmp_path.iterdir()] == [path]


def test_a_moved_run_whose_models_are_gone_keeps_all_but_memory_and_prediction(tmp_path: Path) -> None:
    plan = fast_plan(None, "rollout.engine=transformers")
    directory = leave_run(tmp_path / "elsewhere", plan)
    text = (directory / "config.yaml").read_text()
    models = plan.spec.models.model_copy(
        update={"actor": plan.model("actor").model_copy(update={"init": None, "path": "runs/gone"})}
    )
    (directory / "config.yaml").write_text(plan.spec.model_copy(update={"models": models}).dump())
    assert (directory / "config.yaml").read_text() != text
    page = write_report([directory], tmp_path / "report.html", None)
    (note,) = page.notes
    assert note.startswith("test: planned memory, weights that move and predictions are left out: models.actor")
    assert "runs/gone" in note
    html = page.path.read_text()
    assert '"placement-0"' in html and '"timeline-0"' in html and '"memory-0-peak"' not in html


def test_relative_paths_lead_from_where_the_run_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fast_plan()
    model = tmp_path / "work" / "models" / "actor"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(plan.model("actor").init))
    settings = plan.model("actor").model_copy(update={"init": None, "path": "models/actor"})
    models = plan.spec.models.model_copy(update={"actor": settings})
    directory = leave_run(tmp_path / "work" / "runs" / "a", plan)
    (directory / "config.yaml").write_text(plan.spec.model_copy(update={"models": models}).dump())
    monkeypatch.chdir(tmp_path)
    again, _ = plan_of_run(read_contents(directory))
    assert again is not None and again.model("actor").path == str(tmp_path / "work" / "models" / "actor")


def test_without_figures_of_the_devices_the_page_says_how_to_get_them(tmp_path: Path) -> None:
    runs = [leave_unknown_run(tmp_path / name) for name in ("a", "b")]
    page = write_report(runs, tmp_path / "report.html", None)
    assert page.notes == ("no predicted timeline of a, b; the page says why, above its timelines",)
    text = page.path.read_text()
    sentence = "No predicted timeline: cluster: device class mine has no figures"
    assert text.lower().count("no predicted timeline") == text.count(sentence) == 1
    assert text.index('<section id="timeline">') < text.index(sentence) < text.index('id="timeline-0"')
    assert "measure with <code>flexrlhf profile</code> first" in text


def test_a_run_without_prediction_is_named_where_others_have_one(tmp_path: Path) -> None:
    runs = [leave_run(tmp_path / "a", fast_plan()), leave_unknown_run(tmp_path / "b")]
    page = write_report(runs, tmp_path / "report.html", None)
    assert "No predicted timeline of b: cluster: device class mine" in page.path.read_text()


def test_a_run_on_cpus_is_predicted_by_measurements_of_an_ordinary_one(tmp_path: Path) -> None:
    leave_run(tmp_path / "a", fast_plan())
    (tmp_path / "a" / "config.yaml").write_text(plan_of(None, 2).spec.dump())
    page = write_report([tmp_path / "a"], tmp_path / "report.html", None)
    assert page.notes == () and "by measurements of an ordinary CPU" in page.path.read_text()


def leave_unknown_run(directory: Path) -> Path:
    leave_run(directory, fast_plan())
    plan = plan_of(None, 2, "cluster={nodes: [{devices: 2, class: mine, memory_gb: 9}]}")
    (directory / "config.yaml").write_text(plan.spec.dump())
    return directory


# --- the page


def test_texts_of_a_run_are_escaped_everywhere(tmp_path: Path) -> None:
    directory = leave_run(tmp_path / "a", fast_plan())
    text = write_report([directory], tmp_path / "report.html", None).path.read_text()
    assert SCRIPT not in text
    assert text.count("&lt;script&gt;alert(1)") >= 2


def test_restarts_of_rollout_processes_are_named(tmp_path: Path) -> None:
    directory = leave_run(tmp_path / "a", fast_plan())
    file = directory / "metrics.jsonl"
    rows = [json.loads(line) | {"rollout_restarts": float(number == 3)} for number, line in enumerate(file.open())]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_report([directory], tmp_path / "report.html", None).path.read_text()
    assert text.count("1 restart of rollout processes, in step 3") == 1


def test_runs_of_the_same_name_have_those_of_their_directories(tmp_path: Path) -> None:
    runs = [leave_run(tmp_path / name, fast_plan()) for name in ("first", "second")]
    text = write_report(runs, tmp_path / "report.html", None).path.read_text()
    assert "<title>first, second</title>" in text
    with pytest.raises(UserError, match="given twice"):
        write_report([runs[0], runs[0]], tmp_path / "report.html", None)


def test_a_plan_has_a_page(tmp_path: Path) -> None:
    page = PlanPage(tmp_path / "plan.html").write([fast_plan(HALVES, "schedule.lag=1")])
    text = page.path.read_text()
    assert page.notes == ()
    for key in ("placement-0", "timeline-0", "timeline-0-shares", "bytes-0", "memory-0-peak", "memory-0-phases"):
        assert f'id="{key}"' in text
    assert "<td>train_actor on actor</td>" in text and "name: test" in text


def test_the_commands_write_pages_and_keep_files_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    leave_run(tmp_path / "runs" / "a", fast_plan())
    (tmp_path / "a.yaml").write_text(fast_plan().spec.dump())
    for command in (
        ["report", "runs/a"],
        ["report", "runs/a", "-o", "report.html"],
        ["plan", "a.yaml", "--html", "p.html"],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    (tmp_path / "notes.html").write_text("mine")
    for command in (["report", "runs/a", "-o", "notes.html"], ["plan", "a.yaml", "--html", "notes.html"]):
        result = CliRunner().invoke(app, command)
        assert (result.exit_code, (tmp_path / "notes.html").read_text()) == (2, "mine")
        assert "was not written by this command" in result.output


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("runs/mu-ppo", "run runs/mu-ppo: no such directory (did you mean 'runs/my-ppo'?)"),
        (
            "runs",
            "run runs: no run in it, neither config.yaml with status.json nor metrics.jsonl; give one of runs/my-ppo",
        ),
        ("other", "run other: no such directory; there are runs/my-ppo"),
        (
            "runs/my-ppo/metrics.jsonl",
            "run runs/my-ppo/metrics.jsonl: a file; give the directory of the run, such as runs/my-ppo",
        ),
    ],
)
def test_a_wrong_path_is_one_sentence(path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    leave_run(tmp_path / "runs" / "my-ppo", fast_plan())
    result = CliRunner().invoke(app, ["report", path])
    assert (result.exit_code, result.output.strip()) == (2, f"flexrlhf: {message}")
