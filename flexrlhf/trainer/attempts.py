"""Attempts of dynamic sampling: which mini-batches lack groups, and which prompts of the data they go on with.

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
from flexrlhf.operators.columns import POSITION, PRESENT
from flexrlhf.placement.layout import BatchShape
from flexrlhf.trainer.execution import OperatorRun

TAKEN = "prompts_taken"
"""State and statistic: prompts that have been taken from the data."""


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
    return {PRESENT: is_present, POSITION: places.clamp(min=0)}, {TAKEN: taken}


def taken_positions(shape: BatchShape, number: int, lacking: Iterable[int], first: int) -> dict[int, int]:
    """Return prompt → its place in the order of the data, of the mini-batches ``lacking`` in an attempt.

    ``first``: number of prompts that have been taken before.
    """
    prompts = [prompt for mini_batch in lacking for prompt in shape.prompts_of_attempt(mini_batch, number)]
    return {prompt: first + index for index, prompt in enumerate(prompts)}


def _lacking(run: OperatorRun, store: RowStore, spec: GroupSpec, context: CombineContext) -> list[int]:
    """Return the mini-batches with fewer groups that differ in their scores than they train on, on all ranks alike."""
    shape, samples = run.shape, run.shape.samples_per_prompt
    assert run.attempt is not None
    earlier = [replace(run, attempt=number).rows for number in range(run.attempt)]
    rows = sorted(row for each in earlier for row in each)
    rows = [row for row, present in zip(rows, store.get(PRESENT, rows).tolist(), strict=True) if present]
    columns: Mapping[str, Tensor] = {name: store.get(name, rows) for name in run.operator.earlier}
    batch = Batch(columns, torch.tensor(rows, dtype=torch.int64, device=store.device), samples)
    useful = context.reducer.gather((batch.rows[::samples] // samples)[useful_groups(spec, batch, context)]).tolist()
    groups = {mini_batch: set(shape.prompts(mini_batch)) for mini_batch in shape.mini_batches}
    return [m for m, prompts in groups.items() if len(prompts.intersection(useful)) < len(shape.numbers(m))]
