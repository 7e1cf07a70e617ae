"""Engine of a model whose parts and stages are on several ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from flexrlhf.comm.world import Groups, World
from flexrlhf.engines.base import Engine, EngineContext
from flexrlhf.engines.model_ranks import ModelRanks
from flexrlhf.operators.columns import Lengths
from flexrlhf.placement.placed import PlacedModel


def engine_on_rank(
    model: PlacedModel, world: World, groups: Groups, lengths: Lengths, seed: int, num_updates: int
) -> Engine:
    """Make the engine of ``model`` on this rank, as a trainer does."""
    return EngineContext(
        placed=model,
        lengths=lengths,
        temperature=1.0,
        seed=seed,
        num_updates=num_updates,
        ranks=ModelRanks.of(model, world.rank, groups, lambda work, _: work.wait()),
        device=torch.device("cpu"),
        kv_bytes=0,
        store=dist.PrefixStore(model.name, world.store),
    ).make_engine()
