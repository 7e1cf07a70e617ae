"""Run of a verl job: its length, name, seed, loggers, evaluation and checkpoints; and the columns of its rows."""

from __future__ import annotations

from flexrlhf.imports.parts import names_of
from flexrlhf.imports.row_parts import put_columns
from flexrlhf.imports.run_parts import (
    interval,
    named_loggers,
    put_checkpoints,
    put_evaluation,
    put_length,
    put_loggers,
    put_run_name,
    put_seed,
)
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


def put_run(out: Translation, job: JobSettings, default: str) -> None:
    """Write the length of the run, and its name, seed, loggers, evaluation and checkpoints."""
    put_length(
        out,
        job.count("trainer.total_training_steps"),
        job.number("trainer.total_epochs", "rollout.total_epochs"),
        default,
    )
    put_run_name(out, job, "trainer.experiment_name")
    put_seed(out, job, *_SEEDS)
    loggers = named_loggers(out, job.listed("trainer.logger"))
    put_loggers(out, job, loggers, {"wandb": {"project": "trainer.project_name"}})
    _put_evaluation(out, job)
    put_checkpoints(out, interval(job, "trainer.save_freq"), interval(job, "trainer.max_actor_ckpt_to_keep"))


def _put_evaluation(out: Translation, job: JobSettings) -> None:
    """Write the evaluation, whose responses are greedy if the file does not say otherwise."""
    every, samples = interval(job, "trainer.test_freq", "rollout.test_freq"), job.get(f"{_R}val_kwargs.do_sample")
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
    put_evaluation(out, job.listed("data.val_files"), every, {} if is_supervised else settings)


def put_supervised_columns(out: Translation, job: JobSettings) -> None:
    """Write the columns of messages, or of a prompt that is a user's turn and its response."""
    put_columns(out, {"messages": job.get("data.multiturn.messages_key", "data.messages_key")})
    for name in ("prompt", "response"):
        outer, inner = job.get(f"data.{name}_key"), job.listed(f"data.{name}_dict_keys")
        keys = [] if inner is None else names_of(inner.value)
        whole = None if outer is None else Setting(outer.key, ".".join([str(outer.value), *keys[:1]]))
        put_columns(out, {name: whole})
        if whole is not None and name == "prompt":
            out.put("data.chat", "always", whole)
        job.pass_over("of its column", *([f"data.{name}_dict_keys"] if keys else []))
