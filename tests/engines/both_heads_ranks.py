"""One process: one of two ranks with a trunk that has both heads, in every sharding, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from both_heads import CASES, COLUMNS_OF_BOTH, INIT, UPDATES, has_all_rows, parts_of, prompts, rows_of, sampling
from small_models import LENGTHS, SEED, train_in_turn
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.weights import WeightGather
from flexrlhf.comm.world import Groups, World, open_world
from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.engines.base import Engine, EngineContext
from flexrlhf.engines.model_ranks import CopyRanks, ModelRanks
from flexrlhf.placement.groups import Group
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.weights.shapes import model_shape

SECONDS = 100.0
BOTH = (0, 1)


def wait(work: dist.Work, ranks: tuple[int, ...]) -> None:
    work.wait()


def run_case(name: str, settings: dict[str, Any], world: World, groups: Groups) -> dict[str, Tensor]:
    """The weights after some updates, whole; columns and responses of this rank's rows."""
    spec = ModelSpec(init=INIT, **settings)
    model = PlacedModel(ModelName("actor"), Layout(BOTH, ParallelDims(tp=spec.tp, cp=spec.cp)), True, spec, head="both")
    shape = model_shape("actor", spec, "both")
    assert shape is not None
    if spec.lora is not None:
        shape = shape.with_adapters("actor", spec.lora)
    together = RankGroup(groups.get(name, BOTH), BOTH, wait)
    alone = RankGroup(None, (world.rank,), wait)
    engine: Engine = EngineContext(
        placed=model,
        lengths=LENGTHS,
        temperature=1.0,
        seed=SEED,
        num_updates=UPDATES,
        ranks=ModelRanks(
            dp=alone if has_all_rows(name) else together,
            tp=together if spec.tp > 1 else alone,
            alone=groups.alone(world.rank),
            copies=CopyRanks({"cp": together}, together) if spec.cp > 1 else None,
        ),
        device=torch.device("cpu"),
        kv_bytes=0,
        store=dist.PrefixStore(name, world.store),
    ).make_engine()
    planned = {each: part.num_elements for each, part in shape.parts_on(model, world.rank).items()}
    assert planned == {each: tensor.numel() for each, tensor in engine.weights().items()}, name
    of_rank = None if has_all_rows(name) else world.rank
    share = slice(None) if of_rank is None else rows_of(of_rank)
    losses = engine.losses(parts_of(0, of_rank))
    for step in range(UPDATES):
        parts = parts_of(step, of_rank)
        if step == 1:
            train_in_turn(engine, parts, partial(engine.forward, prompts().select(share), COLUMNS_OF_BOTH))
        else:
            engine.train(parts)
    found = engine.forward(prompts().select(share), COLUMNS_OF_BOTH) | {"losses": torch.stack([*losses.values()])}
    found |= {
        f"response {each}": column for each, column in engine.generate(prompts().select(share), sampling()).items()
    }
    sets = next(ranks for ranks in model.gather_sets if world.rank in ranks)
    parts = tuple(shape.trained_parts(model, rank) for rank in sets)
    gather = WeightGather(groups.get(name, BOTH) if len(sets) > 1 else None, sets, parts, wait)
    live = engine.weights()
    weights = {each: live[each] for each in parts[0]}
    dtype = next(iter(weights.values())).dtype
    found |= {f"weight {each}": tensor for each, tensor in gather.whole(weights, sorted(weights), dtype).items()}
    engine.close()
    return {each: tensor.detach().clone() for each, tensor in found.items()}


def run_rank(directory: Path, cases: Sequence[str], world: World) -> None:
    own = [Group("alone", (rank,), alone=True) for rank in BOTH]
    groups = world.make_groups([*(Group(name, BOTH) for name in cases), *own], SECONDS)
    found = {name: run_case(name, CASES[name], world, groups) for name in cases}
    torch.save(found, directory / f"rank-{world.rank}.pt")
    world.close_groups(groups, SECONDS)
    world.meet("end", SECONDS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open_world("cpu", SECONDS) as opened:
        run_rank(Path(sys.argv[1]), sys.argv[2:], opened)
