"""Syncs of one rank: each is planned once, after the models are loaded, and executed whenever it is due.

A copy whose Sync overlaps other work stores the weights when it is used next. Ranks on CPUs begin to receive as early
as a round of the list in which the Sync is due begins: it is then certain that they are sent, since a run stops between
rounds. With NCCL a receipt that is begun early would stop the device at its next synchronization.
"""

from __future__ import annotations

from flexrlhf.comm.sync import Receipt, SyncChannel, WeightMover
from flexrlhf.comm.weights import WeightGather
from flexrlhf.engines.models import DTYPES
from flexrlhf.placement.placed import ModelName
from flexrlhf.strategies.instructions import Instruction, Offload, Reload, Sync
from flexrlhf.strategies.schedule import ANEW, RunStart
from flexrlhf.trainer.rank_context import RankContext
from flexrlhf.weights.sync_plan import SyncPlan


class WeightSyncs:
    """Weights that this rank's trained models send, and that its copies of them receive."""

    def __init__(self, context: RankContext, start: RunStart = ANEW) -> None:
        self._models, self._steps = context.models, context.plan.spec.steps
        self._copies = context.copies
        self._next_step = start.next_step
        self._mover = WeightMover(context.plan.spec.sync, context.wait)
        mine = [each for each in context.plan.schedule.for_rank(context.rank) if isinstance(each, Sync)]
        self._channels = {sync.destination: make_channel(context, sync) for sync in mine}
        self._overlapped = [sync for sync in mine if sync.overlaps and sync.destination in context.models]
        self._is_early = context.world.backend == "gloo"
        # copies that will have a Sync in this round, and receipts of copies
        self._due: set[ModelName] = set()
        self._receipts: dict[ModelName, Receipt] = {}
        # copies with a Sync that is executed but not stored, and the step of its weights
        self._unstored: dict[ModelName, int] = {}

    def begin_round(self, turn: int) -> None:
        """Begin to receive the weights of this rank's copies in a round of the list."""
        if self._is_early:
            self._due = {sync.destination for sync in self._overlapped if self._is_due(sync, turn - sync.lag)}
            for name in sorted(self._due - self._receipts.keys()):
                self._receive(name)

    def _is_due(self, sync: Sync, step: int) -> bool:
        return step >= self._next_step and sync.due(step, self._steps)

    def run(self, sync: Sync, step: int) -> int:
        """Execute ``sync`` on this rank and return the bytes sent; the copy has the weights of ``step`` afterwards.

        The copy of a Sync that overlaps has them once ``store_for`` has an instruction that uses it, for which its
        ranks send each other what only some have received.
        """
        source, copy = self._models.get(sync.source), self._models.get(sync.destination)
        channel, weights = self._channels[sync.destination], None if source is None else source.engine.weights()
        if sync.overlaps and copy is not None:
            self._store(sync.destination)
            if sync.destination not in self._receipts:
                self._receive(sync.destination)
            self._unstored[sync.destination] = step + sync.after_training
            return channel.plan.bytes_sent_on
        if copy is not None and sync.refills:
            copy.allocate(None if source is None else source.engine)
        if copy is not None and copy.reused is not None:
            weights = weights and {**weights, **copy.reused.lent}
        num_bytes = self._mover.run(channel, weights, None if copy is None else copy.engine.weights())
        if copy is not None:
            copy.engine.weights_changed()
            copy.version = step + sync.after_training
        return num_bytes

    def store_for(self, instruction: Instruction) -> None:
        """Store the weights of copies that ``instruction`` uses, once all have arrived.

        Ranks of a copy that send on to each other do so before the same instruction, so never before one that offloads
        it, which each does by itself.
        """
        if self._unstored:
            is_alone = isinstance(instruction, Offload | Reload)
            for name in instruction.uses:
                if not (is_alone and name in self._unstored and self._channels[name].plan.is_sent_on):
                    self._store(name)

    def store_all(self) -> None:
        """Store the weights that have arrived for all copies."""
        for name in list(self._unstored):
            self._store(name)

    def close(self) -> None:
        """Await all sends that are under way, and drop the process groups."""
        self.store_all()
        self._mover.close()
        self._channels.clear()

    def _receive(self, name: ModelName) -> None:
        self._due.discard(name)
        self._receipts[name] = self._mover.receive(self._channels[name])

    def _store(self, name: ModelName) -> None:
        step = self._unstored.pop(name, None)
        if step is None:
            return
        copy = self._models[name]
        self._copies.join()
        with copy.on_device():
            self._receipts.pop(name).store(copy.engine.weights())
        copy.engine.weights_changed()
        copy.version = step
        if name in self._due:
            # memory for one receipt at a time
            self._receive(name)


def make_channel(context: RankContext, sync: Sync) -> SyncChannel:
    """Return the plan of ``sync`` on this rank, with its dtype in torch and its process groups."""
    plan = _plan(context, sync)
    group = None if sync.is_in_place else context.groups.get(f"sync {sync.source}", sync.ranks)
    gather = None
    if plan.adapters is not None:
        ranks = plan.adapters.ranks
        handle = context.groups.get(f"gather {sync.source}", ranks)
        gather = WeightGather(handle, ranks, plan.adapters.shards, context.wait)
    reuse = context.plan.sizing.reuse(context.plan.placement[sync.destination], context.rank) if plan.parts else None
    reused = frozenset[str]() if reuse is None else reuse.views | reuse.lent
    return SyncChannel(plan, DTYPES[plan.dtype], context.world.device, group, gather, sync.overlaps, reused)


def _plan(context: RankContext, sync: Sync) -> SyncPlan:
    # planning may be unable to read an architecture, so the loaded models have the shapes
    loaded = context.models.get(sync.source) or context.models[sync.destination]
    source, destination = (context.plan.placement[name] for name in (sync.source, sync.destination))
    settings, node_of = context.plan.spec.sync, context.plan.cluster.node_of
    return SyncPlan.of(
        source, destination, loaded.shape, settings.bucket_bytes, context.rank, node_of, settings.dtype, sync.overlaps
    )
