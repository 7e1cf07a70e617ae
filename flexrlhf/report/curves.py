"""Curves of metrics over steps, one figure for each metric or pair of them, all runs in each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from flexrlhf.api import METRICS, counted, shortened
from flexrlhf.report.look import run_colour
from flexrlhf.report.metric_table import Series
from flexrlhf.report.picture import AUTOMARGIN, Picture, escaped, make_figure
from flexrlhf.report.run_contents import RunContents

HEIGHT = 215
MARGIN = {"l": 52, "r": 12, "t": 12, "b": 28}
FEW_STEPS = 6
"""Steps that have a mark each on the axis."""
MOST_POINTS = 2000
"""Points of a curve."""
MOST_OWN, MOST_NAMED, MOST_OF_NAME = 100, 50, 80
"""Metrics of a user that have figures, further ones that are named, and characters of a name."""
PAIRS = {
    "reward_mean": "eval_reward_mean",
    "response_length": "eval_response_length",
    "nll": "eval_nll",
    "pair_accuracy": "eval_accuracy",
    "preference_margin": "eval_preference_margin",
    "truncated": "eval_truncated",
    "chosen_reward": "rejected_reward",
    "chosen_logprob": "rejected_logprob",
    "actor_grad_norm": "critic_grad_norm",
    "actor_learning_rate": "critic_learning_rate",
}
"""Metric → one with the same unit that is in its figure."""
MAIN = (
    *("reward_mean", "kl", "policy_loss", "value_loss", "response_length", "cost_mean", "nll", "pair_loss"),
    *("pair_accuracy", "preference_loss", "preference_margin", "seconds", "samples_per_second"),
)
"""Metrics that are shown at once; the others are folded."""
_LINES = (
    {"width": 2.4, "dash": "solid"},
    {"width": 1.7, "dash": "dash"},
    {"width": 1.7, "dash": "dot"},
    {"width": 1.7, "dash": "dashdot"},
)
"""Lines of runs: one run's shows through the next one's where they coincide."""
ROWS = "rows_"
"""Begins the names of metrics that have a figure together (rows_picture.py)."""
OWN = "mean of what a function of the user reports"


@dataclass(frozen=True)
class MetricCurve:
    """A metric of a run.

    run:     number of the run in the page
    metric:  its key in metrics.jsonl
    steps:   from 0, as in metrics.jsonl
    values:  one a step
    """

    run: int
    metric: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


def curves_of(runs: Sequence[RunContents], metric: str) -> list[MetricCurve]:
    """Return the curve of ``metric`` of each run that has it."""
    curves = []
    for number, run in enumerate(runs):
        steps, values = _finite(run.rows.series(metric))
        if steps:
            places = _shown(values)
            shown = tuple(steps[place] for place in places), tuple(values[place] for place in places)
            curves.append(MetricCurve(number, metric, *shown))
    return curves


def _finite(series: Series) -> tuple[Sequence[int], Sequence[float]]:
    """Return the steps and values of ``series`` that a figure can show."""
    if all(map(math.isfinite, series.values)):
        return series.steps, series.values
    places = [place for place, value in enumerate(series.values) if math.isfinite(value)]
    return [series.steps[place] for place in places], [series.values[place] for place in places]


def _shown(values: Sequence[float]) -> Sequence[int]:
    """Return the places of the points of a curve: all, or of many the first, the last, a smallest and a largest one of
    each of as many parts as there is room for."""
    if len(values) <= MOST_POINTS:
        return range(len(values))
    places: set[int] = set()
    for part in parts_of(len(values), MOST_POINTS // 4):
        places |= {part[0], part[-1], min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(places)


def parts_of(number: int, most: int) -> list[range]:
    """Return ``number`` places in at most ``most`` parts of about the same size, in order."""
    count = min(number, most)
    return [range(part * number // count, (part + 1) * number // count) for part in range(count)]


def main_curves(runs: Sequence[RunContents]) -> list[Picture]:
    """Return the figures that are shown at once."""
    return list(_pictures(runs, MAIN))


def further_curves(runs: Sequence[RunContents]) -> list[Picture]:
    """Return the figures of all other metrics."""
    shown = {*MAIN, *(PAIRS[name] for name in MAIN if name in PAIRS and curves_of(runs, name))}
    others = [
        metric.name
        for metric in METRICS
        if metric.name not in {*shown, *METRICS.stale_shares} and not metric.name.startswith(ROWS)
    ]
    paired = {PAIRS[name] for name in others if name in PAIRS and curves_of(runs, name)}
    own = _own_metrics(runs)[:MOST_OWN]
    return list(_pictures(runs, [*(name for name in others if name not in paired), *own]))


def _own_metrics(runs: Sequence[RunContents]) -> list[str]:
    """Return the metrics that are not defined here, such as those of a user's function."""
    known = {metric.name for metric in METRICS} | {"seconds"}
    return [name for name in dict.fromkeys(name for run in runs for name in run.rows.names) if name not in known]


