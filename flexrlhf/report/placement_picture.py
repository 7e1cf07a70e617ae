"""Picture of a placement: placed models by ranks, with node and device class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from flexrlhf.api import OF_REPLICA, PlacedModel, Plan, bytes_text, counted, ranks_text, span_of
from flexrlhf.report.look import INSTRUCTIONS, role_colours
from flexrlhf.report.picture import AUTOMARGIN, Picture, escaped, make_figure

ROW, LINE = 34, 15
MOST_COLUMNS = 64
"""Ranks that have a column each; of more, those with the same models and device share one."""
ENVIRONMENT = "environment"
CAPTION = (
    "A column is a rank, a row a placed model (a copy of a role's weights). dp: number of the replica that the rank is "
    "of, of so many; cp, tp, pp: its part of the rows' tokens, its tensor-parallel part and pipeline stage. Row "
    "environment: processes of the whole node that play episodes. Above: node and device class."
)


@dataclass(frozen=True)
class RankColumn:
    """Ranks with the same models on devices of one class and one node, or of alike nodes.

    ranks:  in order
    where:  node and device class
    """

    ranks: tuple[int, ...]
    where: str


def columns_of(plan: Plan, device: str = "") -> list[RankColumn]:
    """Return a column for each rank, or one for neighbours that are alike if there are many.

    ``device``: name of devices without a class.
    """
    if plan.placement.num_ranks <= MOST_COLUMNS:
        return [RankColumn((rank,), _where(plan, (rank,), device)) for rank in plan.cluster.ranks]
    groups: list[list[int]] = []
    for rank in plan.cluster.ranks:
        if groups and _kind(plan, groups[-1][0]) == _kind(plan, rank):
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return [RankColumn(tuple(ranks), _where(plan, tuple(ranks), device)) for ranks in groups]


def column_names(columns: Sequence[RankColumn]) -> list[str]:
    """Return the ranks of each column, in words if there is room."""
    return [ranks_text(column.ranks) if len(columns) <= 4 else span_of(column.ranks) for column in columns]


def _kind(plan: Plan, rank: int) -> tuple[object, ...]:
    models = tuple((model.name, model.layout.index("pp", rank)) for model in plan.placement.on_rank(rank))
    return plan.cluster.devices[rank].device_class, models


def _where(plan: Plan, ranks: tuple[int, ...], device: str) -> str:
    nodes = _nodes(plan, ranks)
    device_class = plan.cluster.devices[ranks[0]].device_class
    called = device if device_class == plan.cluster.ANY_CLASS else device_class
    return f"node{'s' if len(nodes) > 1 else ''} {span_of(nodes)}" + (f" · {called}" if called else "")


def _nodes(plan: Plan, ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(plan.cluster.node_of(rank) for rank in ranks))


def _environment_hovers(columns: Sequence[RankColumn], shares: Sequence[int]) -> list[str]:
    """Return what is shown of the processes on the nodes of each column."""
    return [
        f"<b>{ENVIRONMENT}</b><br>{column.where}<br>{counted(share, 'process')} that play episodes" if share else ""
        for column, share in zip(columns, shares, strict=True)
    ]


def placement_picture(plan: Plan, key: str, device: str = "") -> Picture:
    """Return the picture of the placement of ``plan``. ``device``: name of devices without a class."""
    columns, models, processes = columns_of(plan, device), plan.placement.models, plan.processes.by_node()
    colours = {**role_colours(plan.graph.roles), ENVIRONMENT: INSTRUCTIONS["move"]}
    roles = [*colours]
    shares = [sum(processes.get(node, 0) for node in _nodes(plan, column.ranks)) for column in columns]
    environment = [f"{share} proc." if share else "" for share in shares]
    names = column_names(columns)
    trace = go.Heatmap(
        x=[*range(len(columns))],
        y=[*(str(model.name) for model in models), *[ENVIRONMENT] * bool(processes)],
        z=[
            *([roles.index(model.role) if _is_on(model, column) else None for column in columns] for model in models),
            *[[roles.index(ENVIRONMENT) if share else None for share in shares]] * bool(processes),
        ],
        text=[*([_part(model, column) for column in columns] for model in models), *[environment] * bool(processes)],
        customdata=[
            *([_hover(plan, model, column) for column in columns] for model in models),
            *[_environment_hovers(columns, shares)] * bool(processes),
        ],
        texttemplate="%{text}" if len(columns) <= 16 else "",
        textfont={"size": 11},
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
        colorscale=_discrete([colours[role] for role in roles]),
        zmin=-0.5,
        zmax=len(roles) - 0.5,
        showscale=False,
        xgap=2,
        ygap=3,
    )
    most_lines = max(_part(model, column).count("<br>") for model in models for column in columns)
    height = (ROW + LINE * max(0, most_lines - 1)) * (len(models) + bool(processes)) + 72
    figure = make_figure([trace], height, margin={"l": 8, "r": 12, "t": 34, "b": 30}, showlegend=False)
    figure.update_yaxes(autorange="reversed", automargin=AUTOMARGIN, showgrid=False, fixedrange=True, zeroline=False)
    step = max(1, len(columns) // 16)
    figure.update_xaxes(
        tickvals=[*range(0, len(columns), step)],
        ticktext=names[::step],
        showgrid=False,
        zeroline=False,
        range=[-0.5, len(columns) - 0.5],
    )
    _mark_nodes(figure, columns)
    return Picture(key, "Placed models by rank", CAPTION, figure, height)


def _is_on(model: PlacedModel, column: RankColumn) -> bool:
    return column.ranks[0] in model.layout.places


def _discrete(colours: Sequence[str]) -> list[tuple[float, str]]:
    """Return a colour scale that gives the numbers 0, 1, ... each a colour of its own."""
    steps = [(index / len(colours), (index + 1) / len(colours), colour) for index, colour in enumerate(colours)]
    return [(place, colour) for low, high, colour in steps for place in (low, high)]


def _part(model: PlacedModel, column: RankColumn) -> str:
    """Return which replica, tensor-parallel part and stage is on the ranks of a column."""
    if not _is_on(model, column):
        return ""
    layout, rank = model.layout, column.ranks[0]
    of_axes = ((axis.name, layout.index(axis.name, rank), layout.dims.of(axis)) for axis in OF_REPLICA)
    parts = (("dp", layout.replica(rank), layout.dp), *of_axes)
    if len(column.ranks) > 1:
        return " ".join(f"{word} {size}" for word, _, size in parts if size > 1)
    return "<br>".join(f"{word} {place + 1}/{size}" for word, place, size in parts if size > 1)


def _hover(plan: Plan, model: PlacedModel, column: RankColumn) -> str:
    if not _is_on(model, column):
        return ""
    settings = model.settings
    state = plan.state(model, column.ranks[0])
    lines = [
        f"<b>{escaped(model.name)}</b> on {'rank' if len(column.ranks) == 1 else 'ranks'} {span_of(column.ranks)}",
        column.where,
        f"{settings.engine}, {settings.dtype}" + (f", ZeRO {model.zero_text}" if settings.zero else ""),
        "trained" if model.trained else f"follows {model.role}" if model.follows else "frozen",
        *([_part(model, column).replace("<br>", ", ")] if _part(model, column) else []),
        *([f"{bytes_text(state.resting)} between calls"] if state is not None else []),
    ]
    return "<br>".join(lines)


def _mark_nodes(figure: go.Figure, columns: Sequence[RankColumn]) -> None:
    """Write node and device class above the columns, and a line between nodes."""
    start = 0
    for index in range(1, len(columns) + 1):
        if index < len(columns) and columns[index].where == columns[start].where:
            continue
        centre = (start + index - 1) / 2
        figure.add_annotation(
            x=centre, y=1, yref="paper", yanchor="bottom", text=columns[start].where, showarrow=False, font={"size": 11}
        )
        if index < len(columns):
            figure.add_shape(
                type="line",
                x0=index - 0.5,
                x1=index - 0.5,
                y0=0,
                y1=1.1,
                yref="paper",
                line={"width": 1, "dash": "dot"},
            )
        start = index
