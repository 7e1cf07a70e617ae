"""Placed models: copies of a role's weights on given ranks; together the placement of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from flexrlhf.config.spec import Head, ModelSpec, RolloutSpec, ShadowSpec
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.names import ROLLOUT, SHADOW, ModelName

Split = Literal["whole", "rows", "flat"]
_SPLITS: dict[tuple[str, int], Split] = {("torch", 2): "rows", ("torch", 3): "rows", ("deepspeed", 3): "flat"}
"""How weights lie between passes, by engine and ZeRO stage: FSDP2 cuts each tensor's rows, ZeRO-3 its flat numbers."""


@dataclass(frozen=True)
class PlacedModel:
    """One copy of ``role``'s weights. ``trained`` copies own an optimizer; shadows and rollouts follow them by Sync.

    ``settings``: how this copy computes. ``rollout``: of one that does nothing but generate. ``head``: that of this
    copy, which follows from what its operators compute.
    """

    name: ModelName
    layout: Layout
    trained: bool
    settings: ModelSpec = field(default=ModelSpec(), hash=False)
    rollout: RolloutSpec | None = field(default=None, hash=False)
    head: Head = "causal"

    @property
    def role(self) -> str:
        return self.name.role

    @property
    def engine(self) -> str:
        return self.settings.engine

    @property
    def split(self) -> Split:
        """How the replicas share the weights between passes."""
        return "whole" if self.layout.dp == 1 else _SPLITS.get((self.engine, self.settings.zero), "whole")

    @property
    def gather_sets(self) -> tuple[tuple[int, ...], ...]:
        """The smallest sets of ranks that hold all weights together."""
        return self.layout.tp_sets if self.split == "whole" else (self.ranks,)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.layout.ranks

    @property
    def is_shadow(self) -> bool:
        return self.name.is_shadow

    @property
    def follows(self) -> bool:
        """Whether its weights are another copy's, sent by Sync."""
        return self.is_shadow or self.rollout is not None

    def key(self, setting: str) -> str:
        """Where the YAML says ``setting``; a shadow has from its role what its own section cannot say."""
        if self.rollout is not None:
            own = {"generate_tokens": "kv_tokens"}.get(setting, setting)
            return f"rollout.{own}" if own in RolloutSpec.model_fields else f"models.{self.role}.{setting}"
        section = f".{SHADOW}" if self.is_shadow and setting in ShadowSpec.model_fields else ""
        return f"models.{self.role}{section}.{setting}"


@dataclass(frozen=True)
class Placement:
    """All placed models of a run, in vector order, and what a person should know about them."""

    models: tuple[PlacedModel, ...]
    num_ranks: int
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> PlacedModel:
        return next(model for model in self.models if model.name == name)

    def __contains__(self, name: str) -> bool:
        return any(model.name == name for model in self.models)

    def on_rank(self, rank: int) -> tuple[PlacedModel, ...]:
        return tuple(model for model in self.models if rank in model.layout.places)

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        used = {rank for model in self.models for rank in model.ranks}
        return tuple(rank for rank in range(self.num_ranks) if rank not in used)

    @property
    def followers(self) -> tuple[PlacedModel, ...]:
        return tuple(model for model in self.models if model.follows)

    @property
    def shadows(self) -> tuple[PlacedModel, ...]:
        """Copies for inference on other ranks than those that train: a rollout engine may be the actor's."""
        return tuple(model for model in self.followers if not set(model.ranks) & set(self[model.role].ranks))

    def inference_copy(self, role: str) -> PlacedModel:
        """The copy beside which rows of ``role`` are made: the shadow where there is one."""
        return next((model for model in self.shadows if model.role == role), self[role])

    def copy_for(self, role: str, kind: str, on_trained: bool = False) -> PlacedModel:
        """The copy that an operator of ``kind`` runs on: the trained copy trains, everything else happens where rows
        are made; but a rollout engine generates, and does not forward."""
        if kind == "train" or on_trained:
            return self[role]
        engine = ModelName.of(role, ROLLOUT)
        if kind == "generate" and engine in self:
            return self[engine]
        copy = self.inference_copy(role)
        return self[role] if kind == "forward" and copy.rollout is not None else copy

    def co_located_pairs(self) -> list[tuple[str, str]]:
        """Pairs of placed models that share a device."""
        return [(a.name, b.name) for a, b in combinations(self.models, 2) if set(a.ranks) & set(b.ranks)]
