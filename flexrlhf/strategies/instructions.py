"""Instructions: what a rank does next. Small frozen data that the trainer executes and the simulator times.

``lag``: how many steps behind the newest batch the instruction works. ``every``: it is due after each so many batches;
``at_end``: and after the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexrlhf.operators.graph import Operator
from flexrlhf.placement.reshard import WeightTransfer
from flexrlhf.placement.routes import Primitive, Transfer


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """What all instructions have. ``ranks``: those that do it; all others walk past."""

    ranks: tuple[int, ...]
    lag: int = 0

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
    model: str
    mini_batches: range
    chunk: int | None = None

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
    chunk: int | None = None

    @property
    def edge(self) -> str:
        return f"{', '.join(self.sources)} -> {', '.join(self.destinations)}"

    @property
    def label(self) -> str:
        return f"{', '.join(self.columns)} {self.edge}"


@dataclass(frozen=True, kw_only=True)
class Sync(_Periodic):
    """Weights of a trained model to its shadow."""

    source: str
    destination: str
    transfers: tuple[WeightTransfer, ...]

    @property
    def label(self) -> str:
        return f"weights {self.source} -> {self.destination}"


@dataclass(frozen=True, kw_only=True)
class Eval(_Periodic):
    """The graph's evaluation operators on one trained model, over the held-out rows."""

    model: str

    @property
    def label(self) -> str:
        return f"{self.model} on held-out rows"


@dataclass(frozen=True, kw_only=True)
class Save(_Periodic):
    """Write the weights of one trained model as a Hugging Face directory."""

    model: str

    @property
    def label(self) -> str:
        return f"{self.model}"
