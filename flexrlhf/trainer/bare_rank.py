"""A rank without a run: it loads single models, and executes single operators, moves and syncs as a run does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from flexrlhf.comm.move import ColumnMover, RowPacking
from flexrlhf.comm.progress import RankProgress
from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.rows import RowStore
from flexrlhf.comm.sync import SyncChannel, WeightMover
from flexrlhf.comm.world import Groups, World
from flexrlhf.config.spec import SyncSpec
from flexrlhf.engines.base import Batch, Sampling
from flexrlhf.operators.columns import Lengths
from flexrlhf.operators.graph import Operator
from flexrlhf.placement.groups import Group
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Move
from flexrlhf.trainer.controllers import Controllers
from flexrlhf.trainer.execution import OperatorRun
from flexrlhf.trainer.loaded_models import LoadedModel, load_model_on_rank
from flexrlhf.trainer.operator_context import OperatorContext
from flexrlhf.trainer.run_operator import run_operator
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.sync_plan import SyncPlan


class BareRank:
    """A rank that has joined the others without a run.

    world:     rank, device and store.
    progress:  position of this rank in the list that all ranks walk, and its waits.
    position:  number of what it has come to in that list.
    """

    def __init__(self, world: World, name: str, timeout_seconds: float) -> None:
        """Make no groups yet.

        name:             of the list in the job's store
        timeout_seconds:  longest wait for another rank
        """
        self.world, self.position = world, 0
        self.progress = RankProgress(world, name, {}, timeout_seconds)
        self._groups = Groups({})

    def report(self, what: str) -> None:
        """Store that this rank has come to the next position; ``what`` it does there."""
        self.position += 1
        self.progress.report(self.position, what)

    def connect(self, *purposes: str, groups: Iterable[Group] = ()) -> None:
        """Make a group of all ranks for each of ``purposes``, and ``groups``. Every rank calls this alike."""
        of_all = [Group(purpose, self._everyone) for purpose in purposes] if self.world.size > 1 else []
        self._groups = self.world.make_groups(dict.fromkeys([*of_all, *groups]), self.progress.timeout_seconds)

    def disconnect(self) -> None:
        """Close the process groups."""
        self.world.close_groups(self._groups, self.progress.timeout_seconds)

    @property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(range(self.world.size))

    def all_ranks(self, purpose: str) -> RankGroup:
        """Return the group of all ranks for a purpose of ``connect``."""
        return RankGroup(self._groups.get(purpose, self._everyone), self._everyone, self.progress.wait)

    def own_groups(self) -> Iterator[RankGroup]:
        """Yield the groups of several ranks that this one is in, in the order of ``connect``."""
        for group, handle in self._groups.handles.items():
            if handle is not None and len(group.ranks) > 1:
                yield RankGroup(handle, group.ranks, self.progress.wait)

    @contextmanager
    def loaded(self, plan: Plan, model: PlacedModel) -> Iterator[LoadedModel]:
        """Load ``model``, whose groups are connected, while this is open."""
        loaded = load_model_on_rank(plan, model, self.world, self._groups, self.progress.wait)
        yield loaded
        # not of a rank that fails: others would have to close it with this one
        loaded.engine.close()
        gc.collect()

    def operator_call(
        self,
        plan: Plan,
        operator: Operator,
        model: LoadedModel,
        shape: BatchShape,
        columns: Mapping[str, Tensor],
        sampling: Sampling,
    ) -> Callable[[], object]:
        """Return a call that executes an operator that calls no scorer on all mini-batches of ``shape``.

        ``columns``: that it reads, of this rank's rows.
        """
        run, store = self._prepared(plan, operator, model, shape, columns)
        context = OperatorContext.by_itself(plan.spec, sampling, self.world.device)
        return lambda: run_operator(run, store, context)

    def batch(
        self, plan: Plan, operator: Operator, model: LoadedModel, shape: BatchShape, columns: Mapping[str, Tensor]
    ) -> Batch:
        """Return the batch that ``operator`` gives to the engine of ``model``, which has the rows of ``columns``."""
        run, store = self._prepared(plan, operator, model, shape, columns)
        return run.batch(store, self.world.device)

    def _prepared(
        self, plan: Plan, operator: Operator, model: LoadedModel, shape: BatchShape, columns: Mapping[str, Tensor]
    ) -> tuple[OperatorRun, RowStore]:
        state = Controllers(plan).state(operator)
        run = OperatorRun(operator, model, model.placed.layout, shape, shape.mini_batches, self.world.rank, state=state)
        store = RowStore(plan.lengths, self.world.device)
        for name, values in columns.items():
            store.put(name, run.rows, values.to(self.world.device))
        return run, store

    def move_call(
        self, move: Move, shape: BatchShape, lengths: Lengths, columns: Mapping[str, Tensor]
    ) -> Callable[[], None]:
        """Return a call that makes ``move`` in the group ``move`` of all ranks, and awaits its rows.

        ``columns``: values of the rows that this rank sends, ascending.
        """
        rank, group, device = self.world.rank, self.all_ranks("move").group, self.world.device
        assert group is not None, "one rank exchanges nothing"
        mover = ColumnMover(rank, RowPacking(shape, lengths, device), self.progress.wait)
        sent = tuple(sorted({prompt for t in move.transfers if t.source == rank for prompt in t.prompts}))
        awaited = tuple({prompt for t in move.transfers if t.destination == rank for prompt in t.prompts})

        def call() -> None:
            store = RowStore(lengths, device)
            for name, values in columns.items():
                store.put(name, shape.rows(sent), values)
            mover.start(move, store, group)
            store.arrive(move.columns, shape.rows(awaited))
            mover.close()

        return call

    def sync_call(
        self,
        source: PlacedModel,
        copy: PlacedModel,
        shape: ModelShape,
        settings: SyncSpec,
        weights: Mapping[str, Tensor],
    ) -> Callable[[], None]:
        """Return a call that sends the float32 weights of ``source`` to ``copy`` in the group ``sync`` of all ranks.

        ``weights``: of this rank, which one of the two is on; the copy's are overwritten.
        """
        rank = self.world.rank
        plan = SyncPlan.of(source, copy, shape, settings.bucket_bytes, rank)
        channel = SyncChannel(plan, torch.float32, self.world.device, self.all_ranks("sync").group)
        mover = WeightMover(settings, self.progress.wait)

        def call() -> None:
            mover.run(channel, weights if rank in source.ranks else None, weights if rank in copy.ranks else None)
            mover.close()

        return call
