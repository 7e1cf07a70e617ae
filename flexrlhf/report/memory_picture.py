"""Pictures of the memory of ranks: planned peak by its parts with the measured one, and planned bytes by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from flexrlhf.api import Plan, RankMemory, bytes_text
from flexrlhf.report.look import PARTS_OF_MEMORY
from flexrlhf.report.picture import AUTOMARGIN, Picture, escaped, make_figure
from flexrlhf.report.placement_picture import RankColumn, column_names, columns_of

MODELS = "models and optimizer"
ROW = 30
CAPTION = (
    "Bytes on each rank's device. Planned: the phase of a step with the highest total; {models}: weights, optimizer "
    "state, caches and the gradients of the model that trains; the other parts exist during that phase alone."
)
MEASURED = " Counted tensors: those of the models on the device at the end of the run. Measured peak: {peak}."
CPU_PEAK = (
    "what the rank's process used in addition to what it did before its models were loaded, so with what libraries and "
    "the allocator keep, which is most of it for small models; the plan has tensors alone"
)
GPU_PEAK = "the most that the device's allocator gave out, in addition to what it had before the models were loaded"
PHASES = (
    "Planned bytes by phase: the total on the device while a kind of work runs on a model. The darkest phase of a rank "
    "is its peak."
)


def memory_pictures(plan: Plan, facts: Mapping[str, Any], key: str) -> list[Picture]:
    """Return the pictures of a plan with the measurements of ``facts``, metadata of a timeline; none without states."""
    columns = columns_of(plan)
    memories = [plan.memories[column.ranks[0]] for column in columns]
    if not any(memory.phases for memory in memories) or not plan.shapes:
        return []
    return [_peaks(plan, facts, columns, memories, f"{key}-peak"), _phases(columns, memories, f"{key}-phases")]


def peak_parts(memory: RankMemory) -> dict[str, int]:
    """Return the bytes of a rank's planned peak by part."""
    peak = memory.peak
    if peak is None:
        return {MODELS: memory.peak_bytes} if memory.peak_bytes else {}
    return {MODELS: peak.states} | {name: size for name, size in peak.parts.items() if size}


def measured_peaks(facts: Mapping[str, Any]) -> Mapping[int, int]:
    """Return the measured peak of each rank; none without a measurement."""
    return {int(rank): int(size) for rank, size in facts.get("peak_bytes", {}).items()}


def counted_tensors(facts: Mapping[str, Any]) -> Mapping[int, int]:
    """Return the bytes of the tensors of each rank's models on its device, as counted at the end of a run."""
    return {
        int(rank): sum(size for sizes in models.values() for name, size in sizes.items() if name != "host")
        for rank, models in facts.get("held_bytes", {}).items()
    }


def _peaks(
    plan: Plan, facts: Mapping[str, Any], columns: Sequence[RankColumn], memories: Sequence[RankMemory], key: str
) -> Picture:
    names = column_names(columns)
    parts = [peak_parts(memory) for memory in memories]
    shown = dict.fromkeys(name for each in parts for name in each)
    traces: list[Any] = [
        go.Bar(
            x=names,
            y=[each.get(name, 0) for each in parts],
            name=f"planned: {name}",
            marker={"color": PARTS_OF_MEMORY[index % len(PARTS_OF_MEMORY)]},
            customdata=[
                [bytes_text(each.get(name, 0)), escaped(memory.peak.label if memory.peak else "")]
                for each, memory in zip(parts, memories, strict=True)
            ],
            hovertemplate=f"{name} %{{customdata[0]}}, in %{{customdata[1]}}<extra></extra>",
        )
        for index, name in enumerate(shown)
    ]
    measured = measured_peaks(facts)
    traces += _markers(columns, names, "measured peak", measured, "diamond")
    traces += _markers(columns, names, "counted tensors", counted_tensors(facts), "line-ew-open")
    height = 300
    figure = make_figure(
        traces, height, barmode="stack", bargap=0.35, margin={"l": 52, "r": 12, "t": 12, "b": 28}, hovermode="closest"
    )
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(tickformat="~s", ticksuffix="B", automargin=AUTOMARGIN, rangemode="tozero")
    is_cpu = facts.get("device") == "cpu"
    caption = CAPTION.format(models=MODELS)
    if measured:
        caption += MEASURED.format(peak=CPU_PEAK if is_cpu else GPU_PEAK)
    return Picture(key, "Memory by rank", caption + _capacities(figure, plan, columns, memories), figure, height)


def _markers(
    columns: Sequence[RankColumn], names: Sequence[str], name: str, sizes: Mapping[int, int], symbol: str
) -> list[go.Scatter]:
    """Return a mark for each rank with a size: the largest of the ranks of a column."""
    points = [
        (label, max(known))
        for label, column in zip(names, columns, strict=True)
        if (known := [sizes[rank] for rank in column.ranks if rank in sizes])
    ]
    if not points:
        return []
    return [
        go.Scatter(
            x=[label for label, _ in points],
            y=[size for _, size in points],
            mode="markers",
            name=name,
            marker={"symbol": symbol, "size": 13, "color": "#c0392b", "line": {"width": 2, "color": "#c0392b"}},
            customdata=[bytes_text(size) for _, size in points],
            hovertemplate=f"{name} %{{customdata}}<extra></extra>",
        )
    ]


def _capacities(figure: go.Figure, plan: Plan, columns: Sequence[RankColumn], memories: Sequence[RankMemory]) -> str:
    """Draw the memory of the devices if it is not far above the planned peak; return a sentence on it."""
    sizes = {plan.device_bytes(column.ranks[0]) for column in columns}
    known = sorted(size for size in sizes if size is not None)
    if not known:
        return ""
    most = max(memory.peak_bytes for memory in memories)
    for size in known:
        if most > 0.2 * size:
            figure.add_shape(
                type="line", x0=0, x1=1, xref="x domain", y0=size, y1=size, line={"width": 1.5, "dash": "dash"}
            )
    figure.update_yaxes(range=[0, 1.08 * max(most, *(size for size in known if most > 0.2 * size), 0)])
    return f" Memory of the devices: {', '.join(map(bytes_text, known))} (dashed where near)."


def _phases(columns: Sequence[RankColumn], memories: Sequence[RankMemory], key: str) -> Picture:
    labels = [*dict.fromkeys(phase.label for memory in memories for phase in memory.phases)]
    totals = [{phase.label: phase.total for phase in memory.phases} for memory in memories]
    names = column_names(columns)
    trace = go.Heatmap(
        x=names,
        y=labels,
        z=[[each.get(label) for each in totals] for label in labels],
        text=[[bytes_text(each[label]) if label in each else "" for each in totals] for label in labels],
        texttemplate="%{text}" if len(columns) <= 12 else "",
        textfont={"size": 11},
        hovertemplate="%{y}, %{x}: %{text}<extra></extra>",
        hoverongaps=False,
        colorscale=[(0, "#dfe8f3"), (1, "#2f5f9e")],
        zmin=0,
        showscale=False,
        xgap=2,
        ygap=2,
    )
    height = ROW * len(labels) + 48
    figure = make_figure([trace], height, margin={"l": 8, "r": 12, "t": 8, "b": 30}, showlegend=False)
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(autorange="reversed", automargin=AUTOMARGIN, fixedrange=True, showgrid=False)
    return Picture(key, "Memory by phase", PHASES, figure, height)
