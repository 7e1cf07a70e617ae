"""Sections of the page of runs or plans."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from flexrlhf.api import (
    Ends,
    Plan,
    bytes_text,
    counted,
    gpu_warnings,
    ranks_text,
    read_yaml,
    restarts_text,
    schedule_rows,
    shortened,
    shown,
    span_of,
)
from flexrlhf.guideline.simulation.simulation_text import seconds_text
from flexrlhf.report.bytes_picture import between_nodes, bytes_picture, edge_bytes
from flexrlhf.report.curves import further_curves, left_out, main_curves
from flexrlhf.report.look import run_colour
from flexrlhf.report.memory_picture import counted_tensors, measured_peaks, memory_pictures
from flexrlhf.report.metric_table import MetricTable, Series
from flexrlhf.report.page import Card, Page, RunPart, Section, Table
from flexrlhf.report.placement_picture import placement_picture
from flexrlhf.report.reported_run import PLANNED_STEPS, Prediction, ReportedRun
from flexrlhf.report.rows_picture import rows_picture, staleness_picture
from flexrlhf.report.run_contents import RunContents
from flexrlhf.report.samples_table import sample_groups
from flexrlhf.report.timeline_picture import MOST_LANES, shares_picture, timeline_picture

CURVES = "A point a step, numbered as in metrics.jsonl, from 0. Under each figure: what the metric is, and its unit."
TIMELINE = (
    "A bar is an instruction on a rank, in seconds; the numbers are those of the steps, where each begins. Drag to "
    "zoom, double-click to go back; a click in the legend hides instructions, a double click all others."
)
PREDICTED = " Predicted: by {source}, with {lengths}; a step {seconds}."
MOST_MEMORY_ROWS = 32
MOST_REPLANS, MOST_CHARACTERS = 20, 500
"""Decisions for another placement, and characters of a list of steps."""
ABSENT = "-"
"""Value of a setting in a run whose config has no such key."""
ROUNDING = 1e-5
"""A metric in the header that is nearer to 0 is shown as 0."""


def run_page(runs: Sequence[ReportedRun], now: str) -> Page:
    """Return the page of runs."""
    contents = [run.contents for run in runs]
    notes = tuple(filter(None, [left_out(contents)]))
    main, further = tuple(main_curves(contents)), tuple(further_curves(contents))
    curves = Section("curves", "Curves", CURVES, main, further, notes=notes)
    cards = tuple(_card(run, number) for number, run in enumerate(runs))
    title = ", ".join(run.name for run in runs)
    lasting = [each.name for each in contents if each.state == "running"]
    footer = f"Written {now} by flexrlhf report" + (f"; going on: {', '.join(lasting)}." if lasting else ".")
    return Page(title, cards, (curves, *_sections(runs)), footer)


def plan_page(runs: Sequence[ReportedRun], now: str) -> Page:
    """Return the page of plans."""
    cards = tuple(_card(run, number, is_planned=True) for number, run in enumerate(runs))
    title = "plan of " + ", ".join(run.name for run in runs)
    return Page(title, cards, tuple(_sections(runs)), f"Written {now} by flexrlhf plan; nothing has run.")


def _sections(runs: Sequence[ReportedRun]) -> list[Section]:
    def section(key: str, title: str, make: Callable[[ReportedRun, str], RunPart], is_open: bool = True) -> Section:
        parts = (replace(make(run, f"{key}-{n}"), colour=run_colour(n)) for n, run in enumerate(runs))
        return Section(key, title, parts=tuple(parts), is_open=is_open)

    return [
        section("rows", "Rows", _rows),
        section("placement", "Placement", _placement),
        replace(section("timeline", "Timeline", _timeline), notes=tuple(_unpredicted(runs))),
        section("bytes", "Bytes moved", _bytes),
        section("memory", "Memory", _memory),
        section("samples", "Samples", lambda run, key: RunPart(run.name, samples=tuple(sample_groups(run.contents)))),
        section("schedule", "Schedule of one step", _schedule, is_open=False),
        _settings(runs),
    ]


def _rows(run: ReportedRun, key: str) -> RunPart:
    pictures = rows_picture(run.contents, key), staleness_picture(run.contents, f"{key}-staleness")
    return RunPart(run.name, pictures=tuple(picture for picture in pictures if picture is not None))


def _placement(run: ReportedRun, key: str) -> RunPart:
    if run.plan is None:
        return RunPart(run.name)
    notes = [*run.plan.placement.warnings, *gpu_warnings(run.plan)]
    if run.plan.placement.idle_ranks:
        notes.append(f"without a model: {ranks_text(run.plan.placement.idle_ranks)}")
    return RunPart(run.name, pictures=(placement_picture(run.plan, key, _device(run.contents)),), notes=tuple(notes))


def _device(contents: RunContents) -> str:
    """Return the kind of a run's devices, in words; empty if it is not recorded."""
    return {"cpu": "CPU", "cuda": "GPU"}.get(str(contents.facts.get("device")), "")


