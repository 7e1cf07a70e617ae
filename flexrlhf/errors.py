"""Errors that a user can fix: one sentence with the name, the value found and the nearest valid one.

The command line prints these without a traceback; everything else keeps its traceback, because it is a bug.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

LONGEST = 1500
"""Characters of a sentence that is shown."""


NEAR = 0.78
"""Least similarity (difflib) of a name and one that it may be a misspelling of."""
LEAST_PART = 4
"""Letters of a name that may be a part of another."""


_EXHAUSTED = (
    *("DefaultCPUAllocator", "out of memory", "Cannot allocate memory"),
    *("failed to map segment", "can't start new thread"),
)
"""Parts of messages about exhausted memory: of torch, the system, its loader of libraries, Python."""


class UserError(ValueError):
    """Problem of a setting, a file or a data row, which the user can fix."""


@dataclass(frozen=True)
class Alternative:
    """Change of a setting with which a refused run is planned.

    section:  of the YAML, such as ``models.actor``.
    setting:  its name there.
    values:   any of which works.
    is_all:   whether no other value works, whatever the other settings of the section are.
    along:    settings of the section that change with it, and their values.
    """

    section: str
    setting: str
    values: tuple[object, ...]
    is_all: bool = False
    along: tuple[tuple[str, object], ...] = ()

    def text_in(self, section: str, setting: str) -> str:
        """Return the change in words, at the end of a sentence that begins with a setting."""
        values = either(map(plain_value, self.values))
        if self.along:
            values += " with " + either((f"{name} {plain_value(value)}" for name, value in self.along), "and")
        if (self.section, self.setting) == (section, setting):
            return values
        return f"{self.setting} {values}" if self.section == section else f"{self.section}.{self.setting}: {values}"


class SettingError(UserError):
    """Setting that does not go with its engine, sizes, devices or other settings.

    section:   of the YAML, such as ``models.actor``.
    setting:   its name there.
    reason:    sentence behind the key.
    alternatives:  changes of settings that the sentence names, each of which is one that works; empty: unknown.
    """

    def __init__(
        self, sentence: str, section: str = "", setting: str = "", alternatives: tuple[Alternative, ...] = ()
    ) -> None:
        super().__init__(sentence)
        self.section, self.setting, self.alternatives = section, setting, alternatives
        self.reason = sentence.removeprefix(f"{section}.{setting}: ")

    @classmethod
    def of(cls, section: str, setting: str, reason: str, alternatives: tuple[Alternative, ...] = ()) -> Self:
        """Return the error whose sentence begins with the key of the setting."""
        return cls(f"{section}.{setting}: {reason}", section, setting, alternatives)

    @property
    def allowed(self) -> tuple[object, ...]:
        """The values of the setting that alone work, whatever the others of the section are; empty: unknown."""
        own = (each for each in self.alternatives if (each.section, each.setting) == (self.section, self.setting))
        return next((each.values for each in own if each.is_all), ())


class RunStopped(Exception):
    """End of a run that one sentence explains, too, though no setting is wrong.

    A wait without end, a process that died, numbers that disagree.
    """


class RankFailure(RuntimeError):
    """End of a job by a rank that failed; the message names the rank.

    is_final: whether a user must mend its cause, so that another attempt would fail as well.
    """

    def __init__(self, sentence: str, is_final: bool = False) -> None:
        super().__init__(sentence)
        self.is_final = is_final


class Interrupted(RuntimeError):
    """End of a job by a signal."""

    def __init__(self, sentence: str = "stopped; all ranks have ended") -> None:
        super().__init__(sentence)


class Preempted(RuntimeError):
    """End of a job by a request to save and end; the message names what goes on with it."""


def is_exhaustion(error: BaseException) -> bool:
    """Return whether an error is exhausted memory, which libraries report by many classes."""
    return isinstance(error, MemoryError) or any(part in str(error) for part in _EXHAUSTED)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the ``known`` name closest to ``name``, or an empty string."""
    meant = near_name(name, known)
    return "" if meant is None else f" (did you mean {meant!r}?)"


def near_name(name: str, known: Iterable[str]) -> str | None:
    """Return the ``known`` name that ``name`` is a misspelling or a part of; None if no name is really near.

    Paths are compared by their last parts without endings: common folders and endings would make all similar.
    """
    compared = {_compared(other, "/" in name): other for other in known if other != name}
    word = _compared(name, "/" in name)
    swapped = [other for other in compared if sorted(other) == sorted(word)]
    matches = difflib.get_close_matches(word, compared, n=1, cutoff=NEAR) or swapped
    if not matches and len(word) >= LEAST_PART:
        parts = [other for other in compared if word in other or (2 * len(other) >= len(word) and other in word)]
        matches = sorted(parts, key=lambda other: abs(len(other) - len(word)))
    return compared[matches[0]] if matches else None


def some_of(names: Iterable[str], most: int = 8) -> str:
    """Return the names as ``a, b and 3 more``."""
    listed = list(names)
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")


def either(choices: Iterable[object], word: str = "or") -> str:
    """Return the choices as ``1, 2 or 4``. ``word``: between the last two."""
    *most, last = map(str, choices)
    return f"{', '.join(most)} {word} {last}" if most else last


def shown(value: Any) -> str:
    """Return a setting in one line as a YAML file may have it (``null``, not ``None``), texts in quotes."""
    return repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def plain_value(value: object) -> str:
    """Return a setting as a sentence names it: as a YAML file may have it, texts without quotes."""
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else shown(value)


def one_line(text: str) -> str:
    """Return a text that a terminal shows in one line: without its middle where it is long, and with what moves a
    cursor or cannot be encoded as escapes."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    words = " ".join(re.split(r"[\t\r\n]+", text.strip()))
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in words)


def _compared(name: str, is_path: bool) -> str:
    """Return what is compared of a name: its letters and digits in lower case, of a path those of its last part."""
    last = name.rstrip("/").rpartition("/")[2].partition(".")[0] if is_path else name
    return re.sub(r"[-_ ]", "", last.lower())
