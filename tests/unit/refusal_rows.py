"""Rows of refusals/*.yaml: a base run and settings, and the sentence that refuses them; rows of refused_commands.yaml:
a command line and its sentence."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from small_runs import PPO

from flexrlhf.config.algorithms import ALGORITHMS
from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import read_settings
from flexrlhf.errors import UserError
from flexrlhf.plan import model_checks
from flexrlhf.plan.pipeline import make_plan

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
FOLDER = HERE / "refusals"
COMMANDS = HERE / "refused_commands.yaml"
LISTED = "<ALGORITHMS>", ", ".join(ALGORITHMS)
"""All algorithms, as the files name them and as sentences list them: a new one changes no row."""
LONGEST = 150
"""Characters of a row's name."""
Raw = dict[str, Any]


@dataclass(frozen=True)
class RefusalRow:
    """One row of a file of refusals.

    subject:   the file's name without ending.
    base:      words: at most one configuration (``configs/NAME.yaml`` as ``NAME``; without one, the small PPO run of
               ``small_runs``), and names in ``bases.yaml``.
    settings:  dotted keys and values, set in this order.
    sentence:  without the beginning ``config: `` that all problems of a file without a name have.
    index:     of the row in its file.
    device:    the one that the ranks turn out to have; empty: it is not known yet.
    lacking:   packages that are not installed when the run starts.
    """

    subject: str
    base: str
    settings: Mapping[str, Any]
    sentence: str
    index: int
    device: str = ""
    lacking: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Short text that names the row among all."""
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in self.settings.items())
        words = (self.subject, "" if self.base == "small" else self.base, self.device, *self.lacking)
        return " ".join([*filter(None, words), re.sub('["\\\\]', "", settings)])[:LONGEST]

    def raw(self) -> Raw:
        """Return the run with the settings, as a YAML file would have it."""
        raw = base_run(self.base)
        for key, value in self.settings.items():
            set_in(raw, key, value)
        return raw

    def found(self) -> str:
        """Return the sentence that refuses this run now; empty if nothing does."""
        try:
            plan = make_plan(Spec.parse(self.raw()))
            for device in self.devices:
                model_checks.check_device(plan.placement, plan.shapes, device)
            if self.lacking:
                with patch.object(model_checks, "find_spec", self._find_spec):
                    model_checks.check_packages(plan.placement)
        except UserError as error:
            return str(error).removeprefix("config: ")
        return ""

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of the ranks, before it another, on which nothing refuses the run."""
        return ("cpu" if self.device == "cuda" else "cuda", self.device) if self.device else ()

    def _find_spec(self, module: str) -> ModuleSpec | None:
        return None if module in self.lacking else find_spec(module)

    def write(self, sentence: str) -> None:
        """Replace the sentence of this row in its file."""
        write_sentence(FOLDER / f"{self.subject}.yaml", self.index, sentence)


@dataclass(frozen=True)
class CommandRow:
    """One row of refused_commands.yaml.

    command:   as a shell has it; PLAN at its begin stands for each command that plans.
    files:     text by name, next to those that every command finds.
    sentence:  on stderr, without the program's name.
    index:     of the row in its file.
    """

    command: str
    files: Mapping[str, str]
    sentence: str
    index: int

    PLANNING: ClassVar[tuple[str, ...]] = ("plan", "run --dry-run", "run")

    @property
    def lines(self) -> tuple[str, ...]:
        """The commands that the row stands for, one that changes from row to row first."""
        turn = self.index % len(self.PLANNING)
        planning = (*self.PLANNING[turn:], *self.PLANNING[:turn]) if self.command.startswith("PLAN ") else ("",)
        return tuple(self.command.replace("PLAN", command, 1) if command else self.command for command in planning)

    def write(self, sentence: str) -> None:
        """Replace the sentence of this row in its file."""
        write_sentence(COMMANDS, self.index, sentence)


def write_sentence(path: Path, index: int, sentence: str) -> None:
    """Replace the sentence of the row with this index, whatever other processes write there."""
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.read().splitlines(keepends=True)
        numbers = [number for number, line in enumerate(lines) if line.startswith("  sentence: ")]
        written = sentence.replace(*reversed(LISTED))
        lines[numbers[index]] = f"  sentence: {json.dumps(written, ensure_ascii=False)}\n"
        file.seek(0)
        file.write("".join(lines))
        file.truncate()


def command_rows() -> Iterator[CommandRow]:
    """Yield the rows of command lines."""
    for index, row in enumerate(read_settings(COMMANDS.read_text())):
        yield CommandRow(row["command"], row.get("files", {}), row["sentence"].replace(*LISTED), index)


def all_rows() -> Iterator[RefusalRow]:
    """Yield the rows of all files, in their order."""
    for file in sorted(FOLDER.glob("*.yaml")):
        if file.stem != "bases":
            index = 0
            for base, rows in read_settings(file.read_text()).items():
                for row in rows:
                    more = {"device": row.get("device", ""), "lacking": tuple(row.get("lacking", ()))}
                    yield RefusalRow(file.stem, base, row["set"], row["sentence"].replace(*LISTED), index, **more)
                    index += 1


def base_run(words: str) -> Raw:
    """Return the run that words stand for: a copy."""
    raw: Raw = {}
    for number, word in enumerate(words.split()):
        parts = _parts()
        if number == 0:
            raw = deepcopy(_config(word) if word not in parts and word != "small" else _small())
        for key, value in parts.get(word, {}).items():
            set_in(raw, key, deepcopy(value))
    return raw


def _small() -> Raw:
    return PPO | {"placement": None, "cluster": {"devices": 2}}


@cache
def _config(name: str) -> Raw:
    raw: Raw = read_settings((CONFIGS / f"{name}.yaml").read_text())
    return raw


@cache
def _parts() -> dict[str, Raw]:
    parts: dict[str, Raw] = read_settings((FOLDER / "bases.yaml").read_text())
    return parts


def set_in(raw: Raw, key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        raw = raw.setdefault(parent, {})
    raw[last] = value
