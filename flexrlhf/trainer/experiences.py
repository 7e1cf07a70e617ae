"""Experiences: the rows that this rank trains on in one round of the schedule, for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from flexrlhf.comm.rows import RowStore
from flexrlhf.data.examples import Example
from flexrlhf.errors import UserError, nearest
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Run


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one training step, in the order of the data set's shuffle; all ranks have the same.

    turn:      round of the schedule that generates for them.
    examples:  rows of the data set; empty in the last rounds with a lag, which train alone.
    """

    turn: int
    examples: tuple[Example, ...]

    def __len__(self) -> int:
        return len(self.examples)


class Experiences(Mapping[str, Tensor]):
    """Columns that this rank's training reads in a round: name → tensor (n, ...), n rows of this rank.

    A column may be replaced before it is trained on. A rank without training, and a round that trains nothing, has
    none.

    turn:  round of the schedule.
    rows:  numbers of the rows in the step's batch.
    """

    def __init__(self, turn: int, store: RowStore | None, rows: Iterable[int], names: Iterable[str]) -> None:
        self.turn = turn
        self.rows, self._names = tuple(dict.fromkeys(rows)), tuple(dict.fromkeys(names))
        self._store = store

    def __getitem__(self, name: str) -> Tensor:
        return self._checked(name).get(name, self.rows)

    def __setitem__(self, name: str, values: Tensor) -> None:
        store, before = self._checked(name), self[name]
        if values.shape != before.shape:
            raise UserError(
                f"experiences[{name!r}]: expected a tensor {tuple(before.shape)}, found {tuple(values.shape)}"
            )
        store.put(name, self.rows, values.to(before))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _checked(self, name: str) -> RowStore:
        if self._store is None or name not in self._names:
            known = f"; there are {', '.join(self._names)}" if self._names else "; this rank trains on none"
            raise UserError(f"experiences: no column {name!r}{nearest(name, self._names)}{known}")
        return self._store


def first_training(plan: Plan) -> int:
    """Return the place in the schedule's list of the first training; the list's length where it has none."""
    listed = enumerate(plan.schedule.instructions)
    return next((index for index, each in listed if is_training(each)), len(plan.schedule.instructions))


def is_training(instruction: object) -> bool:
    """Whether an instruction trains a model."""
    return isinstance(instruction, Run) and instruction.operator.kind == "train"
