"""Rounds of responses that are generated in segments: what a round goes on with, and what the step trains on.

Place ``p`` of a step's batch has prompt ``p // segments`` of the round ``p % segments`` steps before. In the next step
that prompt is one place further, on the same rank. Sampling noise is that of the step and row in which a row was taken,
so a segment's border changes no token unless the weights change there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.comm.rows import RowStore
from flexrlhf.engines.base import Batch
from flexrlhf.objectives.context import Columns, EarlierScores
from flexrlhf.operators.columns import Column, Lengths
from flexrlhf.placement.layout import BatchShape
from flexrlhf.trainer.execution import OperatorRun


@dataclass(frozen=True)
class SegmentRows:
    """Rows of one rank in a round of generation; n rows of the step's batch, k of which are generated.

    batch:      all of them.
    carried:    columns as the step before left them, zeros where nothing is carried.
    exists:     bool (n,), rows of prompts that are under way.
    places:     int64 (k,), rows that have not ended.
    continued:  the batch of these, for an engine, with their response so far.
    """

    batch: Batch
    carried: Columns
    exists: Tensor
    places: Tensor
    continued: Batch


def make_round(run: OperatorRun, batch: Batch, before: RowStore | None, step: int, lengths: Lengths) -> SegmentRows:
    """Return the rows of ``run`` in the round of ``step``. ``before``: rows of the step before; None in the first."""
    shape, rows = run.shape, batch.rows
    ages = rows // shape.samples_per_prompt % shape.segments
    carried = _carried(run, batch, ages > 0, before, lengths)
    # without dynamic sampling every step takes as many prompts as there are places
    is_taken = batch.columns.get(Column.POSITION, torch.zeros_like(ages)) >= 0
    exists = ((ages == 0) & is_taken) | (carried["response_mask"].any(1) & (carried[Column.PRESENT] == 0))
    has_ended = (carried["finished"] == 1) | carried["response_mask"].all(1)
    places = (exists & ~has_ended).nonzero().squeeze(1)
    taken = _rows_as_taken(shape, rows)
    columns = {
        **{name: batch[name][places] for name in ("prompts", "prompt_mask")},
        "responses": carried["tokens"][places, -carried["response_mask"].shape[1] :],
        "response_mask": carried["response_mask"][places],
        "noise_step": (step - ages)[places],
    }
    continued = Batch(columns, taken[places], batch.samples_per_prompt, tokens=batch.tokens)
    return SegmentRows(batch, carried, exists, places, continued)


def _carried(run: OperatorRun, batch: Batch, continues: Tensor, before: RowStore | None, lengths: Lengths) -> Columns:
    """Return the columns that ``run`` carries (n, ...), of the same prompts in the step before.

    ``continues``: bool (n,), rows that the step before may have left.
    """
    columns, empty = Columns(), RowStore(lengths, batch.rows.device)
    earlier = (batch.rows[continues] - run.shape.samples_per_prompt).tolist()
    for name in run.operator.carries:
        none = empty.get(name, ())
        columns[name] = none.new_zeros(len(batch), *none.shape[1:])
        if before is not None and earlier:
            columns[name][continues] = before.get(name, earlier)
    return columns


def _rows_as_taken(shape: BatchShape, rows: Tensor) -> Tensor:
    """Return the rows in the batch of prompts that their step took: their prompts' numbers, without places."""
    samples = shape.samples_per_prompt
    return rows // (samples * shape.segments) * samples + rows % samples


def whole_columns(
    run: OperatorRun, made: SegmentRows, generated: Columns, version: int, by_row: bool = False
) -> Columns:
    """Return the columns of all rows of a round after its segment, with ``present``.

    ``generated``: columns of the rows at ``made.places``, with whole responses, and log-probs of the new tokens.
    ``version``: of the weights. ``by_row``: whether a response is trained on when it ends itself.
    """
    mask = made.carried["response_mask"].clone()
    old = mask[made.places]
    mask[made.places] = generated["response_mask"]
    columns = {**made.carried, "response_mask": mask}
    is_new = (generated["response_mask"] > 0) & (old == 0)
    new = torch.zeros(mask.shape, device=mask.device)
    new[made.places] = generated["rollout_logprobs"] * is_new
    # without a pass of the trained model, an engine's log-probs serve as the policy's
    for name in ("rollout_logprobs", "logprobs"):
        columns[name] = columns.get(name, 0) + new
    columns["policy_version"][made.places] += is_new.int() * version
    for name in ("tokens", "finished"):
        columns[name][made.places] = generated[name]
    prompts = made.batch["prompt_mask"] * made.exists[:, None]
    # a row that is trained on is not carried, so its place is empty in the next step
    columns = {name: values * made.exists.view(-1, *[1] * (values.dim() - 1)) for name, values in columns.items()}
    columns["attention_mask"] = torch.cat([prompts, columns["response_mask"]], 1)
    return {**columns, Column.PRESENT: _present(run.shape, made, columns, by_row)}


def _present(shape: BatchShape, made: SegmentRows, columns: Columns, by_row: bool) -> Tensor:
    """Return uint8 (n,): rows that have ended, or had their last segment; all responses to a prompt at once, unless
    ``by_row``."""
    samples = shape.samples_per_prompt
    is_last = made.batch.rows // samples % shape.segments == shape.segments - 1
    has_ended = made.exists & ((columns["finished"] == 1) | columns["response_mask"].all(1) | is_last)
    if not by_row:
        has_ended = has_ended.view(-1, samples).all(1).repeat_interleave(samples)
    return has_ended.to(torch.uint8)


def places_in(run: OperatorRun, batch: Batch) -> Tensor:
    """Return the places of the rows of ``batch`` among all rows of ``run``, int64 (n,)."""
    place = {row: index for index, row in enumerate(run.rows)}
    return torch.tensor([place[row] for row in batch.rows.tolist()], dtype=torch.int64, device=batch.rows.device)


def carried_scores(run: OperatorRun, before: RowStore | None, device: torch.device) -> Tensor:
    """Return the scores of all rows of ``run`` (n,) that ended in steps before; NaN of others."""
    samples, segments = run.shape.samples_per_prompt, run.shape.segments
    scores = torch.full((len(run.rows),), torch.nan, device=device)
    places = [place for place, row in enumerate(run.rows) if row // samples % segments]
    if before is not None and places:
        scores[places] = before.get(Column.GROUP_SCORES, [run.rows[place] - samples for place in places])
    return scores


def earlier_scores(run: OperatorRun, batch: Batch, scores: Tensor) -> EarlierScores:
    """Return the groups of the rows of ``batch``, with ``scores`` (n,) of all rows of ``run`` as far as they ended in
    steps before."""
    samples = run.shape.samples_per_prompt
    places = places_in(run, batch)
    groups, index = (places // samples).unique(return_inverse=True)
    return EarlierScores(scores.view(-1, samples)[groups], index * samples + places % samples)
