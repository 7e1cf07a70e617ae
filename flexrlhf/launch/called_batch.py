"""Batches of a session's steps, and metrics of its trainings, which are read from the ranks when first used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from operator import index
from typing import NoReturn, Protocol

from torch import Tensor

from flexrlhf.errors import UserError, one_line
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.calls import CalledStep


class BatchSource(Protocol):
    """Session whose ranks have the values of batches."""

    @property
    def plan(self) -> Plan: ...

    def column(self, batch: CalledBatch, name: str) -> Tensor: ...

    def statistics(self, batch: CalledBatch, number: int) -> dict[str, float]: ...


class CalledBatch:
    """Rows of one step, or mini-batches of them; ``batch["values"]`` is a column, on the ranks until it is read.

    session:  that it is of.
    step:     number of the step.
    called:   what the program has called for it.
    parts:    mini-batches that it has.
    """

    def __init__(self, session: BatchSource, step: int, called: CalledStep, parts: range) -> None:
        self.session, self.step, self.called, self.parts = session, step, called, parts

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that it has."""
        written = (name for name in self.called.written if self.called.has(name, self.parts))
        return (*self.called.graph.inputs, *written)

    def __getitem__(self, column: str) -> Tensor:
        return self.session.column(self, column)

    def __setitem__(self, column: object, values: object) -> NoReturn:
        raise UserError(
            f"session: batch[{named(column)}] cannot be assigned, operators write columns; scores of your own are a "
            f"function, reward.function"
        )

    def __delitem__(self, column: object) -> NoReturn:
        raise UserError(f"session: batch[{named(column)}] cannot be deleted; a step's columns go with it")

    def __contains__(self, column: object) -> bool:
        return column in self.columns

    def __iter__(self) -> NoReturn:
        raise UserError(
            "session: a batch has columns and mini-batches; take batch.columns or batch.mini_batches(number)"
        )

    def __len__(self) -> int:
        """Return the number of rows."""
        shape = self.session.plan.batch
        return len(self.parts) * shape.num_rows // shape.num_mini_batches

    def mini_batches(self, number: int) -> list[CalledBatch]:
        """Return ``number`` parts of it, in order, each of whole mini-batches of the plan. Raises UserError."""
        fitting = [each for each in range(1, len(self.parts) + 1) if len(self.parts) % each == 0]
        if isinstance(number, bool) or not hasattr(number, "__index__") or index(number) not in fitting:
            known = ", ".join(map(str, fitting))
            raise UserError(
                f"session: {len(self.parts)} mini-batches (algorithm.num_mini_batches) in {named(number)} parts; use "
                f"one of {known}"
            )
        size = len(self.parts) // index(number)
        starts = range(self.parts.start, self.parts.stop, size)
        return [CalledBatch(self.session, self.step, self.called, range(start, start + size)) for start in starts]


class Metrics(Mapping[str, float]):
    """Metrics of a training call, read from the ranks when first used, before the step ends."""

    def __init__(self, session: BatchSource, batch: CalledBatch, number: int) -> None:
        self._session, self._batch, self._number = session, batch, number

    @cached_property
    def _found(self) -> dict[str, float]:
        return self._session.statistics(self._batch, self._number)

    def __getitem__(self, name: str) -> float:
        if name not in self._found:
            raise KeyError(f"no metric {named(name)}; there are {', '.join(self._found)}")
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return "  ".join(f"{name} {value:.4g}" for name, value in self._found.items())


def named(value: object) -> str:
    """Return a wrong argument as a sentence has it: texts and numbers as they are, of other things their kind."""
    if value is None or isinstance(value, str | bytes | int | float):
        return one_line(repr(value))
    return f"an object of class {type(value).__qualname__}"
