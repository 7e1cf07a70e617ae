"""Instructions: small frozen data that the trainer executes and the simulator times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flexrlhf.config.spec import Spec
from flexrlhf.operators.graph import Operator, OperatorKind
from flexrlhf.placement.layout import BatchShape, Layout, common_range
from flexrlhf.placement.placed import ModelName
from flexrlhf.placement.placement import Placement
from flexrlhf.placement.transfer import Primitive, Transfer


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """Fields of every instruction.

    ranks:  ranks that execute it; all others skip it.
    lag:    number of steps that it works behind the newest batch.
    chunk:  None where it works on whole steps; an attempt of dynamic sampling is one, too.
    """

    ranks: tuple[int, ...]
    lag: int = 0
    chunk: int | None = None

    @property
    def kind(self) -> str:
        """The instruction's type in lower case: ``run``, ``move``, ``sync``, ..."""
        return type(self).__name__.lower()

    def due(self, step: int, steps: int) -> bool:
        """Whether it executes for the batch ``step`` of a run of ``steps``."""
        return 0 <= step < steps

    @property
    def label(self) -> str:
        """Text that names it in tables, timelines and errors."""
        raise NotImplementedError

    @property
    def uses(self) -> tuple[ModelName, ...]:
        """Models whose weights it reads, computes with or moves, apart from the copy that it ``fills``."""
        return ()

    @property
    def fills(self) -> tuple[ModelName, ...]:
        """Copies that it gives other weights."""
        return ()

    @property
    def touches(self) -> tuple[ModelName, ...]:
        """Models that it ``uses`` or ``fills``."""
        return (*self.uses, *self.fills)

    @property
    def period(self) -> int:
        """Steps from one time that it is due to the next."""
        return 1

    @property
    def is_rare(self) -> bool:
        """Whether it is no part of a usual step: evaluating and saving models, and the gate between engines."""
        return False

    @property
    def is_of_every_round(self) -> bool:
        """Whether it is executed in every round of the list, also while a lagging batch drains."""
        return False

    @property
    def copies(self) -> bool:
        """Whether it copies weights and optimizer state of a model between device and host memory."""
        return False

    @property
    def proceeds_in_background(self) -> bool:
        """Whether ranks begin it and go on: rows that move, weights that are stored when they are used."""
        return False


@dataclass(frozen=True, kw_only=True)
class _Periodic(Instruction):
    """An instruction that is due after every ``every`` batches and, with ``at_end``, after the last one.

    at_start:  it is due in the first step instead, and only there.
    """

    every: int = 1
    at_end: bool = False
    at_start: bool = False

    @property
    def period(self) -> int:
        return self.every

    @property
    def is_rare(self) -> bool:
        return self.at_end or self.at_start

    @property
    def turns(self) -> dict[str, Any]:
        """Fields of an instruction that is due whenever this one is."""
        return {name: getattr(self, name) for name in ("every", "at_end", "at_start", "lag")}

    def due(self, step: int, steps: int) -> bool:
        if self.at_start:
            return step == 0
        last = self.at_end and step == steps - 1
        return 0 <= step < steps and ((step + 1) % self.every == 0 or last)


@dataclass(frozen=True, kw_only=True)
class _OfModel(_Periodic):
    """A periodic instruction on one placed model."""

    model: ModelName

    @property
    def uses(self) -> tuple[ModelName, ...]:
        return (self.model,)

    @property
    def label(self) -> str:
        return self.model