def _timeline(run: ReportedRun, key: str) -> RunPart:
    parts = run.timelines
    if not parts:
        return RunPart(run.name)
    caption = TIMELINE
    if run.measured is not None:
        times = run.measured.times
        seconds = seconds_text((times[-1].end - times[0].start) / len(times))
        steps = f"step {times[0].step}" if len(times) == 1 else f"steps {times[0].step}-{times[-1].step}"
        caption += f" Measured: {steps}; a step {seconds} in the mean."
    if isinstance(run.prediction, Prediction):
        step = seconds_text(run.prediction.simulation.seconds)
        caption += PREDICTED.format(source=run.prediction.source, lengths=run.prediction.lengths, seconds=step)
    caption += _lanes_text(run)
    initial = PLANNED_STEPS if run.measured is not None else 1
    picture = timeline_picture(parts, run.lanes, run.styles, key, initial, caption)
    shares = shares_picture(parts, run.lanes, run.styles, f"{key}-shares")
    restarts = shortened(_restarts(run.contents.rows), MOST_CHARACTERS)
    return RunPart(run.name, pictures=(picture, shares), notes=(restarts,) if restarts else ())


def _restarts(rows: MetricTable) -> str:
    """Return the restarts of a run in words; empty if it has none."""
    series = rows.series("rollout_restarts")
    pairs = zip(series.steps, series.values, strict=True)
    return restarts_text(
        [{"step": step, "rollout_restarts": value} for step, value in pairs if math.isfinite(value) and value]
    )


