"""The checkpoint that a run goes on from, whatever placement, engines and ZeRO stages wrote it.

Each rank verifies some of its files and rank 0 prepares the directory of the run; then every rank loads its part.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from flexrlhf.comm.mailbox import Mailbox
from flexrlhf.comm.world import World
from flexrlhf.config.spec import Spec
from flexrlhf.engines.base import TrainingState
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.placed import ModelName
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.run_data import RunData
from flexrlhf.runs.checkpoint_directory import CheckpointDirectory
from flexrlhf.runs.manifest import Progress
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.runs.run_files import RunFiles
from flexrlhf.runs.tensor_files import Piece, PieceReader
from flexrlhf.strategies.instructions import Offload, Sync
from flexrlhf.strategies.schedule import RunStart
from flexrlhf.trainer.checkpoint_pieces import load_rows, missing_columns
from flexrlhf.trainer.checkpointer import RunState
from flexrlhf.trainer.loaded_models import LoadedModel
from flexrlhf.trainer.rank_context import RankContext
from flexrlhf.trainer.weight_syncs import WeightSyncs
from flexrlhf.weights.shards import Parts, make_buckets


@dataclass(frozen=True)
class StartingPoint:
    """Checkpoint that a run goes on from."""

    checkpoint: CheckpointDirectory

    @property
    def next_step(self) -> int:
        return self.progress.next_step

    @property
    def progress(self) -> Progress:
        return self.checkpoint.manifest.progress

    @property
    def spec(self) -> Spec:
        """Settings of the run that wrote it."""
        return self.checkpoint.manifest.settings

    def run_start(self, plan: Plan) -> RunStart:
        """Return the first steps that the run of ``plan`` goes on with."""
        generated = self.progress.first_generated(self.spec)
        in_flight = range(self.next_step, generated)
        return RunStart(self.next_step, generated, missing_columns(plan, self.checkpoint.path, in_flight))


def choose_start(
    plan: Plan, world: World, data: RunData, files: RunFiles, candidates: Sequence[Path]
) -> StartingPoint | None:
    """Return the first of ``candidates`` whose files are all as written; None without any: the run begins anew.

    All ranks call this with the same candidates. Rank 0 then prepares the run's directory, and every rank waits for it.
    A machine with directories of its own gets a copy of the checkpoint.
    Raises RunStopped if all are damaged, and UserError if the data has changed since.
    """
    mailbox = Mailbox(world, f"start/{plan.spec.name}", plan.spec.timeout_seconds)
    for candidate in candidates:
        found = CheckpointDirectory(files.received_checkpoint(candidate, plan, world))
        try:
            manifest = found.manifest
        except UserError as error:
            _print_unused(world, str(error), candidate is candidates[-1])
            continue
        problems = _verified(found, world, mailbox)
        if not problems:
            if manifest.data != data.digest:
                raise UserError(
                    f"checkpoint {candidate}: the training examples are others than those it was written with; "
                    f"restore the data and the tokenizer, or start a new run under another name"
                )
            _prepare(plan, world, mailbox, files, manifest.progress.next_step)
            return StartingPoint(found)
        _print_unused(world, f"checkpoint {candidate}: {problems[0]}", candidate is candidates[-1])
    if candidates:
        raise RunStopped(f"{plan.spec.name}: every checkpoint is damaged; remove {candidates[0].parent} to begin anew")
    _prepare(plan, world, mailbox, files, 0)
    return None


def _print_unused(world: World, problem: str, is_last: bool) -> None:
    if world.rank == 0:
        further = "" if is_last else "; an earlier one is tried"
        print(f"flexrlhf: {problem}{further}", file=sys.stderr, flush=True)


def _verified(checkpoint: CheckpointDirectory, world: World, mailbox: Mailbox) -> list[str]:
    """Return the problems of the files of a checkpoint, of which each rank reads its share."""
    mine, key = sorted(checkpoint.manifest.files)[world.rank :: world.size], checkpoint.path.name
    problems = [problem for name in mine if (problem := checkpoint.damage(name)) is not None]
    mailbox.publish(f"{key}/{world.rank}", problems)
    keys = {f"{key}/{rank}": f"rank {rank}" for rank in range(world.size)}
    return [line for found in mailbox.gather(keys, f"the verification of {checkpoint}") for line in found]


def _prepare(plan: Plan, world: World, mailbox: Mailbox, files: RunFiles, next_step: int) -> None:
    """Remove the records of ``next_step`` and later steps of an interrupted run; all ranks wait for rank 0."""
    if files.keeps:
        RunDirectory(plan.spec.directory).go_back(next_step, plan.spec.steps)
    if world.rank == 0:
        mailbox.publish("prepared", True)
    mailbox.wait({"prepared": "rank 0"}, "the start of the run")


def restore(state: RunState, syncs: WeightSyncs, start: StartingPoint) -> None:
    """Load models, controllers, reports and rows in flight on this rank. All ranks call this before the first step.

    Copies without files of their own have the weights of their trained copy: a Sync brings them. Models that the run
    offloads are on the device one at a time, since moments exist from here on.
    """
    context, progress = state.context, start.progress
    plan = context.plan
    movable = {each.model for each in plan.schedule.for_rank(context.rank) if isinstance(each, Offload)}
    for name in movable:
        if not context.models[name].is_offloaded:
            context.models[name].offload()
    contained = plan.placement.checkpointed(plan.spec)
    for name, model in context.models.items():
        stored = _stored_name(name, start) if name in contained else name
        if model.placed.trained or name in contained:
            _restore(model, context, start, stored)
        model.version = progress.versions.get(stored, model.version)
    _sync_others(state, syncs, progress.next_step)
    for name in movable.difference(plan.offloaded.get(context.rank, ())):
        context.models[name].reload()
    state.controllers.load(progress.controllers, progress.begun)
    state.ledger.load(progress.rows, progress.carried, progress.next_step)
    state.recorder.restore(progress.reports, progress.best, start.run_start(plan))
    state.rows.restore_given(progress.prompts)
    load_rows(plan, context.rank, state.rows, start.checkpoint.path, progress.next_step, BatchShape.of(start.spec))


def _stored_name(name: ModelName, start: StartingPoint) -> str:
    """Return the name under which a checkpoint has the weights of a model: its own, or where a copy is called otherwise
    under the placement that wrote it, the name of another copy of its role, which lags alike."""
    others = [each for each in map(ModelName, start.progress.versions) if each.role == name.role and each.copy]
    copies = others if name.copy else []
    return next((each for each in (name, *copies) if PieceReader(start.checkpoint.path, each).pieces), name)


def _restore(model: LoadedModel, context: RankContext, start: StartingPoint, stored: str) -> None:
    """Load a model from the files of ``stored``."""
    name = model.placed.name
    reader, size = PieceReader(start.checkpoint.path, stored), context.plan.spec.sync.bucket_bytes
    if model.placed.trained:
        numbers = start.progress.numbers
        if name not in numbers:
            raise UserError(f"checkpoint {start.checkpoint}: it has no {name}; it has {', '.join(numbers)}")
        with model.on_device():
            restore_trained(model, reader, numbers[name], context.rank, size)
    else:
        with model.on_device():
            _load_weights(model, reader, model.shape.trained_parts(model.placed, context.rank), size)


def restore_trained(
    model: LoadedModel, reader: PieceReader, numbers: Mapping[str, float], rank: int, bucket_bytes: int
) -> None:
    """Load weights, moments and numbers of a trained model on ``rank``. Raises UserError if the files lack some."""
    parts = model.shape.trained_parts(model.placed, rank)
    _load_weights(model, reader, parts, bucket_bytes)
    for kind, tensors in model.engine.training_state().tensors.items():
        for name, tensor in tensors.items():
            values = reader.read(Piece.key(kind, name), tensor.part_of(parts[name]))
            tensor.values.copy_(values.view(tensor.values.shape))
    model.engine.load_numbers(numbers)


def _load_weights(model: LoadedModel, reader: PieceReader, parts: Parts, bucket_bytes: int) -> None:
    for names in bucket_names(parts, 4, bucket_bytes):
        live = model.engine.weights()
        model.engine.load_weights(
            {
                name: reader.read(Piece.key(TrainingState.WEIGHTS, name), parts[name]).to(live[name].device)
                for name in names
            }
        )


def _sync_others(state: RunState, syncs: WeightSyncs, next_step: int) -> None:
    """Execute the Sync of every copy that the checkpoint does not contain, unless a step refills it anyway."""
    plan, models = state.context.plan, state.context.models
    contained = plan.placement.checkpointed(plan.spec)
    for sync in plan.schedule.for_rank(state.context.rank):
        if isinstance(sync, Sync) and sync.destination not in contained and not sync.refills:
            with ExitStack() as used:
                for name in {sync.source, sync.destination} & models.keys():
                    used.enter_context(models[name].on_device())
                syncs.run(sync, next_step - 1)


def bucket_names(parts: Parts, item_bytes: int, bucket_bytes: int) -> list[list[str]]:
    """Return the names of each bucket, sorted; sizes are of whole tensors, so that all ranks make the same buckets."""
    names = sorted(parts)
    sizes = [math.prod(parts[name].shape) * item_bytes for name in names]
    return [[names[index] for index in bucket] for bucket in make_buckets(sizes, bucket_bytes)]
