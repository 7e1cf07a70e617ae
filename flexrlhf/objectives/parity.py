"""Parity gate: rollout engine and trainer must compute equal log-probs of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.config.spec import RolloutSpec
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.errors import RunStopped
from flexrlhf.objectives.context import Columns, CombineContext, Reducer

NUM_WORST = 3
"""Tokens that an error names."""
SCALE = 1e9
"""Log-probs are gathered as integers, in units of 1 / SCALE nats."""


@dataclass(frozen=True)
class Difference:
    """Log-probs of one token, by both sides.

    row:      number in the step.
    position: in the response, from 0.
    token:    id.
    engine:   log-prob by the rollout engine, in nats.
    trainer:  log-prob by the trainer.
    """

    row: int
    position: int
    token: int
    engine: float
    trainer: float

    def text(self, decode: Callable[[Sequence[int]], str]) -> str:
        """Describe it in an error sentence."""
        return (
            f"{decode([self.token])!r} (row {self.row}, token {self.position}: engine {self.engine:.5f}, "
            f"trainer {self.trainer:.5f})"
        )


@dataclass(frozen=True)
class LogprobDifferences:
    """Absolute differences of two log-probs of the same tokens, over all ranks.

    mean:    over tokens, in nats.
    largest: in nats.
    p999:    exceeded by one token of a thousand, in nats.
    worst:   the tokens that differ most.
    """

    mean: float
    largest: float
    p999: float
    worst: tuple[Difference, ...]

    @classmethod
    def of(
        cls, engine: Tensor, trainer: Tensor, batch: Batch, response_mask: Tensor, reducer: Reducer
    ) -> LogprobDifferences:
        """Compare log-probs (n, R) of the tokens of ``batch`` by both sides, over all ranks of ``reducer``.

        NaN differs without bound.
        """
        mask = response_mask.bool()
        difference = (engine - trainer).abs().double().nan_to_num(nan=torch.inf).masked_fill(~mask, -1.0)
        tokens = reducer.gather(_encoded(batch, engine, trainer, difference)).view(-1, 6)
        total = reducer.gather(_as_integers(torch.stack([difference[mask].sum(), mask.sum().double()])))
        mean = float(total[0::2].double().sum()) / max(float(total[1::2].sum()), 1.0)
        # all that exceed the quantile may be on one rank
        above = 1 + int(total[1::2].sum() / SCALE) // 1000
        tail = reducer.gather(
            _as_integers(difference.flatten().topk(min(above, difference.numel())).values.clamp(min=0))
        )
        p999 = float(tail.sort(descending=True).values[above - 1]) / SCALE if len(tail) >= above else 0.0
        worst = [_decoded(row) for row in tokens[tokens[:, 3].argsort(descending=True)][:NUM_WORST].tolist()]
        largest = float(tokens[:, 3].max()) / SCALE if len(tokens) else 0.0
        return cls(mean, largest, p999, tuple(worst))


class ParityError(RunStopped):
    """Rollout engine and trainer disagree. ``worst``: the tokens that differ most."""

    def __init__(self, sentence: str, worst: Sequence[Difference]) -> None:
        super().__init__(sentence)
        self.worst = tuple(worst)


@contextmanager
def naming_tokens(decode: Callable[[Sequence[int]], str], step: int) -> Iterator[None]:
    """Add the step and the worst tokens as text to a ParityError raised inside."""
    try:
        yield
    except ParityError as error:
        worst = ", ".join(item.text(decode) for item in error.worst)
        raise ParityError(f"step {step}: {error}; worst tokens: {worst}", error.worst) from None


def parity(spec: RolloutSpec, batch: Batch, context: CombineContext) -> tuple[Columns, Moments]:
    """Return the mean, the 99.9 % quantile and the largest difference of log-probs (nats) over the step's responses.

    Raises ParityError, on all ranks alike, if one of them is over its limit.
    """
    # plan/rollout_engine.py chooses the columns
    engine = batch["rollout_logprobs" if "rollout_logprobs" in batch.columns else "logprobs"]
    trainer = batch["trainer_logprobs" if "trainer_logprobs" in batch.columns else "logprobs"]
    found = LogprobDifferences.of(engine, trainer, batch, batch["response_mask"], context.reducer)
    _check(spec, found)
    statistics = {"parity_mean": found.mean, "parity_p999": found.p999, "parity_max": found.largest}
    return {}, {name: moments(engine.new_tensor(value, dtype=torch.float64)) for name, value in statistics.items()}


def _as_integers(values: Tensor) -> Tensor:
    """Convert to integers, which can be gathered; NaN and infinity become the largest one."""
    return (values.nan_to_num(nan=torch.inf) * SCALE).clamp(max=2.0**62).long()


def _encoded(batch: Batch, engine: Tensor, trainer: Tensor, difference: Tensor) -> Tensor:
    """Return the worst tokens of this rank, int64 (6 x tokens,): row, position, token, difference, both log-probs.

    ``difference`` (n, R) is negative outside the responses.
    """
    largest, worst = difference.flatten().topk(min(NUM_WORST, difference.numel()))
    worst = worst[largest >= 0]
    row, position = worst // difference.shape[1], worst % difference.shape[1]
    token = batch["tokens"][:, -difference.shape[1] :][row, position].long()
    numbers = [_as_integers(each[row, position].double()) for each in (difference, -engine, -trainer)]
    return torch.stack([batch.rows[row], position, token, *(each.clamp(min=0) for each in numbers)], 1).flatten()


def _decoded(item: Sequence[int]) -> Difference:
    """Return a token that ``_encoded`` has as six integers."""
    row, position, token, _, engine, trainer = item
    return Difference(row, position, token, -engine / SCALE, -trainer / SCALE)


def _check(spec: RolloutSpec, found: LogprobDifferences) -> None:
    """Raise ParityError if a difference is over its limit, or NaN."""
    assert spec.parity is not None, "only graphs with a parity gate compare"
    measured = {"max_difference": found.largest, "p999_difference": found.p999, "mean_difference": found.mean}
    for name, value in measured.items():
        limit = getattr(spec.parity, name)
        if limit is not None and not value <= limit:
            raise ParityError(
                f"rollout engine and trainer disagree about the same tokens: rollout.parity.{name} {limit:g}, found "
                f"{value:.3g} nats (mean {found.mean:.3g}, largest {found.largest:.3g})",
                found.worst,
            )
