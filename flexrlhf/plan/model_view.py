"""Subjects of the rules of placed models: their settings, and facts of their engines, roles, sizes and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, Self

from flexrlhf.config.engines import EngineFacts
from flexrlhf.config.model_settings import Head, ModelSpec
from flexrlhf.config.rules import RuleView
from flexrlhf.config.spec import RolloutSpec
from flexrlhf.placement.placed import PlacedModel

_PLAIN, _NO_ROLLOUT = ModelSpec(), RolloutSpec()
ROLLOUT_PREFIX = "rollout."
"""Beginning of the names of a rollout engine's own settings among subjects."""


@dataclass(frozen=True)
class RoleFacts:
    """Facts of a placed model that follow from its role.

    name:     of the role.
    trained:  whether it has an optimizer.
    follows:  whether its weights come from another copy.
    head:     its outputs.
    """

    name: str
    trained: bool
    follows: bool
    head: Head


@dataclass(frozen=True)
class ModelView(RuleView):
    """Subjects of the rules of one placed model. Plans and searches make it of all that they have, so that a rule has
    one answer for both: what a search does not have before a layout is known is no subject.

    model:   the placed model.
    """

    SOURCES: ClassVar[Mapping[str, str]] = MappingProxyType({"engine": "facts", "role": "role"})

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
        yield from (EngineFacts.full_engines(), EngineFacts.model_engines())

    def changed(self, changes: Mapping[str, object]) -> Self:
        settings = self.model.settings.model_copy(update=changes)
        return replace(self, model=replace(self.model, settings=settings))

    @cached_property
    def settings(self) -> ModelSpec:
        return self.model.settings

    @cached_property
    def facts(self) -> EngineFacts:
        return self.model.facts

    @cached_property
    def role(self) -> RoleFacts:
        model = self.model
        return RoleFacts(model.role, model.trained, model.follows, model.head)

    @cached_property
    def rollout(self) -> RolloutSpec:
        return self.model.rollout or _NO_ROLLOUT
