"""Placement of a run: all of its placed models, and which of them each operator runs on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from types import MappingProxyType

from flexrlhf.config.model_settings import ShadowSpec
from flexrlhf.config.spec import Spec
from flexrlhf.operators.graph import Graph
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.placed import ModelName, PlacedModel, PlacedOperator
from flexrlhf.placement.protocols import PromptParts

MOST_OF_SHARES = 1000
"""Largest share of rows over one with which a replica has none, or next to none."""


def idle_warnings(models: Iterable[PlacedModel]) -> list[str]:
    """Return warnings for replicas that their shares of the rows leave without any."""
    return [
        f"{model.name}: replica {number} of {len(shares)} has {'hardly any' if share else 'no'} rows by row_shares, so "
        f"that its ranks store weights and compute nothing with them"
        for model in models
        for shares in [model.layout.row_shares]
        for number, share in enumerate(shares)
        if share * MOST_OF_SHARES < max(shares)
    ]


@dataclass(frozen=True)
class Placement:
    """All placed models of a run, in vector order.

    num_ranks:  devices of the run.
    warnings:   for the user.
    operators:  copy of each operator that has a placement of its own, by name.
    layouts:    layout of each operator whose rows a protocol splits over replicas, by name.
    reason:     why models are on the device classes that planning has chosen; empty if it chose none.
    pass_tokens: computed tokens of a pass of each operator that has its own number, by name.
    """

    models: tuple[PlacedModel, ...]
    num_ranks: int
    warnings: tuple[str, ...] = ()
    operators: Mapping[str, ModelName] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    layouts: Mapping[str, Layout] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    reason: str = ""
    pass_tokens: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}), hash=False)

    @cached_property
    def _by_name(self) -> dict[str, PlacedModel]:
        return {model.name: model for model in self.models}

    def __getitem__(self, name: str) -> PlacedModel:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def on_rank(self, rank: int) -> tuple[PlacedModel, ...]:
        """Return the placed models that have ``rank``."""
        return tuple(model for model in self.models if rank in model.layout.places)

    def names_on(self, rank: int) -> str:
        """Return the names of the placed models of a rank, with commas."""
        return ", ".join(model.name for model in self.on_rank(rank))

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """Ranks without a placed model."""
        used = {rank for model in self.models for rank in model.ranks}
        return tuple(rank for rank in range(self.num_ranks) if rank not in used)

    @property
    def followers(self) -> tuple[PlacedModel, ...]:
        """Copies whose weights come from a trained copy by Sync once it has trained; copies of operators are others."""
        return tuple(model for model in self.models if model.follows and not model.is_filled_for_calls)

    @cached_property
    def shadows(self) -> tuple[PlacedModel, ...]:
        """Copies for inference on other ranks than the trained copy's; the actor's may be a rollout engine."""
        return tuple(model for model in self.followers if not set(model.ranks) & set(self[model.role].ranks))

    def inference_copy(self, role: str) -> PlacedModel:
        """Return the copy on whose ranks rows of ``role`` are generated and scored: the shadow where there is one."""
        return next((model for model in self.shadows if model.role == role), self[role])

    def copy_for(self, operator: PlacedOperator) -> PlacedModel:
        """Return the copy that ``operator`` runs on: its own where it has a placement, unless it needs the trained
        weights and that is a shadow or a rollout engine.

        Else the trained copy trains, the inference copy does the rest; a rollout engine generates and does not forward.
        """
        role, generates = operator.role, operator.kind == "generate"
        if operator.name in self.operators:
            copy = self[self.operators[operator.name]]
            if not (operator.on_trained and (copy.is_kept or copy.rollout is not None)):
                return copy
        if operator.kind == "train" or operator.on_trained:
            return self[role]
        engine = ModelName.rollout_of(role)
        if generates and engine in self:
            return self[engine]
        copy = self.inference_copy(role)
        return self[role] if operator.kind == "forward" and copy.rollout is not None else copy

    def layout_of(self, operator: PlacedOperator) -> Layout:
        """Return the layout of the rows of ``operator``: its copy's, or the one that its protocol has."""
        return self.layouts.get(operator.name) or self.copy_for(operator).layout

    def own_splits(self, batch: BatchShape) -> dict[str, list[PromptParts]]:
        """Return the splits of each mini-batch by the functions of a user's, by operator."""
        return {
            name: [layout.protocol.parts(layout.replica_sets, batch.numbers(each)) for each in batch.mini_batches]
            for name, layout in self.layouts.items()
            if layout.protocol is not None
        }

    def pass_tokens_of(self, operator: PlacedOperator) -> int | None:
        """Return the computed tokens of a pass of ``operator``; None: as in the settings of its model."""
        return self.pass_tokens.get(operator.name)

    def co_located_pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of placed models that share a device."""
        return [(a.name, b.name) for a, b in combinations(self.models, 2) if set(a.ranks) & set(b.ranks)]

    def as_placed(self, spec: Spec) -> Spec:
        """Return ``spec`` with the types that its placed models have, the shadows' apart."""
        placed = [each for each in self.models if each.rollout is None]
        own = {each.role: each.settings.dtype for each in reversed(placed) if not each.is_shadow}
        of_shadow = {each.role: each.settings.dtype for each in placed if each.is_shadow}
        changed = {}
        for role, model in spec.models:
            if model is None or role not in own:
                continue
            found = own[role], of_shadow.get(role, own[role])
            if found != (model.dtype, model.of_shadow.dtype):
                raw = model.shadow.model_dump() if model.shadow is not None else {}
                changed[role] = model.model_copy(
                    update={"dtype": found[0], "shadow": ShadowSpec(**raw | {"dtype": found[1]})}
                )
        return spec.with_models(changed) if changed else spec

    @property
    def sleepers(self) -> frozenset[ModelName]:
        """Rollout engines without ranks of their own that sleep whenever they do not generate, but for those that are
        freed then."""
        shadows = self.shadows
        return frozenset(
            model.name
            for model in self.models
            if model.rollout is not None and model.rollout.sleep and not model.is_transient and model not in shadows
        )

    def checkpointed(self, spec: Spec) -> tuple[ModelName, ...]:
        """Return the models whose tensors a checkpoint contains.

        A copy that is synced after every step has the weights of its trained copy then, which a Sync restores.
        """
        lags = spec.schedule.lag > 0 or spec.sync.every > 1
        kept = self.followers if lags else ()
        return tuple(model.name for model in self.models if model.trained or model in kept)

    def whole_step(self, graph: Graph) -> frozenset[str]:
        """Return the operators that run once over all chunks: barriers, what follows them, training of roles without
        shadow.

        Such a role infers and trains with the same weights: no chunk may be generated or scored with weights that
        another chunk has trained already. The same holds where the trained copy also forwards.
        """
        inferring = [o for o in graph.operators if o.call is not None and o.kind != "train"]
        scored = {o.role for o in inferring if o.on_trained or not self.copy_for(o).follows}
        scored |= {role for role in graph.roles if not self.inference_copy(role).follows}
        return graph.after_barrier | {o.name for o in graph.operators if o.kind == "train" and o.role in scored}
