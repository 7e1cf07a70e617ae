"""Parts of a YAML on rows: columns by the names that they have here, and uses of rows that have no counterpart."""

from __future__ import annotations

import re
from collections.abc import Mapping

from flexrlhf.imports.settings import JobSettings, Setting, is_true
from flexrlhf.imports.translation import Translation

_TEMPLATE_VALUES = re.compile(r"chat_template_kwargs|(enable|disable)_thinking(?!_)")
_ORDER = re.compile(r"(^|\.)(data|train_dataset)\.(\w+\.)?shuffle$|^shuffle_dataset$")
_IN_ROWS = "variables of a chat template are in the rows' column chat_template_kwargs: docs/data.md"


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
