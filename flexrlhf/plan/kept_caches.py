"""Slots of rows that keep their keys and values from step to step (``rollout.caches: kept``)."""

from __future__ import annotations

from collections.abc import Mapping

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.memory.packed_rows import TextPacking
from flexrlhf.operators.columns import Lengths
from flexrlhf.operators.graph import Graph
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.placement.placement import Placement
from flexrlhf.placement.rollout import KeptSlots
from flexrlhf.weights.model_shape import ModelShape


def kept_slots(spec: Spec, graph: Graph, placement: Placement, batch: BatchShape) -> dict[ModelName, KeptSlots]:
    """Return the slots of each placed model that carries rows with their keys and values; none if they are renewed."""
    if spec.rollout.caches == "renewed":
        return {}
    found = dict[ModelName, int]()
    for operator in graph.operators:
        if operator.kind == "generate" and operator.carries:
            model = placement.copy_for(operator)
            found[model.name] = found.get(model.name, 0) + batch.most_rows(placement.layout_of(operator))
    of_run = batch.segments, spec.schedule.lag, spec.checkpoint.every
    return {name: KeptSlots(rows, *of_run) for name, rows in found.items()}


def check_kept_slots(
    spec: Spec,
    kept: Mapping[ModelName, KeptSlots],
    placement: Placement,
    shapes: Mapping[str, ModelShape],
    lengths: Lengths,
) -> None:
    """Raise UserError for a model that cannot keep the keys and values of every row that may be under way."""
    for name, slots in kept.items():
        model = placement[name]
        if reason := _obstacle(spec, model, shapes.get(model.role), lengths):
            raise UserError(f"rollout.caches: kept needs a slot for each row under way, and {reason}")
        room, needed = model.settings.generate_tokens // lengths.total, slots.rows * lengths.total
        if room < slots.rows:
            raise model.refusal(
                "generate_tokens",
                f"{model.settings.generate_tokens} have room for {room} of the {slots.rows} rows of {lengths.total} "
                f"tokens that a rank may have under way, which rollout.caches: kept has a slot for each of; use at "
                f"least {needed}, or caches: renewed",
            )


def _obstacle(spec: Spec, model: PlacedModel, shape: ModelShape | None, lengths: Lengths) -> str:
    """Return why ``model`` cannot keep the keys and values of rows, in words; empty if it can."""
    if not model.facts.transformers_modules:
        return f"{model.engine} chooses by itself which keys and values it drops; use renewed, or engine: transformers"
    if not (spec.debug.slots and TextPacking.of(model, shape, lengths.total).in_slots):
        return f"{model.role} is decoded in waves, which have none; use renewed"
    if (parts := model.layout.dims.row_parts) > 1:
        return f"{parts} context-parallel ranks of {model.role} divide the rows of each call; use renewed"
    return ""
