"""Execution of an instruction on this rank, as observers receive it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from flexrlhf.comm.rows import RowStore
from flexrlhf.data.examples import Example
from flexrlhf.engines.base import Batch, Moments
from flexrlhf.metrics import Triple
from flexrlhf.operators.columns import Column
from flexrlhf.operators.graph import Operator
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.strategies.instructions import Instruction
from flexrlhf.timeline import Span
from flexrlhf.trainer.loaded_models import LoadedModel


@dataclass(frozen=True)
class OperatorRun:
    """An operator over whole mini-batches on this rank. A mini-batch may have no rows here.

    operator:      its columns and function.
    model:         the loaded model that computes it, or on whose ranks it runs.
    layout:        how its rows are split over these ranks.
    shape:         prompts and mini-batches of the step or evaluation.
    mini_batches:  those that it works on.
    rank:          this rank.
    examples:      of the prompts of ``shape``, for an operator that reads them as text; in an attempt, of its prompts.
    state:         values of the operator's controllers.
    attempt:       that it works on; None: on the rows of all.
    tokens:        computed tokens of a pass; None: as in the settings of the model.
    """

    operator: Operator
    model: LoadedModel
    layout: Layout
    shape: BatchShape
    mini_batches: range
    rank: int
    examples: Sequence[Example] | Mapping[int, Example] = ()
    state: Mapping[str, float] = field(default_factory=dict)
    attempt: int | None = None
    tokens: int | None = None

    def rows_of(self, mini_batches: range) -> tuple[int, ...]:
        """Return the rows of ``mini_batches`` on this rank."""
        return self.shape.rows(self.shape.prompts_on(self.layout, self.rank, mini_batches, self.attempt))

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows that the operator works on."""
        return self.rows_of(self.mini_batches)

    def present_rows(self, store: RowStore, mini_batches: range) -> tuple[int, ...]:
        """Return the rows of ``mini_batches`` that the operator computes for: all, or those that are whole."""
        rows = self.rows_of(mini_batches)
        if Column.PRESENT not in self.operator.reads:
            return rows
        present = store.get(Column.PRESENT, rows).tolist()
        return tuple(row for row, is_present in zip(rows, present, strict=True) if is_present)

    def extra_rows(self, mini_batches: range) -> tuple[int, ...]:
        """Return the rows of ``mini_batches`` on this rank at which further texts are: as many in every step."""
        prompts = self.shape.prompts_on(self.layout, self.rank, mini_batches, self.attempt)
        return self.shape.text_rows(prompt for prompt in prompts if prompt in self.shape.first_places)

    def has_rows(self, batch: Batch) -> bool:
        """Whether any data-parallel rank has rows of a mini-batch. ``batch``: this rank's rows of it."""
        number = torch.tensor(float(len(batch)), dtype=torch.float64, device=batch.rows.device)
        return bool(self.model.dp.sum(number) > 0)

    def examples_of(self, batch: Batch) -> list[Example]:
        """Return the example of each row of ``batch``."""
        return [self.examples[row // self.shape.samples_per_prompt] for row in batch.rows.tolist()]

    def parts(self, store: RowStore) -> list[slice]:
        """Return the slice of each mini-batch's rows in ``batch``."""
        ends = list(accumulate(len(self.present_rows(store, range(m, m + 1))) for m in self.mini_batches))
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def batch(
        self, store: RowStore, device: torch.device, mini_batches: range | None = None, is_extra: bool = False
    ) -> Batch:
        """Return the columns that the operator reads, named without its suffix; some operators read those of the first
        sequences of episodes alone.

        mini_batches:  some of its own; None: all of them.
        is_extra:      the columns that its extra loss reads, named without that loss.
        """
        operator, suffix = self.operator, self.operator.suffix
        mini_batches = self.mini_batches if mini_batches is None else mini_batches
        rows = self.extra_rows(mini_batches) if is_extra else self.present_rows(store, mini_batches)
        by_row, k = self.shape.is_by_row and Column.PRESENT in operator.reads, self.shape.sequences
        unit = self.shape.unit_rows if by_row else self.shape.samples_per_prompt
        names = [
            name for name in operator.reads if (name in operator.extra_reads) == is_extra and name != Column.PRESENT
        ]
        unit_rows = unit
        if is_extra:
            suffix, unit_rows, k = f".{operator.extra_loss}", unit // k, 1
        columns = {name.removesuffix(suffix): store.get(name, rows) for name in names}
        blocks = self.shape.blocks_on(self.layout, self.rank, mini_batches)
        if by_row:
            blocks = tuple(tuple(row // unit for row in self.shape.rows(block)[::unit]) for block in blocks)
        place = {row // unit: index for index, row in enumerate(rows[::unit_rows])}
        batch = Batch(
            columns,
            torch.tensor(rows, dtype=torch.int64, device=device),
            unit_rows,
            blocks=_places(blocks, place),
            compares=operator.compares_responses and not is_extra,
            tokens=self.tokens,
            sequences=k,
        )
        return batch.episodes if operator.is_of_episodes else batch


def _places(blocks: Sequence[Sequence[int]], place: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
    """Return the places of the prompts of each block, without prompts that have none."""
    found = (tuple(place[prompt] for prompt in block if prompt in place) for block in blocks)
    return tuple(each for each in found if each)


@dataclass(eq=False)
class Execution:
    """An instruction that this rank executes. Observers receive it at each event, and add to it for those after them.

    position:    number in the list that all ranks walk.
    step:        training step.
    instruction: of the plan, or of the list of an Eval.
    inner:       index in the list of an Eval; None: of the plan.
    span:        its times on this rank.
    work:        operator of a Run.
    store:       rows that the operator reads and writes.
    moments:     its statistics over the rows of this rank.
    samples:     samples that it has written, as far as this rank reports them.
    outcomes:    rows by outcome, of a training that accounts for them.
    positions:   prompt → its place in the order of the data, of an attempt.
    statistics:  its statistics, summed over the data-parallel group.
    """

    position: int
    step: int
    instruction: Instruction
    inner: int | None = None
    span: Span = field(init=False)
    work: OperatorRun = field(init=False)
    store: RowStore = field(init=False)
    moments: Moments = field(init=False)
    samples: Sequence[dict[str, Any]] = ()
    outcomes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    positions: Mapping[int, int] = field(default_factory=dict)
    statistics: Mapping[str, Triple] = field(default_factory=dict)


class Observer:
    """Receiver of the events of this rank's instructions. A method that a class does not override does nothing."""

    def begin(self, execution: Execution) -> None:
        """Receive an instruction before it is executed."""

    def arrived(self, execution: Execution) -> None:
        """Receive a Run once the rows that its operator reads have arrived, before it computes."""

    def computed(self, execution: Execution) -> None:
        """Receive a Run, of the plan or of an Eval, once its operator has written its columns."""

    def end(self, execution: Execution) -> None:
        """Receive an instruction that has been executed."""
