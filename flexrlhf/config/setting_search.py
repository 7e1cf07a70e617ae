"""Search in the list of settings, as text for a terminal and as words to complete."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from flexrlhf.config.algorithms import ALGORITHMS
from flexrlhf.config.setting_list import SettingRow, SettingSection, setting_sections
from flexrlhf.errors import UserError, nearest

NARROWEST, WIDEST = 40, 120
"""Columns of a text."""


def find_settings(text: str | None) -> list[SettingSection]:
    """Return the sections, with those of their settings that ``text`` finds. Raises UserError where it finds none.

    text:  a key or the start of one, an algorithm, or a part of a key; None: all settings.
    """
    sections = list(setting_sections())
    if text is None:
        return sections
    if text in ALGORITHMS:
        return [section for section in sections if text in section.algorithms]
    found = [_those(section, text.strip("."), _is_below) for section in sections]
    if not any(section.rows for section in found):
        found = [_those(section, text.lower(), _has_part) for section in sections]
    found = [section for section in found if section.rows]
    if not found:
        parts = dict.fromkeys(part for section in sections for row in section.rows for part in _parts(section, row))
        hint = nearest(text.rpartition(".")[2], [*parts, *ALGORITHMS])
        raise UserError(f"settings {text}: no such setting{hint}; flexrlhf settings lists all of them")
    return found


def _those(section: SettingSection, text: str, is_found: Callable[[str, str], bool]) -> SettingSection:
    return replace(section, rows=tuple(row for row in section.rows if is_found(section.key(row), text)))


def _is_below(key: str, text: str) -> bool:
    """Whether ``text`` is ``key`` or the start of it, part by part."""
    parts, given = key.split("."), text.split(".")
    return len(given) <= len(parts) and all(map(_is_same, parts, given))


def _is_same(part: str, given: str) -> bool:
    """Whether a part of a key is the given one; a role or another name of the user's own is in capitals."""
    return part in (given, "ROLE", "MODEL", "OPERATOR")


def _has_part(key: str, text: str) -> bool:
    return text in key.lower()


def _parts(section: SettingSection, row: SettingRow) -> list[str]:
    return section.key(row).split(".")


def format_sections(sections: Sequence[SettingSection], width: int) -> str:
    """Return the settings as text of at most ``width`` columns, with each key on a line of its own."""
    columns = max(NARROWEST, min(width, WIDEST))
    return "\n".join(line for section in sections for line in _lines(section, columns)).rstrip()


def _lines(section: SettingSection, width: int) -> Iterator[str]:
    yield f"# {section.title.replace('`', '')}"
    if section.algorithms:
        listed = f"{', '.join(section.algorithms)}"
        yield from _wrapped("all algorithms" if len(section.algorithms) == len(ALGORITHMS) else listed, width, "#   ")
    for row in section.rows:
        default = f"default {row.default}" if row.default else "required"
        yield section.key(row)
        yield from _wrapped(f"{row.values.replace('`', '')}; {default}", width, "    ")
        if row.meaning:
            yield from _wrapped(row.meaning.replace("`", ""), width, "    ")
    yield ""


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def keys_from(start: str) -> Iterator[str]:
    """Yield what the dotted key that begins with ``start`` may go on with, up to its next part.

    Names that a user chooses are those of the usual roles.
    """
    scope, colon, key = start.rpartition(":")
    typed = key.split(".")
    found: dict[str, None] = {}
    for section in setting_sections():
        for row in section.rows:
            parts = section.key(row).split(".")
            if len(parts) >= len(typed) and all(map(_is_same, parts, typed[:-1])):
                ends = len(parts) == len(typed)
                for name in _ROLES if parts[len(typed) - 1] == "ROLE" else (parts[len(typed) - 1],):
                    if name.startswith(typed[-1]) and not re.fullmatch("[A-Z]+", name):
                        found[".".join([*typed[:-1], name]) + ("=" if ends else ".")] = None
    for each in found:
        if not (each.endswith("=") and f"{each[:-1]}." in found):
            yield f"{scope}{colon}{each}"


_ROLES = ("all", "actor", "critic", "cost_critic", "ref", "reward", "cost")
