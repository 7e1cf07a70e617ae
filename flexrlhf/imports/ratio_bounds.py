"""Bounds of ratios and of importance weights, as every system has them."""

from __future__ import annotations

from flexrlhf.imports.settings import Setting
from flexrlhf.imports.translation import Translation

NO_LOWER_BOUND = 0.999999
"""``clip_low`` of a ratio that only its upper bound limits."""
NO_BOUND = 1e9
"""Ratio that none reaches, since logarithms of ratios are at most 20."""


def put_cap(out: Translation, upper: Setting) -> None:
    """Write the largest importance weight; one below 1 is listed."""
    if upper.value >= 1:
        out.put_real("algorithm.importance.cap", upper)
    else:
        out.put("algorithm.importance.cap", 1.0, "the nearest")
        out.drop(upper, "a largest importance weight is at least 1")


def put_floor(out: Translation, lower: Setting | None) -> None:
    """Write the smallest importance weight of a mask; one above 1, or of weights that are truncated, is listed."""
    if lower is None:
        return
    if out.value("algorithm.importance.outside") != "mask":
        out.drop(lower, "weights that are truncated have no lower bound here")
    elif lower.value > 1:
        out.drop(lower, "a smallest importance weight is at most 1")
    else:
        out.put_real("algorithm.importance.floor", lower)


def put_rejection(out: Translation, level: str, lower: float, upper: float, *sources: Setting | str | None) -> bool:
    """Write which tokens or responses are left out, by the bounds of pi_old / pi_rollout; return whether the bounds are
    around 1, as they are here."""
    lower, upper = max(lower, 1 / NO_BOUND), min(upper, NO_BOUND)
    if not lower < 1 < upper:
        return False
    prefix = "algorithm.importance.reject."
    out.put(f"{prefix}level", level, *sources)
    for key, bound in (("lower", lower), ("upper", upper)):
        out.put(f"{prefix}{key}", float(f"{bound:.10g}"), *sources)
    return True


def note_penalty(out: Translation) -> None:
    """Note whose KL penalty a reward has next to importance weights."""
    has_none = "algorithm.kl" in out.lines or out.value("algorithm.kl.place") == "loss"
    if "algorithm.importance.level" in out.lines and not has_none:
        out.note(
            f"next to importance weights the KL penalty in the reward is of the engine's log-probs here, in "
            f"{out.system} of the trained model's"
        )
