"""Settings of a job file: dotted keys with values, which one is read, and which cannot be resolved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import yaml

from flexrlhf.api import UserError, hidden, is_secret_name, read_yaml

EXTRA = "import"
"""Extra that installs the libraries that read job files."""
MARK = "\0"
"""Encloses, inside a text, the name of a part whose value the file does not have."""
LARGEST = 1e9
"""Numbers of settings are smaller."""
LONGEST_NUMBER = 40
"""Characters of a number; longer ones are texts."""
MAX_SETTINGS = 5_000
"""Settings of a job."""
LONGEST_VALUE = 4_000
"""Characters of a value that are kept."""
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


def library(name: str, files: str) -> Any:
    """Return a library that reads ``files``. Raises UserError if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        missing = f"{files} are read by {error.name}, which is not installed"
        raise UserError(f"import: {missing}: pip install 'flexrlhf[{EXTRA}]'") from None


def read_scalar(text: str) -> Any:
    """Return the value of a text as Hydra and YAML 1.2 read it: ``1e-6`` is a number, ``None`` is null."""
    word = text.strip()
    if MARK in word:
        return word
    if word in ("None", "null", ""):
        return None
    if len(word) > LONGEST_NUMBER and re.fullmatch(_NUMBER, word):
        return word
    if re.fullmatch(_NUMBER, word):
        number = float(word.replace("_", ""))
        return int(number) if re.fullmatch(r"[-+]?[\d_]+", word) else number
    try:
        value = read_yaml(word)
    except yaml.YAMLError:
        return word
    return word if isinstance(value, dict) or value is None else value


def check_number(settings: int) -> None:
    """Raise UserError for more settings than any job has."""
    if settings > MAX_SETTINGS:
        raise UserError(f"import: {settings} settings are more than a job has: at most {MAX_SETTINGS} (MAX_SETTINGS)")


def _clean(value: Any, *names: str) -> Any:
    """Return a value without secrets and halves of surrogate pairs."""
    if isinstance(value, list | tuple):
        return [_clean(each, *names) for each in value]
    if isinstance(value, str):
        value = value[:LONGEST_VALUE].encode("utf-8", "replace").decode()
    return hidden(value, next(filter(is_secret_name, names), names[0]))


