"""Sides of a verification: short runs of specs that differ in settings that numbers must not depend on. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexrlhf.api import ModelSpec, Plan, SettingDifference, Spec, UserError, counted, shown, span_of

NOT_SHOWN = {"name", "placement", "runs"}
"""Settings that sides differ in by their nature, or whose consequence is shown."""


def short_spec(spec: Spec, name: str, directory: Path, steps: int, first: Spec | None = None) -> Spec:
    """Return ``spec`` for ``steps`` steps with columns recorded below ``directory``, and its weights saved at the end.

    Warm-ups and steps without training of the actor are shortened to fit into so few steps. Rows are late where the
    ``first`` side's were, so that both sample each token with the same weights.
    """
    late_replies_of = None if first is None or not spec.rollout.carries_late else str(first.directory)
    spec = spec.with_defaults("save", "checkpoint")
    changes: dict[str, Any] = {
        "name": name,
        "runs": str(directory),
        "steps": steps,
        "epochs": None,
        "checkpoint": spec.checkpoint.model_copy(update={"on_signal": False}),
        "debug": spec.debug.model_copy(
            update={"record_columns": True, "replay": None, "late_replies_of": late_replies_of}
        ),
        "eval": spec.eval and spec.eval.model_copy(update={"every": None}),
    }
    algorithm = spec.algorithm
    frozen = min(algorithm.freeze_actor_steps, steps - 1)
    if frozen != algorithm.freeze_actor_steps:
        changes["algorithm"] = algorithm.model_copy(update={"freeze_actor_steps": frozen})
    updates = (steps - frozen) * algorithm.num_mini_batches * algorithm.epochs
    models = [("all", spec.models.all), *spec.models]
    short = {role: _shortened(model, updates - 1) for role, model in models if model is not None}
    return spec.model_copy(update={**changes, "models": spec.models.model_copy(update=short)})


def _shortened(model: ModelSpec, most: int) -> ModelSpec:
    """Return ``model`` with a warm-up of at most so many steps, and its weights saved as they are trained."""
    steps = min(model.optimizer.warmup_steps, most)
    changes: dict[str, Any] = {"optimizer": model.optimizer.model_copy(update={"warmup_steps": steps})}
    # rounding would add to differences of weights
    return model.model_copy(update=changes if model.share is not None else {**changes, "save_dtype": "float32"})


def check_comparable(first: Plan, second: Plan, option: str) -> None:
    """Raise UserError if a setting that numbers depend on differs. ``option``: of the command line, for it."""
    differing = first.spec.differences(second.spec)
    if differing:
        further = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise UserError(f"{option}: {differing[0]}{further}, and numbers depend on it; give both sides the same value")


def side_text(plan: Plan, first: Plan) -> str:
    """Return a side in words: strategy, ranks, and the settings in which it differs from the first side."""
    raw, of_first = (each.spec.model_dump(mode="json", exclude=NOT_SHOWN) for each in (plan, first))
    differing = [f"{each.key}: {shown(each.second)}" for each in SettingDifference.between(of_first, raw)]
    where = ", ".join(f"{model.name} {span_of(model.ranks)}" for model in plan.placement.models)
    devices = counted(plan.placement.num_ranks, "device")
    return "; ".join([f"{plan.spec.name}: {plan.strategy} on {devices}: {where}", *differing])
