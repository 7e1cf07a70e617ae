"""Comparison of two runs with ``debug.record_columns``, in the order in which a step computes its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from flexrlhf.api import METRICS, Operator, Plan, RunDirectory, Triple
from flexrlhf.api.engine import RecordedColumn, RecordedColumns
from flexrlhf.verify.deviations import (
    IN_NATS,
    NOT_COMPARED,
    THRESHOLDS,
    ColumnEntry,
    Deviation,
    Limits,
    is_exact,
    limit_of_metric,
)


@dataclass(frozen=True)
class Arrival:
    """Rows of one column as an operator read them on one rank, after a move.

    values:  (n, ...), in the order of ``rows``
    """

    operator: str
    column: str
    rank: int
    rows: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class RecordedRun:
    """A finished run.

    plan:  the plan that it executed
    """

    plan: Plan

    @property
    def name(self) -> str:
        return self.plan.spec.name

    @property
    def directory(self) -> Path:
        return self.plan.spec.directory

    def columns(self, step: int) -> dict[str, RecordedColumn]:
        """Return the columns of ``step`` by name."""
        return RecordedColumns(self.directory).read(step)

    def arrivals(self, step: int) -> list[Arrival]:
        """Return the columns that operators of ``step`` read after moves."""
        found: list[Arrival] = []
        for operator, rank, file in RecordedColumns(self.directory).files(step, arrived=True):
            parts = load_file(file)
            rows = tuple(parts.pop("rows").tolist())
            found += [Arrival(operator, name, rank, rows, values) for name, values in parts.items()]
        return found

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of ``metrics.jsonl``."""
        return RunDirectory(self.directory).metrics.read()

    def statistics(self, step: int) -> dict[str, Triple]:
        """Return weight, sum and sum of squares of each statistic of ``step``."""
        return {name: tuple(triple) for name, triple in self._statistics[step]["statistics"].items()}

    def reporters(self, step: int) -> dict[str, str]:
        """Return the reporter of each statistic of ``step``, in words, in the order of the schedule."""
        return dict(self._statistics[step]["reporters"])

    @cached_property
    def _statistics(self) -> dict[int, dict[str, Any]]:
        """Statistics by step; a run that went on from a checkpoint may have repeated some."""
        return {row["step"]: row for row in RecordedColumns(self.directory).statistics.read()}

    def weights(self, role: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained weights of ``role`` after the last step, by name, one tensor in memory at a time."""
        for file in sorted((self.directory / role).glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in sorted(tensors.keys()):
                    yield name, tensors.get_tensor(name)


RunPair = tuple[RecordedRun, RecordedRun]


def compare_runs(runs: RunPair, limits: Limits) -> Iterator[Deviation]:
    """Yield the deviations of all steps, and then of the weights. The other run is compared with the first one."""
    for step in range(runs[0].plan.spec.steps):
        yield from compare_step(runs, step, limits)
    for role in runs[0].plan.graph.trained:
        yield _weights(runs, role, limits)


def compare_step(runs: RunPair, step: int, limits: Limits) -> Iterator[Deviation]:
    """Yield the deviations of one step: by operator columns that arrived and were written, then metrics."""
    columns = runs[0].columns(step), runs[1].columns(step)
    arrivals = [(run, own, run.arrivals(step)) for run, own in zip(runs, columns, strict=True)]
    for operator in _operators(runs):
        for run, own, arrived in arrivals:
            yield from _moved(run, own, [each for each in arrived if each.operator == operator.name], step)
        for name in operator.writes:
            if name in columns[0] and name in columns[1]:
                num_rows = runs[0].plan.batch.num_rows
                yield _column(step, name, columns[0][name], columns[1][name], num_rows, limits)
    yield from _metrics(runs, step, limits)


def not_compared(runs: RunPair) -> list[str]:
    """Return the columns that operators of one run alone write."""
    names = [set(run.plan.graph.producers) for run in runs]
    return sorted(names[0] ^ names[1])


def _operators(runs: RunPair) -> list[Operator]:
    """Return the operators of the first run, then further ones of the second run."""
    named = {each.name: each for run in reversed(runs) for each in run.plan.graph.operators}
    first = [each.name for each in runs[0].plan.graph.operators]
    return [named[name] for name in (*first, *(name for name in named if name not in first))]


def _moved(
    run: RecordedRun, written: Mapping[str, RecordedColumn], arrivals: list[Arrival], step: int
) -> Iterator[Deviation]:
    """Yield one deviation for each column that moved: it must be read as it was written, to the last bit."""
    for arrival in arrivals:
        column = written.get(arrival.column)
        if column is None or not set(arrival.rows) <= column.values.keys():
            continue
        sent = column.of_rows(arrival.rows)
        wrong = _differs(arrival.values, sent)
        entry = None
        if wrong.any():
            place = _first(wrong)
            row = arrival.rows[place[0]]
            entry = _entry(row, place, sent, arrival.values, (column.ranks[row], arrival.rank))
        largest = float((arrival.values.double() - sent.double()).abs().nan_to_num().max())
        size = float(wrong.sum())
        yield Deviation(step, "move", arrival.column, arrival.operator, largest, size, 0.0, entry, run=run.name)


def _column(
    step: int, name: str, first: RecordedColumn, second: RecordedColumn, num_rows: int, limits: Limits
) -> Deviation:
    rows = list(range(num_rows))
    for column in (first, second):
        missing = set(rows) - column.values.keys()
        if missing or column.repeated:
            what = f"row {min(missing)} missing" if missing else f"row {min(column.repeated)} written twice"
            return Deviation(step, "column", name, first.operator, math.inf, math.inf, 0.0, note=what)
    one, other = first.of_rows(rows), second.of_rows(rows)
    differences = (one.double() - other.double()).abs()
    differs = _differs(one, other)
    # infinite where one value alone is finite, 0 where both are the same and not finite
    differences = torch.where(differs, differences.nan_to_num(nan=math.inf, posinf=math.inf), 0.0)
    absolute = float(differences.max())
    finite = one[one.isfinite()].double().abs()
    # without a magnitude differences are absolute
    scale = float(finite.max()) if len(finite) and finite.max() > 0 else 1.0
    if is_exact(name):
        size, limit, beyond = float(differs.sum()), 0.0, differs
    else:
        size, limit = absolute / scale, limits.numbers
        beyond = differences > limit * scale
    entry = None
    if beyond.any():
        place = _first(beyond)
        row = rows[place[0]]
        entry = _entry(row, place, one, other, (first.ranks[row], second.ranks[row]))
    return Deviation(step, "column", name, first.operator, absolute, size, limit, entry)


def _differs(one: Tensor, other: Tensor) -> Tensor:
    """Return where two tensors differ; NaN is the same as NaN."""
    return (one != other) & ~(one.isnan() & other.isnan())


def _first(mask: Tensor) -> list[int]:
    """Return the index of the first entry that is set, row by row."""
    place: list[int] = mask.nonzero()[0].tolist()
    return place


def _entry(row: int, place: list[int], one: Tensor, other: Tensor, ranks: tuple[int, int]) -> ColumnEntry:
    position = place[1] if len(place) > 1 else None
    return ColumnEntry(row, position, (float(one[tuple(place)]), float(other[tuple(place)])), ranks)


def _metrics(runs: RunPair, step: int, limits: Limits) -> Iterator[Deviation]:
    """Yield the deviations of the metrics that both runs have, in the order in which operators report them."""
    rows = [run.metrics[step] for run in runs]
    statistics, reporters = runs[0].statistics(step), runs[0].reporters(step)
    order = {name: number for number, name in enumerate(reporters)}
    named = sorted((m for m in METRICS if m.statistic in order), key=lambda metric: order[metric.statistic])
    for metric in named:
        if metric.name in NOT_COMPARED or not all(metric.name in row for row in rows):
            continue
        values = float(rows[0][metric.name]), float(rows[1][metric.name])
        absolute = 0.0 if values[0] == values[1] else abs(values[0] - values[1])
        size = absolute / _scale(metric.name, metric.scale(statistics[metric.statistic]), rows[0])
        limit, source = limit_of_metric(metric.name, limits), reporters[metric.statistic]
        yield Deviation(step, "metric", metric.name, source, absolute, size, limit, values=values)


def _scale(name: str, scale: float, row: Mapping[str, float]) -> float:
    """Return the scale of a metric's rounding, from that of its values."""
    if name in THRESHOLDS:
        return 1.0
    if name in IN_NATS:
        scale = max(scale, row.get("response_length", 1.0) if name == "kl" else 1.0)
    return scale or 1.0


def _weights(runs: RunPair, role: str, limits: Limits) -> Deviation:
    """Return the norm of the difference of all weights of ``role`` over their norm."""
    square, norm, largest = 0.0, 0.0, 0.0
    for one, other in zip_longest(*(run.weights(role) for run in runs)):
        if one is None or other is None or one[0] != other[0] or one[1].shape != other[1].shape:
            note = f"{one and one[0]} and {other and other[0]} are not the same tensor"
            return Deviation(None, "weights", role, "", math.inf, math.inf, limits.weights, note=note)
        difference = one[1].double() - other[1].double()
        square += float(difference.square().sum())
        norm += float(one[1].double().square().sum())
        largest = max(largest, float(difference.abs().max()))
    size = math.sqrt(square / norm) if norm else math.sqrt(square)
    return Deviation(None, "weights", role, "", largest, size, limits.weights)
