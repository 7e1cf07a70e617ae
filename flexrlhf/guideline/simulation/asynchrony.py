"""Comparison of a run's lags and segments, and with a co-located run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from flexrlhf.api import Plan, Spec, Strategy, UserError, make_graph
from flexrlhf.guideline.costs.cost_model import CostModel
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.variants import Variant, Variants

LEAST_GAIN = 0.02
"""Share of the samples per second below which a larger lag counts as no gain: its batches are older."""


@dataclass(frozen=True)
class AsynchronyTable:
    """Variants of a run to compare.

    plan:        the plan with the first of the lags
    lengths:     response lengths
    steps:       number of measured steps
    variants:    one for each lag, then those with segments
    co_located:  the same models on all devices, without a lag; or why there is no such plan
    """

    plan: Plan
    lengths: TextLengths
    steps: int
    variants: tuple[Variant, ...]
    co_located: Variant | str

    @property
    def by_lag(self) -> tuple[Variant, ...]:
        """Variants without segments, by ascending lag."""
        return tuple(each for each in self.variants if each.tokens is None)

    @property
    def enough(self) -> Variant:
        """The variant without segments with the least lag that none with a larger one exceeds by more than
        ``LEAST_GAIN``."""
        best = max(each.samples for each in self.by_lag)
        return next(each for each in self.by_lag if best <= (1 + LEAST_GAIN) * each.samples)


def compare_lags(
    spec: Spec, costs: CostModel, lengths: TextLengths, lags: Sequence[int], segments: Sequence[int] = ()
) -> AsynchronyTable:
    """Return the variants of ``spec`` with ``lags``, and with each of them segments of so many tokens.

    Raises UserError for lags and a placement whose ranks both generate and train, and an algorithm that generates
    nothing.
    """
    variants = Variants(spec, costs, lengths, max(lags))
    plan = variants.plan(0)
    _check(plan, max(lags))
    found = [variants.simulate(lag, tokens) for tokens in (None, *segments) for lag in lags]
    return AsynchronyTable(plan, lengths, len(variants.measured(plan)), tuple(found), _co_located(variants))


def _check(plan: Plan, most_lag: int) -> None:
    name, generated = plan.spec.name, plan.graph.generated
    if generated is None:
        raise UserError(
            f"{name}: {plan.spec.algorithm.name} generates nothing, so it has neither lags nor segments to compare; "
            f"simulate without --lags and --segments"
        )
    if most_lag and plan.strategy != Strategy.DISAGGREGATED:
        copy = f"{generated}.{'rollout' if plan.spec.rollout.has_copy else 'shadow'}"
        apart = f"give {copy} devices of its own, such as --set 'placement={{{copy}: 0.5, {generated}: 0.5, ...}}'"
        if plan.placement.operators:
            apart = "give generate ranks that train nothing, and shadow: true"
        raise UserError(
            f"{name} is {plan.strategy}, and schedule.lag {most_lag} needs generation on other ranks than training; "
            f"compare --lags 0 alone, or {apart}"
        )


def read_lags(text: str | None) -> list[int]:
    """Return the lags of ``--lags``; without it, 0 and 1. Raises UserError."""
    return _numbers("0,1" if text is None else text, "--lags", 0, Spec.MAX_LAG)


def read_segments(text: str | None, plan: Plan) -> list[int]:
    """Return the tokens of ``--segments``; without it those of ``plan``, if it has segments. Raises UserError."""
    if text is None:
        tokens = plan.spec.rollout.segment_tokens
        return [] if tokens is None else [tokens]
    return _numbers(text, "--segments", 1, max(1, plan.lengths.response - 1))


def _numbers(text: str, option: str, least: int, most: int) -> list[int]:
    """Return ascending whole numbers that are separated by commas."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"{option} {text}: expected whole numbers such as {option} 1,2,4") from None
    for number in numbers:
        if not least <= number <= most:
            nearest = least if number < least else most
            raise UserError(f"{option} {text}: {number} is not from {least} to {most}; use {nearest}")
    return numbers


def _co_located(variants: Variants) -> Variant | str:
    """Return the run without copies, with every model on all devices; or why it has no plan."""
    roles = len(make_graph(variants.spec).roles)
    schedule = variants.spec.schedule.model_copy(update={"strategy": None, "num_chunks": 1})
    spec = variants.spec.model_copy(update={"placement": (Fraction(1),) * roles, "schedule": schedule})
    try:
        return replace(variants, spec=spec).simulate(0)
    except UserError as error:
        return str(error)
