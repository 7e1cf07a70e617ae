"""Deviations of two runs, and their limits: how far one quantity may be apart, how far it is, and where first. Pure.

A value is compared relative to the scale of its rounding: an entry of a column to the column's largest magnitude, a
metric to the root mean square of the values that it is a mean of, weights to their norm over the whole model (per
tensor the optimizer would amplify rounding where a gradient is zero).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from flexrlhf.api import METRICS, Column, PlacedModel, RowAccount

DeviationKind = Literal["column", "move", "metric", "weights"]


@dataclass(frozen=True)
class Limits:
    """Largest relative differences.

    reason:   for which they are chosen
    numbers:  of columns and metrics
    weights:  norm of the difference over the norm, over a model
    shares:   of ``THRESHOLDS``, absolute: rounding may move a value across a threshold
    tie:      two perturbed logits nearer than this (nats) are a tie, which rounding decides
    """

    reason: str
    numbers: float
    weights: float
    shares: float
    tie: float


FLOAT32 = Limits("float32", numbers=1e-5, weights=1e-5, shares=1e-3, tie=1e-4)
DEEPSPEED = Limits("float32 with DeepSpeed", numbers=5e-5, weights=5e-5, shares=1e-3, tie=1e-4)
FLOAT16 = Limits("float16", numbers=2e-2, weights=2e-3, shares=0.1, tie=0.1)
BFLOAT16 = Limits("bfloat16", numbers=5e-2, weights=1e-2, shares=0.1, tie=0.5)
"""16 bits: three to five times the deviations of small models' forced tokens (tests/distributed/test_precision.py)."""
BITWISE = Limits("bitwise", numbers=0.0, weights=0.0, shares=0.0, tie=0.0)
"""The same run twice on CPUs, which add numbers up in one order."""

COUNTED = frozenset(
    {
        *("response_length", "truncated", "score_invalid", "score_failed", "kept_length_ratio"),
        *RowAccount.METRICS.values(),
        *("staleness_max", "staleness_dropped"),
        *("rollout_requests", "eval_distinct_2", "eval_response_length", "eval_truncated", "eval_score_invalid"),
        *("eval_score_failed", "text_cut", "eval_text_cut"),
    }
)
"""Metrics that count whole things: the same in both runs."""
COUNTS = 1e-12
"""Limit of ``COUNTED``: of the division alone."""
THRESHOLDS = frozenset(
    {
        *("ratio_clipped", "value_clipped", "cost_value_clipped", "reward_clipped", "importance_clipped"),
        *("pair_accuracy", "group_alike", "eval_accuracy", "eval_pass_at_1", "eval_pass_at_k"),
    }
)
"""Metrics that count values on one side of a threshold."""
IN_NATS = frozenset(
    {
        "kl",
        "kl_token",
        "update_kl",
        "behaviour_kl",
        "preference_margin",
        "eval_preference_margin",
        "effective_sample_size",
    }
)
"""Metrics that are differences of log-probs: rounding is relative to these, so to at least 1 (``kl``: each token)."""
NOT_COMPARED = frozenset({"step", "rollout_engine", "parity_mean", "parity_p999", "parity_max", *METRICS.times})
"""Entries of a row of metrics that two runs may differ in."""


def limits_for(models: Iterable[PlacedModel], sent: Iterable[str | None] = ()) -> Limits:
    """Return the limits for two runs that together have ``models``: the ones of the coarsest type or engine.

    ``sent``: ``sync.dtype`` of the runs.
    """
    placed = list(models)
    own = ((model.rollout.dtype if model.rollout is not None else None, model.settings.dtype) for model in placed)
    types = {of_rollout or dtype for of_rollout, dtype in own} | {*sent}
    if "bfloat16" in types:
        return BFLOAT16
    if "float16" in types:
        return FLOAT16
    return DEEPSPEED if any(model.facts.averages_gradients for model in placed) else FLOAT32


def is_exact(column: str) -> bool:
    """Whether a column has whole numbers, of which none may differ."""
    return Column.of(column).dtype != "float32"


def limit_of_metric(name: str, limits: Limits) -> float:
    """Return the limit of a metric, relative to its scale."""
    if name in COUNTED:
        return min(COUNTS, limits.numbers)
    return limits.shares if name in THRESHOLDS else limits.numbers


@dataclass(frozen=True)
class ColumnEntry:
    """One number of a column, in both runs.

    position:  in the row; None for a column of one number a row
    values:    of the first and of the second run
    ranks:     that wrote the row in each; of a move, the one that wrote and the one that read it
    """

    row: int
    position: int | None
    values: tuple[float, float]
    ranks: tuple[int, int]


@dataclass(frozen=True)
class Deviation:
    """Largest difference of one quantity in one step.

    step:      None: after the last one
    kind:      a column as written; one as it arrived by a move, against the same run's own; a metric; weights
    name:      of the column, metric or role
    source:    operator that wrote the column or that read it after a move; the reporter of a metric
    absolute:  largest difference
    size:      relative to the scale of the quantity; for whole numbers how many differ
    limit:     of ``size``
    entry:     the first number of a column beyond the limit
    values:    of a metric
    run:       of a move: the name of the run
    note:      why nothing could be compared
    """

    step: int | None
    kind: DeviationKind
    name: str
    source: str
    absolute: float
    size: float
    limit: float
    entry: ColumnEntry | None = None
    values: tuple[float, float] | None = None
    run: str = ""
    note: str = ""

    @property
    def is_beyond(self) -> bool:
        """Whether the two runs part here; NaN is beyond every limit."""
        return not self.size <= self.limit


def first_beyond(deviations: Sequence[Deviation]) -> Deviation | None:
    """Return the first deviation beyond its limit; of metrics that are reported at once the one furthest beyond."""
    first = next((each for each in deviations if each.is_beyond), None)
    if first is None or first.kind != "metric":
        return first
    at_once = [each for each in deviations if (each.step, each.source) == (first.step, first.source)]
    beyond = [each for each in at_once if each.kind == "metric" and each.is_beyond]
    return max(beyond, key=lambda each: each.size / (each.limit or math.ulp(0.0)))


@dataclass(frozen=True)
class Tie:
    """Responses of one step in which the two runs part at a token that rounding decides.

    rows:    responses
    margin:  largest distance of two perturbed logits, in nats
    """

    step: int
    rows: tuple[int, ...]
    margin: float
