"""Placed models on this rank: make their engines, and say how their weights become whole or cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.weights import WeightGather
from flexrlhf.comm.world import Groups, Wait, World
from flexrlhf.engines.base import EngineContext
from flexrlhf.engines.factory import make_engine
from flexrlhf.errors import UserError
from flexrlhf.execution.run_operator import LoadedModel
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.plan import Plan
from flexrlhf.weights.lora import shape_of
from flexrlhf.weights.reshard import bucket_names, trained_parts
from flexrlhf.weights.shapes import ModelShape
from flexrlhf.weights.shards import parts_on


def load_model_on_rank(plan: Plan, model: PlacedModel, world: World, groups: Groups, wait: Wait) -> LoadedModel:
    """Make the engine of ``model`` and check that it holds what the plan says."""
    layout, rank = model.layout, world.rank
    members = layout.dp_set(rank)
    tp_set = next(ranks for ranks in layout.tp_sets if rank in ranks)
    dp = RankGroup(groups.get(f"compute {model.name}", members), members, wait)
    tp = RankGroup(groups.get(f"tp {model.name}", tp_set), tp_set, wait)
    engine = make_engine(
        EngineContext(
            placed=model,
            lengths=plan.lengths,
            temperature=plan.temperature,
            seed=plan.spec.seed,
            num_updates=plan.num_updates(model.role) if model.trained else 0,
            dp=dp,
            tp=tp,
            alone=groups.alone(rank),
            device=world.device,
            kv_bytes=plan.sizing.kv_bytes(model),
            store=dist.PrefixStore(f"{plan.spec.name}/{model.name}/{tp_set[0]}", world.store),
            timeout_seconds=plan.spec.timeout_seconds,
        )
    )
    return LoadedModel(model, engine, dp, tp, _shape(plan, model, engine.weights(), rank))


def _shape(plan: Plan, model: PlacedModel, weights: dict[str, Tensor], rank: int) -> ModelShape:
    """The planned shape; of an architecture that only loading can tell, the shape of what was loaded."""
    planned = plan.shapes.get(model.role)
    if planned is None or {name for name, _ in shape_of(model, planned).parameters} != set(weights):
        if model.split != "whole" or model.layout.tp > 1 or model.settings.lora is not None:
            raise UserError(
                f"models.{model.role}: its parameters are not named as in its files, so it cannot be cut; "
                f"save it again with transformers, or use zero 0, tp 1 and no lora"
            )
        return ModelShape(tuple((name, tuple(weights[name].shape)) for name in sorted(weights)))
    for name, part in parts_on(model, planned, rank).items():
        held = weights[name].numel()
        assert held == part.num_elements, f"{model.name}: {name} has {held} numbers here, planned {part.num_elements}"
    return planned


def weight_gather(
    loaded: LoadedModel, sets: Sequence[tuple[int, ...]], rank: int, groups: Groups, wait: Wait
) -> WeightGather:
    """Return the collective of the ranks among ``sets`` that make the trained weights of ``loaded`` whole with this."""
    ranks = next((members for members in sets if rank in members), (rank,))
    shards = tuple(trained_parts(loaded.model, loaded.shape, member) for member in ranks)
    return WeightGather(groups.get(f"gather {loaded.model.name}", ranks), ranks, shards, wait)


def whole_weights(
    weights: Mapping[str, Tensor], gather: WeightGather, bucket_bytes: int, keep: bool
) -> dict[str, Tensor]:
    """Return all trained weights, whole, in host memory where ``keep``; else nothing. A collective, by buckets."""
    shards = gather.shards[0]
    dtype = weights[next(iter(shards))].dtype
    tensors: dict[str, Tensor] = {}
    for names in bucket_names(shards, dtype.itemsize, bucket_bytes):
        bucket = gather.whole(weights, names, dtype)
        if keep:
            tensors |= {name: tensor.to("cpu", copy=True) for name, tensor in bucket.items()}
    return tensors
