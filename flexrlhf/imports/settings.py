"""Settings of a job file: dotted keys with values, which one is read, and which cannot be resolved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from flexrlhf.config.yaml_io import read_yaml

MARK = "\0"
"""Encloses, inside a text, the name of a part whose value the file does not have."""
LARGEST = 1e9
"""Numbers of settings are smaller."""
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Setting:
    """One setting of a job file.

    key:      as the file writes it.
    value:    a number, a text, a list, ..., or a text with marked parts.
    default:  whether it is not in the file but its system's default.
    """

    key: str
    value: Any
    default: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the parts whose values the file does not have."""
        return tuple(dict.fromkeys(re.findall(f"{MARK}([^{MARK}]*){MARK}", str(self.value))))

    @property
    def text(self) -> str:
        """Value in one line, with ``$NAME`` in the place of a part without a value."""
        words = f"[{', '.join(map(str, self.value))}]" if isinstance(self.value, list) else str(self.value)
        if not isinstance(self.value, str):
            words = words.replace("True", "true").replace("False", "false").replace("None", "null")
        return re.sub(f"{MARK}([^{MARK}]*){MARK}", r"$\1", words)


def read_scalar(text: str) -> Any:
    """Return the value of a text as Hydra and YAML 1.2 read it: ``1e-6`` is a number, ``None`` is null."""
    word = text.strip()
    if MARK in word:
        return word
    if word in ("None", "null", ""):
        return None
    if re.fullmatch(_NUMBER, word):
        number = float(word.replace("_", ""))
        return int(number) if re.fullmatch(r"[-+]?[\d_]+", word) else number
    try:
        value = read_yaml(word)
    except yaml.YAMLError:
        return word
    return word if isinstance(value, dict) or value is None else value


@dataclass
class JobSettings:
    """Settings of a job, which a translation reads one by one; the others are reported.

    found:       settings of the file by key.
    defaults:    values of the system where the file has none, by key.
    read:        keys that have been read.
    unresolved:  settings that were read and whose values the file does not have.
    """

    found: Mapping[str, Setting]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    unresolved: dict[str, Setting] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> JobSettings:
        """Return the settings with these values."""
        return cls({key: Setting(key, value) for key, value in values.items()}, defaults or {})

    def has(self, key: str) -> bool:
        """Whether the file has the setting."""
        return key in self.found

    def get(self, *keys: str) -> Setting | None:
        """Return the first of several settings that the file has, else a default; None if there is neither or if it is
        null. If its value is not in the file, or is a list, it is listed and None is returned."""
        key = next((each for each in keys if each in self.found), None)
        if key is None:
            key = next((each for each in keys if each in self.defaults), None)
            return None if key is None else Setting(key, self.defaults[key], default=True)
        self.read.add(key)
        setting = self.found[key]
        if setting.missing or isinstance(setting.value, list | dict):
            self.unresolved[key] = setting
            return None
        return None if setting.value is None else setting

    def listed(self, *keys: str) -> Setting | None:
        """Return the first of several settings that the file has, which may be a list."""
        key = next((each for each in keys if each in self.found), "")
        setting = self.found.get(key)
        if setting is None or setting.missing or not isinstance(setting.value, list):
            return self.get(*keys)
        self.read.add(key)
        return setting if setting.value else None

    def named(self, key: str) -> Setting | None:
        """Return a setting with a path or name whose last part is in the file; the directories may be missing.

        None for an option without a value, which is ``true``.
        """
        setting = self.found.get(key)
        if setting is not None and isinstance(setting.value, bool):
            return None
        if setting is None or MARK in str(setting.value).rpartition("/")[2] or not setting.missing:
            return self.get(key)
        self.read.add(key)
        return Setting(key, setting.text)

    def value(self, *keys: str) -> Any:
        """Return the value of ``get``; None if there is none."""
        setting = self.get(*keys)
        return None if setting is None else setting.value

    def real(self, *keys: str) -> Setting | None:
        """Return a setting with a finite number; None for another, which is listed if it is no number."""
        setting = self.get(*keys)
        if setting is None or isinstance(setting.value, bool):
            return None
        value = read_scalar(setting.value) if isinstance(setting.value, str) else setting.value
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < LARGEST:
            self.unresolved[setting.key] = setting
            return None
        return Setting(setting.key, value, setting.default)

    def number(self, *keys: str) -> Setting | None:
        """Return a setting with a number above 0."""
        setting = self.real(*keys)
        return setting if setting is not None and setting.value > 0 else None

    def is_zero(self, *keys: str) -> Setting | None:
        """Return the first of several settings that the file has, if it is 0 or null."""
        setting = next((self.found[each] for each in keys if each in self.found), None)
        return setting if setting is not None and not setting.value else None

    def count(self, *keys: str) -> Setting | None:
        """Return a setting with a whole number above 0."""
        setting = self.number(*keys)
        if setting is None or int(setting.value) < 1:
            return None
        return Setting(setting.key, int(setting.value), setting.default)

    def truth(self, *keys: str) -> Setting | None:
        """Return a setting that is true; None for one that is not."""
        setting = self.get(*keys)
        return setting if setting is not None and is_true(setting.value) else None

    def starts(self, *prefixes: str) -> bool:
        """Whether the file has settings that begin so."""
        return any(key.startswith(prefixes) for key in self.found)

    def pass_over(self, *prefixes: str) -> None:
        """Count settings that begin so as read."""
        self.read |= {key for key in self.found if key.startswith(prefixes)}

    def unread(self) -> Iterator[tuple[str, Setting]]:
        """Yield the settings of the file that nothing has read, and that are on, with their keys."""
        off = tuple(
            f"{key.rpartition('.')[0]}."
            for key, setting in self.found.items()
            if key.rpartition(".")[2] in ("enabled", "enable") and not is_true(setting.value) and "." in key
        )
        for key, setting in self.found.items():
            if key not in self.read and not _is_off(key, setting.value) and not (off and key.startswith(off)):
                yield key, setting


def _is_off(key: str, value: Any) -> bool:
    """Whether a value says that there is nothing: null, false, 0, an empty list, one rank or turn."""
    one = value == 1 and re.search(r"(size|turns|stages)$", key) is not None
    return value is None or value is False or value in (0, "", "false", "False", [], "none", "disabled", "auto") or one


def is_true(value: Any) -> bool:
    """Whether a value of a file or a command line is true."""
    return value is True or (isinstance(value, str) and value.lower() in ("true", "yes", "1", "on")) or value == 1


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings with their dotted keys; an empty mapping is no leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
