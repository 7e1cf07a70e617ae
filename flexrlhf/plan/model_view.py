"""Subjects of the rules of placed models: their settings, and facts of their engines, roles, sizes and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, Self

from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.engines import EngineFacts
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.rules import RuleView, with_values
from flexrlhf.config.spec import RolloutSpec
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.size_facts import DeviceFacts, RoleFacts, SizeFacts
from flexrlhf.weights.decoder_sizes import Sizes
from flexrlhf.weights.model_shape import ModelShape

_PLAIN, _NO_ROLLOUT = ModelSpec(), RolloutSpec()
ROLLOUT_PREFIX = "rollout."
"""Beginning of the names of a rollout engine's own settings among subjects."""


@dataclass(frozen=True)
class RunFacts:
    """Facts of the run that a placed model is a part of.

    generates:  whether it computes the operator generate.
    on_gpus:    whether its devices are planned as GPUs.
    """

    generates: bool
    on_gpus: bool


@dataclass(frozen=True)
class ModelView(RuleView):
    """Subjects of the rules of a placed model that its engine, role and settings decide.

    model:   the placed model.
    """

    SOURCES: ClassVar[Mapping[str, tuple[str, type]]] = MappingProxyType(
        {"engine": ("facts", EngineFacts), "role": ("role", RoleFacts)}
    )

    model: PlacedModel

    @classmethod
    def getter(cls, subject: str) -> Callable[[Any], Any]:
        return attrgetter(subject) if subject.startswith(ROLLOUT_PREFIX) else super().getter(subject)

    @classmethod
    def default(cls, setting: str) -> object:
        of_rollout = setting.removeprefix(ROLLOUT_PREFIX)
        if of_rollout != setting:
            return RolloutSpec.model_fields[of_rollout].default
        return getattr(_PLAIN, setting)

    def place(self, setting: str) -> tuple[str, str]:
        section, _, name = setting.rpartition(".")
        return (section, name) if setting.startswith(ROLLOUT_PREFIX) else self.model.place_of(setting)

    def engines(self) -> Iterator[tuple[str, ...]]:
        if self.model.rollout is None:
            yield from (EngineFacts.full_engines(), EngineFacts.model_engines())

    def offers(self, setting: str, value: object) -> bool:
        if setting not in ParallelDims._fields:
            return True
        dims, ranks = ParallelDims.of_settings(self.changed({setting: value}).settings), len(self.model.ranks)
        return ranks % dims.replica == 0 and ranks // dims.parts % dims.expert_parts == 0

    def changed(self, changes: Mapping[str, object]) -> Self:
        own = {name: value for name, value in changes.items() if not name.startswith(ROLLOUT_PREFIX)}
        others = {name.removeprefix(ROLLOUT_PREFIX): value for name, value in changes.items() if name not in own}
        settings, rollout = with_values(self.model.settings, own), with_values(self.model.rollout, others)
        return replace(self, model=replace(self.model, settings=settings, rollout=rollout))

    @cached_property
    def settings(self) -> ModelSpec:
        return self.model.settings

    @cached_property
    def facts(self) -> EngineFacts:
        return self.model.facts

    @cached_property
    def role(self) -> RoleFacts:
        return RoleFacts.of(self.model)

    @cached_property
    def rollout(self) -> RolloutSpec:
        return self.model.rollout or _NO_ROLLOUT


@dataclass(frozen=True)
class SizedView(ModelView):
    """Subjects that the sizes of a placed model decide, too.

    shape:    parameters of the model; None: unknown.
    longest:  tokens of the longest text that it reads; None: any.
    """

    SOURCES: ClassVar[Mapping[str, tuple[str, type]]] = MappingProxyType(
        {**ModelView.SOURCES, "sizes": ("sizes", SizeFacts), "decoder": ("decoder", Sizes)}
    )

    shape: ModelShape | None
    longest: int | None

    @cached_property
    def sizes(self) -> SizeFacts:
        return SizeFacts(self.settings, self.role, self.shape, self.longest)

    @property
    def decoder(self) -> Sizes:
        return self.sizes.decoder


@dataclass(frozen=True)
class PlacedView(SizedView):
    """Subjects of all rules of a placed model. Whoever asks gives everything, so that a rule has one answer: a fact
    that one of them does not have, such as a number of replicas before a layout is chosen, is no subject.

    cluster:  its devices.
    run:      the run that it is a part of.
    """

    SOURCES: ClassVar[Mapping[str, tuple[str, type]]] = MappingProxyType(
        {**SizedView.SOURCES, "devices": ("devices", DeviceFacts), "run": ("run", RunFacts)}
    )

    cluster: Cluster
    run: RunFacts

    @cached_property
    def devices(self) -> DeviceFacts:
        return DeviceFacts(self.model, self.cluster)