@dataclass(frozen=True, kw_only=True)
class Run(Instruction):
    """One operator on one placed model, over whole mini-batches, or on the rows of one ``attempt`` of them.

    layout:     how its rows are split over its ranks: as of the model, unless a protocol splits them.
    tokens:     computed tokens of a pass; None: as in the settings of the model.
    """

    operator: Operator
    model: ModelName
    layout: Layout
    mini_batches: range
    attempt: int | None = None
    tokens: int | None = None

    @property
    def uses(self) -> tuple[ModelName, ...]:
        return (self.model,)

    @property
    def period(self) -> int:
        return self.operator.every

    @property
    def is_rare(self) -> bool:
        return self.operator.is_rare

    @property
    def is_statistic(self) -> bool:
        """Whether it writes no column, so computes statistics alone."""
        return not self.operator.writes

    def common_mini_batches(self, other: Run) -> range:
        """Return the mini-batches that both work on."""
        return common_range(self.mini_batches, other.mini_batches)

    def reads_from(self, writer: Run) -> bool:
        """Whether it reads a column that ``writer`` writes, of mini-batches that both work on."""
        if not self.common_mini_batches(writer):
            return False
        reads = self.operator.columns_read(self.attempt, writer.attempt)
        return not set(writer.operator.writes).isdisjoint(reads)

    def due(self, step: int, steps: int) -> bool:
        return super().due(step, steps) and self.operator.is_due(step)

    def only_accounts(self, step: int) -> bool:
        """Whether it accounts for the rows of ``step`` without training on them (``freeze_actor_steps``)."""
        return step < self.operator.first_step

    @property
    def label(self) -> str:
        return f"{self.operator.name} on {self.model}"


@dataclass(frozen=True, kw_only=True)
class Move(Instruction):
    """Transfer of columns from the models that wrote them to the models that read them."""

    columns: tuple[str, ...]
    sources: tuple[str, ...]
    destinations: tuple[str, ...]
    primitive: Primitive
    transfers: tuple[Transfer, ...]

    @property
    def proceeds_in_background(self) -> bool:
        return True

    @property
    def edge(self) -> str:
        return f"{', '.join(self.sources)} -> {', '.join(self.destinations)}"

    @property
    def label(self) -> str:
        return f"{', '.join(self.columns)} {self.edge}"


@dataclass(frozen=True, kw_only=True)
class Sync(_Periodic):
    """Transfer of the weights of a trained model to a copy that follows it.

    is_in_place:     whether no weights cross between ranks.
    gathers:         sets of source ranks that gather adapters, which the copy stores merged.
    refills:         whether the copy has been released, so that memory for its weights is allocated first.
    after_training:  whether it sends the weights that the step ends with, else those that the step starts from.
    overlaps:        whether it overlaps what comes next: the source packs the weights and sends them meanwhile, and the
                     copy stores what has arrived when it is used next.
    """

    source: ModelName
    destination: ModelName
    is_in_place: bool = False
    gathers: tuple[tuple[int, ...], ...] = ()
    refills: bool = False
    after_training: bool = True
    overlaps: bool = False

    @property
    def uses(self) -> tuple[ModelName, ...]:
        return (self.source,)

    @property
    def fills(self) -> tuple[ModelName, ...]:
        return (self.destination,)

    @property
    def proceeds_in_background(self) -> bool:
        return self.overlaps

    @property
    def label(self) -> str:
        return f"weights {self.source} -> {self.destination}"