@dataclass
class JobSettings:
    """Settings of a job, which a translation reads one by one; the others are reported.

    found:       settings of the file by key.
    defaults:    values of the system where the file has none, by key.
    read:        keys that have been read.
    unresolved:  settings that were read and whose values the file does not have, or that cannot be used.
    why:         why not, by key; missing parts of a value need no reason.
    passed:      keys that need no counterpart of their own → reason, and whether they change a run.
    """

    found: Mapping[str, Setting]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    unresolved: dict[str, Setting] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    passed: dict[str, tuple[str, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Hide secrets, which nothing may write, and half surrogate pairs, which nothing can write.

        Raises UserError for more settings than any job has.
        """
        check_number(len(self.found))
        self.found = {key: Setting(each.key, _clean(each.value, key, each.key)) for key, each in self.found.items()}

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
        if setting.missing:
            self.unresolved[key] = setting
            return None
        if setting.value in ([], {}):
            return None
        if isinstance(setting.value, list | dict):
            self.turn_down(setting, "one value")
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

    def turn_down(self, setting: Setting, expected: str) -> None:
        """List a setting whose value cannot be used; a default of the system is not listed."""
        if not setting.default:
            self.unresolved[setting.key] = setting
            self.why[setting.key] = f"expected {expected}: it is as if the file did not have it"

    def real(self, *keys: str) -> Setting | None:
        """Return a setting with a finite number; None for another value, which is listed."""
        setting = self.get(*keys)
        if setting is None or setting.value is False:
            return None
        value = read_scalar(setting.value) if isinstance(setting.value, str) else setting.value
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < LARGEST:
            self.turn_down(setting, "a number")
            return None
        return Setting(setting.key, value, setting.default)

    def number(self, *keys: str) -> Setting | None:
        """Return a setting with a number above 0; None for another value, which is listed if it does not say that there
        is nothing (``ZERO_IS_OFF``, ``NO_LIMIT``)."""
        setting = self.real(*keys)
        if setting is None or setting.value > 0:
            return setting
        if not is_off(setting.key, setting.value):
            self.turn_down(setting, "a number above 0")
        return None

    def is_zero(self, *keys: str) -> Setting | None:
        """Return the first of several settings that the file has, if it is 0 or null."""
        setting = next((self.found[each] for each in keys if each in self.found), None)
        return setting if setting is not None and not setting.value else None

    def count(self, *keys: str) -> Setting | None:
        """Return a setting with a whole number above 0; None for another value, which is listed as in ``number``."""
        setting = self.number(*keys)
        if setting is None:
            return None
        if int(setting.value) != setting.value:
            self.turn_down(setting, "a whole number")
            return None
        return Setting(setting.key, int(setting.value), setting.default)

    def known(self, key: str) -> Setting:
        """Return the ``count`` of a setting that has a default; the default if the file's value is not in it."""
        return self.count(key) or Setting(key, self.defaults[key], default=True)

    def truth(self, *keys: str) -> Setting | None:
        """Return the setting if it is true, else None; a value that is neither true nor false is listed as refused."""
        setting = self.get(*keys)
        if setting is None or is_true(setting.value):
            return setting
        if not is_false(setting.value):
            self.turn_down(setting, "true or false")
        return None

    def starts(self, *prefixes: str) -> bool:
        """Whether the file has settings that begin so."""
        return any(key.startswith(prefixes) for key in self.found)

    def pass_over(self, why: str, *prefixes: str, matters: bool = False) -> None:
        """Give the reason why settings that begin so need no counterpart; those with one keep it."""
        for key in self.found:
            if key.startswith(prefixes):
                self.passed.setdefault(key, (why, matters))

    def in_section_that_is_off(self, key: str) -> str | None:
        """Return the switch of a setting's section, or of one around it, if it is off."""
        parents = key.split(".")[:-1]
        names = (".".join([*parents[:end], name]) for end in range(len(parents), 0, -1) for name in _SWITCHES)
        return next((each for each in names if each in self.found and is_false(self.found[each].value)), None)


_SWITCHES = ("enabled", "enable")
ZERO_IS_OFF = re.compile(
    r"len|dim|lag|bias|\w*(coeff?|coefficient|rank|lora_dim|lora_r|warmup\w*|dropout\w*|penalty|penalty_factor|decay|"
    r"freez\w*|smoothing|buffer_len\w*|age_steps|staleness\w*|kl_ctl|min_lr\w*|start_step)"
)
"""Keys of settings that are off where they are 0."""
NO_LIMIT = re.compile(r"\w*(steps|top_k|limit|fsdp_size|max_samples|max_\w*batches|epochs)")
"""Keys of settings without a limit where they are -1."""


def is_off(key: str, value: Any) -> bool:
    """Whether a value says that there is nothing: null, false, an empty list, one rank or turn, 0 of a penalty."""
    name = key.lstrip("-").rpartition(".")[2]
    if isinstance(value, int | float) and not isinstance(value, bool):
        is_one = value == 1 and re.search(r"(size|turns|stages)$", name) is not None
        is_none = value == 0 and ZERO_IS_OFF.fullmatch(name) is not None
        return is_one or is_none or (value == -1 and NO_LIMIT.fullmatch(name) is not None)
    return value is None or value in ([], {}) or is_false(value)


def is_false(value: Any) -> bool:
    """Whether a value of a file or a command line is false, or names nothing."""
    words = ("", "false", "no", "off", "0", "none", "null", "disabled")
    return value is None or value is False or value == 0 or (isinstance(value, str) and value.lower() in words)


def is_true(value: Any) -> bool:
    """Whether a value of a file or a command line is true."""
    return value is True or (isinstance(value, str) and value.lower() in ("true", "yes", "1", "on")) or value == 1


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings with their dotted keys; an empty mapping is one, too."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
