"""Set the state of a trainer to that of a checkpoint, whatever placement, engines and ZeRO stages wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from torch import Tensor

from flexrlhf.engines.base import WEIGHTS
from flexrlhf.errors import UserError
from flexrlhf.runs.tensor_files import PieceReader, piece_key
from flexrlhf.strategies.instructions import Offload, Sync
from flexrlhf.strategies.schedule import checkpointed_models
from flexrlhf.trainer.checkpointer import RunState
from flexrlhf.trainer.loaded_models import LoadedModel
from flexrlhf.trainer.model_pieces import part_of
from flexrlhf.trainer.rank_context import RankContext
from flexrlhf.trainer.rows_in_flight import load_rows
from flexrlhf.trainer.starting_point import StartingPoint
from flexrlhf.trainer.weight_syncs import WeightSyncs
from flexrlhf.weights.buckets import bucket_names
from flexrlhf.weights.shards import Parts, trained_parts


def restore(state: RunState, syncs: WeightSyncs, start: StartingPoint) -> None:
    """Load models, controllers, reports and rows in flight on this rank. All ranks call this before the first step.

    Copies without files of their own have the weights of their trained copy: a Sync brings them. Models that the run
    offloads are on the device one at a time, since moments exist from here on.
    """
    context, progress = state.context, start.manifest.progress
    plan = context.plan
    movable = {each.model for each in plan.schedule.for_rank(context.rank) if isinstance(each, Offload)}
    for name in movable:
        if not context.models[name].is_offloaded:
            context.models[name].offload()
    for name, model in context.models.items():
        _restore(model, context, start)
        model.version = progress.versions.get(name, model.version)
    _sync_others(state, syncs, progress.next_step)
    for name in movable.difference(plan.offloaded.get(context.rank, ())):
        context.models[name].reload()
    state.controllers.load(progress.controllers)
    state.recorder.restore(progress.reports, progress.best)
    load_rows(plan, context.rank, state.rows, start.checkpoint, progress.next_step)


def _restore(model: LoadedModel, context: RankContext, start: StartingPoint) -> None:
    plan, name = context.plan, model.placed.name
    reader, size = PieceReader(start.checkpoint, name), plan.spec.sync.bucket_bytes
    if model.placed.trained:
        _check_numbers(name, start)
        with model.on_device():
            restore_trained(model, reader, start.manifest.progress.numbers[name], context.rank, size)
    elif model.placed.follows and name in checkpointed_models(plan.placement, plan.spec):
        with model.on_device():
            _restore_follower(model, reader, context.rank, size)


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
    plan, models = state.context.plan, state.context.models
    contained = checkpointed_models(plan.placement, plan.spec)
    for sync in plan.schedule.for_rank(state.context.rank):
        if isinstance(sync, Sync) and sync.destination not in contained and not sync.refills:
            with ExitStack() as used:
                for name in {sync.source, sync.destination} & models.keys():
                    used.enter_context(models[name].on_device())
                syncs.run(sync, next_step - 1)


def _check_numbers(name: str, start: StartingPoint) -> None:
    if name not in start.manifest.progress.numbers:
        known = ", ".join(start.manifest.progress.numbers)
        raise UserError(f"checkpoint {start.checkpoint}: it has no {name}; it has {known}")
