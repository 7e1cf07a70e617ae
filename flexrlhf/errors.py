"""Errors that a user can fix: one sentence with the name, the value found and the nearest valid one.

The command line prints these without a traceback; everything else keeps its traceback, because it is a bug.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

LONGEST = 1500
"""Characters of a sentence that is shown."""


class UserError(ValueError):
    """Problem of a setting, a file or a data row, which the user can fix."""


class RunStopped(Exception):
    """End of a run that one sentence explains, too, though no setting is wrong.

    A wait without end, a process that died, numbers that disagree.
    """


class RankFailure(RuntimeError):
    """End of a job by a rank that failed; the message names the rank."""


class Interrupted(RuntimeError):
    """End of a job by a signal."""


class Preempted(RuntimeError):
    """End of a job by a request to save and end; the message names what goes on with it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the ``known`` name closest to ``name``, or an empty string.

    Paths are compared by their last parts (their common folders would make all similar), and have to be closer.
    """
    is_path = "/" in name
    compared = {_last_part(other) if is_path else other: other for other in known}
    matches = difflib.get_close_matches(
        _last_part(name) if is_path else name, compared, n=1, cutoff=0.75 if is_path else 0.5
    )
    return f" (did you mean {compared[matches[0]]!r}?)" if matches else ""


def either(choices: Iterable[object]) -> str:
    """Return the choices as ``1, 2 or 4``."""
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last


def shown(value: Any) -> str:
    """Return a setting in one line as a YAML file may have it (``null``, not ``None``), texts in quotes."""
    return repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def one_line(text: str) -> str:
    """Return a text that a terminal shows in one line: without its middle where it is long, and with what moves a
    cursor or cannot be encoded as escapes."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    words = " ".join(re.split(r"[\t\r\n]+", text.strip()))
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in words)


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
