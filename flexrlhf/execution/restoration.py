"""Set the state of a trainer to that of a checkpoint, whatever placement, engines and ZeRO stages wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from flexrlhf.checkpoints.piece_files import PieceReader
from flexrlhf.engines.base import WEIGHTS
from flexrlhf.errors import UserError
from flexrlhf.execution.checkpointer import RunState
from flexrlhf.execution.loaded_models import LoadedModel
from flexrlhf.execution.model_pieces import part_of, piece_key
from flexrlhf.execution.rows_in_flight import load_rows
from flexrlhf.execution.starting_point import StartingPoint
from flexrlhf.execution.weight_syncs import WeightSyncs
from flexrlhf.strategies.instructions import Sync
from flexrlhf.strategies.schedule import checkpointed_models
from flexrlhf.weights.buckets import bucket_names
from flexrlhf.weights.shards import Parts, trained_parts


def restore(state: RunState, syncs: WeightSyncs, start: StartingPoint) -> None:
    """Load models, controllers, reports and rows in flight on this rank. All ranks call this before the first step.

    Copies without files of their own have the weights of their trained copy: a Sync brings them.
    """
    context, progress = state.context, start.manifest.progress
    plan, size = context.plan, context.plan.spec.sync.bucket_bytes
    for name, model in context.models.items():
        reader = PieceReader(start.checkpoint, name)
        if model.placed.trained:
            _check_numbers(name, start)
            restore_trained(model, reader, progress.numbers[name], context.rank, size)
        elif model.placed.follows and name in checkpointed_models(plan.placement, plan.spec):
            _restore_follower(model, reader, context.rank, size)
        model.version = progress.versions.get(name, model.version)
    _sync_others(state, syncs, progress.next_step)
    state.controllers.load(progress.controllers)
    state.recorder.restore(progress.reports, progress.best)
    load_rows(plan, context.rank, state.rows, start.checkpoint, progress.next_step)


def restore_trained(
    model: LoadedModel, reader: PieceReader, numbers: Mapping[str, float], rank: int, bucket_bytes: int
) -> None:
    """Load weights, moments and numbers of a trained model on ``rank``. Raises UserError where the files lack some."""
    parts = trained_parts(model.placed, model.shape, rank)
    for names in bucket_names(parts, 4, bucket_bytes):
        model.engine.load_weights(_read(reader, parts, names, model))
    for kind, tensors in model.engine.training_state().tensors.items():
        for name, tensor in tensors.items():
            values = reader.read(piece_key(kind, name), part_of(tensor, parts, name))
            tensor.values.copy_(values.view(tensor.values.shape))
    model.engine.load_numbers(numbers)


def _restore_follower(model: LoadedModel, reader: PieceReader, rank: int, bucket_bytes: int) -> None:
    parts = trained_parts(model.placed, model.shape, rank)
    for names in bucket_names(parts, 4, bucket_bytes):
        model.engine.load_weights(_read(reader, parts, names, model))


def _read(reader: PieceReader, parts: Parts, names: Sequence[str], model: LoadedModel) -> dict[str, Tensor]:
    """Return this rank's parts of the weights ``names``, on the device of the model."""
    live = model.engine.weights()
    return {name: reader.read(piece_key(WEIGHTS, name), parts[name]).to(live[name].device) for name in names}


def _sync_others(state: RunState, syncs: WeightSyncs, next_step: int) -> None:
    """Execute the Sync of every copy that the checkpoint does not contain, unless a step refills it anyway."""
    plan, rank = state.context.plan, state.context.rank
    contained = checkpointed_models(plan.placement, plan.spec)
    for sync in plan.schedule.for_rank(rank):
        if isinstance(sync, Sync) and sync.destination not in contained and not sync.refills:
            syncs.run(sync, next_step - 1)


def _check_numbers(name: str, start: StartingPoint) -> None:
    if name not in start.manifest.progress.numbers:
        known = ", ".join(start.manifest.progress.numbers)
        raise UserError(f"checkpoint {start.checkpoint}: it has no {name}; it has {known}")
