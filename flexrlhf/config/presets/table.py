"""Presets: defaults of a peer's own trainer for an algorithm, with their sources, and the form of their files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter

from flexrlhf.config.model_names import known_family
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.config.yaml_io import read_yaml

_CHECKED = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class MiniBatchesOf:
    """Number of mini-batches that follows from the size of one.

    size:  prompts or responses of a mini-batch
    unit:  unit of ``size``: "prompts" or "responses"
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CHECKED

    size: int
    unit: Literal["prompts", "responses"] = "prompts"

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

    __pydantic_config__: ClassVar[ConfigDict] = _CHECKED

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

    def resolved(self, prompts: int, samples: int, steps: int, updates_per_step: int) -> Any:
        """Return the value; a number that follows from others, for a run of these sizes."""
        match self.value:
            case MiniBatchesOf():
                return self.value.number(prompts, samples)
            case WarmUp():
                return self.value.number(steps, updates_per_step)
        return list(self.value) if isinstance(self.value, tuple) else self.value


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

    @property
    def sizes(self) -> dict[str, Any]:
        """Settings of the algorithm; of mini-batches the size."""
        values = {cell.key.removeprefix("algorithm."): cell.value for cell in self.cells}
        return {key: value.size if isinstance(value, MiniBatchesOf) else value for key, value in values.items()}

    def warm_up_share(self, role: str) -> float | None:
        """Return the share of a run that is the warm-up of a role; None if it is a number."""
        found = (cell.value for cell in self.cells if cell.key == f"models.{role}.optimizer.warmup_steps")
        return next((each.share for each in found if isinstance(each, WarmUp)), None)

    def router_loss(self, model: Mapping[str, Any]) -> float | None:
        """Return the factor of the loss of routers of a model; None without such a loss, or of an unknown family."""
        return None if self.routers is None else self.routers.value.get(known_family(model))


@dataclass(frozen=True)
class Peer:
    """An engine or a paper that ``algorithm.like`` names.

    title:     name and version
    trainers:  name of an algorithm → its trainer
    """

    title: str
    trainers: Mapping[str, PeerTrainer]


class _Form(StrictModel):
    """A part of a preset file; its validator is built when a file is read first."""

    model_config = ConfigDict(defer_build=True)


class Settings(_Form):
    """Settings of one section that a peer has in one of its files.

    file:      file of the peer
    section:   section of the YAML
    settings:  name of a setting in the section → its value, and its name in ``file``
    """

    file: str = Field(pattern=r"\.")
    section: str = Field("algorithm", pattern=r"^(algorithm|models\.\w+(\.optimizer)?)$")
    settings: Mapping[str, tuple[Any, Annotated[str, Field(min_length=1)]]]

    def cells(self) -> tuple[Cell, ...]:
        """Return a cell for each setting."""
        named = self.settings.items()
        return tuple(
            Cell(f"{self.section}.{key}", _value(key, value), f"{self.file}: {name}") for key, (value, name) in named
        )


_FOLLOWING: Mapping[str, type] = {"num_mini_batches": MiniBatchesOf, "warmup_steps": WarmUp}
"""Settings that may be a number that follows from others, in a file a mapping of its fields."""


def _value(key: str, value: Any) -> Any:
    if key in _FOLLOWING and isinstance(value, dict):
        return TypeAdapter(_FOLLOWING[key]).validate_python(value)
    return tuple(value) if isinstance(value, list) else value


def _flat(parts: Any) -> Any:
    """Return ``parts`` with the items of its lists: an anchor may name several."""
    if not isinstance(parts, list):
        return parts
    return [each for part in parts for each in (_flat(part) if isinstance(part, list) else [part])]


class TrainerForm(_Form):
    """A trainer of a preset file."""

    settings: Annotated[tuple[Settings, ...], BeforeValidator(_flat)]
    penalties: Mapping[str, Mapping[str, Any]] = {}
    differs: Annotated[tuple[str, ...], BeforeValidator(_flat)] = ()
    routers: Settings | None = None

    def trainer(self) -> PeerTrainer:
        """Return the trainer. Raises ValueError for a setting that is given twice."""
        cells = tuple(cell for part in self.settings for cell in part.cells())
        keys = [cell.key for cell in cells]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise ValueError(f"given twice: {', '.join(sorted(twice))}")
        [routers] = [None] if self.routers is None else self.routers.cells()
        return PeerTrainer(cells, self.penalties, self.differs, routers)


class PresetForm(_Form):
    """A preset file. Anchors in ``files`` and ``shared`` name the peer's files, and parts that trainers share."""

    title: str
    files: tuple[str, ...]
    shared: tuple[Any, ...] = ()
    trainers: Mapping[str, TrainerForm]


def read_peer(path: Path) -> Peer:
    """Return the peer of a preset file. Raises ValueError or yaml.YAMLError for a file without its form."""
    form = PresetForm.model_validate(read_yaml(path.read_text(encoding="utf-8")))
    return Peer(form.title, {name: trainer.trainer() for name, trainer in form.trainers.items()})
