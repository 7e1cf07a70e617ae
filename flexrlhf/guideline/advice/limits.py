"""Parts of a space that plans have rejected: settings of a model that a rule refuses, and memory of which a search
counts too little. What is left is searched again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from flexrlhf.api import ModelName, ModelSpec, SettingError
from flexrlhf.guideline.advice.request_changes import DEGREES
from flexrlhf.guideline.search.problem import Assignment, Choice

SPARED = 0.001
"""Share of memory that is left out in addition, so that what was rejected is not found again."""


@dataclass(frozen=True)
class RefusedSettings:
    """Settings of a part that a plan refuses.

    values:  setting → values of it, all of which are meant together.
    others:  whether all values but these are refused.
    """

    part: str
    values: tuple[tuple[str, tuple[object, ...]], ...]
    others: bool = False

    @classmethod
    def of(cls, choice: Choice, *names: str) -> Self:
        return cls(choice.part, tuple((name, (getattr(choice.option.settings, name),)) for name in names))

    @classmethod
    def by(cls, error: SettingError, choice: Choice, name: str) -> Self:
        """Return the values of the setting ``name`` that ``error`` refuses: all but the ones that alone work, if it has
        any."""
        if not error.allowed:
            return cls.of(choice, name)
        return cls(choice.part, ((name, error.allowed),), others=True)

    def covers(self, part: str, settings: object) -> bool:
        alike = (getattr(settings, name) in values for name, values in self.values)
        return part == self.part and all(alike) is not self.others


@dataclass(frozen=True)
class SpaceLimits:
    """Limits within which a space is searched again.

    share:          share of the memory that its plans may take, as a search counts it.
    refused:        settings that plans have refused.
    communicators:  most communicators of a rank that its plans may have; 0: the usual number of its engines.
    """

    share: float = 1.0
    refused: tuple[RefusedSettings, ...] = ()
    communicators: int = 0

    def allows(self, part: str, settings: object) -> bool:
        return not any(each.covers(part, settings) for each in self.refused)

    def below(self, needed: float, counted: float = 1.0) -> Self:
        """Return these limits after a plan needs ``needed`` of the memory that it may take, a share above 1.

        counted:  share that the search counts for it, so that it is not found again.
        """
        return replace(self, share=self.share * (1 - SPARED) * min(1 / needed, counted))

    def without(self, assignment: Assignment, error: SettingError | None) -> Self:
        """Return these limits after a plan refuses ``assignment``: without the setting of ``error``, unless it is its
        default, else without the degrees of every part."""
        found: list[RefusedSettings] = []
        if error is not None:
            setting = "generate_tokens" if error.setting == "kv_tokens" else error.setting
            chosen = (choice for choice in assignment if error.section in _sections(choice.part))
            found = [RefusedSettings.by(error, each, setting) for each in chosen if _is_changed(each, setting)]
        # an error that is about no setting of a part refuses its degrees together
        found = found or [RefusedSettings.of(each, *DEGREES) for each in assignment]
        return replace(self, refused=(*self.refused, *found))


def _sections(part: str) -> tuple[str, ...]:
    """Return the sections of a YAML that may have the settings of a part: a placed model, or an operator."""
    name = ModelName(part)
    if name.is_rollout:
        return ("rollout",)
    own = (f"models.{name.role}.shadow",) if name.is_shadow else ()
    return (f"models.{name.role}", f"placement.operators.{part}", *own)


def _is_changed(choice: Choice, setting: str) -> bool:
    field = ModelSpec.model_fields.get(setting)
    return field is not None and getattr(choice.option.settings, setting) != field.default
