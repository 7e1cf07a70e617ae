"""Figures of a model on a mesh: the bytes of its state and of its transfers, the time and the bytes of its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from flexrlhf.api import ModelSpec, PlacedModel, State
from flexrlhf.guideline.advice.sketch import PlacedCallKind
from flexrlhf.guideline.costs.links import MeshSide


@dataclass(frozen=True)
class ShardedModel:
    """A model on a mesh with a layout and a ZeRO stage, whatever its passes are.

    placed:  the model
    key:     all that its state depends on
    stages:  state of each pipeline stage
    side:    its layout
    """

    placed: PlacedModel
    key: object
    stages: tuple[State, ...]
    side: MeshSide

    @cached_property
    def state(self) -> State:
        """State of the stage that stores most."""
        return max(self.stages, key=lambda state: state.resting)

    def placed_with(self, settings: ModelSpec) -> PlacedModel:
        """Return the model with ``settings``, which differ in passes, so that its parts are the same."""
        placed = replace(self.placed, settings=settings)
        vars(placed).update(split=self.placed.split, facts=self.placed.facts)
        return placed


@dataclass(frozen=True, eq=False)
class CallFigures:
    """Time and bytes of a call by the settings of its passes.

    kind:   kind of work
    price:  computes its time
    size:   computes its bytes in addition to the resting ones
    times:  times computed so far, by the settings that they depend on
    sizes:  bytes computed so far
    """

    kind: PlacedCallKind
    price: Callable[[ModelSpec], float]
    size: Callable[[ModelSpec], int]
    times: dict[object, float] = field(default_factory=dict)
    sizes: dict[object, int] = field(default_factory=dict)

    def seconds(self, settings: ModelSpec) -> float:
        key = relevant_settings(self.kind, settings)
        found = self.times.get(key)
        if found is None:
            found = self.times[key] = self.price(settings)
        return found

    def most_bytes(self, settings: ModelSpec) -> int:
        key = relevant_settings(self.kind, settings)
        if self.kind == "generate":
            # slots read prompts in passes
            key = *key, settings.micro_batch_tokens
        found = self.sizes.get(key)
        if found is None:
            found = self.sizes[key] = self.size(settings)
        return found


def relevant_settings(kind: PlacedCallKind, settings: ModelSpec) -> tuple[object, ...]:
    """Settings that a call of ``kind`` depends on, of those that differ between options of one mesh."""
    if kind == "generate":
        return (settings.generate_tokens,)
    if kind == "train":
        of_layers = settings.activation_checkpointing, settings.offload_activations
        return settings.micro_batch_tokens, settings.tiled_mlp, of_layers
    return settings.micro_batch_tokens, settings.tiled_mlp


def total(calls: Sequence[CallFigures], settings: ModelSpec) -> tuple[float, int]:
    """Return the time of ``calls`` together, and the most bytes that one needs in addition to the resting ones."""
    return sum(call.seconds(settings) for call in calls), max((call.most_bytes(settings) for call in calls), default=0)


@dataclass(frozen=True)
class TransferBytes:
    """Bytes of a model's syncs and saves.

    under_way:  of buffers for weights that travel while ranks compute, which stay
    most:       that one of them needs in addition to the resting ones
    """

    under_way: int
    most: int
