"""Pictures of a timeline: ranks by time, measured above predicted, and shares of their activities."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from flexrlhf.api import Plan, Span, bytes_text, counted, ranks_text
from flexrlhf.guideline.simulation.simulation_text import seconds_text
from flexrlhf.guideline.simulation.timed_instructions import blocks_of
from flexrlhf.report.look import SHARE_COLOURS, InstructionStyles
from flexrlhf.report.picture import AUTOMARGIN, BOTTOM, Picture, View, add_part_title, base_layout, escaped, lane_layout
from flexrlhf.report.step_times import SHARES, WAITING, StepTime, time_shares

MOST_OWN_LANES, MOST_LANES = 16, 32
"""Ranks that have a lane each; of more, those with the same instructions share one, and so many lanes are shown."""
MOST_STEPS, MOST_SPANS = 20, 2500
TOP = 36
WAITED = "waiting for rows"
SHARES_CAPTION = (
    "Share of each rank's time, in percent, over the steps that the timeline shows. Waiting: no instruction runs, or "
    "one waits for rows of other ranks. Waiting inside an instruction, for other ranks of its group, is part of that "
    "instruction, in both halves."
)


@dataclass(frozen=True)
class Lane:
    """A row of the picture: ranks that execute the same instructions, of which the first is shown."""

    ranks: tuple[int, ...]

    @property
    def label(self) -> str:
        return ranks_text(self.ranks)


@dataclass(frozen=True)
class ShownTimeline:
    """Spans of one half of the picture.

    title:  ``measured`` or ``predicted``
    spans:  of all ranks
    times:  steps that are shown
    """

    title: str
    spans: Sequence[Span]
    times: Sequence[StepTime]

    @property
    def shown(self) -> Iterator[Span]:
        """Spans that reach into the steps that are shown."""
        start, end = self.times[0].start, self.times[-1].end
        return (span for span in self.spans if span.end >= start and span.start - span.waited <= end)


def lanes_of(plan: Plan | None, spans: Iterable[Span]) -> list[Lane]:
    """Return the lanes of a timeline: of each rank, or of ranks with the same work if there are many."""
    if plan is None:
        return [Lane((rank,)) for rank in sorted({span.rank for span in spans})][:MOST_LANES]
    ranks = range(plan.placement.num_ranks)
    if len(ranks) <= MOST_OWN_LANES:
        return [Lane((rank,)) for rank in ranks]
    return [Lane(block) for block in blocks_of(plan.schedule.instructions, len(ranks))][:MOST_LANES]


def timeline_picture(
    parts: Sequence[ShownTimeline],
    lanes: Sequence[Lane],
    styles: InstructionStyles,
    key: str,
    initial: int,
    caption: str,
) -> Picture:
    """Return the picture of measured and predicted timelines. ``initial``: steps that are shown at first."""
    height, spacing = lane_layout(len(parts), len(lanes), between=40, top=TOP)
    figure = make_subplots(rows=len(parts), cols=1, shared_xaxes=True, vertical_spacing=spacing)
    named: set[str] = set()
    for row, part in enumerate(parts, 1):
        for trace in _traces(part, lanes, styles, named):
            figure.add_trace(trace, row=row, col=1)
    figure.update_layout(**{**base_layout(height), "margin": {"l": 8, "r": 12, "t": TOP, "b": BOTTOM}})
    figure.update_layout(barmode="overlay", bargap=0.25, hovermode="closest", dragmode="zoom")
    figure.update_layout(showlegend=True)
    views = _views(parts, initial)
    first = min(views, key=lambda view: abs(view.steps - initial))
    figure.update_xaxes(range=[first.start, first.end], zeroline=False, ticksuffix=" s")
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=[lane.label for lane in lanes],
        range=[len(lanes) - 0.5, -0.5],
        automargin=AUTOMARGIN,
        fixedrange=True,
        showgrid=False,
    )
    _mark_steps(figure, parts)
    return Picture(key, "Ranks by time", caption, figure, height, views)


def _views(parts: Sequence[ShownTimeline], initial: int) -> tuple[View, ...]:
    """Return the ranges of the buttons: one step, as many as are shown at first, all."""

    def view(number: int) -> View:
        widest = max(part.times[min(number, len(part.times)) - 1].end - part.times[0].start for part in parts)
        return View(counted(number, "step"), number, -0.005 * widest, 0.9995 * widest)

    most = max(len(part.times) for part in parts)
    return tuple(view(number) for number in sorted({min(number, most) for number in (initial, 1, most)}))


def _traces(part: ShownTimeline, lanes: Sequence[Lane], styles: InstructionStyles, named: set[str]) -> Iterator[go.Bar]:
    """Yield the bars of each instruction by name, then waiting. ``named``: names that the legend has already."""
    labels = {lane.ranks[0]: lane.label for lane in lanes}
    spans = sorted((span for span in part.shown if span.rank in labels), key=lambda span: span.start)
    origin = part.times[0].start
    groups: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        groups[styles.of(span.kind, span.label).name].append(span)
    for name, members in sorted(groups.items(), key=lambda group: styles.place(group[0])):
        colour = styles.of(members[0].kind, members[0].label).colour
        yield go.Bar(
            base=[_rounded(span.start - origin) for span in members],
            x=[_rounded(span.end - span.start) for span in members],
            y=[labels[span.rank] for span in members],
            text=name if members[0].kind == "run" else "",
            hovertext=[_hover(span) for span in members],
            marker={"color": colour, "line": {"color": colour, "width": 1}},
            **_common(name, named),
        )
    waited = [span for span in spans if span.waited > 0]
    if waited:
        yield go.Bar(
            base=[_rounded(span.start - span.waited - origin) for span in waited],
            x=[_rounded(span.waited) for span in waited],
            y=[labels[span.rank] for span in waited],
            hovertext=[
                f"waiting for the rows of {escaped(span.label)}<br>{seconds_text(span.waited)}" for span in waited
            ],
            marker={"color": SHARE_COLOURS[WAITING], "opacity": 0.3},
            **_common(WAITED, named),
        )


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


def _common(name: str, named: set[str]) -> Mapping[str, Any]:
    """Return the settings of all bars: they are one entry of the legend by name."""
    is_first = name not in named
    named.add(name)
    return {
        "orientation": "h",
        "name": name,
        "legendgroup": name,
        "showlegend": is_first,
        "hoverinfo": "text",
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
    }


def _hover(span: Span) -> str:
    chunk = "" if span.chunk is None else f", chunk {span.chunk + 1}"
    lines = [
        f"<b>{escaped(span.label)}</b> ({span.kind})",
        f"rank {span.rank}, step {span.step}{chunk}",
        seconds_text(span.end - span.start),
        *([f"after waiting {seconds_text(span.waited)}"] if span.waited else []),
        *([f"{bytes_text(span.bytes_sent)} sent"] if span.bytes_sent is not None else []),
    ]
    return "<br>".join(lines)


def _mark_steps(figure: go.Figure, parts: Sequence[ShownTimeline]) -> None:
    """Mark where steps begin, with their numbers, from 0."""
    for number, part in enumerate(parts, 1):
        suffix = "" if number == 1 else str(number)
        axes = {"xref": f"x{suffix}", "yref": f"y{suffix} domain"}
        add_part_title(figure, part.title, number, above=16)
        for time in part.times:
            place = _rounded(time.start - part.times[0].start)
            figure.add_shape(type="line", x0=place, x1=place, y0=0, y1=1, line={"width": 1, "dash": "dot"}, **axes)
            figure.add_annotation(
                x=place,
                y=1,
                yanchor="bottom",
                xanchor="left",
                xshift=-4,
                showarrow=False,
                text=str(time.step),
                font={"size": 11},
                **axes,
            )


def shares_picture(
    parts: Sequence[ShownTimeline], lanes: Sequence[Lane], styles: InstructionStyles, key: str
) -> Picture:
    """Return the picture of the activities of all lanes, as shares of their time."""
    shares = [time_shares(part.spans, part.times[0].start, part.times[-1].end, styles) for part in parts]
    shown = [name for name in SHARES if name == WAITING or any(each.get(name) for of in shares for each in of.values())]
    height, spacing = lane_layout(len(parts), len(lanes), between=26, top=22)
    figure = make_subplots(rows=len(parts), cols=1, shared_xaxes=True, vertical_spacing=spacing)
    for row, (part, of_rank) in enumerate(zip(parts, shares, strict=True), 1):
        for name in shown:
            figure.add_trace(_bars(of_rank, lanes, name, is_named=row == 1), row=row, col=1)
        add_part_title(figure, part.title, row, above=2)
    figure.update_layout(**{**base_layout(height), "margin": {"l": 8, "r": 12, "t": 22, "b": BOTTOM}})
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_xaxes(range=[0, 100], ticksuffix=" %", zeroline=False, fixedrange=True)
    figure.update_yaxes(autorange="reversed", automargin=AUTOMARGIN, fixedrange=True, showgrid=False)
    return Picture(key, "Time of each rank", SHARES_CAPTION, figure, height)


def _bars(of_rank: Mapping[int, Mapping[str, float]], lanes: Sequence[Lane], name: str, is_named: bool) -> go.Bar:
    shares = [100 * of_rank.get(lane.ranks[0], {WAITING: 1.0}).get(name, 0.0) for lane in lanes]
    return go.Bar(
        x=shares,
        y=[lane.label for lane in lanes],
        orientation="h",
        name=name,
        legendgroup=name,
        showlegend=is_named,
        marker={"color": SHARE_COLOURS[name]},
        text=[f"{share:.0f} %" if share >= 1 else "" for share in shares],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertemplate=f"{name} %{{x:.1f}} %<extra></extra>",
    )
