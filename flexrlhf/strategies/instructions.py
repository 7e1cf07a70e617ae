"""Instructions: what a rank does next. Small frozen data that the trainer executes and the simulator times.

``lag``: how many steps behind the newest batch the instruction works. ``every``: it is due after each so many batches;
``at_end``: and after the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexrlhf.operators.graph import Operator
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.names import ModelName
from flexrlhf.placement.routes import Primitive, Transfer
from flexrlhf.weights.reshard import WeightTransfer


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """Fields of every instruction. ``ranks``: those that execute it; all others walk past. ``chunk``: None where it
    works on whole steps."""

    ranks: tuple[int, ...]
    lag: int = 0
    chunk: int | None = None

    @property
    def kind(self) -> str:
        """The instruction's type in lower case: ``run``, ``move``, ``sync``, ..."""
        return type(self).__name__.lower()

    def due(self, step: int, steps: int) -> bool:
        return 0 <= step < steps

    @property
    def label(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _Periodic(Instruction):
    every: int = 1
    at_end: bool = False

    def due(self, step: int, steps: int) -> bool:
        last = self.at_end and step == steps - 1
        return 0 <= step < steps and ((step + 1) % self.every == 0 or last)


@dataclass(frozen=True, kw_only=True)
class Run(Instruction):
    """One operator on one placed model, over whole mini-batches."""

    operator: Operator
    model: ModelName
    mini_batches: range

    @property
    def is_statistic(self) -> bool:
        """Whether it computes nothing for another operator."""
        return not self.operator.writes

    def due(self, step: int, steps: int) -> bool:
        is_turn = step % self.operator.every == 0 or step == self.operator.also
        return super().due(step, steps) and is_turn and step >= self.operator.first_step

    @property
    def label(self) -> str:
        return f"{self.operator.name} on {self.model}"


@dataclass(frozen=True, kw_only=True)
class Move(Instruction):
    """Columns from the models that wrote them to the models that read them."""

    columns: tuple[str, ...]
    sources: tuple[str, ...]
    destinations: tuple[str, ...]
    primitive: Primitive
    transfers: tuple[Transfer, ...]

    @property
    def edge(self) -> str:
        return f"{', '.join(self.sources)} -> {', '.join(self.destinations)}"

    @property
    def label(self) -> str:
        return f"{', '.join(self.columns)} {self.edge}"


@dataclass(frozen=True, kw_only=True)
class Sync(_Periodic):
    """Weights of a trained model to a copy that follows it.

    ``gathers``: sets of source ranks that put their shards together. ``is_local``: nothing crosses between ranks then.
    """

    source: ModelName
    destination: ModelName
    transfers: tuple[WeightTransfer, ...]
    gathers: tuple[tuple[int, ...], ...] = ()

    @property
    def is_local(self) -> bool:
        return all(transfer.source == transfer.destination for transfer in self.transfers)

    @property
    def label(self) -> str:
        return f"weights {self.source} -> {self.destination}"


@dataclass(frozen=True, kw_only=True)
class Eval(_Periodic):
    """A list of its own, walked once for each batch of held-out prompts; ranks that none of it names walk past.

    ``batch``: the most that one walk works on. Statistics are computed once, over the rows of all batches.
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
    def label(self) -> str:
        return f"{', '.join(self.models)} on held-out rows"


@dataclass(frozen=True, kw_only=True)
class Save(_Periodic):
    """Gather the weights of one trained model on its ranks; the first of them writes a Hugging Face directory.

    ``best``: a metric of the evaluation before it; then only if that is better than in all evaluations before.
    """

    model: ModelName
    best: str | None = None

    @property
    def label(self) -> str:
        return self.model if self.best is None else f"{self.model}, if best by {self.best}"


@dataclass(frozen=True, kw_only=True)
class _Residence(_Periodic):
    """Moves a model between device and host memory on each of ``ranks`` by itself.

    It is due in every round of the list, also those in which a lagging batch is all that is left; beside an instruction
    that most steps do without (``rare``), when that one is.
    """

    model: ModelName
    rare: bool = False

    def due(self, step: int, steps: int) -> bool:
        return super().due(step, steps) if self.rare else step >= 0

    @property
    def label(self) -> str:
        return self.model


class Offload(_Residence):
    """Put a placed model's weights and optimizer state into host memory."""


class Reload(_Residence):
    """Take them back."""
