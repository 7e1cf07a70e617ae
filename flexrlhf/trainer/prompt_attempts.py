"""Prompts that dynamic sampling takes: for mini-batches that lack groups, or in place of groups that were left out.

Prompts are taken in the order of the data, for the mini-batches that lack groups in their order: the same under every
placement, and no prompt is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flexrlhf.comm.rows import RowStore
from flexrlhf.config.algorithms.grpo import GroupSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.group_advantages import useful_groups
from flexrlhf.operators.columns import Column
from flexrlhf.placement.layout import BatchShape
from flexrlhf.trainer.execution import OperatorRun

TAKEN = "prompts_taken"
"""State and statistic: prompts that have been taken from the data."""
LEFT_OUT = "prompts_left_out"
"""Statistic: groups that ended in the step before and are not trained on."""
LACKING = "prompts_lacking"
"""State: groups that were left out, in place of which no prompt has been taken yet."""


def take_prompts(
    run: OperatorRun, store: RowStore, spec: GroupSpec, context: CombineContext
) -> tuple[Columns, Moments]:
    """Return which rows of an attempt have a prompt, and its place in the order of the data, as columns (n,)."""
    shape, rows, number = run.shape, run.rows, run.attempt
    assert number is not None, "an operator of each attempt"
    lacking = shape.mini_batches if number == 0 else _lacking(run, store, spec, context)
    positions = taken_positions(shape, number, lacking, int(context.state[TAKEN]))
    found = [positions.get(row // shape.samples_per_prompt, -1) for row in rows]
    places = torch.tensor(found, dtype=torch.int32, device=store.device)
    is_present = (places >= 0).to(torch.uint8)
    taken = moments(is_present[:: shape.samples_per_prompt])
    return {Column.PRESENT: is_present, Column.POSITION: places}, {TAKEN: taken}


def taken_positions(shape: BatchShape, number: int, lacking: Iterable[int], first: int) -> dict[int, int]:
    """Return prompt → its place in the order of the data, of the mini-batches ``lacking`` in an attempt.

    ``first``: number of prompts that have been taken before.
    """
    prompts = [prompt for mini_batch in lacking for prompt in shape.prompts_of_attempt(mini_batch, number)]
    return {prompt: first + index for index, prompt in enumerate(prompts)}


def replace_prompts(
    run: OperatorRun, before: RowStore | None, spec: GroupSpec, context: CombineContext, device: torch.device
) -> tuple[Columns, Moments]:
    """Return the places in the order of the data of all prompts under way, as a column (n,), -1 where there is none.

    Responses are generated in segments; ``before``: rows of the step before, None in the first.
    """
    shape, samples = run.shape, run.shape.samples_per_prompt
    prompts = torch.tensor(run.rows[::samples], dtype=torch.int64, device=device) // samples
    places = torch.full(prompts.shape, -1, dtype=torch.int32, device=device)
    is_left_out = torch.zeros(prompts.shape, dtype=torch.bool, device=device)
    if before is not None:
        has_ended = before.get(Column.PRESENT, run.rows)[::samples] > 0
        rows = [
            row
            for first, ended in zip(run.rows[::samples], has_ended.tolist(), strict=True)
            if ended
            for row in range(first, first + samples)
        ]
        columns = {name: before.get(name, rows) for name in run.operator.carries}
        batch = Batch(columns, torch.tensor(rows, dtype=torch.int64, device=device), samples, sequences=shape.sequences)
        is_left_out[has_ended] = ~useful_groups(spec, batch, context)
        places = before.get(Column.POSITION, run.rows)[::samples].masked_fill(has_ended, -1)
    left_out = int(context.reducer.sum(is_left_out.sum().double()))
    first, number = int(context.state[TAKEN]), shape.num_new + int(context.state.get(LACKING, 0)) + left_out
    positions = replacing_positions(shape, context.step, number, first)
    taken = torch.tensor([positions.get(prompt, -1) for prompt in prompts.tolist()], dtype=torch.int32, device=device)
    statistics = {TAKEN: moments((taken >= 0).float()), LEFT_OUT: moments(is_left_out.float())}
    return {Column.POSITION: places.maximum(taken).repeat_interleave(samples)}, statistics


def replacing_positions(shape: BatchShape, step: int, number: int, first: int) -> dict[int, int]:
    """Return prompt → its place in the order of the data, of ``number`` prompts that ``step`` takes, or as many as fit.

    They are evenly spread over the mini-batches and replicas. ``first``: number of prompts that have been taken before.
    """
    places = shape.new_prompts(step)
    number = min(number, len(places))
    return {places[index * len(places) // number]: first + index for index in range(number)}


def next_taken(shape: BatchShape, state: Mapping[str, float], taken: float, left_out: float | None) -> dict[str, float]:
    """Return the ``state`` after a step has ``taken`` prompts; ``left_out``: None without segments."""
    found = {TAKEN: state[TAKEN] + taken}
    if left_out is not None:
        found[LACKING] = state.get(LACKING, 0.0) + left_out + shape.num_new - taken
    return found


def _lacking(run: OperatorRun, store: RowStore, spec: GroupSpec, context: CombineContext) -> list[int]:
    """Return the mini-batches with fewer groups that differ in their scores than they train on, on all ranks alike."""
    shape, samples = run.shape, run.shape.samples_per_prompt
    assert run.attempt is not None
    earlier = [replace(run, attempt=number).rows for number in range(run.attempt)]
    rows = sorted(row for each in earlier for row in each)
    rows = [row for row, present in zip(rows, store.get(Column.PRESENT, rows).tolist(), strict=True) if present]
    columns: Mapping[str, Tensor] = {name: store.get(name, rows) for name in run.operator.earlier}
    numbers = torch.tensor(rows, dtype=torch.int64, device=store.device)
    batch = Batch(columns, numbers, samples, sequences=shape.sequences)
    useful = context.reducer.gather((batch.rows[::samples] // samples)[useful_groups(spec, batch, context)]).tolist()
    groups = {mini_batch: set(shape.prompts(mini_batch)) for mini_batch in shape.mini_batches}
    return [m for m, prompts in groups.items() if len(prompts.intersection(useful)) < len(shape.numbers(m))]
