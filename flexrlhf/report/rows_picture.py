"""Pictures of the rows of steps: how many are trained on, filtered, or not counted for which reason; and how stale the
tokens are that a step trains on."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from flexrlhf.metrics import FILTERED, STALENESS
from flexrlhf.operators.outcomes import IN_FLIGHT, OUTCOMES, TRAINED, account, account_text, row_metric
from flexrlhf.report.curves import HEIGHT, MARGIN, STALE, MetricCurve, curves_of
from flexrlhf.report.look import OTHERS, RUNS
from flexrlhf.report.picture import AUTOMARGIN, Picture, make_figure
from flexrlhf.report.run_contents import RunContents

COLOURS = dict(zip(OUTCOMES, (*RUNS, *OTHERS), strict=False))
IN_FLIGHT_COLOUR = "#8b9098"


def rows_picture(run: RunContents, key: str) -> Picture | None:
    """Return the picture of a run; None for one of an older version."""
    counts = account(run.rows)
    if not counts:
        return None
    curves = {name: curves_of([run], row_metric(name)) for name in (*OUTCOMES, IN_FLIGHT) if name in counts}
    traces = [_trace(name, curve) for name, (curve,) in curves.items()]
    caption = f"Rows of each step by outcome, one above the other. The run: {account_text(counts)}."
    return Picture(key, "Rows by outcome", caption, _stacked(traces), HEIGHT)


def staleness_picture(run: RunContents, key: str) -> Picture | None:
    """Return the histogram over steps of the staleness of trained tokens; None for a run without stale tokens."""
    rows = [row for row in run.rows if any(name in row for name in STALE)]
    steps, colours = [row["step"] for row in rows], (*RUNS, *OTHERS)
    traces = []
    for age, name in enumerate(STALE):
        if any(name in row for row in rows):
            title = f"{age} or more" if name == STALE[-1] else str(age)
            shares, colour = [row.get(name, 0.0) for row in rows], colours[age % len(colours)]
            traces.append(go.Bar(x=steps, y=shares, name=title, marker_color=colour, hovertemplate="%{y:.1%}"))
    if not traces:
        return None
    figure = _stacked(traces)
    figure.update_layout(barmode="stack", bargap=0)
    caption = f"Share of the tokens that a step trains on, by {STALENESS}."
    return Picture(key, "Staleness of tokens", caption, figure, HEIGHT)


def _stacked(traces: Sequence[go.Scatter | go.Bar]) -> go.Figure:
    figure = make_figure(traces, HEIGHT, showlegend=True, hovermode="x unified", margin=MARGIN)
    figure.update_xaxes(rangemode="normal", tickformat="d", hoverformat="d", unifiedhovertitle={"text": "step %{x}"})
    figure.update_yaxes(automargin=AUTOMARGIN, rangemode="tozero")
    return figure


def _trace(name: str, curve: MetricCurve) -> go.Scatter:
    """Return the area of an outcome, or the line of the rows in flight, which later steps count."""
    kind = "filtered: " if name in FILTERED else "" if name in (TRAINED, IN_FLIGHT) else "not counted: "
    line = {"color": COLOURS.get(name, IN_FLIGHT_COLOUR), "width": 1.5, "dash": "solid" if name in COLOURS else "dot"}
    stack = {"stackgroup": "rows"} if name in COLOURS else {}
    title = f"{kind}{name.replace('_', ' ')}"
    return go.Scatter(
        x=curve.steps, y=curve.values, name=title, mode="lines+markers", line=line, marker_size=4, **stack
    )
