"""The two sides of a verification: short runs of specs that numbers must not depend on the differences of. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexrlhf.config.number_settings import differing_settings, nested_differences
from flexrlhf.config.output_settings import CheckpointSpec, DebugSpec, SaveSpec
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError, shown
from flexrlhf.plan.plan import Plan
from flexrlhf.text import span_of

NOT_SHOWN = {"name", "placement", "runs"}
"""Settings that sides differ in by their nature, or whose consequence is shown."""


def short_spec(spec: Spec, name: str, directory: Path, steps: int) -> Spec:
    """Return ``spec`` for ``steps`` steps with columns recorded below ``directory``, and its weights saved at the end.

    Warm-ups and steps without training of the actor are shortened to what so few steps leave room for.
    """
    changes: dict[str, Any] = {
        "name": name,
        "runs": str(directory),
        "steps": steps,
        "save": SaveSpec(),
        "checkpoint": CheckpointSpec(on_signal=False),
        "debug": DebugSpec(record_columns=True),
        "eval": spec.eval and spec.eval.model_copy(update={"every": None}),
    }
    algorithm = spec.algorithm
    frozen = min(getattr(algorithm, "freeze_actor_steps", 0), steps - 1)
    if frozen != getattr(algorithm, "freeze_actor_steps", 0):
        changes["algorithm"] = algorithm.model_copy(update={"freeze_actor_steps": frozen})
    updates = (steps - frozen) * algorithm.num_mini_batches * algorithm.epochs
    models = [("all", spec.models.all), *spec.models]
    short = {role: _with_warmup(_unrounded(model), updates - 1) for role, model in models if model is not None}
    return spec.model_copy(update={**changes, "models": spec.models.model_copy(update=short)})


def _unrounded(model: Any) -> Any:
    """Return ``model`` with its weights saved as they are trained: rounding would add to their differences."""
    return model if model.share is not None else model.model_copy(update={"save_dtype": "float32"})


def _with_warmup(model: Any, most: int) -> Any:
    steps = min(model.optimizer.warmup_steps, most)
    return model.model_copy(update={"optimizer": model.optimizer.model_copy(update={"warmup_steps": steps})})


def check_comparable(first: Plan, second: Plan, option: str) -> None:
    """Raise UserError where a setting that numbers depend on differs. ``option``: of the command line, for it."""
    differing = differing_settings(first.spec, second.spec)
    if differing:
        further = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise UserError(f"{option}: {differing[0]}{further}, and numbers depend on it; give both sides the same value")


def side_text(plan: Plan, first: Plan) -> str:
    """Return a side in words: strategy, ranks, and the settings in which it differs from the first side."""
    raw, of_first = (each.spec.model_dump(mode="json", exclude=NOT_SHOWN) for each in (plan, first))
    differing = [f"{each.key}: {shown(each.second)}" for each in nested_differences(of_first, raw)]
    return "; ".join([f"{plan.spec.name}: {_placement_text(plan)}", *differing])


def _placement_text(plan: Plan) -> str:
    where = ", ".join(f"{model.name} {span_of(model.ranks)}" for model in plan.placement.models)
    count = plan.placement.num_ranks
    return f"{plan.strategy} on {count} device{'s' * (count > 1)}: {where}"
