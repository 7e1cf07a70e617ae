"""Syncs of one rank: each is planned once, after the models are loaded, and executed whenever it is due."""

from __future__ import annotations

from flexrlhf.comm.sync import SyncChannel, WeightReceiver, WeightSender
from flexrlhf.comm.weights import WeightGather
from flexrlhf.engines.models import DTYPES
from flexrlhf.execution.rank_context import RankContext
from flexrlhf.strategies.instructions import Sync
from flexrlhf.weights.sync_plan import SyncPlan, plan_sync


class WeightSyncs:
    """Weights that this rank's trained models send, and that its copies of them receive."""

    def __init__(self, context: RankContext) -> None:
        self._models = context.models
        settings = context.plan.spec.sync
        self._sender = WeightSender(settings, context.wait)
        self._receiver = WeightReceiver(settings.checksum, context.wait)
        mine = [each for each in context.plan.schedule.for_rank(context.rank) if isinstance(each, Sync)]
        self._channels = {sync.destination: make_channel(context, sync) for sync in mine}

    def run(self, sync: Sync, step: int) -> int:
        """Execute ``sync`` on this rank and return the bytes sent; the copy has the weights of ``step`` afterwards."""
        channel, copy = self._channels[sync.destination], self._models.get(sync.destination)
        load = None if copy is None else copy.engine.load_weights
        num_bytes, delivered = 0, None
        if channel.plan.send is not None:
            sent = self._sender.send(channel, self._models[sync.source].engine.weights(), load)
            num_bytes, delivered = sent.num_bytes, sent.delivered
        if copy is not None:
            self._receiver.receive(channel, copy.engine.weights(), copy.engine.load_weights, delivered)
            copy.version = step + 1
        return num_bytes

    def close(self) -> None:
        """Await all sends that are under way, and drop the process groups."""
        self._sender.close()
        self._channels.clear()


def make_channel(context: RankContext, sync: Sync) -> SyncChannel:
    """Return the plan of ``sync`` on this rank, with its dtype in torch and its process groups."""
    plan = _plan(context, sync)
    group = None if sync.is_local else context.groups.get(f"sync {sync.source}", sync.ranks)
    gather = None
    if plan.send is not None:
        handle = context.groups.get(f"gather {sync.source}", plan.send.ranks)
        gather = WeightGather(handle, plan.send.ranks, plan.send.shards, context.wait, plan.send.merge)
    return SyncChannel(plan, DTYPES[plan.dtype], gather, group)


def _plan(context: RankContext, sync: Sync) -> SyncPlan:
    # planning may be unable to read an architecture, so shapes are those of the loaded models
    loaded = context.models.get(sync.source) or context.models[sync.destination]
    source, destination = (context.plan.placement[name] for name in (sync.source, sync.destination))
    size = context.plan.spec.sync.bucket_bytes
    return plan_sync(source, destination, loaded.shape, sync.transfers, size, context.rank)
