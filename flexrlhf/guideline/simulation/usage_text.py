"""Printed speed and cost of a run."""

from __future__ import annotations

from collections.abc import Iterator

from flexrlhf.api import counted, rate
from flexrlhf.guideline.simulation.usage import THOUSAND, RunUsage

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


def usage_lines(usage: RunUsage) -> Iterator[str]:
    """Yield lines on the tokens and model FLOPs of a step, and one on all steps of the run."""
    yield (
        f"{rate(usage.tokens_per_second)} tokens/s of prompts and responses "
        f"({rate(usage.response_tokens_per_second)} of responses), {rate(usage.tokens_per_device)} per {usage.unit}"
    )
    yield _flops(usage)
    yield (
        f"{counted(usage.steps, 'step')}: {duration_text(usage.duration)}, {amount_text(usage.device_hours)} "
        f"{usage.unit}-hours{_money(usage)}"
    )


def _flops(usage: RunUsage) -> str:
    """Return the model FLOPs utilisation, and that of the parts of a step; without a known peak the FLOP/s."""
    if usage.mfu is None:
        return f"{usage.flops_per_device / 1e12:.3g} TFLOP/s of the models per {usage.unit}"
    shares = {part: each.utilisation for part, each in usage.parts.items()}
    parts = [f"{part} {share_text(share)}" for part, share in shares.items() if share is not None]
    return f"MFU {share_text(usage.mfu)}" + (f" ({', '.join(parts)})" if len(parts) > 1 else "")


def share_text(share: float) -> str:
    """Return a share in percent, in three digits."""
    return f"{100 * share:.3g}%"


def _money(usage: RunUsage) -> str:
    """Return the price of all steps and of a thousand; nothing without prices."""
    whole, thousand = usage.money(usage.steps), usage.money(THOUSAND)
    if whole is None or thousand is None:
        return ""
    return f", price {amount_text(whole)} ({amount_text(thousand)} per {THOUSAND:,} steps)"


def amount_text(amount: float) -> str:
    """Return an amount in three digits, from a thousand on without decimals."""
    return f"{amount:,.0f}" if amount >= THOUSAND else f"{amount:.3g}"


def duration_text(seconds: float) -> str:
    """Return a duration in three digits and the unit that a person uses for it."""
    for unit, length in (("days", DAY), ("h", HOUR), ("min", MINUTE)):
        if seconds >= 2 * length:
            return f"{amount_text(seconds / length)} {unit}"
    return f"{seconds:.3g} s"
