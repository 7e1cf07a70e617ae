"""Text of a comparison: a table of differences by step, and a verdict that names the first place where runs part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flexrlhf.api import METRICS, Move, Plan, Run, Sync, ranks_text, table
from flexrlhf.verify.comparison import RecordedRun, RunPair
from flexrlhf.verify.deviations import ColumnEntry, Deviation, Limits, Tie, first_beyond, is_exact

MARK = "*"
"""Follows a difference beyond its limit."""


def format_table(deviations: Sequence[Deviation], limits: Limits, steps: int) -> list[str]:
    """Return one line for each column and metric with a difference for each step, then moves and weights."""
    metrics = [each for each in deviations if each.kind == "metric"]
    differing = {each.name for each in metrics if each.size != 0}
    num_equal = len({each.name for each in metrics} - differing)
    columns = _lines([each for each in deviations if each.kind == "column"], steps)
    notes = [
        *([f"{num_equal} metrics are the same to the last bit"] if num_equal else []),
        *_move_lines(deviations),
        *(_weight_line(each) for each in deviations if each.kind == "weights"),
        *([f"{MARK} beyond the limit"] if any(each.is_beyond for each in deviations) else []),
    ]
    return [
        f"largest differences, relative ({limits.reason}: at most {limits.numbers:g}); whole numbers: how many differ",
        *_aligned(columns, _lines([each for each in metrics if each.name in differing], steps), steps),
        *(f"  {note}" for note in notes),
    ]


def _aligned(columns: Sequence[tuple[str, ...]], metrics: Sequence[tuple[str, ...]], steps: int) -> list[str]:
    """Return the two tables, which share their widths, each with an empty line behind it."""
    numbers = ("absolute", "limit", *(f"step {step}" for step in range(steps)))
    rows = [("column", "written by", *numbers), *columns, *([("metric", "", *numbers), *metrics] if metrics else [])]
    lines = [f"  {line}" for line in table(rows, "<<" + ">" * len(numbers))]
    first, second = lines[: len(columns) + 1], lines[len(columns) + 1 :]
    return [*first, "", *second, *([""] if second else [])]


def _lines(deviations: Iterable[Deviation], steps: int) -> list[tuple[str, ...]]:
    named: dict[str, list[Deviation]] = {}
    for each in deviations:
        named.setdefault(each.name, []).append(each)
    rows = []
    for name, items in named.items():
        sizes = {item.step: _size(item) for item in items}
        source = items[0].source if items[0].kind == "column" else ""
        largest = max(item.absolute for item in items)
        absolute = f"{largest:.1e}" if largest else "0"
        rows.append((name, source, absolute, f"{items[0].limit:g}", *(sizes.get(step, "") for step in range(steps))))
    return rows


def _size(deviation: Deviation) -> str:
    is_count = deviation.kind == "column" and is_exact(deviation.name)
    size = f"{deviation.size:.0f}" if is_count or not deviation.size else f"{deviation.size:.1e}"
    return size + MARK * deviation.is_beyond


def _move_lines(deviations: Sequence[Deviation]) -> list[str]:
    moves = [each for each in deviations if each.kind == "move"]
    wrong = [each for each in moves if each.is_beyond]
    lines = [
        f"step {each.step}, {each.run}: {each.size:.0f} numbers of {each.name} arrived changed at {each.source}{MARK}"
        for each in wrong
    ]
    return lines or ([f"{len(moves)} columns arrived by moves as they were written"] if moves else [])


def _weight_line(deviation: Deviation) -> str:
    return (
        f"weights of {deviation.name} after the last step: norm of the difference / norm {_size(deviation)}, "
        f"limit {deviation.limit:g}"
    )


def format_tie(tie: Tie, runs: RunPair) -> str:
    """Return a sentence about responses that part at a tie."""
    count = len(tie.rows)
    which = f"row {tie.rows[0]}" if count == 1 else f"{count} rows, the first of them {tie.rows[0]},"
    return (
        f"step {tie.step}: {which} of tokens part{'s' * (count == 1)} at a tie (two perturbed logits {tie.margin:.1e} "
        f"apart): {runs[1].name} runs again with the responses of {runs[0].name}"
    )


def format_verdict(deviations: Sequence[Deviation], runs: RunPair, limits: Limits) -> list[str]:
    """Return the verdict: one sentence, and if the runs part, how each of them computed it."""
    first = first_beyond(deviations)
    if first is None:
        return [f"same numbers: {runs[1].name} is within the limits of {runs[0].name} ({limits.reason})"]
    where = "after the last step" if first.step is None else f"at step {first.step}"
    if first.kind == "move":
        return _move_verdict(first, runs, where)
    lines = [f"they part {where}, {_place(first, runs)}: {_sizes(first)}"]
    if first.kind == "column":
        lines += [f"  {line}" for index, run in enumerate(runs) for line in _written(first, run, index)]
        lines += [f"  {_inputs(first, runs)}"]
    elif first.kind == "metric":
        lines += [f"  reported by {first.source} in {runs[0].name}, {_reporter(first, runs[1])} in {runs[1].name}"]
        lines += ["  all columns of this step, and of the steps before, are the same"]
    return lines


def _move_verdict(first: Deviation, runs: RunPair, where: str) -> list[str]:
    assert first.entry is not None, "a move that changes numbers has a first one"
    entry = first.entry
    plan = next(run.plan for run in runs if run.name == first.run)
    return [
        f"they part {where}, column {first.name}, {_row(entry)}, on its way to {first.source} in {first.run}: "
        f"rank {entry.ranks[0]} wrote {entry.values[0]:.7g}, rank {entry.ranks[1]} read {entry.values[1]:.7g}",
        *(f"  move {', '.join(move.columns)}  {move.edge}  {move.primitive}" for move in _moves(plan, first.name)),
    ]


def _place(first: Deviation, runs: RunPair) -> str:
    names = " and ".join(run.name for run in runs)
    if first.note:
        return f"{first.kind} {first.name}: {first.note}"
    if first.entry is not None:
        values = " and ".join(f"{value:.7g}" for value in first.entry.values)
        return f"column {first.name}, {_row(first.entry)}: {values} ({names})"
    if first.values is not None:
        return f"metric {first.name}: {first.values[0]:.7g} and {first.values[1]:.7g} ({names})"
    return f"weights of {first.name}"


def _row(entry: ColumnEntry) -> str:
    return f"row {entry.row}" + (f", position {entry.position}" if entry.position is not None else "")


def _sizes(first: Deviation) -> str:
    if first.kind == "column" and is_exact(first.name):
        return f"{first.size:.0f} numbers of the column differ, and none may"
    return f"{first.size:.1e} apart, allowed {first.limit:g}"


def _written(first: Deviation, run: RecordedRun, index: int) -> list[str]:
    """Return who wrote the column in ``run``: operator, model, ranks, and where its weights come from."""
    entry = first.entry
    wrote = next((each for each in _runs(run.plan) if first.name in each.operator.writes), None)
    if wrote is None:
        return []
    by = f", this row on rank {entry.ranks[index]}" if entry is not None else ""
    syncs = (each for each in run.plan.schedule.instructions if isinstance(each, Sync))
    sync = next((each for each in syncs if each.destination == wrote.model), None)
    weights = f"; its weights come by sync from {sync.source}" if sync is not None else ""
    return [f"{run.name}: written by {wrote.label} ({ranks_text(wrote.ranks)}{by}){weights}"]


def _inputs(first: Deviation, runs: RunPair) -> str:
    operator = next(each.operator for each in _runs(runs[0].plan) if first.name in each.operator.writes)
    moved = [name for name in operator.reads if any(_moves(run.plan, name) for run in runs)]
    reads = f"it reads {', '.join(operator.reads)}" if operator.reads else "it reads no column"
    return f"{reads}, which are the same in both{', as they arrived by moves, too' if moved else ''}"


def _reporter(first: Deviation, run: RecordedRun) -> str:
    """Return who reported in ``run`` the statistic of a metric."""
    assert first.step is not None, "metrics are of steps"
    statistic = next(metric.statistic for metric in METRICS if metric.name == first.name)
    return run.reporters(first.step).get(statistic, "no rank")


def _runs(plan: Plan) -> list[Run]:
    return [each for each in plan.schedule.instructions if isinstance(each, Run)]


def _moves(plan: Plan, column: str) -> list[Move]:
    return [each for each in plan.schedule.instructions if isinstance(each, Move) and column in each.columns]
