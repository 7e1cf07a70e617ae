"""Rows of the steps that are under way on this rank, and the columns that the data set gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexrlhf.comm.move import ColumnMover, RowPacking
from flexrlhf.comm.rows import RowStore
from flexrlhf.data.examples import Example
from flexrlhf.data.order import DataOrder, SourceShare
from flexrlhf.operators.columns import Column, Lengths, Qualifier
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.run_data import RunData
from flexrlhf.strategies.instructions import Move, Run
from flexrlhf.strategies.schedule import RunStart
from flexrlhf.trainer.execution import OperatorRun
from flexrlhf.trainer.open_steps import CalledSteps
from flexrlhf.trainer.rank_context import RankContext

MISMATCHED_TOKENS = f"tokens.{Qualifier.MISMATCHED}"


class StepRows:
    """Row stores of the steps under way on this rank, and the moves to and from other ranks.

    called:  steps that a program calls; None: the schedule has all of them.
    """

    def __init__(self, rank: RankContext, start: RunStart, called: CalledSteps | None = None) -> None:
        self.called = called
        self._plan, self._data, self._groups, self._rank = rank.plan, rank.data, rank.groups, rank.rank
        # more than planned while the batches of a larger lag are trained on; a program may go on with rows of the step
        # before the oldest open one at any time
        of_program = 0 if called is None or rank.plan.batch.segments == 1 else rank.plan.schedule.lag + 1
        self._num_kept = max(rank.plan.num_steps_kept, start.generated - start.next_step, of_program)
        self._start = start
        self.device = rank.world.device
        self._stores: dict[int, RowStore] = {}
        self._given: dict[int, Sequence[Example]] = {}
        self.most_bytes = 0
        self._input_rows = rows_with_inputs(rank.plan, rank.rank)
        self._mover = ColumnMover(rank.rank, RowPacking(rank.plan.batch, rank.plan.lengths, self.device), rank.wait)

    def at(self, step: int) -> RowStore:
        """Return the rows of a step; steps that no instruction works on any more are dropped."""
        if step not in self._stores:
            self._count()
            for old in [s for s in self._stores if s < step - self._num_kept]:
                self._stores.pop(old).finish()
            store = self._stores[step] = RowStore(self._plan.lengths, self.device)
            self._put_inputs(step, store, self._input_rows)
        return self._stores[step]

    def steps_in_flight(self, next_step: int) -> range:
        """Return the steps whose rows exist before ``next_step`` is trained on."""
        if self.called is not None:
            return self.called.in_flight(next_step, self._start.generated)
        if next_step == self._start.next_step:
            # a larger lag than before is not reached yet
            return range(next_step, self._start.generated)
        return self._plan.steps_in_flight(next_step, self._start.generated)

    def carried_to(self, step: int) -> RowStore | None:
        """Return the rows of the step before, of which some are carried to ``step``; None for the first step."""
        return self._stores.get(step - 1)

    def move(self, move: Move, step: int) -> int:
        """Start a move of columns and return the bytes sent; its rows are awaited when they are read."""
        group = self._groups.get("move", move.ranks)
        assert group is not None, "a move joins at least two ranks"
        return self._mover.start(move, self.at(step), group)

    def finish(self) -> None:
        """Await all rows that are under way."""
        for store in self._stores.values():
            store.finish()
        self._count()
        self._mover.close()

    def _count(self) -> None:
        """Keep the most bytes that all rows together have had at the end of a step."""
        self.most_bytes = max(self.most_bytes, sum(store.num_bytes for store in self._stores.values()))

    def examples(self, step: int) -> list[Example]:
        """Return the example of each prompt of a step; none where the step itself decides which it takes."""
        shape = self._plan.batch
        if shape.attempts > 1:
            return []
        examples = [self._data.examples[number] for number in _taken_numbers(self._plan, self._data, step)]
        for taken in range(step - shape.segments + 1, step + 1):
            places = slice(taken % shape.segments, None, shape.segments)
            examples[places] = self._given.get(taken, examples[places])
        return examples

    def give(self, step: int, examples: Sequence[Example]) -> None:
        """Have ``examples`` be taken by a step, in place of the ones that it would take from the data."""
        least = step - max(self._num_kept, self._plan.batch.segments)
        self._given = {step: examples, **{old: each for old, each in self._given.items() if old >= least}}
        if step in self._stores:
            # of a step in flight, which has begun with the data's
            self._put_inputs(step, self._stores[step], self._input_rows)

    def given_from(self, next_step: int) -> dict[str, Sequence[Any]]:
        """Return the examples that were given to steps with rows in flight or carried at ``next_step``, for JSON."""
        first = next_step - self._plan.batch.segments
        kept = ((step, examples) for step, examples in self._given.items() if step > first)
        return {str(step): Example.to_data(examples) for step, examples in kept}

    def restore_given(self, prompts: Mapping[str, Sequence[Any]]) -> None:
        """Have the examples of ``given_from`` be taken again."""
        for step, examples in prompts.items():
            self.give(int(step), Example.from_data(examples))
            if self.called is not None:
                self.called.given.add(int(step))

    def taken(self, step: int) -> list[Example]:
        """Return the examples that a step takes from the data; none where the step itself decides which it takes."""
        return self.examples(step)[step % self._plan.batch.segments :: self._plan.batch.segments]

    def take_examples(self, work: OperatorRun, step: int) -> dict[int, Example]:
        """Return the examples that the rows of ``work`` have been taken, by prompt, and put their prompts; of rows
        without one, any."""
        store, samples = self.at(step), self._plan.batch.samples_per_prompt
        rows = work.present_rows(store, work.mini_batches)
        positions = zip(rows, store.get(Column.POSITION, rows).tolist(), strict=True)
        examples = {row // samples: self._data.examples[self._number(max(0, place))] for row, place in positions}
        columns = input_columns(examples, rows, samples, self._plan.lengths, self._data.pad_token_id)
        for name in set(work.operator.reads) & columns.keys():
            store.put(name, rows, columns[name].to(self.device))
        return examples

    def _number(self, position: int) -> int:
        return prompt_at(self._plan, self._data, position)

    def put_inputs_of(self, run: Run, step: int) -> None:
        """Put the input columns of the rows of a ``run`` that is not in the plan."""
        if set(run.operator.reads) & set(self._plan.graph.inputs):
            rows = self._plan.batch.rows(self._plan.batch.prompts_on(run.layout, self._rank, run.mini_batches))
            self._put_inputs(step, self.at(step), tuple(sorted(set(rows).difference(self._input_rows))))

    def _put_inputs(self, step: int, store: RowStore, rows: Sequence[int]) -> None:
        """Put the input columns of ``rows`` of a step into ``store``: prompts or whole rows, mismatched rows,
        pretraining texts."""
        shape, examples = self._plan.batch, self.examples(step)
        if examples:
            self._put(store, rows, self._columns(examples, rows, shape.samples_per_prompt))
        if MISMATCHED_TOKENS in self._plan.graph.inputs:
            parts = [shape.prompts(number) for number in shape.mini_batches]
            mismatched = self._columns(mismatched_examples(examples, parts), rows, shape.samples_per_prompt)
            self._put(
                store,
                rows,
                {name: mismatched[Column.plain(name)] for name in Column.qualified(mismatched, Qualifier.MISMATCHED)},
            )
        if further := self._data.texts:
            order = DataOrder(self._plan.spec.seed, (SourceShare(len(further)),))
            places = shape.text_rows(shape.first_places)
            indices = dict(zip(places, order.indices(step, len(places)), strict=True))
            own = [row for row in rows if row in indices]
            texts = self._columns([further[indices[row]] for row in own], range(len(own)), 1)
            self._put(store, own, {name: texts[Column.plain(name)] for name in Column.qualified(texts, Qualifier.PTX)})

    def _columns(self, examples: Sequence[Example], rows: Sequence[int], samples_per_prompt: int) -> dict[str, Tensor]:
        return input_columns(examples, rows, samples_per_prompt, self._plan.lengths, self._data.pad_token_id)

    def _put(self, store: RowStore, rows: Sequence[int], columns: Mapping[str, Tensor]) -> None:
        """Put the ``columns`` that the graph reads."""
        for name in self._plan.graph.inputs:
            if name in columns:
                store.put(name, rows, columns[name].to(self.device))


def prompt_numbers(
    plan: Plan, data: RunData, step: int, positions: Mapping[int, int] | None = None
) -> Sequence[int | None]:
    """Return the number of each prompt of a step in the examples of the data.

    ``positions``: prompt → its place in the order of the data, of prompts that attempts have taken; others have none.
    """
    shape = plan.batch
    if positions:
        places = [positions.get(prompt) for prompt in range(shape.num_prompts)]
        return [None if place is None else prompt_at(plan, data, place) for place in places]
    numbers = _taken_numbers(plan, data, step)
    # the first steps have no prompts of steps before
    return [number if (step - prompt) % shape.segments <= step else None for prompt, number in enumerate(numbers)]


def _taken_numbers(plan: Plan, data: RunData, step: int) -> list[int]:
    """Return the number of each prompt of a step in the examples of the data; where it has none, any."""
    shape, order = plan.batch, DataOrder(plan.spec.seed, data.shares)
    ages = [(step - place) % shape.segments for place in range(shape.segments)]
    taken = [order.indices(max(0, step - age), shape.num_new) for age in ages]
    return [taken[prompt % shape.segments][prompt // shape.segments] for prompt in range(shape.num_prompts)]


def prompt_at(plan: Plan, data: RunData, position: int) -> int:
    """Return the number in the examples of the prompt at a place of the order of the data."""
    return DataOrder(plan.spec.seed, data.shares).indices(position, 1)[0]


def mismatched_examples(examples: Sequence[Example], mini_batches: Sequence[range]) -> list[Example]:
    """Return ``examples``, each with the responses of the one before it in its mini-batch; the first has the last's."""
    others = {number: examples[part[place - 1]] for part in mini_batches for place, number in enumerate(part)}
    return [
        replace(example, responses=other.responses, finished=other.finished, trained=other.trained)
        for example, other in ((example, others[number]) for number, example in enumerate(examples))
    ]


