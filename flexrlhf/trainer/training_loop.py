"""Rounds of the schedule as a training loop, also one of a user's (``algorithm.loop``), receives and calls them.

A round is cut where training begins. A loop receives a batch of prompts and then experiences, the rows to train on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from torch import Tensor

from flexrlhf.comm.rows import RowStore
from flexrlhf.data.examples import Example
from flexrlhf.errors import UserError, nearest
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Instruction, Run
from flexrlhf.strategies.schedule import RunStart
from flexrlhf.trainer.execution import Execution, OperatorRun


def cut_round(plan: Plan, rank: int, turn: int, start: RunStart) -> tuple[list[Execution], list[Execution]]:
    """Return the instructions of ``rank`` in a round: before the first training of the list, and from there on."""
    listed = plan.schedule.instructions
    first = next((index for index, each in enumerate(listed) if is_training(each)), len(listed))
    executions = [Execution(*each) for each in plan.schedule.walk_round(rank, plan.spec.steps, turn, start)]
    before = [each for each in executions if each.position % len(listed) < first]
    return before, executions[len(before) :]


def is_training(instruction: Instruction) -> TypeGuard[Run]:
    """Whether an instruction trains a model."""
    return isinstance(instruction, Run) and instruction.operator.kind == "train"


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one training step, in the order of the data set's shuffle; all ranks have the same.

    turn:      round of the schedule that generates for them.
    examples:  rows of the data set; empty in the last rounds with a lag, which train alone, and with dynamic sampling,
               which takes as many as it needs.
    """

    turn: int
    examples: tuple[Example, ...]

    def __len__(self) -> int:
        return len(self.examples)


class Experiences(Mapping[str, Tensor]):
    """Columns that this rank's training reads in a round: name → tensor (n, ...), n rows of this rank.

    A column has the rows of the trainings that read it; by protocols, or models of other layouts, two columns may have
    different rows. It may be replaced before it is trained on. A rank without training, and a round that trains
    nothing, has none.

    turn:  round of the schedule.
    """

    def __init__(self, turn: int, store: RowStore | None, works: Sequence[OperatorRun]) -> None:
        """``works``: trainings of this rank in the round. ``store``: their rows; None without any."""
        self.turn, self._store, self._works = turn, store, works
        self._names = tuple(dict.fromkeys(name for work in works for name in work.operator.reads))

    def rows(self, name: str) -> tuple[int, ...]:
        """Return the numbers of the rows of a column in the step's batch, in segments of the ones that are trained on,
        once they are there."""
        store = self._checked(name)
        readers = (work for work in self._works if name in work.operator.reads)
        rows = (work.present_rows(store, work.mini_batches) for work in readers)
        return tuple(dict.fromkeys(row for of_work in rows for row in of_work))

    def __getitem__(self, name: str) -> Tensor:
        return self._checked(name).get(name, self.rows(name))

    def __setitem__(self, name: str, values: Tensor) -> None:
        store, before = self._checked(name), self[name]
        if values.shape != before.shape:
            raise UserError(
                f"experiences[{name!r}]: expected a tensor {tuple(before.shape)}, found {tuple(values.shape)}"
            )
        store.put(name, self.rows(name), values.to(before))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _checked(self, name: str) -> RowStore:
        if self._store is None or name not in self._names:
            known = f"; there are {', '.join(self._names)}" if self._names else "; this rank trains on none"
            raise UserError(f"experiences: no column {name!r}{nearest(name, self._names)}{known}")
        return self._store


class LoopCalls:
    """Calls that a loop has yet to make for the batch that it has received, in order.

    next_step:  the first step that is not trained on, once no batch is left.
    """

    def __init__(self) -> None:
        self.next_step: int | None = None
        self._due: list[tuple[int, str]] = []

    def begin(self, turn: int) -> None:
        """Start with the calls for a batch."""
        self._due = [(turn, call) for call in ("generate_experience", "train_rlhf")]

    def take(self, turn: int, call: str) -> None:
        """Take a call of the loop. Raises UserError for one that is not the next."""
        if self._due[:1] != [(turn, call)]:
            due = f"{self._due[0][1]} of batch {self._due[0][0]}" if self._due else "the next batch"
            raise UserError(f"algorithm.loop: {call} of batch {turn}, where {due} is due")
        self._due.pop(0)

    def end(self, turn: int) -> None:
        """Raise UserError if a loop takes the next batch without all calls for this one."""
        if self._due:
            raise UserError(f"algorithm.loop: no {self._due[0][1]} of batch {turn}; call both for each batch")

    def end_loop(self, loop: str | None) -> int:
        """Return the first step that is not trained on. Raises UserError if ``loop`` leaves batches out."""
        if self.next_step is None:
            raise UserError(f"algorithm.loop: {loop or 'the loop'} has ended before its batches have; train on each")
        return self.next_step
