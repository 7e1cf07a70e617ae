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
"""How replicas split weights between passes, by engine and ZeRO stage: FSDP2 by rows of a tensor, ZeRO-3 flat."""


@dataclass(frozen=True)
class PlacedModel:
    """One copy of a role's weights on given ranks.

    name:      role and copy.
    layout:    its ranks, and how they form replicas.
    trained:   whether it has an optimizer; shadows and rollout engines follow a trained copy by Sync.
    settings:  how this copy computes.
    rollout:   settings of a copy that only generates.
    head:      follows from what its operators compute.
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
        """Split of the weights over replicas between passes."""
        return "whole" if self.layout.dp == 1 else _SPLITS.get((self.engine, self.settings.zero), "whole")

    @property
    def gather_sets(self) -> tuple[tuple[int, ...], ...]:
        """Smallest sets of ranks that together store all weights."""
        return self.layout.tp_sets if self.split == "whole" else (self.ranks,)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.layout.ranks

    @property
    def is_shadow(self) -> bool:
        return self.name.is_shadow

    @property
    def follows(self) -> bool:
        """Whether its weights come from another copy by Sync."""
        return self.is_shadow or self.rollout is not None

    def key(self, setting: str) -> str:
        """Return the YAML key of ``setting``; a shadow takes from its role what its own section does not have."""
        if self.rollout is not None:
            own = {"generate_tokens": "kv_tokens"}.get(setting, setting)
            return f"rollout.{own}" if own in RolloutSpec.model_fields else f"models.{self.role}.{setting}"
        section = f".{SHADOW}" if self.is_shadow and setting in ShadowSpec.model_fields else ""
        return f"models.{self.role}{section}.{setting}"


@dataclass(frozen=True)
class Placement:
    """All placed models of a run, in vector order, with warnings for the user."""

    models: tuple[PlacedModel, ...]
    num_ranks: int
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> PlacedModel:
        return next(model for model in self.models if model.name == name)

    def __contains__(self, name: str) -> bool:
        return any(model.name == name for model in self.models)

    def on_rank(self, rank: int) -> tuple[PlacedModel, ...]:
        """Return the placed models that have ``rank``."""
        return tuple(model for model in self.models if rank in model.layout.places)

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """Ranks without a placed model."""
        used = {rank for model in self.models for rank in model.ranks}
        return tuple(rank for rank in range(self.num_ranks) if rank not in used)

    @property
    def followers(self) -> tuple[PlacedModel, ...]:
        """Copies whose weights come from a trained copy by Sync."""
        return tuple(model for model in self.models if model.follows)

    @property
    def shadows(self) -> tuple[PlacedModel, ...]:
        """Copies for inference on other ranks than the trained copy's; the actor's may be a rollout engine."""
        return tuple(model for model in self.followers if not set(model.ranks) & set(self[model.role].ranks))

    def inference_copy(self, role: str) -> PlacedModel:
        """Return the copy on whose ranks rows of ``role`` are generated and scored: the shadow where there is one."""
        return next((model for model in self.shadows if model.role == role), self[role])

    def copy_for(self, role: str, kind: str, on_trained: bool = False) -> PlacedModel:
        """Return the copy that an operator of ``kind`` runs on.

        The trained copy trains, the inference copy does the rest; a rollout engine generates and does not forward.
        """
        if kind == "train" or on_trained:
            return self[role]
        engine = ModelName.of(role, ROLLOUT)
        if kind == "generate" and engine in self:
            return self[engine]
        copy = self.inference_copy(role)
        return self[role] if kind == "forward" and copy.rollout is not None else copy

    def co_located_pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of placed models that share a device."""
        return [(a.name, b.name) for a, b in combinations(self.models, 2) if set(a.ranks) & set(b.ranks)]
