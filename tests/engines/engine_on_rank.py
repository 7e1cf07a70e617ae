"""Engine of a model whose parts and stages are on several ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.world import Groups, World
from flexrlhf.engines.base import ContextRanks, Engine, EngineContext
from flexrlhf.operators.columns import Lengths
from flexrlhf.placement.groups import GroupPurpose
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.trainer.loaded_models import stage_ranks


def engine_on_rank(
    model: PlacedModel, world: World, groups: Groups, lengths: Lengths, seed: int, num_updates: int
) -> Engine:
    """Make the engine of ``model`` on this rank, as a trainer does."""
    rank, layout = world.rank, model.layout

    def ranks_of(purpose: str, ranks: tuple[int, ...]) -> RankGroup:
        return RankGroup(groups.get(f"{purpose} {model.name}", ranks), ranks, lambda work, _: work.wait())

    cp = None
    if layout.cp > 1:
        of_weights = ranks_of(GroupPurpose.WEIGHTS, layout.of_weights.dp_set(rank))
        cp = ContextRanks(ranks_of("cp", layout.cp_set(rank)), of_weights)
    return EngineContext(
        placed=model,
        lengths=lengths,
        temperature=1.0,
        seed=seed,
        num_updates=num_updates,
        dp=ranks_of("compute", layout.dp_set(rank)),
        tp=ranks_of("tp", next(ranks for ranks in layout.tp_sets if rank in ranks)),
        alone=groups.alone(rank),
        device=torch.device("cpu"),
        kv_bytes=0,
        store=dist.PrefixStore(model.name, world.store),
        stages=stage_ranks(layout, rank, ranks_of),
        cp=cp,
    ).make_engine()
