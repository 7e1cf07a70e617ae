"""Settings that numbers depend on and that differ between two runs, as lines for a person."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from flexrlhf.config.number_settings import SettingDifference, differences
from flexrlhf.errors import shown
from flexrlhf.text import shortened

WIDEST = 110
"""Characters of a line."""
MOST_CHARACTERS = 80
"""Characters of a value."""


def setting_lines(difference: SettingDifference) -> Iterator[str]:
    """Yield the lines of one setting, of lists of mappings those of each key that differs."""
    for each in _inner(difference):
        text = f"a setting that numbers depend on differs: {each.key} is {_text(each.first)} and {_text(each.second)}"
        yield from textwrap.wrap(
            text, WIDEST, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )


def _inner(difference: SettingDifference) -> Iterator[SettingDifference]:
    """Yield the differences within two lists of mappings of other lengths, by place."""
    first, second = (_by_place(value) for value in (difference.first, difference.second))
    if first is None or second is None:
        yield difference
    else:
        yield from differences(first, second, difference.key)


def _by_place(value: Any) -> dict[str, Any] | None:
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return {str(place): item for place, item in enumerate(value)}
    return None


def _text(value: Any) -> str:
    """Return a value; of a mapping, which the other run lacks, what is set in it."""
    return shown(_set(value)) if isinstance(value, dict) else shortened(shown(value), MOST_CHARACTERS)


def _set(value: Any) -> Any:
    """Return a value without the keys that are null or empty in its mappings."""
    if not isinstance(value, dict):
        return value
    return {key: _set(item) for key, item in value.items() if item is not None and item != [] and item != {}}
