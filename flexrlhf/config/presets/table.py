"""Form of the preset tables: defaults of a peer's own trainer for an algorithm, with their sources."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MiniBatchesOf:
    """Number of mini-batches that follows from the size of one.

    size:  prompts or responses of a mini-batch
    unit:  unit of ``size``: "prompts" or "responses"
    """

    size: int
    unit: str = "prompts"

    def number(self, prompts: int, samples: int) -> int:
        """Return the number of mini-batches of a step: at least 1, and at most one for each prompt."""
        rows = prompts * (samples if self.unit == "responses" else 1)
        return min(max(math.ceil(rows / self.size), 1), prompts)

    def __str__(self) -> str:
        return f"mini-batches of {self.size} {self.unit}"


@dataclass(frozen=True)
class WarmUp:
    """Number of warm-up steps that follows from the length of a run.

    share:  of the optimizer steps of the run
    steps:  training steps, each of several optimizer steps; added to the share
    """

    share: float = 0.0
    steps: int = 0

    def number(self, training_steps: int, updates_per_step: int) -> int:
        """Return the number of optimizer steps; a share is rounded up."""
        return math.ceil(self.share * training_steps * updates_per_step) + self.steps * updates_per_step

    def __str__(self) -> str:
        return f"{self.share:.0%} of the optimizer steps" if self.share else f"{self.steps} training steps"


@dataclass(frozen=True)
class Cell:
    """One default of a peer.

    key:     setting of the YAML, dotted
    value:   its value in the words of the YAML, or a number that follows from others
    source:  file of the peer, and the name that the setting has there
    """

    key: str
    value: Any
    source: str


@dataclass(frozen=True)
class PeerTrainer:
    """A peer's own trainer for one algorithm.

    cells:      its defaults
    penalties:  place of a KL penalty → its settings that are not written; first the place if none is written
    differs:    settings that cannot be expressed, a sentence each
    routers:    the cell of ``router_aux_loss_coef``, which a trained mixture of experts has: its value is by family
    """

    cells: tuple[Cell, ...]
    penalties: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    routers: Cell | None = None


@dataclass(frozen=True)
class Peer:
    """An engine or a paper that ``algorithm.like`` names.

    title:     name and version
    trainers:  name of an algorithm → its trainer
    """

    title: str
    trainers: Mapping[str, PeerTrainer]


def cells(file: str, settings: Mapping[str, tuple[Any, str]], prefix: str = "algorithm.") -> tuple[Cell, ...]:
    """Return a cell for each setting: key after ``prefix`` → value, name in ``file``."""
    return tuple(Cell(prefix + key, value, f"{file}: {name}") for key, (value, name) in settings.items())


def optimizers(file: str, roles: tuple[str, ...], settings: Mapping[str, tuple[Any, str]]) -> tuple[Cell, ...]:
    """Return the cells of the optimizer of each role: name in ``file`` may contain ``{role}``."""
    return tuple(
        Cell(f"models.{role}.optimizer.{key}", value, f"{file}: {name.format(role=role)}")
        for role in roles
        for key, (value, name) in settings.items()
    )
