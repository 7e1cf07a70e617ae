"""Placed models on this rank: their engines, and the groups of ranks that compute each model together."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.world import Groups, Wait, World
from flexrlhf.engines.base import Engine, EngineContext
from flexrlhf.engines.factory import make_engine
from flexrlhf.errors import UserError
from flexrlhf.placement.names import ModelName
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.plan import Plan
from flexrlhf.weights.lora import shape_of
from flexrlhf.weights.shapes import ModelShape
from flexrlhf.weights.shards import parts_on


@dataclass(eq=False)
class LoadedModel:
    """A placed model on this rank.

    placed:   its ranks, layout and settings.
    engine:   computes with it.
    dp:       data-parallel group: ranks that store the same part of the model for other rows.
    tp:       tensor-parallel group: ranks that store the other parts for the same rows.
    shape:    shapes of its parameters.
    version:  weights version, the number of batches that they have been trained on.
    """

    placed: PlacedModel
    engine: Engine
    dp: RankGroup
    tp: RankGroup
    shape: ModelShape
    version: int = 0


def load_models(
    plan: Plan, world: World, groups: Groups, wait: Wait, pad_token_id: int
) -> dict[ModelName, LoadedModel]:
    """Load every model that is placed on this rank. ``pad_token_id``: of the run's tokenizer."""
    placed = plan.placement.on_rank(world.rank)
    return {model.name: load_model_on_rank(plan, model, world, groups, wait, pad_token_id) for model in placed}


def load_model_on_rank(
    plan: Plan, model: PlacedModel, world: World, groups: Groups, wait: Wait, pad_token_id: int | None = None
) -> LoadedModel:
    """Make the engine of ``model`` and check that this rank stores what is planned.

    Raises UserError for a model that cannot be sharded as planned.
    """
    layout, rank = model.layout, world.rank
    dp_ranks = layout.dp_set(rank)
    tp_ranks = next(ranks for ranks in layout.tp_sets if rank in ranks)
    dp = RankGroup(groups.get(f"compute {model.name}", dp_ranks), dp_ranks, wait)
    tp = RankGroup(groups.get(f"tp {model.name}", tp_ranks), tp_ranks, wait)
    engine = make_engine(
        EngineContext(
            placed=model,
            lengths=plan.lengths.of_role(model.role),
            temperature=plan.temperature,
            seed=plan.spec.seed,
            num_updates=plan.num_updates(model.role) if model.trained else 0,
            dp=dp,
            tp=tp,
            alone=groups.alone(rank),
            device=world.device,
            kv_bytes=plan.sizing.kv_bytes(model),
            store=dist.PrefixStore(f"{plan.spec.name}/{model.name}/{tp_ranks[0]}", world.store),
            timeout_seconds=plan.spec.timeout_seconds,
            pad_token_id=pad_token_id,
        )
    )
    return LoadedModel(model, engine, dp, tp, _shape(plan, model, engine.weights(), rank))


def _shape(plan: Plan, model: PlacedModel, weights: dict[str, Tensor], rank: int) -> ModelShape:
    """Return the planned shape; of an architecture that planning cannot read, the shape of what was loaded."""
    planned = plan.shapes.get(model.role)
    if planned is None or {name for name, _ in shape_of(model, planned).parameters} != set(weights):
        if model.split != "whole" or model.layout.tp > 1 or model.settings.lora is not None:
            raise UserError(
                f"models.{model.role}: its parameters are not named as in its files, so it cannot be sharded; "
                f"save it again with transformers, or use zero 0, tp 1 and no lora"
            )
        return ModelShape(tuple((name, tuple(weights[name].shape)) for name in sorted(weights)))
    for name, part in parts_on(model, planned, rank).items():
        stored = weights[name].numel()
        assert stored == part.num_elements, (
            f"{model.name}: {name} has {stored} numbers here, planned {part.num_elements}"
        )
    return planned
