"""Names of placed models: a role, and which copy of its weights."""

from __future__ import annotations

from typing import Self

SHADOW = "shadow"
ROLLOUT = "rollout"


class ModelName(str):
    """Name of a placed model: ``role`` for the copy that is trained or frozen, ``role.copy`` for one that follows it.

    A copy is called shadow, rollout, or as the first operator that it computes where operators are placed.

    It is a string, so that it serves as a key of YAML mappings and in messages; this class alone takes it apart.

    role:  ``actor`` of ``actor.shadow``.
    copy:  ``shadow``, ``rollout``, an operator, or nothing.
    """

    role: str
    copy: str

    def __new__(cls, text: str) -> Self:
        name = super().__new__(cls, text)
        name.role, _, name.copy = text.partition(".")
        return name

    @classmethod
    def of(cls, role: str, copy: str = "") -> Self:
        """Return the name of the ``copy`` of ``role``."""
        return cls(f"{role}.{copy}" if copy else role)

    @property
    def is_shadow(self) -> bool:
        return self.copy == SHADOW

    @property
    def is_rollout(self) -> bool:
        return self.copy == ROLLOUT
