"""Placed models: copies of a role's weights on given ranks; together the placement of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from flexrlhf.placement.layout import Layout
from flexrlhf.spec import ModelSpec, RolloutSpec, ShadowSpec

SHADOW = ".shadow"

Split = Literal["whole", "rows", "flat"]
_SPLITS: dict[tuple[str, int], Split] = {("torch", 2): "rows", ("torch", 3): "rows", ("deepspeed", 3): "flat"}
"""How weights lie between passes, by engine and ZeRO stage: FSDP2 cuts each tensor's rows, ZeRO-3 its flat numbers."""


@dataclass(frozen=True)
class PlacedModel:
    """One copy of ``role``'s weights. ``trained`` copies own an optimizer; shadows follow them by Sync.

    ``settings``: how this copy computes. ``rollout``: of one that does nothing but generate.
    """

    name: str
    role: str
    layout: Layout
    trained: bool
    settings: ModelSpec = field(default=ModelSpec(), hash=False)
    rollout: RolloutSpec | None = field(default=None, hash=False)

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
        return self.name.endswith(SHADOW)

    def key(self, setting: str) -> str:
        """Where the YAML says ``setting``; a shadow has from its role what its own section cannot say."""
        section = SHADOW if self.is_shadow and setting in ShadowSpec.model_fields else ""
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
        return tuple(model for model in self.models if rank in model.ranks)

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        used = {rank for model in self.models for rank in model.ranks}
        return tuple(rank for rank in range(self.num_ranks) if rank not in used)

    @property
    def shadows(self) -> tuple[PlacedModel, ...]:
        return tuple(model for model in self.models if model.is_shadow)

    def inference_copy(self, role: str) -> PlacedModel:
        """The copy that generates and forwards: the shadow where there is one."""
        return self[role + SHADOW] if role + SHADOW in self else self[role]

    def co_located_pairs(self) -> list[tuple[str, str]]:
        """Pairs of placed models that share a device."""
        return [(a.name, b.name) for a, b in combinations(self.models, 2) if set(a.ranks) & set(b.ranks)]
