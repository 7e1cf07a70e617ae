"""Settings that differ between runs, by the keys of their YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import shown

ABSENT = "-"


@dataclass(frozen=True)
class DifferingSetting:
    """A setting that is not the same in all runs.

    key:     dotted
    values:  one a run; ``-`` where it has no such key
    """

    key: str
    values: tuple[str, ...]


def differences(texts: Sequence[str]) -> list[DifferingSetting]:
    """Return the settings that are not the same in all of the YAML ``texts``, in the order of the first."""
    settings = [dict(_flat(read_yaml(text) or {})) for text in texts]
    keys = dict.fromkeys(key for each in settings for key in each)
    found = [DifferingSetting(key, tuple(each.get(key, ABSENT) for each in settings)) for key in keys]
    return [each for each in found if len(set(each.values)) > 1]


def _flat(setting: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(setting, Mapping) and setting:
        for name, value in setting.items():
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, shown(setting)
