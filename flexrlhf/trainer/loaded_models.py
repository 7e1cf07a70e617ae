"""Placed models on this rank: their engines, and the groups of ranks that compute each model together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.world import Groups, Wait, World
from flexrlhf.engines.base import Batch, Engine, EngineContext, Loss
from flexrlhf.engines.copy_streams import CopyStreams
from flexrlhf.engines.model_ranks import ModelRanks
from flexrlhf.errors import UserError
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.plan.plan import Plan
from flexrlhf.trainer.reused_weights import ReusedWeights
from flexrlhf.weights.model_shape import ModelShape


@dataclass(eq=False)
class LoadedModel:
    """A placed model on this rank.

    placed:   its ranks, layout and settings.
    engine:   computes with it.
    dp:       data-parallel group: ranks that store the same part of the model for other rows.
    replica:  ranks that store the other parts for the same rows.
    shape:    shapes of its parameters.
    version:  weights version, the number of batches that they have been trained on.
    reused:   weights that it has in common with its source here while they exist; None: it stores all by itself.
    is_released: whether its weights have no memory.
    is_offloaded: whether it is in host memory.
    reported_restarts: processes of its engine that were replaced, as far as steps have reported them.
    added:    mini-batches and losses whose gradients its engine has added since its last optimizer step, of a program.
    """

    placed: PlacedModel
    engine: Engine
    dp: RankGroup
    replica: RankGroup
    shape: ModelShape
    version: int = 0
    reused: ReusedWeights | None = None
    is_released: bool = False
    is_offloaded: bool = False
    reported_restarts: int = 0
    added: list[tuple[Batch, Loss]] = field(default_factory=list)

    def take_restarts(self) -> int:
        """Return how many processes of its engine were replaced since the last call, also in evaluations."""
        number, self.reported_restarts = self.engine.num_restarts - self.reported_restarts, self.engine.num_restarts
        return number

    def offload(self, keeps: bool = True, changed: bool = True) -> None:
        """Move it to host memory.

        keeps:    False if a Sync overwrites all weights before they are read.
        changed:  False if nothing has changed it since it was reloaded.
        """
        self.engine.offload(keeps, changed)
        self.is_offloaded = True

    def reload(self) -> None:
        """Move it back to the device."""
        self.engine.reload()
        self.is_offloaded = False

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have it on the device; one that was in host memory goes back there."""
        was_offloaded = self.is_offloaded
        if was_offloaded:
            self.reload()
        yield
        if was_offloaded:
            self.offload()

    def release(self) -> None:
        """Free the weights, and the cache of an engine that has one, until ``allocate``."""
        assert not self.is_released, f"{self.placed.name} is released already"
        if self.reused is not None:
            self.reused.give_back()
        self.engine.offload(keeps=False)
        self.is_released = True

    def allocate(self, source: Engine | None) -> None:
        """Allocate the weights that ``release`` has freed; a Sync then fills those that are not reused.

        source:  the model that it follows; None if it is not on this rank.
        """
        assert self.is_released, f"{self.placed.name} is allocated already"
        self.engine.reload()
        self.is_released = False
        if self.reused is not None:
            assert source is not None, "weights are reused where their source is"
            self.reused.take(source)

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes of the engine's tensors on this rank, by the fields of ``MemoryUsage``."""
        usage = self.engine.memory_usage()
        return asdict(usage.released if self.is_released else usage)


def load_models(
    plan: Plan,
    world: World,
    groups: Groups,
    wait: Wait,
    pad_token_id: int,
    copies: CopyStreams,
    report: Callable[[str, Mapping[ModelName, LoadedModel]], None],
) -> dict[ModelName, LoadedModel]:
    """Load every model that is placed on this rank.

    Before the next one is loaded, one that starts in host memory goes there, and one that a Sync refills is released.

    pad_token_id:  of the run's tokenizer.
    copies:        streams of this rank.
    report:        receives moments of the start, and the models that are loaded.
    """
    models: dict[ModelName, LoadedModel] = {}
    for placed in plan.loaded_on(world.rank):
        model = models[placed.name] = load_model_on_rank(plan, placed, world, groups, wait, pad_token_id, copies)
        if placed.has_cache:
            report(f"{placed.name} has started", models)
        if placed.is_transient:
            if (reuse := plan.sizing.reuse(placed, world.rank)) is not None:
                model.reused = ReusedWeights(model.engine, reuse)
            model.release()
        elif placed.name in plan.offloaded.get(world.rank, ()):
            model.offload()
    return {placed.name: models[placed.name] for placed in plan.placement.on_rank(world.rank)}


def load_model_on_rank(
    plan: Plan,
    model: PlacedModel,
    world: World,
    groups: Groups,
    wait: Wait,
    pad_token_id: int | None = None,
    copies: CopyStreams | None = None,
) -> LoadedModel:
    """Make the engine of ``model`` and check that this rank stores the planned parts.

    Raises UserError for a model that cannot be sharded as planned.
    """
    rank = world.rank
    ranks = ModelRanks.of(model, rank, groups, wait)
    engine = EngineContext(
        placed=model,
        lengths=plan.lengths.of_role(model.role),
        temperature=plan.temperature,
        seed=plan.spec.seed,
        num_updates=plan.num_updates(model.role) if model.trained else 0,
        ranks=ranks,
        device=world.device,
        kv_bytes=plan.sizing.kv_bytes(model),
        store=dist.PrefixStore(f"{plan.spec.name}/{model.name}/{ranks.replica.ranks[0]}", world.store),
        timeout_seconds=plan.spec.timeout_seconds,
        pad_token_id=pad_token_id,
        copies=copies,
        switches=plan.spec.debug,
        waits=world.waits,
        kept_slots=plan.kept_slots.get(model.name),
    ).make_engine()
    return LoadedModel(model, engine, ranks.dp, ranks.replica, _shape(plan, model, engine.weights(), rank))


def _shape(plan: Plan, model: PlacedModel, weights: dict[str, Tensor], rank: int) -> ModelShape:
    """Return the planned shape; of an architecture that planning cannot read, the shape of the loaded weights."""
    planned = plan.shapes.get(model.role)
    if planned is None or planned.parts_on(model, rank).keys() != weights.keys():
        if model.split != "whole" or model.layout.dims.tp * model.layout.dims.pp > 1 or model.settings.lora is not None:
            raise UserError(
                f"models.{model.role}: its parameters are not named as in its files, so it cannot be sharded; "
                f"save it again with transformers, or use zero 0, tp 1, pp 1 and no lora"
            )
        return ModelShape(tuple((name, tuple(weights[name].shape)) for name in sorted(weights)))
    for name, part in planned.parts_on(model, rank).items():
        stored = weights[name].numel()
        assert stored == part.num_elements, (
            f"{model.name}: {name} has {stored} elements here, planned {part.num_elements}"
        )
    return planned
