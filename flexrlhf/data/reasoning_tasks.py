"""Rows that reasoning-gym generates: ``reasoning-gym:TASK``, with settings of the task as ``?NAME=VALUE&NAME=VALUE``.

A process of its own generates them. Some tasks iterate over sets of texts or use global random numbers, so their rows
depend on the process, and ranks would read different ones. In this process hashes and random numbers are fixed.

| column   | value                                                              |
|----------|--------------------------------------------------------------------|
| question | the prompt                                                         |
| answer   | a solution; null for a task that has many                          |
| task     | name of the task                                                   |
| settings | its settings, as JSON                                              |
| entry    | the library's entry, as a Python literal: a scorer compares tuples |
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from typing import Any

import yaml

from flexrlhf.config.code_loading import python_command
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import UserError, nearest, shown

PREFIX = "reasoning-gym:"
SECONDS = 600.0
"""Longest time that rows may take."""


def is_task(text: str) -> bool:
    """Whether a path names a task."""
    return text.startswith(PREFIX)


def is_installed() -> bool:
    """Whether the library that generates rows is installed."""
    return find_spec("reasoning_gym") is not None


def read_task(text: str) -> list[Any]:
    """Return the rows of a task: the same ones in every process. Raises UserError."""
    if not is_installed():
        raise UserError(f"{text}: needs reasoning-gym, which is not installed: pip install 'flexrlhf[reasoning]'")
    return [json.loads(line) for line in _generated(text).splitlines()]


@cache
def _generated(text: str) -> str:
    """Return the rows of a task as lines of JSON, once in a process: planning reads them several times."""
    name, _, query = text.removeprefix(PREFIX).partition("?")
    settings = {"seed": 0, **dict(_setting(text, part) for part in query.split("&") if part)}
    if not isinstance(settings["seed"], int):
        raise UserError(f"{text}: seed must be an integer, found {shown(settings['seed'])}")
    try:
        done = subprocess.run(
            python_command(__name__, name, json.dumps(settings, default=str)),
            env={**os.environ, "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{text}: no rows after {SECONDS:g} s; use a smaller size") from None
    if done.returncode:
        raise UserError(f"{text}: {(done.stderr.strip() or f'exit code {done.returncode}').splitlines()[-1]}")
    return done.stdout


def _setting(text: str, part: str) -> tuple[str, Any]:
    name, equals, value = part.partition("=")
    if not equals:
        raise UserError(f"{text}: expected NAME=VALUE after ?, found {part!r}")
    try:
        return name, read_yaml(value)
    except yaml.YAMLError as error:
        raise UserError(f"{text}: the value of {name} is not YAML: {error}") from None


# --- the process that generates


def _generate(name: str, settings: dict[str, Any]) -> list[str]:
    """Return the rows as JSON. Ends the process with a sentence for a task or setting that does not exist."""
    import random
    from dataclasses import fields

    import numpy as np
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        sys.exit(f"reasoning-gym has no task {name!r}{nearest(name, DATASETS)}")
    known = [each.name for each in fields(DATASETS[name][1])]
    for setting in settings:
        if setting not in known:
            sys.exit(f"{name} has no setting {setting!r}{nearest(setting, known)}; it has {', '.join(known)}")
    random.seed(settings["seed"])
    np.random.seed(settings["seed"] % 2**32)
    try:
        entries = list(create_dataset(name, **settings))
    except (AssertionError, TypeError, ValueError) as error:
        sys.exit(f"{name} refuses its settings: {error}")
    common = {"task": name, "settings": json.dumps(settings)}
    rows = [{"question": each["question"], "answer": each["answer"], **common} for each in entries]
    return [json.dumps({**row, "entry": repr(_plain(each))}) for row, each in zip(rows, entries, strict=True)]


def _plain(value: Any) -> Any:
    """Return a value of which ``repr`` is a literal: numpy's become Python's, other objects texts."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | set):
        return type(value)(map(_plain, value))
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    value = value.tolist() if hasattr(value, "tolist") else value
    return value if value is None or isinstance(value, str | int | float | complex) else str(value)


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        lines = _generate(sys.argv[1], json.loads(sys.argv[2]))
    sys.stdout.writelines(f"{line}\n" for line in lines)
