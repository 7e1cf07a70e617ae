"""Errors that a user can mend: one sentence with the name, the value found and the nearest that works.

The command line prints these without a traceback; everything else keeps its traceback, because it is our mistake.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A setting, a file or a data row that the user can mend."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known name closest to ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
