"""Run of a verl job: its length, name, seed, loggers, evaluation, checkpoints, columns and scores."""

from __future__ import annotations

from flexrlhf.imports import parts, run_parts, score_parts
from flexrlhf.imports.settings import JobSettings, Setting, is_true
from flexrlhf.imports.translation import Translation

_R = "actor_rollout_ref.rollout."
_SEEDS = (
    "data.seed",
    "trainer.seed",
    "actor_rollout_ref.actor.data_loader_seed",
    "critic.data_loader_seed",
    f"{_R}seed",
    "data.sampler.seed",
)

_GROUND_TRUTH = "reward_model.ground_truth"
"""Column of the solution in verl's rows."""
_MANAGERS = ("naive", "dapo", "batch", "prime")


def put_run(out: Translation, job: JobSettings, default: str) -> None:
    """Write the length of the run, and its name, seed, loggers, evaluation and checkpoints."""
    run_parts.put_length(
        out,
        job.count("trainer.total_training_steps"),
        job.number("trainer.total_epochs", "rollout.total_epochs"),
        default,
    )
    run_parts.put_run_name(out, job, "trainer.experiment_name")
    run_parts.put_seed(out, job, *_SEEDS)
    loggers = run_parts.named_loggers(out, job.listed("trainer.logger"))
    run_parts.put_loggers(out, job, loggers, {"wandb": {"project": "trainer.project_name"}})
    _put_evaluation(out, job)
    run_parts.put_checkpoints(
        out, run_parts.interval(job, "trainer.save_freq"), run_parts.interval(job, "trainer.max_actor_ckpt_to_keep")
    )


def _put_evaluation(out: Translation, job: JobSettings) -> None:
    """Write the evaluation, whose responses are greedy if the file does not say otherwise."""
    every, samples = (
        run_parts.interval(job, "trainer.test_freq", "rollout.test_freq"),
        job.get(f"{_R}val_kwargs.do_sample"),
    )
    before = job.get("trainer.val_before_train")
    if every is None or not job.has("data.val_files"):
        return
    temperature = job.real(f"{_R}val_kwargs.temperature") or Setting(f"{_R}val_kwargs.temperature", 0, default=True)
    if samples is not None and not is_true(samples.value):
        temperature = Setting(samples.key, 0)
    settings = {
        "before": Setting("trainer.val_before_train", before is None or is_true(before.value), before is None),
        "temperature": temperature,
        "samples_per_prompt": job.count(f"{_R}val_kwargs.n") or Setting(f"{_R}val_kwargs.n", 1, default=True),
    }
    is_supervised = out.value("algorithm.name") == "sft"
    run_parts.put_evaluation(out, job.listed("data.val_files"), every, {} if is_supervised else settings)


def put_supervised_columns(out: Translation, job: JobSettings) -> None:
    """Write the columns of messages, or of a prompt that is a user's turn and its response."""
    run_parts.put_columns(out, {"messages": job.get("data.multiturn.messages_key", "data.messages_key")})
    for name in ("prompt", "response"):
        outer, inner = job.get(f"data.{name}_key"), job.listed(f"data.{name}_dict_keys")
        keys = [] if inner is None else parts.names_of(inner.value)
        whole = None if outer is None else Setting(outer.key, ".".join([str(outer.value), *keys[:1]]))
        run_parts.put_columns(out, {name: whole})
        if whole is not None and name == "prompt":
            out.put("data.chat", "always", whole)
        job.pass_over("of its column", *([f"data.{name}_dict_keys"] if keys else []))


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
        parts.put_model(out, "reward", path)
        job.pass_over("it is written", enabled.key)
        job.pass_over("it has the micro-batches and places of models.all", "reward.reward_model.", "reward_model.")
    elif function is not None and str(function.value).endswith(".py"):
        own = "compute_score" if name is None else name.value
        score_parts.put_function(out, f"{function.value}:{own}", function, name, needs={"ground_truth": _GROUND_TRUTH})
    else:
        _rule(out, job, function, manager)
    if manager is not None and manager.value not in _MANAGERS:
        out.drop(manager, "a manager of scores that is not here")


def _rule(out: Translation, job: JobSettings, function: Setting | None, manager: Setting | None) -> None:
    """Write the rule that fits the rows best, and the column that it reads."""
    rule = score_parts.rule_for(out)
    why = "the data's name" if rule == "gsm8k" else "the rows' data_source chooses it in verl"
    out.put("reward", {"rule": rule}, function, manager, why if function is None else score_parts.IN_PLACE)
    out.drop(function, score_parts.CHANGED)
    if not job.has("data.custom_cls.path"):
        run_parts.put_columns(out, {"answer": Setting("verl's rows", _GROUND_TRUTH)})
