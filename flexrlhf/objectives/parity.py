"""The gate between the rollout engine and the trainer: both tell the log-probs of the same tokens, which must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.config.spec import RolloutSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.errors import RunStopped
from flexrlhf.objectives.context import Columns, CombineContext

NUM_WORST = 3
SCALE = 1e9
"""Log-probs travel as whole numbers of this fraction of a nat."""


@dataclass(frozen=True)
class Difference:
    """A token and what each side says of it. ``row``: of the step; ``position``: in the answer, from 0."""

    row: int
    position: int
    token: int
    engine: float
    trainer: float

    def text(self, decode: Callable[[Sequence[int]], str]) -> str:
        return (
            f"{decode([self.token])!r} (row {self.row}, token {self.position}: engine {self.engine:.5f}, "
            f"trainer {self.trainer:.5f})"
        )


class ParityError(RunStopped):
    """The rollout engine does not compute what is trained."""

    def __init__(self, sentence: str, worst: Sequence[Difference]) -> None:
        super().__init__(sentence)
        self.worst = tuple(worst)


@contextmanager
def naming_tokens(decode: Callable[[Sequence[int]], str], step: int) -> Iterator[None]:
    """Say the step and the texts of the worst tokens, which the comparison of columns cannot know."""
    try:
        yield
    except ParityError as error:
        worst = ", ".join(item.text(decode) for item in error.worst)
        raise ParityError(f"step {step}: {error}; worst tokens: {worst}", error.worst) from None


def parity(spec: RolloutSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Mean and largest difference of log-probs (nats) over the answers of the step. Raises ParityError.

    All replicas see the same numbers, so they stop together.
    """
    engine, trainer = _compared(batch)
    mask = batch["response_mask"].bool()
    difference = (engine - trainer).abs().double().nan_to_num(nan=torch.inf).masked_fill(~mask, -1.0)
    found = context.reducer.gather(_encoded(batch, engine, trainer, difference)).view(-1, 6)
    total = context.reducer.gather(_whole_number(torch.stack([difference[mask].sum(), mask.sum().double()])))
    mean = float(total[0::2].double().sum()) / max(float(total[1::2].sum()), 1.0)
    worst = [_decoded(row) for row in found[found[:, 3].argsort(descending=True)][:NUM_WORST].tolist()]
    largest = float(found[:, 3].max()) / SCALE if len(found) else 0.0
    _check(spec, mean, largest, worst)
    statistics = {"parity_mean": mean, "parity_max": largest}
    return {}, {name: moments(difference.new_tensor(value)) for name, value in statistics.items()}


def _compared(batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs (n, R) of the engine and of the trainer (operators/rollout.py says which columns they are)."""
    if "trainer_logprobs" in batch.columns:
        return batch["logprobs"], batch["trainer_logprobs"]
    return batch["rollout_logprobs"], batch["logprobs"]


def _whole_number(values: Tensor) -> Tensor:
    """Differences as integers, which replicas can gather; one beyond all sense, or none at all, is the largest."""
    return (values.nan_to_num(nan=torch.inf) * SCALE).clamp(max=2.0**62).long()


def _encoded(batch: Batch, engine: Tensor, trainer: Tensor, difference: Tensor) -> Tensor:
    """The worst tokens of this replica: row, position, token, difference and both log-probs of each.

    ``difference`` is negative outside the answers.
    """
    largest, worst = difference.flatten().topk(min(NUM_WORST, difference.numel()))
    worst = worst[largest >= 0]
    row, position = worst // difference.shape[1], worst % difference.shape[1]
    token = batch["tokens"][:, -difference.shape[1] :][row, position].long()
    numbers = [_whole_number(each[row, position].double()) for each in (difference, -engine, -trainer)]
    return torch.stack([batch.rows[row], position, token, *(each.clamp(min=0) for each in numbers)], 1).flatten()


def _decoded(item: Sequence[int]) -> Difference:
    row, position, token, _, engine, trainer = item
    return Difference(row, position, token, -engine / SCALE, -trainer / SCALE)


def _check(spec: RolloutSpec, mean: float, largest: float, worst: Sequence[Difference]) -> None:
    assert spec.parity is not None, "compared only where there is a gate"
    limits = {"max_difference": largest, "mean_difference": mean}
    for name, found in limits.items():
        limit = getattr(spec.parity, name)
        assert limit is not None, "planning fills it in"
        if not found <= limit:
            raise ParityError(
                f"rollout engine and trainer disagree about the same tokens: rollout.parity.{name} {limit:g}, found "
                f"{found:.3g} nats (mean {mean:.3g}, largest {largest:.3g})",
                worst,
            )
