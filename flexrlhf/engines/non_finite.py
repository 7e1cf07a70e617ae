"""Numbers that are NaN or infinite: no optimizer step follows from them, and the first response with one is named.

A loss that is not finite makes the gradients of its micro-batch NaN (``forbid_update``), so the global norm of the
gradient, which all ranks of a model compute alike, is all that they need to agree. Only then the rows are searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.engines.base import Batch, Loss, Moments, Outputs, Totals, add_moments

LOSS, GRADIENT = "the loss", "the gradient of the loss"
_COMPUTED = {
    "logprobs": "the computed log-probs",
    "values": "the computed values",
    "scores": "the computed scores",
    "token_scores": "the computed token scores",
    "entropy": "the computed entropy",
}
"""Outputs of a model, by quantity."""
OUTPUTS = (*_COMPUTED.values(), LOSS, GRADIENT)
"""What training computes, in order."""


@dataclass(frozen=True)
class NonFinite:
    """First number of a row that is NaN or infinite.

    row:         number in the step.
    part:        index of the loss: 1 for that of further texts.
    what:        the name of the value that is not finite: a column, or one of ``OUTPUTS``.
    position:    in the response, from 0; None where the row has one number.
    micro_batch: of the rank that found it, from 0; None outside training.
    """

    row: int
    part: int
    what: str
    position: int | None = None
    micro_batch: int | None = None

    @property
    def text(self) -> str:
        """Description in an error sentence."""
        rows = f"row {self.row}" if self.part == 0 else f"row {self.row} of the further texts"
        place = "" if self.position is None else f" at response token {self.position}"
        pieces = "" if self.micro_batch is None else f" (micro-batch {self.micro_batch} of its rank)"
        return f"{self.what} of {rows}{place}{pieces}"

    @classmethod
    def first_in_columns(cls, columns: Mapping[str, Tensor], rows: Tensor) -> NonFinite | None:
        """Return the first row with a number that is not finite, and the first such column of it; None: there is none.

        One reduction for each column where all is well.

        columns: name -> tensor (n, ...); only floating-point ones are searched.
        rows:    int64 (n,), numbers of the rows.
        """
        found = [_first(name, tensor, rows) for name, tensor in columns.items()]
        return min((each for each in found if each is not None), key=lambda each: each.row, default=None)

    @classmethod
    def first_of(
        cls, passes: Iterable[TrainingPass], parts: Sequence[tuple[Batch, Loss]], ranks: RankGroup
    ) -> NonFinite | None:
        """Return the first row, over all ``ranks``, with a number that is not finite, and the first such number of it.

        All ranks call this with the passes of their rows, and get the same.

        parts: the mini-batches of an optimizer step on this rank, and their losses.
        """
        kinds = [*dict.fromkeys(name for batch, _ in parts for name in sorted(batch.columns)), *OUTPUTS]
        found = [_encoded(number, kinds) for each in passes for number in _in_pass(each, parts[each.part][1])]
        first = [min(found)] if found else []
        numbers = torch.tensor(first, dtype=torch.int64, device=parts[0][0].rows.device).flatten()
        gathered = ranks.gather(numbers).view(-1, _NUMBERS).tolist()
        return _decoded(min(gathered), kinds) if gathered else None


class NonFiniteStep(FloatingPointError):
    """Optimizer step that was not made, on all ranks of the model alike.

    statistics: of a skipped update.
    first:      first row with a number that is not finite; None where every row and its loss is finite.
    """

    def __init__(self, statistics: Moments, first: NonFinite | None = None) -> None:
        super().__init__("the gradient is not finite; the weights were left as they were")
        self.statistics = statistics
        self.first = first


@dataclass(frozen=True)
class TrainingPass:
    """One micro-batch of a loss, computed without gradients.

    part:        index of the loss.
    micro_batch: index in the part.
    batch:       its rows.
    outputs:     the model's, of these rows.
    totals:      sizes of the mini-batch.
    """

    part: int
    micro_batch: int
    batch: Batch
    outputs: Outputs
    totals: Totals

    @classmethod
    def losses_of(cls, passes: Iterable[TrainingPass], parts: Sequence[tuple[Batch, Loss]], dp: RankGroup) -> Moments:
        """Return the statistics of the losses of ``parts``, and their sum, as ``Engine.losses``."""
        device = parts[0][0].rows.device
        names = dict.fromkeys(name for _, loss in parts for name in loss.statistics)
        statistics: Moments = {name: torch.zeros(3, dtype=torch.float64, device=device) for name in names}
        total = torch.zeros((), dtype=torch.float64, device=device)
        for each in passes:
            value, part = parts[each.part][1].function(each.outputs, each.batch, each.totals)
            add_moments(statistics, part)
            total = total + value
        return statistics | {
            "total_loss": torch.stack([torch.full_like(total, float(dp.is_first)), total, total * total])
        }


def forbid_update(value: Tensor, outputs: Iterable[Tensor]) -> None:
    """Make the gradients of ``outputs`` NaN if the loss ``value`` () is not finite; else leave every bit of them.

    Clamps and masks would let only a part of such a loss into the gradient, and an update would follow from the rest.
    """
    is_finite = value.detach().isfinite()
    for tensor in outputs:
        tensor.register_hook(lambda gradient: gradient.where(is_finite, math.nan))


def _first(name: str, values: Tensor, rows: Tensor) -> NonFinite | None:
    """Return the first row of ``values`` (n, ...) with a number that is not finite, and its place."""
    if not values.is_floating_point() or bool(values.isfinite().all()):
        return None
    wrong = ~values.isfinite().view(len(rows), -1)
    row = int(rows.masked_fill(~wrong.any(1), torch.iinfo(rows.dtype).max).argmin())
    return NonFinite(int(rows[row]), 0, name, int(wrong[row].int().argmax()) if values.ndim > 1 else None)


def _in_pass(each: TrainingPass, loss: Loss) -> Iterator[NonFinite]:
    """Yield the first row of every kind of values of a pass: columns, outputs of the model, losses, gradients."""
    rows, outputs = each.batch.rows, each.outputs
    names = {"quantity": loss.quantity, "entropy": "entropy", "values": "values"}
    computed = {_COMPUTED[names[field]]: tensor for field, tensor in _tensors(outputs).items()}
    numbers = {**each.batch.columns, **computed}
    found = [_first(name, tensor, rows) for name, tensor in numbers.items()]
    at_once = each.batch.samples_per_prompt if each.batch.compares else 1
    found += [_first_of_loss(each, loss, slice(start, start + at_once)) for start in range(0, len(rows), at_once)]
    for number in found:
        if number is not None:
            yield replace(number, part=each.part, micro_batch=each.micro_batch)


@torch.enable_grad()
def _first_of_loss(each: TrainingPass, loss: Loss, part: slice) -> NonFinite | None:
    """Return the first row of ``part`` if its loss is not finite, or its gradient at the outputs."""
    batch = each.batch.select(part)
    leaves = {name: tensor[part].clone().requires_grad_() for name, tensor in _tensors(each.outputs).items()}
    value, _ = loss.function(Outputs(**leaves), batch, each.totals)
    if not value.isfinite():
        return NonFinite(int(batch.rows[0]), 0, LOSS)
    if not value.requires_grad:
        return None
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    found = [_first(GRADIENT, gradient, batch.rows) for gradient in gradients if gradient is not None]
    return next((number for number in found if number is not None), None)


def _tensors(outputs: Outputs) -> dict[str, Tensor]:
    named = {"quantity": outputs.quantity, "entropy": outputs.entropy, "values": outputs.values}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


_NUMBERS = 5


def _encoded(number: NonFinite, kinds: Sequence[str]) -> list[int]:
    """Return ``number`` as integers, which are not negative and in the order of part, row and kind."""
    position = 0 if number.position is None else number.position + 1
    assert number.micro_batch is not None, "training has micro-batches"
    return [number.part, number.row, kinds.index(number.what), position, number.micro_batch]


def _decoded(numbers: Sequence[int], kinds: Sequence[str]) -> NonFinite:
    part, row, kind, position, micro_batch = numbers
    return NonFinite(row, part, kinds[kind], position - 1 if position else None, micro_batch)