def _unpredicted(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """Yield why there is no predicted timeline: each reason once, with its runs where there are others."""
    names: dict[str, list[str]] = {}
    for run in runs:
        if isinstance(run.prediction, str) and run.prediction:
            names.setdefault(run.prediction, []).append(run.name)
    for reason, named in names.items():
        of = f" of {', '.join(named)}" if len(named) < len(runs) else ""
        yield f"No predicted timeline{of}: {reason}"


def _lanes_text(run: ReportedRun) -> str:
    if all(len(lane.ranks) == 1 for lane in run.lanes):
        return ""
    shown = f" The first {MOST_LANES} such groups are shown." if len(run.lanes) == MOST_LANES else ""
    return f" Ranks with the same instructions share a lane, which shows the first of them.{shown}"


def _bytes(run: ReportedRun, key: str) -> RunPart:
    measured = run.measured
    edges = edge_bytes(run.plan, run.contents.spans, measured.times if measured is not None else ())
    pictures = (bytes_picture(edges, key),) if edges else ()
    notes = () if edges or run.plan is None else ("nothing moves between ranks: no rows, no weights",)
    nodes = between_nodes(run.plan) if run.plan is not None else []
    table = Table(("node", "sends to other nodes in a step"), tuple(nodes), "Between nodes") if nodes else None
    return RunPart(run.name, pictures=pictures, tables=(table,) if table else (), notes=notes)


def _memory(run: ReportedRun, key: str) -> RunPart:
    if run.plan is None:
        return RunPart(run.name)
    pictures = tuple(memory_pictures(run.plan, run.contents.facts, key))
    table = _memory_table(run.plan, run.contents)
    notes = () if pictures else ("planned memory needs the models' files, which are not here",)
    return RunPart(run.name, pictures=pictures, tables=(table,) if table else (), notes=notes)


def _memory_table(plan: Plan, contents: RunContents) -> Table | None:
    """Return planned against measured memory of the ranks whose measured peak is highest; None without measurements."""
    peaks, tensors = measured_peaks(contents.facts), counted_tensors(contents.facts)
    if not peaks or not plan.shapes:
        return None
    is_cpu = contents.facts.get("device") == "cpu"
    rows = []
    for rank in sorted(sorted(peaks, key=lambda rank: -peaks[rank])[:MOST_MEMORY_ROWS]):
        if rank >= plan.placement.num_ranks:
            continue
        memory = plan.memories[rank]
        peak = memory.process_bytes if is_cpu else memory.peak_bytes
        sizes = (memory.tensor_bytes, tensors.get(rank), peak, peaks[rank])
        rows.append((str(rank), *(bytes_text(size) for size in sizes)))
    head = ("rank", "tensors planned", "tensors counted", "peak planned", "peak measured")
    return Table(head, tuple(rows), "Planned and measured")


def _schedule(run: ReportedRun, key: str) -> RunPart:
    if run.plan is None:
        return RunPart(run.name)
    rows = tuple(
        (
            span_of(row.ranks),
            ("↳ " if row.is_inner else "") + row.kind,
            row.label.replace("->", "→"),
            ", ".join(row.notes),
        )
        for row in schedule_rows(run.plan)
    )
    return RunPart(run.name, tables=(Table(("ranks", "kind", "instruction", "how"), rows),))


def _settings(runs: Sequence[ReportedRun]) -> Section:
    readable = [run for run in runs if run.contents.spec is not None]
    tables: tuple[Table, ...] = ()
    if len(readable) > 1:
        rows = tuple(settings_rows([run.contents.yaml for run in readable]))
        tables = (Table(("setting", *(run.name for run in readable)), rows, "Settings that differ"),)
    parts = tuple(RunPart(run.name, run_colour(number), text=run.contents.yaml) for number, run in enumerate(runs))
    return Section(
        "yaml",
        "Settings",
        "The resolved YAML: every key with the value that the run had.",
        tables=tables,
        parts=parts,
        is_open=False,
    )


def settings_rows(texts: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the settings that are not the same in all of the YAML ``texts``: the dotted key, then a value of each."""
    settings = [dict(_flat(read_yaml(text) or {})) for text in texts]
    keys = dict.fromkeys(key for each in settings for key in each)
    rows = [(key, *(each.get(key, ABSENT) for each in settings)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(setting: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(setting, Mapping) and setting:
        for name, value in setting.items():
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, shown(setting)


def _card(run: ReportedRun, number: int, is_planned: bool = False) -> Card:
    contents = run.contents
    state = "planned" if is_planned else _state(contents)
    alerts = contents.failures
    return Card(run.name, run_colour(number), state, tuple(_facts(run, is_planned)), alerts, run.notes)


def _state(contents: RunContents) -> str:
    of = f" of {contents.steps}" if contents.steps is not None else ""
    steps = f"{contents.next_step}{of} steps"
    words = {
        "finished": "finished",
        "running": f"running: {steps}",
        "stopped": f"stopped after {steps}",
        "failed": f"failed after {steps}",
        "unknown": f"{steps}, no status",
    }
    return words[contents.state]


def _facts(run: ReportedRun, is_planned: bool) -> list[tuple[str, str]]:
    contents, plan, spec = run.contents, run.plan, run.contents.spec
    facts = [] if is_planned else [("directory", str(contents.directory))]
    if spec is not None:
        facts.append(("algorithm", spec.algorithm.name))
    if plan is not None:
        nodes = f" on {counted(plan.cluster.num_nodes, 'node')}" if plan.cluster.num_nodes > 1 else ""
        classes = ", ".join(name for name in plan.cluster.classes if name != "any")
        devices = f"{counted(plan.placement.num_ranks, 'rank')}{nodes}{f' ({classes})' if classes else ''}"
        facts += [("strategy", plan.strategy), ("devices", devices), ("rows a step", str(plan.batch.num_taken))]
    if contents.steps is not None and is_planned:
        facts.append(("steps", str(contents.steps)))
    seconds = [value for value in contents.rows.series("seconds").values if math.isfinite(value)]
    if seconds:
        mean = sum(seconds) / len(seconds)
        facts += [("seconds a step", f"{mean:.3g}"), ("total", seconds_text(sum(seconds)))]
    facts += [
        ("re-planned", replan_text(each, contents.rows))
        for each in contents.replans[-MOST_REPLANS:]
        if each["switches"]
    ]
    if isinstance(run.prediction, Prediction):
        simulation = run.prediction.simulation
        facts.append(("predicted step", seconds_text(simulation.seconds)))
        facts.append(("predicted waiting", f"{100 * max(simulation.bubble, 0.0):.0f} %"))
    for metric in ("reward_mean", "kl", "eval_nll", "preference_loss", "pair_accuracy"):
        values = contents.rows.series(metric).values
        if values:
            facts.append(_trend(metric, values))
    return facts


def replan_text(decision: Mapping[str, Any], rows: MetricTable) -> str:
    """Return a decision to go on under another placement, with the time and the length of steps before and after."""
    seconds, lengths = (_after(rows.series(name), decision["step"]) for name in ("seconds", "response_length"))
    measured = f", measured {seconds_text(median(seconds))}" if seconds else ""
    measured += f" with {sum(lengths) / len(lengths):.3g} tokens" if lengths else ""
    return (
        f"after step {decision['step']}: {decision['before']} → {decision['after']}; "
        f"{seconds_text(decision['seconds'])} a step before with responses of {decision['response_length']:.3g} "
        f"tokens, {seconds_text(decision['predicted_after'])} predicted{measured} after"
    )


def _after(series: Series, step: int) -> Sequence[float]:
    """Return the finite values of the steps after ``step``."""
    return [value for value in series.values[bisect_right(series.steps, step) :] if math.isfinite(value)]


def _trend(metric: str, values: Sequence[float]) -> tuple[str, str]:
    """Return a metric and its means over the first and the last steps, the same ones as in the summary of a run."""
    if len(values) == 1:
        return metric, _number(values[0])
    ends = Ends.of(values)
    return f"{metric}, {ends.title.replace('->', '→')}", f"{_number(ends.first)} → {_number(ends.last)}"


def _number(value: float) -> str:
    """Return a metric in few digits, without rounding near 0."""
    return f"{0 if abs(value) < ROUNDING else value:.4g}"
