"""Sentences of refusals: each run of refusals/*.yaml is refused with its sentence.

FLEXRLHF_UPDATE_SNAPSHOTS=1 writes the sentences anew; the runs and their order stay.
"""

from __future__ import annotations

import os
import re
from functools import cache

import pytest
from refusal_rows import RefusalRow, all_rows

from flexrlhf.config.setting_list import setting_sections

ROWS = list(all_rows())
UPDATE = os.environ.get("FLEXRLHF_UPDATE_SNAPSHOTS") == "1"
CHOSEN = re.compile("[A-Z]+")
"""Part of a key for which a user chooses a name, such as ``ROLE``."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_run_is_refused_with_this_sentence(row: RefusalRow) -> None:
    found = row.found()
    assert found, "nothing refuses this run"
    check_form(found)
    if UPDATE:
        row.write(found)
    else:
        assert found == row.sentence


def check_form(sentence: str) -> None:
    """All sentences begin with the key, which exists or is called unknown, and are one line and one sentence."""
    assert "\n" not in sentence
    assert not re.search(r"\. [A-Z]", sentence)
    key = re.match(r"[\w.-]+", sentence)
    assert sentence.startswith("unknown key ") or (key is not None and is_setting(key[0])), "it begins with no key"


def is_setting(key: str) -> bool:
    """Whether a key names a setting, settings in one, or part of a setting that is a mapping of the user's own."""
    given = tuple(part for part in key.split(".") if not part.isdigit())
    return any(
        all(part == name or CHOSEN.fullmatch(name) for part, name in zip(given, known, strict=False))
        for known in setting_keys()
        if len(given) <= len(known) or not is_section(known)
    )


@cache
def is_section(key: tuple[str, ...]) -> bool:
    return any(len(known) > len(key) and known[: len(key)] == key for known in setting_keys())


@cache
def setting_keys() -> tuple[tuple[str, ...], ...]:
    """Return the keys of all settings, part by part, with the names that the settings of an algorithm are listed by."""
    keys = (each.key(row) for each in setting_sections() for row in each.rows)
    return ("algorithm", "name"), *(tuple(key.split(".")) for key in keys)


def test_no_two_rows_are_of_one_run() -> None:
    names = [(row.base, row.device, row.settings) for row in ROWS]
    assert not [row.name for number, row in enumerate(ROWS) if names[number] in names[:number]]
