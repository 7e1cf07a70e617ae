"""Picture of the outcomes of rows: how many of each step are trained on, filtered, or not counted for which reason."""

from __future__ import annotations

import plotly.graph_objects as go

from flexrlhf.metrics import FILTERED
from flexrlhf.operators.outcomes import IN_FLIGHT, OUTCOMES, TRAINED, account, account_text, row_metric
from flexrlhf.report.curves import HEIGHT, MARGIN, MetricCurve, curves_of
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
    figure = make_figure(traces, HEIGHT, showlegend=True, hovermode="x unified", margin=MARGIN)
    figure.update_xaxes(rangemode="normal", tickformat="d", hoverformat="d", unifiedhovertitle={"text": "step %{x}"})
    figure.update_yaxes(automargin=AUTOMARGIN, rangemode="tozero")
    caption = f"Rows of each step by outcome, one above the other. The run: {account_text(counts)}."
    return Picture(key, "Rows by outcome", caption, figure, HEIGHT)


def _trace(name: str, curve: MetricCurve) -> go.Scatter:
    """Return the area of an outcome, or the line of the rows in flight, which later steps count."""
    kind = "filtered: " if name in FILTERED else "" if name in (TRAINED, IN_FLIGHT) else "not counted: "
    line = {"color": COLOURS.get(name, IN_FLIGHT_COLOUR), "width": 1.5, "dash": "solid" if name in COLOURS else "dot"}
    stack = {"stackgroup": "rows"} if name in COLOURS else {}
    title = f"{kind}{name.replace('_', ' ')}"
    return go.Scatter(
        x=curve.steps, y=curve.values, name=title, mode="lines+markers", line=line, marker_size=4, **stack
    )