@dataclass(frozen=True, kw_only=True)
class Eval(_Periodic):
    """An evaluation: a list of its own, walked once for each batch of the evaluation set.

    instructions:  its list. Statistics run once, over the rows of all batches.
    batch:         shape of the largest batch.
    """

    instructions: tuple[Run | Move, ...]
    batch: BatchShape

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(each for each in self.instructions if isinstance(each, Run))

    @property
    def moves(self) -> tuple[Move, ...]:
        return tuple(each for each in self.instructions if isinstance(each, Move))

    @property
    def models(self) -> tuple[ModelName, ...]:
        return tuple(dict.fromkeys(run.model for run in self.runs))

    @property
    def uses(self) -> tuple[ModelName, ...]:
        return self.models

    @property
    def is_rare(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return f"{', '.join(self.models)} on the evaluation set"


@dataclass(frozen=True, kw_only=True)
class Save(_OfModel):
    """Gather of one trained model's weights on its ranks, which write the files of a Hugging Face directory in turns.

    ``best``: metric of the evaluation before it; the model is written only if that is the best so far.
    """

    best: str | None = None

    @property
    def is_rare(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return self.model if self.best is None else f"{self.model}, if best by {self.best}"


@dataclass(frozen=True, kw_only=True)
class Checkpoint(_Periodic):
    """Copy of all that the next step depends on, by each rank for itself; files are written meanwhile.

    It names all ranks: each reports its files, also if there are none.

    models:  trained models, and copies whose weights differ from theirs at the end of a step.
    """

    models: tuple[ModelName, ...]

    @property
    def uses(self) -> tuple[ModelName, ...]:
        return self.models

    @property
    def is_rare(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return ", ".join(self.models)

    @classmethod
    def of(cls, placement: Placement, spec: Spec, lag: int = 0, every: int = 1) -> Checkpoint:
        """Return a Checkpoint of all that changes from step to step."""
        names, ranks = placement.checkpointed(spec), tuple(range(placement.num_ranks))
        return cls(ranks=ranks, lag=lag, every=every, at_end=True, models=names)


@dataclass(frozen=True, kw_only=True)
class Release(_OfModel):
    """Freeing of the weights of a copy, on each of ``ranks`` by itself, until a Sync refills it."""


@dataclass(frozen=True, kw_only=True)
class _Residence(_OfModel):
    """Transfer of a model between device and host memory, on each of ``ranks`` by itself.

    rare:         it stands next to an instruction that most steps skip, and is due when that one is.
    is_refilled:  a Sync overwrites all weights before they are read, so none are copied.
    """

    rare: bool = False
    is_refilled: bool = False

    def due(self, step: int, steps: int) -> bool:
        return step >= 0 if self.is_of_every_round else super().due(step, steps)

    @property
    def is_of_every_round(self) -> bool:
        return not self.rare

    @property
    def copies(self) -> bool:
        return not self.is_refilled


@dataclass(frozen=True, kw_only=True)
class Offload(_Residence):
    """Transfer of a placed model's weights and optimizer state to host memory, where their copy is kept.

    is_unchanged:  nothing has changed them since they were reloaded, so none are copied again.
    """

    is_unchanged: bool = False

    @property
    def copies(self) -> bool:
        return super().copies and not self.is_unchanged


@dataclass(frozen=True, kw_only=True)
class Reload(_Residence):
    """Transfer of them back to the device.

    overlaps:  a call without the model comes before its next use, and computes meanwhile.
    """

    overlaps: bool = False


class WorkKind(StrEnum):
    """Kind of work that ranks spend their time on, in the order of figures and tables."""

    GENERATE = "generate"
    FORWARD = "forward"
    SCORE = "score"
    TRAIN = "train"
    COMBINE = "combine"
    MOVE = "move"
    SYNC = "sync"
    OFFLOAD = "offload"
    EVALUATE = "evaluate"
    SAVE = "save"

    @property
    def text(self) -> str:
        """Name in metrics, figures and tables."""
        return _TEXTS[self]

    @classmethod
    def of(cls, instruction: str, operator: OperatorKind | None) -> WorkKind:
        """Return the work of a kind of instruction, of a Run that of its kind of operator; unknown ones compute
        sums."""
        kind = operator or "combine" if instruction == "run" else instruction
        if kind in _WORK:
            return _WORK[kind]
        return cls(kind) if kind in _TEXTS else cls.COMBINE


_TEXTS: Mapping[str, str] = {
    WorkKind.GENERATE: "generation",
    WorkKind.FORWARD: "forward passes",
    WorkKind.SCORE: "functions, services and rules",
    WorkKind.TRAIN: "training",
    WorkKind.COMBINE: "advantages and other sums",
    WorkKind.MOVE: "moves of rows",
    WorkKind.SYNC: "weight syncs",
    WorkKind.OFFLOAD: "host offload",
    WorkKind.EVALUATE: "evaluations",
    WorkKind.SAVE: "saving, checkpoints",
}
_WORK: Mapping[str, WorkKind] = {
    "loss": WorkKind.FORWARD,
    "backward": WorkKind.TRAIN,
    "step": WorkKind.TRAIN,
    "retokenize": WorkKind.SCORE,
    "eval": WorkKind.EVALUATE,
    "checkpoint": WorkKind.SAVE,
    "reload": WorkKind.OFFLOAD,
    "release": WorkKind.OFFLOAD,
}
"""Work of other kinds of instructions and operators."""
