"""Syncs of one rank: each is planned once, after the models are loaded, and executed whenever it is due."""

from __future__ import annotations

from flexrlhf.comm.sync import SyncChannel, WeightMover
from flexrlhf.comm.weights import WeightGather
from flexrlhf.engines.models import DTYPES
from flexrlhf.execution.rank_context import RankContext
from flexrlhf.strategies.instructions import Sync
from flexrlhf.weights.sync_plan import SyncPlan, plan_sync


class WeightSyncs:
    """Weights that this rank's trained models send, and that its copies of them receive."""

    def __init__(self, context: RankContext) -> None:
        self._models = context.models
        self._mover = WeightMover(context.plan.spec.sync, context.wait)
        mine = [each for each in context.plan.schedule.for_rank(context.rank) if isinstance(each, Sync)]
        self._channels = {sync.destination: make_channel(context, sync) for sync in mine}

    def run(self, sync: Sync, step: int) -> int:
        """Execute ``sync`` on this rank and return the bytes sent; the copy has the weights of ``step`` afterwards."""
        source, copy = self._models.get(sync.source), self._models.get(sync.destination)
        num_bytes = self._mover.run(
            self._channels[sync.destination],
            None if source is None else source.engine.weights(),
            None if copy is None else copy.engine.weights(),
        )
        if copy is not None:
            copy.engine.weights_changed()
            copy.version = step + 1
        return num_bytes

    def close(self) -> None:
        """Await all sends that are under way, and drop the process groups."""
        self._mover.close()
        self._channels.clear()


def make_channel(context: RankContext, sync: Sync) -> SyncChannel:
    """Return the plan of ``sync`` on this rank, with its dtype in torch and its process groups."""
    plan = _plan(context, sync)
    group = None if sync.is_in_place else context.groups.get(f"sync {sync.source}", sync.ranks)
    gather = None
    if plan.adapters is not None:
        ranks = plan.adapters.ranks
        handle = context.groups.get(f"gather {sync.source}", ranks)
        gather = WeightGather(handle, ranks, plan.adapters.shards, context.wait)
    return SyncChannel(plan, DTYPES[plan.dtype], context.world.device, group, gather)


def _plan(context: RankContext, sync: Sync) -> SyncPlan:
    # planning may be unable to read an architecture, so shapes are those of the loaded models
    loaded = context.models.get(sync.source) or context.models[sync.destination]
    source, destination = (context.plan.placement[name] for name in (sync.source, sync.destination))
    size, node_of = context.plan.spec.sync.bucket_bytes, context.plan.cluster.node_of
    return plan_sync(source, destination, loaded.shape, size, context.rank, node_of)