def left_out(runs: Sequence[RunContents]) -> str:
    """Return a sentence on metrics without a figure; empty if all have one."""
    others = _own_metrics(runs)[MOST_OWN:]
    if not others:
        return ""
    names = ", ".join(shortened(name, MOST_OF_NAME) for name in others[:MOST_NAMED])
    more = f" and {len(others) - MOST_NAMED:,} more" if len(others) > MOST_NAMED else ""
    return f"{counted(len(others), 'further metric')} without a figure, in metrics.jsonl alone: {names}{more}"


def _pictures(runs: Sequence[RunContents], names: Iterable[str]) -> Iterator[Picture]:
    for name in names:
        curves = curves_of(runs, name)
        second = curves_of(runs, PAIRS[name]) if curves and name in PAIRS else []
        if curves:
            yield _picture(runs, name, curves, second)


def _picture(
    runs: Sequence[RunContents], name: str, curves: Sequence[MetricCurve], second: Sequence[MetricCurve]
) -> Picture:
    other = PAIRS[name] if second else None
    several = len(runs) > 1
    traces = [_trace(runs, curve, several, is_second=False) for curve in curves]
    traces += [_trace(runs, curve, several, is_second=True) for curve in second]
    has_legend = len(traces) > 1
    figure = figure_by_step(traces, has_legend)
    if max(curve.steps[-1] - curve.steps[0] for curve in curves) < FEW_STEPS:
        # else there are marks between steps, with the numbers of these
        figure.update_xaxes(dtick=1)
    caption = definition(name) + (f"; {other}: {definition(other)}" if other else "")
    title = name if other is None else f"{name}, {other}"
    return Picture(f"curve-{name}", title, caption + _thinning(runs), figure, HEIGHT)


def figure_by_step(traces: Sequence[go.Scatter | go.Bar], has_legend: bool) -> go.Figure:
    """Return a figure of values over steps."""
    figure = make_figure(traces, HEIGHT, showlegend=has_legend, hovermode="x unified", margin=MARGIN)
    figure.update_xaxes(rangemode="normal", tickformat="d", hoverformat="d", unifiedhovertitle={"text": "step %{x}"})
    figure.update_yaxes(automargin=AUTOMARGIN)
    return figure


def _trace(runs: Sequence[RunContents], curve: MetricCurve, several: bool, is_second: bool) -> go.Scatter:
    metric = "evaluation" if is_second and curve.metric.startswith("eval_") else curve.metric
    words = [escaped(runs[curve.run].name)] * several + [escaped(metric)] * (is_second or not several)
    line = {"width": 1.2, "dash": "dot"} if is_second else _LINES[curve.run % len(_LINES)]
    return go.Scatter(
        x=curve.steps,
        y=curve.values,
        name=", ".join(words),
        mode="lines+markers" if is_second or len(curve.steps) == 1 else "lines",
        line={"color": run_colour(curve.run), **line},
        marker={"size": max(4, 9 - 3 * curve.run), "symbol": "diamond"},
        hovertemplate="%{y:.4g}",
    )


def definition(name: str) -> str:
    """Return the definition of an entry of a row of metrics, with its unit."""
    return METRICS.definitions.get(name, OWN)


def _thinning(runs: Sequence[RunContents]) -> str:
    most = max(len(run.rows) for run in runs)
    if most <= MOST_POINTS:
        return ""
    return f". Of every {4 * most // MOST_POINTS} steps the first, the last, the lowest and the highest point"
