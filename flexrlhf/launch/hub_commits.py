"""Commits of what a run takes from the Hub: the same on all machines, each of which has a cache of its own."""

from __future__ import annotations

import json

import torch.distributed as dist

from flexrlhf.comm.world import World
from flexrlhf.errors import UserError
from flexrlhf.plan.data_sources import data_sources
from flexrlhf.plan.hub_names import commits
from flexrlhf.plan.plan import Plan


def check_commits(plan: Plan, world: World) -> None:
    """Raise UserError where this rank has another commit of a model or a data set than rank 0."""
    mine = commits(plan.spec, data_sources(plan))
    if not mine:
        return
    store = dist.PrefixStore(f"commits/{plan.spec.name}", world.store)
    if world.rank == 0:
        store.set("first", json.dumps(mine))
    world.wait_for(store, {"first": "rank 0"}, "the commits of models and data", plan.spec.timeout_seconds)
    first = json.loads(store.get("first"))
    for setting, commit in mine.items():
        if commit != first.get(setting):
            raise UserError(
                f"{setting}: rank {world.rank} (host {world.host}) has {commit} in its Hub cache, rank 0 has "
                f"{first.get(setting)}; name the commit, as in {first.get(setting) or commit}"
            )
