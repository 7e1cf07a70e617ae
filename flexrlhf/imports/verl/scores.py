"""Scores of a verl job: a reward model, a function of the user, or a rule for the rows."""

from __future__ import annotations

from flexrlhf.imports.parts import put_model
from flexrlhf.imports.row_parts import put_columns
from flexrlhf.imports.score_parts import CHANGED, IN_PLACE, put_function, rule_for
from flexrlhf.imports.settings import JobSettings, Setting
from flexrlhf.imports.translation import Translation

_GROUND_TRUTH = "reward_model.ground_truth"
"""Column of the solution in verl's rows."""
_MANAGERS = ("naive", "dapo", "batch", "prime")


def put_scores(out: Translation, job: JobSettings) -> None:
    """Write where scores are from."""
    switches = [key for key in job.found if key.endswith(("overlong_buffer_cfg.enable", "overlong_buffer.enable"))]
    for key in switches:
        job.passed.setdefault(key, ("what it says is written", False))
    enabled = job.truth("reward.reward_model.enable", "reward_model.enable")
    path = job.named("reward.reward_model.model_path") or job.named("reward_model.model.path")
    function, name = (
        job.get(f"reward.custom_reward_function.{key}", f"custom_reward_function.{key}") for key in ("path", "name")
    )
    if function is None and name is not None:
        job.pass_over("there is no file of it", name.key)
    manager = job.get("reward.reward_manager.name", "reward_model.reward_manager")
    if enabled is not None and path is not None:
        put_model(out, "reward", path)
        job.pass_over("it is written", enabled.key)
        job.pass_over("it has the micro-batches and places of models.all", "reward.reward_model.", "reward_model.")
    elif function is not None and str(function.value).endswith(".py"):
        own = "compute_score" if name is None else name.value
        put_function(out, f"{function.value}:{own}", function, name, needs={"ground_truth": _GROUND_TRUTH})
    else:
        _rule(out, job, function, manager)
    if manager is not None and manager.value not in _MANAGERS:
        out.drop(manager, "a manager of scores that is not here")


def _rule(out: Translation, job: JobSettings, function: Setting | None, manager: Setting | None) -> None:
    """Write the rule that fits the rows best, and the column that it reads."""
    rule = rule_for(out)
    why = "the data's name" if rule == "gsm8k" else "the rows' data_source chooses it in verl"
    out.put("reward", {"rule": rule}, function, manager, why if function is None else IN_PLACE)
    out.drop(function, CHANGED)
    if not job.has("data.custom_cls.path"):
        put_columns(out, {"answer": Setting("verl's rows", _GROUND_TRUTH)})
