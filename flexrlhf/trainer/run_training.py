"""Train on this rank's rows: mini-batches one after the other, or a part of a training that a program calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flexrlhf.comm.rows import RowStore
from flexrlhf.engines.base import Batch, Loss, Moments, add_moments
from flexrlhf.engines.non_finite import NonFiniteStep
from flexrlhf.metrics import Outcome
from flexrlhf.objectives.functions import make_loss
from flexrlhf.operators.columns import Column
from flexrlhf.text import mini_batches_text
from flexrlhf.trainer.execution import OperatorRun
from flexrlhf.trainer.operator_context import OperatorContext

LossParts = list[tuple[Batch, Loss]]
"""Losses that are added, each over its own mini-batch."""


def _train(run: OperatorRun, store: RowStore, context: OperatorContext) -> Moments:
    """Make one optimizer step per mini-batch, in order, ``epochs`` times over; none before the operator's first step.
    Outcomes of rows go into ``store``."""
    if context.sampling.step < run.operator.first_step:
        rows = run.present_rows(store, run.mini_batches)
        frozen = torch.full((len(rows),), Outcome.FROZEN.code, dtype=torch.uint8, device=context.device)
        store.put(Column.FINAL_OUTCOME, rows, frozen)
        return {}
    _check_sampled(run, store, context)
    epochs = context.spec.algorithm.epochs
    statistics: Moments = {}
    outcomes: dict[int, Tensor] = {}
    updated: set[int] = set()
    for epoch in range(epochs):
        for mini_batch in run.mini_batches:
            batch = run.batch(store, context.device, range(mini_batch, mini_batch + 1))
            outcomes[mini_batch] = _outcomes(batch)
            if Column.PRESENT in run.operator.reads and not run.has_rows(batch):
                continue
            parts = _loss_parts(run, mini_batch, batch, store, context)
            name = f"mini-batch {mini_batch}" + (f" of epoch {epoch}" if epochs > 1 else "")
            of_step = _optimizer_step(run, run.model.engine.train, parts, name, context)
            add_moments(statistics, of_step)
            if not _is_skipped(of_step):
                updated.add(mini_batch)
    _put_outcomes(run, outcomes, updated, store)
    return statistics


def _check_sampled(run: OperatorRun, store: RowStore, context: OperatorContext) -> None:
    """Compare log-probs before the first training."""
    if context.check is not None and context.sampling.step == 0:
        context.check.before_training(run.model, run.batch(store, context.device))


def _is_skipped(of_step: Moments) -> bool:
    return "skipped" in of_step and bool(of_step["skipped"][1])


def _put_outcomes(run: OperatorRun, outcomes: Mapping[int, Tensor], updated: Collection[int], store: RowStore) -> None:
    """Put the outcomes of the rows of each mini-batch; rows of others than the ``updated`` ones are skipped."""
    final = [
        each if mini_batch in updated else each.where(each > 0, Outcome.SKIPPED.code)
        for mini_batch, each in outcomes.items()
    ]
    store.put(Column.FINAL_OUTCOME, run.present_rows(store, run.mini_batches), torch.cat(final))


def _losses(run: OperatorRun, store: RowStore, context: OperatorContext) -> Moments:
    """Compute the losses of a training on each of its mini-batches, without an optimizer step."""
    statistics: Moments = {}
    for parts in _parts_of_each(run, store, context):
        add_moments(statistics, run.model.engine.losses(parts))
    return statistics


def _backward(run: OperatorRun, store: RowStore, context: OperatorContext) -> Moments:
    """Add the gradients of the losses of mini-batches, for the next optimizer step."""
    _check_sampled(run, store, context)
    parts = [part for of_one in _parts_of_each(run, store, context) for part in of_one]
    run.model.added += parts
    return run.model.engine.backward(parts)


def _step(run: OperatorRun, store: RowStore, context: OperatorContext) -> Moments:
    """Make one optimizer step on the gradients that were added. Outcomes of their rows go into ``store``."""
    parts, run.model.added = run.model.added, []
    numbers = run.mini_batches
    outcomes = {number: _outcomes(run.batch(store, context.device, range(number, number + 1))) for number in numbers}
    statistics = _optimizer_step(run, run.model.engine.step, parts, mini_batches_text(numbers), context)
    _put_outcomes(run, outcomes, () if _is_skipped(statistics) else numbers, store)
    return statistics


def _parts_of_each(run: OperatorRun, store: RowStore, context: OperatorContext) -> Iterator[LossParts]:
    """Yield the losses of each mini-batch."""
    for number in run.mini_batches:
        batch = run.batch(store, context.device, range(number, number + 1))
        yield _loss_parts(run, number, batch, store, context)


def _loss_parts(
    run: OperatorRun, mini_batch: int, batch: Batch, store: RowStore, context: OperatorContext
) -> LossParts:
    """Return ``batch``, the rows of a mini-batch, with the loss, and further texts with the extra loss; these alone if
    that is the operator's loss."""
    operator, algorithm = run.operator, context.spec.algorithm
    parts: LossParts = []
    if operator.function != operator.extra_loss:
        parts.append((batch, make_loss(operator.function, algorithm)))
    if operator.extra_loss:
        extra = run.batch(store, context.device, range(mini_batch, mini_batch + 1), is_extra=True)
        parts.append((extra, make_loss(operator.extra_loss, algorithm)))
    return parts


def _outcomes(batch: Batch) -> Tensor:
    """Return uint8 (n,): codes of the outcomes of rows if the optimizer step on them is made."""
    outcomes = batch.columns.get("outcome", torch.zeros_like(batch.rows, dtype=torch.uint8))
    rejected = torch.where(batch.sampled_mask.bool().any(1), Outcome.REJECTED.code, Outcome.NO_TOKENS.code).to(
        outcomes.dtype
    )
    return outcomes.where((outcomes > 0) | batch.mask.bool().any(1), rejected)


def _optimizer_step(
    run: OperatorRun,
    update: Callable[[LossParts], Moments],
    parts: LossParts,
    mini_batch: str,
    context: OperatorContext,
) -> Moments:
    """Make one optimizer step by a method of the engine, or none if its gradient is not finite; return its
    statistics."""
    try:
        return context.guard.counted(update(parts))
    except NonFiniteStep as error:
        if error.first is not None:
            # whether the row is one of further texts, of which each mini-batch has some
            error.first = replace(error.first, part=error.first.part % (2 if run.operator.extra_loss else 1))
        where = f"{context.where(run)}, {mini_batch}"
        is_reporter = run.rank == run.model.placed.ranks[0]
        return context.guard.left_out(where, context.sampling.step, error, [loss for _, loss in parts], is_reporter)


TRAINING: Mapping[str, Callable[[OperatorRun, RowStore, OperatorContext], Moments]] = {
    "train": _train,
    "loss": _losses,
    "backward": _backward,
    "step": _step,
}
"""Function of a train, and of its parts; they write no columns."""
