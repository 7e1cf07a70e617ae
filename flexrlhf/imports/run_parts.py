"""Parts of a YAML on the run as a whole: its length, name, seed, loggers, evaluation, checkpoints, and its rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flexrlhf.api import LOGGERS
from flexrlhf.imports.parts import names_of
from flexrlhf.imports.settings import JobSettings, Setting, is_true
from flexrlhf.imports.translation import Translation

_NO_LOGGERS = ("none", "no", "null", "console", "file", "print")
"""Loggers that need no line: metrics are on the terminal and in ``metrics.jsonl`` in any case."""
OTHER_LOGGER = f"loggers here are {', '.join(LOGGERS)}"
AT_STEPS = "it is counted in steps here"
_TEMPLATE_VALUES = re.compile(r"chat_template_kwargs|(enable|disable)_thinking(?!_)")
_ORDER = re.compile(r"(^|\.)(data|train_dataset)\.(\w+\.)?shuffle$|^shuffle_dataset$")
_IN_ROWS = "variables of a chat template are in the rows' column chat_template_kwargs: docs/data.md"


def put_length(
    out: Translation, steps: Setting | None, epochs: Setting | None, default: str, steps_count_alone: bool = False
) -> None:
    """Write the length of a run: its steps, or passes over its data if it has no number of steps.

    default:            length that the system has if the file has none.
    steps_count_alone:  whether epochs next to steps mean nothing; else the run ends there with the first of both.
    """
    if steps is None and "steps" not in out.lines:
        if epochs is None:
            out.note(f"the length of the run is not in the file ({out.system}'s default: {default}): here 100 steps")
        else:
            whole = int(epochs.value) if int(epochs.value) == epochs.value else float(epochs.value)
            out.put("epochs", whole, epochs)
        return
    out.put_same("steps", steps)
    if epochs is not None and not steps_count_alone:
        out.note(f"the run ends with its steps; there {epochs.key}={epochs.text} would end it, if that is earlier")
    out.drop(epochs, "steps end the run", matters=False)


def interval(job: JobSettings, *keys: str) -> Setting | None:
    """Return the steps between two of something; None where it is off, which systems write as -1 or 0."""
    setting = next((job.found[key] for key in keys if job.has(key)), None)
    if setting is not None and setting.value in (-1, 0):
        job.pass_over("it is off", *keys)
        return None
    return job.count(*keys)


def put_run_name(out: Translation, job: JobSettings, *keys: str) -> None:
    """Write the name of the run, if the file has all of it."""
    setting = next((job.found[key] for key in keys if _is_text(job.found.get(key))), None)
    name = "" if setting is None else re.sub(r"[^A-Za-z0-9._-]+", "-", setting.value).strip("-._")
    if name and setting is not None:
        job.read.add(setting.key)
        out.put("name", name[:128], setting)


def _is_text(setting: Setting | None) -> bool:
    """Whether a setting is a text of the file, without control characters."""
    return (
        setting is not None and isinstance(setting.value, str) and setting.value.isprintable() and not setting.missing
    )


def put_seed(out: Translation, job: JobSettings, *keys: str) -> None:
    """Write the seed: the first of several. Others with other values are listed."""
    seeds = [each for key in keys if job.has(key) and (each := job.real(key)) is not None]
    seeds = [each for each in seeds if each.value >= 0 and int(each.value) == each.value]
    if seeds:
        same = [each for each in seeds if each.value == seeds[0].value]
        out.put("seed", int(seeds[0].value), *same)
        for each in seeds:
            if each not in same:
                out.drop(each, "one seed is of the order of rows, of sampling and of random weights: seed")


def named_loggers(out: Translation, setting: Setting | None) -> dict[str, Setting]:
    """Return the loggers that a list names, each with it; others are listed."""
    found = {}
    for name in [] if setting is None else names_of(setting.value):
        if name in LOGGERS and setting is not None:
            found[name] = setting
        elif name not in _NO_LOGGERS and setting is not None:
            out.drop(Setting(setting.key, name), OTHER_LOGGER, matters=False)
    return found


def put_loggers(
    out: Translation, job: JobSettings, names: Mapping[str, Setting | None], keys: Mapping[str, Mapping[str, str]]
) -> None:
    """Write loggers.

    names:  logger → the setting that switches it on, or None. Its value may be a key, which is not written.
    keys:   logger → its settings here → keys of the file.
    """
    found: list[dict[str, Any]] = []
    sources: list[Setting] = []
    for name, switch in names.items():
        if switch is None:
            continue
        own = {key: job.found[each] for key, each in keys.get(name, {}).items() if _is_text(job.found.get(each))}
        own = {key: each for key, each in own.items() if _is_valid(key, each.value)}
        job.read |= {each.key for each in own.values()}
        found.append({"name": name, **{key: each.value for key, each in own.items()}})
        sources += [switch if isinstance(switch.value, list) else Setting(switch.key, name), *own.values()]
    if found:
        out.put("loggers", found, *sources)


def _is_valid(key: str, value: str) -> bool:
    """Whether a logger here takes a value of a setting: no user or password in an address."""
    if key == "tracking_uri":
        return "@" not in value
    return bool(value) and (key != "mode" or value in ("online", "offline"))


def put_evaluation(
    out: Translation, path: Setting | None, every: Setting | None, settings: Mapping[str, Setting | None]
) -> None:
    """Write the evaluation on rows of its own.

    path:      their file, or files, of which the first is taken.
    every:     steps between two; None: one, after the last step.
    settings:  further settings here, by name.
    """
    files = [] if path is None else names_of(path.value)
    if path is None or not files:
        return
    if len(files) > 1:
        out.drop(Setting(path.key, files[1:]), "an evaluation has one file", matters=False)
    out.put("eval.path", files[0], path)
    for name, setting in {"every": every, **settings}.items():
        out.put_same(f"eval.{name}", setting)


def check_evaluation(out: Translation) -> None:
    """Leave out an evaluation that would sample from a model that Megatron trains, which does not generate here."""
    samples = out.value("algorithm.samples_per_prompt") is not None or out.value("rollout.engine") is not None
    if samples and "eval.path" in out.lines and out.value("models.all.engine") == "megatron":
        why = "an evaluation samples from the trained copy, which Megatron does not here: eval with engine torch"
        for key in [key for key in out.lines if key.startswith("eval.")]:
            value, source = out.lines.pop(key)
            for part in source.split(", "):
                if not part.endswith("default)"):
                    out.drop(Setting(part.partition("=")[0], value), why, matters=False)


def put_checkpoints(out: Translation, every: Setting | None, keep: Setting | None) -> None:
    """Write the checkpoints that a run goes on from, if there are some."""
    if every is not None:
        out.put_same("checkpoint.every", every)
        out.put_same("checkpoint.keep_last", keep)


def put_columns(out: Translation, columns: Mapping[str, Setting | None]) -> None:
    """Write columns of the rows under the names that forms and scores have here."""
    found = {name: each for name, each in columns.items() if each is not None}
    if found:
        values = {name: str(each.value) for name, each in found.items() if str(each.value) != name}
        out.put("data.columns", {**(out.value("data.columns") or {}), **values}, *found.values())


def drop_uses_of_rows(out: Translation, job: JobSettings) -> None:
    """List variables of a chat template, and rows in the file's order, which change a run though a value may be
    false."""
    for key, setting in job.found.items():
        if _TEMPLATE_VALUES.search(key) and setting.value not in (None, "", {}):
            job.read.add(key)
            out.drop(setting, _IN_ROWS)
        elif _ORDER.search(key) and not setting.missing:
            job.read.add(key)
            out.drop(
                setting, "rows are in a random order, which follows from the seed", matters=not is_true(setting.value)
            )
