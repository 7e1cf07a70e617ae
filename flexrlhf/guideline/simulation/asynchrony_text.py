"""Printed table of a run's lags and segments, and what follows from it in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from flexrlhf.api import bytes_text, table
from flexrlhf.guideline.simulation.asynchrony import LEAST_GAIN, AsynchronyTable
from flexrlhf.guideline.simulation.inputs import CostSource
from flexrlhf.guideline.simulation.simulation_text import seconds_text
from flexrlhf.guideline.simulation.variants import Variant

HEADS = (
    "lag",
    "segment",
    "s/step",
    "samples/s",
    "ratio",
    "idle: inf.",
    "training",
    "memory: inference",
    "training",
    "staleness",
)
BUSY = 0.03
"""Idle share below which devices count as always at work."""


def format_asynchrony(compared: AsynchronyTable, source: CostSource) -> str:
    """Return the table and its conclusions. ``source``: origin of the predicted times."""
    plan, lengths, first = compared.plan, compared.lengths, compared.variants[0]
    head = [
        f"{plan.spec.name}: lags and segments on {plan.placement.num_ranks} devices "
        f"({', '.join(plan.cluster.classes)}), by {source.name}",
        f"  {compared.steps} steps with responses of {lengths.mean_response:.4g} tokens in the mean and at most "
        f"{max(lengths.responses):.4g}{lengths.assumption}; sampled for each row",
    ]
    rows = [HEADS, *(_row(str(each.lag), each, first) for each in compared.variants)]
    if isinstance(compared.co_located, Variant):
        rows.append(_row("co-located", compared.co_located, first))
    lines = table(rows, "<>>>>>>>>>")
    conclusions = [each for each in (*_of_lags(compared), *_of_segments(compared)) if each]
    if any(not use.fits for each in compared.variants for use in each.sides.values()):
        conclusions.append("*: more than its device has")
    if isinstance(compared.co_located, str):
        conclusions.append(f"co-located: no plan ({compared.co_located})")
    return "\n".join([*head, "", *(f"  {line}" for line in lines), "", *(f"  {each}" for each in conclusions)])


def _row(name: str, variant: Variant, first: Variant) -> tuple[str, ...]:
    sides = [variant.sides.get("inference"), variant.sides.get("training")]
    return (
        name,
        "-" if variant.tokens is None else str(variant.tokens),
        f"{variant.seconds:.4g}",
        f"{variant.samples:.4g}",
        f"{variant.samples / first.samples:.2f}",
        *("-" if side is None else f"{100 * max(0.0, side.idle):.0f}%" for side in sides),
        *("-" if side is None else f"{'' if side.fits else '* '}{bytes_text(side.memory)}" for side in sides),
        f"{variant.staleness:.2f}",
    )


def _of_lags(compared: AsynchronyTable) -> Iterator[str]:
    """Yield which lag is enough, and why a larger one gains nothing."""
    by_lag, enough = compared.by_lag, compared.enough
    if len(by_lag) < 2:
        return
    first, larger = by_lag[0], [each for each in by_lag if each.lag > enough.lag]
    if enough is first:
        yield f"lag: none above {first.lag} pays ({_best_gain(larger, enough)}):"
        yield f"     {_cause(enough)}"
        return
    gain = f"lag {enough.lag} is {enough.samples / first.samples:.2f} times as fast as lag {first.lag}"
    if larger:
        yield f"{gain}, and a larger one does not pay ({_best_gain(larger, enough)}):"
        yield f"     {_cause(enough)}"
    else:
        yield f"{gain}, and more may still pay: the largest that was compared"


def _best_gain(larger: list[Variant], than: Variant) -> str:
    """Return the largest gain among some variants, with its lag."""
    best = max(larger, key=lambda each: each.samples)
    return f"lag {best.lag} is {100 * (best.samples / than.samples - 1):+.1f}%"


def _cause(variant: Variant) -> str:
    """Return why a larger lag gains little."""
    times = f"generation takes {seconds_text(variant.generation)}, training {seconds_text(variant.training)}"
    if variant.busiest.idle < BUSY:
        return f"{times}, and the devices of {variant.busiest.models} never wait"
    return f"{times}; more batches in flight shorten no wait"


def _of_segments(compared: AsynchronyTable) -> Iterator[str]:
    """Yield the best segments."""
    cut = [each for each in compared.variants if each.tokens is not None]
    if not cut:
        return
    whole, most = (max(each.samples for each in group) for group in (compared.by_lag, cut))
    best = min((each for each in cut if most <= (1 + LEAST_GAIN) * each.samples), key=lambda each: each.staleness)
    gain = best.samples / whole
    if gain < 1 + LEAST_GAIN:
        yield f"segments: none pays (the best, {best.tokens} tokens with lag {best.lag}, is {100 * (gain - 1):+.1f}%)"
    else:
        yield (
            f"segments of {best.tokens} tokens with lag {best.lag} are {gain:.2f} times as fast as whole responses; "
            f"tokens are {best.staleness:.2f} batches old"
        )
