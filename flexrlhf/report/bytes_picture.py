"""Picture of the bytes that moves and syncs send in a step: planned and measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from flexrlhf.api import Move, Plan, Span, Sync, bytes_text, shortened, span_of
from flexrlhf.report.picture import AUTOMARGIN, Picture, escaped, make_figure
from flexrlhf.report.step_times import StepTime

PLANNED, MEASURED = "#8b9098", "#3f74b8"
ROW, WIDEST = 46, 30
CAPTION = (
    "Bytes between ranks in a step. Planned: rows are sent padded to the longest prompt and response, weights by the "
    "shapes of the models. Measured: what all ranks sent, mean over the steps of the timeline. In-place syncs send "
    "nothing."
)
LOGARITHMIC = " The axis is logarithmic."


@dataclass(frozen=True)
class EdgeBytes:
    """Bytes of one edge in a step.

    kind:      ``move`` or ``sync``
    label:     as timelines name it
    what:      columns or weights
    edge:      from where and to where; empty where the plan does not say it
    planned:   None where the shapes of the model are unknown, or without a plan
    measured:  None without a timeline
    """

    kind: str
    label: str
    what: str
    edge: str
    planned: float | None
    measured: float | None


def edge_bytes(plan: Plan | None, spans: Iterable[Span], times: Sequence[StepTime]) -> list[EdgeBytes]:
    """Return the bytes of each edge, in the order of the schedule; ``times``: steps that were measured."""
    planned = {} if plan is None else _planned(plan)
    measured = _measured(spans, [time.step for time in times])
    parts = {} if plan is None else _parts(plan)
    return [
        EdgeBytes(*key, *parts.get(key, (key[1], "")), planned.get(key), measured.get(key, 0.0 if times else None))
        for key in dict.fromkeys([*planned, *measured])
    ]


def _parts(plan: Plan) -> Mapping[tuple[str, str], tuple[str, str]]:
    """Return columns or weights, and from where to where they move, for each kind and label."""
    parts: dict[tuple[str, str], tuple[str, str]] = {}
    for each in plan.schedule.instructions:
        if isinstance(each, Move):
            parts[each.kind, each.label] = ", ".join(each.columns), each.edge
        elif isinstance(each, Sync):
            parts[each.kind, each.label] = "weights", f"{each.source} -> {each.destination}"
    return parts


def _planned(plan: Plan) -> Mapping[tuple[str, str], float | None]:
    sizes: dict[tuple[str, str], float | None] = {}
    for each in plan.schedule.instructions:
        if isinstance(each, Move | Sync):
            size = plan.traffic.move_bytes(each) if isinstance(each, Move) else plan.traffic.sync_bytes(each)
            before = sizes.get((each.kind, each.label), 0.0)
            every = getattr(each, "every", 1)
            sizes[each.kind, each.label] = None if size is None or before is None else before + size / every
    return sizes


def _measured(spans: Iterable[Span], steps: Sequence[int]) -> Mapping[tuple[str, str], float]:
    sizes: dict[tuple[str, str], float] = defaultdict(float)
    chosen = set(steps)
    for span in spans:
        if span.step in chosen and span.bytes_sent is not None and span.kind in ("move", "sync"):
            sizes[span.kind, span.label] += span.bytes_sent / len(chosen)
    return sizes


def bytes_picture(edges: Sequence[EdgeBytes], key: str) -> Picture:
    """Return the picture of ``edges``, planned and measured next to each other."""
    traces = [_bars(edges, "planned", [edge.planned for edge in edges], PLANNED)]
    if any(edge.measured is not None for edge in edges):
        traces.append(_bars(edges, "measured", [edge.measured for edge in edges], MEASURED))
    height = ROW * len(edges) + 44
    figure = make_figure(
        traces,
        height,
        barmode="group",
        bargap=0.3,
        margin={"l": 8, "r": 12, "t": 8, "b": 30},
        showlegend=len(traces) > 1,
    )
    sizes = [size for edge in edges for size in (edge.planned, edge.measured) if size]
    is_wide = bool(sizes) and max(sizes) > 50 * min(sizes)
    figure.update_xaxes(type="log" if is_wide else "linear", tickformat="~s", ticksuffix="B", nticks=5)
    if is_wide:
        decades = math.log10(max(sizes) / min(sizes))
        figure.update_xaxes(dtick=math.ceil(decades / 3))
    figure.update_yaxes(autorange="reversed", automargin=AUTOMARGIN, fixedrange=True, showgrid=False)
    return Picture(key, "Bytes of a step by edge", CAPTION + LOGARITHMIC * is_wide, figure, height)


def _bars(edges: Sequence[EdgeBytes], name: str, sizes: Sequence[float | None], colour: str) -> go.Bar:
    return go.Bar(
        x=[size or None for size in sizes],
        y=[_label(edge) for edge in edges],
        orientation="h",
        name=name,
        marker={"color": colour},
        text=[bytes_text(None if size is None else round(size)) for size in sizes],
        textposition="auto",
        textfont={"size": 11},
        textangle=0,
        cliponaxis=False,
        customdata=[escaped(edge.label) for edge in edges],
        hovertemplate=f"%{{customdata}}<br>{name} %{{text}}<extra></extra>",
    )


def _label(edge: EdgeBytes) -> str:
    where = edge.edge.replace("->", "→")
    return "<br>".join(escaped(shortened(text, WIDEST)) for text in (edge.what, where) if text)


def between_nodes(plan: Plan) -> list[tuple[str, str]]:
    """Return nodes and the bytes that each of them sends to others in a step; none on one node, or without shapes."""
    if plan.cluster.num_nodes == 1 or len(plan.shapes) < len(plan.graph.roles):
        return []
    groups: dict[str, list[int]] = defaultdict(list)
    for node, sent in plan.traffic.sent.items():
        groups[str(sent)].append(node)
    return [(span_of(tuple(nodes)), text) for text, nodes in groups.items()]
