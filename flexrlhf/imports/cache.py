"""Size of vLLM's cache where a job gives it a share of a device's memory, as other systems do."""

from __future__ import annotations

from flexrlhf.api import Spec, UserError, make_plan
from flexrlhf.imports.translation import Translation

KEY = "rollout.kv_tokens"
MANY_STEPS = 10**6
"""Steps of a plan in the place of epochs, whose rows may not be here; memory does not depend on them."""
TRIALS = 6
"""Plans that are made, each with a smaller cache."""


def fit_cache(out: Translation) -> None:
    """Reduce vLLM's cache until the plan fits its devices, if a smaller one is enough.

    The share is of all that vLLM needs; next to weights and cache these are the activations of its passes, which a
    plan computes.
    """
    if KEY not in out.lines or any(key.startswith("models.") and key.endswith(".path") for key in out.lines):
        return
    tokens, comment = out.lines[KEY]
    least = (out.value("data.max_prompt_tokens") or 0) + (out.value("data.max_response_tokens") or 0)
    first = _lacking(out)
    for _ in range(TRIALS):
        if first is None or first <= 0 or tokens <= least:
            return
        tokens = max(least, int(tokens * 0.7))
        out.lines[KEY] = (tokens, f"{comment}, and what a plan needs next to them")
        lacking = _lacking(out)
        if lacking is None or lacking <= 0:
            return


def _lacking(out: Translation) -> int | None:
    """Return the bytes that the plan's tightest rank lacks for generation or a sync; None if something else lacks."""
    try:
        tree = out.tree()
        if tree.pop("epochs", None) is not None:
            tree["steps"] = MANY_STEPS
        plan = make_plan(Spec.parse(tree, out.file))
    except UserError:
        return None
    rank = plan.tightest_rank
    size, memory = plan.device_bytes(rank), plan.memories[rank]
    if size is None:
        return None
    lacks = memory.peak_bytes - size
    is_of_rollout = memory.peak is not None and "actor.rollout" in memory.peak.label
    return lacks if lacks <= 0 or is_of_rollout else None
