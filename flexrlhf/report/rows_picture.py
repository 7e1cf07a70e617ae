"""Pictures of the rows of steps: how many are trained on, filtered, or not counted for which reason; and how stale the
tokens are that a step trains on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from flexrlhf.api import METRICS, Outcome, RowAccount
from flexrlhf.report.curves import HEIGHT, figure_by_step
from flexrlhf.report.look import OTHERS, RUNS
from flexrlhf.report.metric_table import MetricTable, Series
from flexrlhf.report.picture import Picture
from flexrlhf.report.run_contents import RunContents
from flexrlhf.report.samples_table import spread

COLOURS = dict(zip(map(str, Outcome), (*RUNS, *OTHERS), strict=True))
IN_FLIGHT_COLOUR = "#8b9098"
MOST_STEPS = 1000
"""Steps of a figure."""


def rows_picture(run: RunContents, key: str) -> Picture | None:
    """Return the picture of a run; None for one of an older version."""
    account = RowAccount.of(_totals(run.rows))
    if not account.counts:
        return None
    places = shown_places(run.rows)
    traces = [
        _trace(name, _points(run.rows, metric, places))
        for name, metric in RowAccount.METRICS.items()
        if name in account.counts
    ]
    caption = f"Rows of each step by outcome, one above the other. The run: {account}."
    return Picture(key, "Rows by outcome", caption, _stacked(traces), HEIGHT)


def _totals(rows: MetricTable) -> list[dict[str, float]]:
    """Return one row with the sums of the rows by outcome, and those in flight after the last step."""
    if not rows:
        return []
    sums = {metric: _sum(rows.series(metric)) for metric in RowAccount.METRICS.values()}
    metric = RowAccount.METRICS[RowAccount.IN_FLIGHT]
    in_flight = rows.last(metric)
    return [sums | {metric: in_flight if in_flight is not None and math.isfinite(in_flight) else 0.0}]


def _sum(series: Series) -> float:
    return sum(value for value in series.values if math.isfinite(value))


def shown_places(rows: MetricTable) -> list[int]:
    """Return the places of the steps in a figure with values one above the other: all, or of many some evenly spaced
    ones, with the first and the last."""
    return spread(range(len(rows)), MOST_STEPS)


def _points(rows: MetricTable, name: str, places: Sequence[int]) -> tuple[list[int], list[float]]:
    """Return steps and values of a metric at those of ``places`` that have it."""
    series, chosen = rows.series(name), {rows.steps[place] for place in places}
    pairs = zip(series.steps, series.values, strict=True)
    found = [(step, value) for step, value in pairs if step in chosen and math.isfinite(value)]
    return [step for step, _ in found], [value for _, value in found]


def staleness_picture(run: RunContents, key: str) -> Picture | None:
    """Return the histogram over steps of the staleness of trained tokens; None for a run without stale tokens."""
    series = {
        name: dict(zip(*_points(run.rows, name, shown_places(run.rows)), strict=True)) for name in METRICS.stale_shares
    }
    steps, colours = sorted({step for each in series.values() for step in each}), (*RUNS, *OTHERS)
    traces = []
    for age, (name, known) in enumerate(series.items()):
        if known:
            title = f"{age} or more" if name == METRICS.stale_shares[-1] else str(age)
            shares, colour = [known.get(step, 0.0) for step in steps], colours[age % len(colours)]
            traces.append(go.Bar(x=steps, y=shares, name=title, marker_color=colour, hovertemplate="%{y:.1%}"))
    if not traces:
        return None
    figure = _stacked(traces)
    figure.update_layout(barmode="stack", bargap=0)
    caption = "Share of the tokens that a step trains on, by batches trained on since the weights that sampled a token."
    return Picture(key, "Staleness of tokens", caption, figure, HEIGHT)


def _stacked(traces: Sequence[go.Scatter | go.Bar]) -> go.Figure:
    figure = figure_by_step(traces, has_legend=True)
    figure.update_yaxes(rangemode="tozero")
    return figure


def _trace(name: str, points: tuple[list[int], list[float]]) -> go.Scatter:
    """Return the area of an outcome, or the line of the rows in flight, which later steps count."""
    kind = f"{Outcome(name).kind}: " if name in tuple(Outcome)[1:] else ""
    line = {"color": COLOURS.get(name, IN_FLIGHT_COLOUR), "width": 1.5, "dash": "solid" if name in COLOURS else "dot"}
    stack = {"stackgroup": "rows"} if name in COLOURS else {}
    title = f"{kind}{name.replace('_', ' ')}"
    return go.Scatter(x=points[0], y=points[1], name=title, mode="lines+markers", line=line, marker_size=4, **stack)