def rows_with_inputs(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the rows whose input columns operators on ``rank`` read."""
    prompts: set[int] = set()
    for run in plan.schedule.for_rank(rank):
        if isinstance(run, Run) and set(run.operator.reads) & set(plan.graph.inputs):
            prompts.update(plan.batch.prompts_on(run.layout, rank, run.mini_batches, run.attempt))
    return plan.batch.rows(tuple(sorted(prompts)))


def input_columns(
    examples: Sequence[Example] | Mapping[int, Example],
    rows: Sequence[int],
    samples_per_prompt: int,
    lengths: Lengths,
    pad_token_id: int,
) -> dict[str, Tensor]:
    """Return the columns of ``rows``; a row has example row // samples_per_prompt and its response of the remainder.

    Prompts are left-padded to P, responses right-padded to R. Without responses there are the prompt columns alone.
    """
    chosen = [(examples[row // samples_per_prompt], row % samples_per_prompt) for row in rows]
    prompts = torch.full((len(rows), lengths.prompt), pad_token_id, dtype=torch.int32)
    prompt_mask = torch.zeros_like(prompts, dtype=torch.uint8)
    for i, (example, _) in enumerate(chosen):
        prompts[i, -len(example.prompt) :] = torch.tensor(example.prompt, dtype=torch.int32)
        prompt_mask[i, -len(example.prompt) :] = 1
    columns = {"prompts": prompts, "prompt_mask": prompt_mask}
    if examples and not isinstance(examples, Mapping) and examples[0].responses:
        columns |= _with_responses(columns, chosen, lengths, pad_token_id)
    return columns


def _with_responses(
    prompts: dict[str, Tensor], chosen: Sequence[tuple[Example, int]], lengths: Lengths, pad_token_id: int
) -> dict[str, Tensor]:
    """Return the columns of prompts with responses, each given as its example and its number in that."""
    padded = torch.full((len(chosen), lengths.response), pad_token_id, dtype=torch.int32)
    mask = torch.zeros_like(padded, dtype=torch.uint8)
    trained = torch.zeros_like(mask)
    for i, (example, number) in enumerate(chosen):
        tokens = example.responses[number]
        padded[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        mask[i, : len(tokens)] = 1
        trained[i, : len(tokens)] = torch.tensor(example.is_trained(number), dtype=torch.uint8)
    return {
        "tokens": torch.cat([prompts["prompts"], padded], 1),
        "attention_mask": torch.cat([prompts["prompt_mask"], mask], 1),
        "response_mask": mask,
        "loss_mask": trained,
        "finished": torch.tensor([example.finished[number] for example, number in chosen], dtype=torch.uint8),
    }
