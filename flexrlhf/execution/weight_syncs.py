"""Syncs of one rank: each is planned once, after the models are loaded, and executed whenever it is due."""

from __future__ import annotations

from collections.abc import Mapping

from flexrlhf.comm.sync import SyncChannel, WeightReceiver, WeightSender
from flexrlhf.comm.weights import WeightGather
from flexrlhf.comm.world import Groups, Wait
from flexrlhf.engines.models import DTYPES
from flexrlhf.execution.run_operator import LoadedModel
from flexrlhf.placement.names import ModelName
from flexrlhf.plan.plan import Plan, bucket_bytes
from flexrlhf.strategies.instructions import Sync
from flexrlhf.weights.sync_plan import SyncPlan, plan_sync


class WeightSyncs:
    """Weights that this rank's trained models send, and that its copies of them receive."""

    def __init__(
        self, plan: Plan, rank: int, models: Mapping[ModelName, LoadedModel], groups: Groups, wait: Wait
    ) -> None:
        self._models = models
        self._sender = WeightSender(plan.spec.sync, wait)
        self._receiver = WeightReceiver(plan.spec.sync.checksum, wait)
        mine = [sync for sync in plan.schedule.for_rank(rank) if isinstance(sync, Sync)]
        self._channels = {
            sync.destination: make_channel(self._plan(plan, sync, rank), sync, groups, wait) for sync in mine
        }

    def run(self, sync: Sync) -> int:
        """Execute ``sync`` on this rank and return the bytes sent."""
        channel, copy = self._channels[sync.destination], self._models.get(sync.destination)
        load = None if copy is None else copy.engine.load_weights
        num_bytes, delivered = 0, None
        if channel.plan.send is not None:
            sent = self._sender.send(channel, self._models[sync.source].engine.weights(), load)
            num_bytes, delivered = sent.num_bytes, sent.delivered
        if copy is not None and load is not None:
            self._receiver.receive(channel, copy.engine.weights(), load, delivered)
        return num_bytes

    def close(self) -> None:
        """Await all sends that are under way."""
        self._sender.close()

    def _plan(self, plan: Plan, sync: Sync, rank: int) -> SyncPlan:
        # an architecture may be unknown before it is loaded, so shapes are those of the loaded models
        loaded = self._models.get(sync.source) or self._models[sync.destination]
        source, destination = plan.placement[sync.source], plan.placement[sync.destination]
        return plan_sync(source, destination, loaded.shape, sync.transfers, bucket_bytes(plan.spec), rank)


def make_channel(plan: SyncPlan, sync: Sync, groups: Groups, wait: Wait) -> SyncChannel:
    """Return ``plan`` with its dtype in torch and its process groups."""
    group = None if sync.is_local else groups.get(f"sync {sync.source}", sync.ranks)
    gather = None
    if plan.send is not None:
        handle = groups.get(f"gather {sync.source}", plan.send.ranks)
        gather = WeightGather(handle, plan.send.ranks, plan.send.shards, wait, plan.send.merge)
    return SyncChannel(plan, DTYPES[plan.dtype], gather, group)
