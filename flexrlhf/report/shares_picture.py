"""Picture of what ranks spend the time of a step on: running, exchanging, waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from flexrlhf.report.colours import SHARES as COLOURS
from flexrlhf.report.picture import AUTOMARGIN, BOTTOM, Picture, add_part_title, base_layout, lane_layout
from flexrlhf.report.step_times import SHARES, WAITING
from flexrlhf.report.timeline_picture import Lane

CAPTION = (
    "Share of each rank's time, in percent, over the steps that the timeline shows. Waiting: no instruction runs, or "
    "one waits for rows of other ranks. Waiting inside an instruction, for other ranks of its group, is part of that "
    "instruction, in both halves."
)


@dataclass(frozen=True)
class RankShares:
    """Shares of one half of the picture.

    title:   ``measured`` or ``predicted``
    shares:  by rank
    """

    title: str
    shares: Mapping[int, Mapping[str, float]]


def shares_picture(parts: Sequence[RankShares], lanes: Sequence[Lane], key: str) -> Picture:
    """Return the picture of the shares of all lanes."""
    height, spacing = lane_layout(len(parts), len(lanes), between=26, top=22)
    figure = make_subplots(rows=len(parts), cols=1, shared_xaxes=True, vertical_spacing=spacing)
    for row, part in enumerate(parts, 1):
        for name in SHARES:
            trace = _bars(part, lanes, name, is_named=row == 1)
            if any(each.get(name) for half in parts for each in half.shares.values()) or name == WAITING:
                figure.add_trace(trace, row=row, col=1)
        add_part_title(figure, part.title, row, above=2)
    figure.update_layout(**{**base_layout(height), "margin": {"l": 8, "r": 12, "t": 22, "b": BOTTOM}})
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_xaxes(range=[0, 100], ticksuffix=" %", zeroline=False, fixedrange=True)
    figure.update_yaxes(autorange="reversed", automargin=AUTOMARGIN, fixedrange=True, showgrid=False)
    return Picture(key, "Time of each rank", CAPTION, figure, height)


def _bars(part: RankShares, lanes: Sequence[Lane], name: str, is_named: bool) -> go.Bar:
    shares = [100 * part.shares.get(lane.ranks[0], {WAITING: 1.0}).get(name, 0.0) for lane in lanes]
    return go.Bar(
        x=shares,
        y=[lane.label for lane in lanes],
        orientation="h",
        name=name,
        legendgroup=name,
        showlegend=is_named,
        marker={"color": COLOURS[name]},
        text=[f"{share:.0f} %" if share >= 1 else "" for share in shares],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertemplate=f"{name} %{{x:.1f}} %<extra></extra>",
    )
