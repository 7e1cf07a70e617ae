"""Translation of a job: the lines of a YAML with the settings that they come from, and the settings without a
counterpart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import TextWrapper
from typing import Any

from flexrlhf.api import FoundModel, hidden
from flexrlhf.imports.settings import JobSettings, Setting, is_off, read_scalar

WIDTH = 118
DOT = "\0"
"""In the place of a dot inside one key, such as ``actor.rollout`` of a placement."""
HEAD = "by `flexrlhf import`: behind each line the setting that it is from"
OFF = "off there, or without a value"
"""Why a setting needs no counterpart."""
SECTIONS = ("name", "algorithm", "models", "data", "reward", "steps", "seed", "cluster", "placement", "schedule")
"""Sections in the order of the YAML; others follow."""


@dataclass(frozen=True)
class LeftOut:
    """A setting of the job that the YAML does not have."""

    setting: Setting
    why: str
    matters: bool


@dataclass
class Translation:
    """A job in the words of a YAML.

    system:    whose job it is.
    file:      the file that was read.
    devices:   class of its devices, and where that is from; None: it has none.
    lines:     dotted key → value and comment.
    left_out:  settings without a counterpart.
    notes:     sentences on assumptions.
    sources:   dotted key → keys of the settings that its line follows from.
    """

    system: str
    file: str
    devices: tuple[str, str] | None = None
    lines: dict[str, tuple[Any, str]] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: dict[str, set[str]] = field(default_factory=dict)

    def put(self, key: str, value: Any, *sources: Setting | str | None) -> None:
        """Write a setting of the YAML, with the settings that its value follows from in its comment."""
        parts = [self._source(source, value) for source in sources if source is not None]
        self.lines[key] = (value, ", ".join(dict.fromkeys(parts)))
        self.sources[key] = {_bare(each.key) for each in sources if isinstance(each, Setting)}

    def has_model(self, role: str) -> bool:
        """Whether a model of a role is written."""
        return bool({f"models.{role}.init", f"models.{role}.path"} & set(self.lines))

    def put_real(self, key: str, setting: Setting | None) -> None:
        """Write a setting's number, if there is a setting."""
        if setting is not None:
            self.put(key, float(setting.value), setting)

    def put_same(self, key: str, setting: Setting | None) -> None:
        """Write a setting's value as it is, if there is a setting."""
        if setting is not None:
            self.put(key, setting.value, setting)

    def _source(self, source: Setting | str, value: Any) -> str:
        if isinstance(source, str):
            return source
        shows = str(source.value) != str(value)
        text = source.text if len(source.text) <= 80 else f"{source.text[:77]}..."
        ending = f" ({self.system}'s default)" if source.default else ""
        return source.key + (f"={text}" if shows else "") + ending

    def value(self, key: str) -> Any:
        """Return the value of a line; None if there is none."""
        return self.lines[key][0] if key in self.lines else None

    def known_model(self, role: str) -> FoundModel | None:
        """Return the model of a role if it is known by its name."""
        return FoundModel.known(self.value(f"models.{role}.init"))

    def drop(self, setting: Setting | None, why: str, matters: bool = True) -> None:
        """List a setting that has no counterpart; a default of the system is not listed."""
        if setting is not None and not setting.default:
            self.left_out.append(LeftOut(setting, why, matters))

    def note(self, sentence: str) -> None:
        """Add a sentence on an assumption, once."""
        sentence = hidden(sentence)
        if sentence not in self.notes:
            self.notes.append(sentence)

    def finish(self, job: JobSettings, without_effect: Mapping[str, str], with_effect: Mapping[str, str]) -> None:
        """List each setting of the file that no line follows from and that is not listed yet, with its reason.

        Before, it writes the one that systems have in many places.

        without_effect:  reasons → regular expressions of keys, of settings that change neither results, memory nor
                         time of a step.
        with_effect:     the same of settings that do.
        """
        flags = [job.truth(key) for key in job.found if "full_determinism" in key]
        if sources := [each for each in flags if each is not None]:
            self.put("debug.deterministic", True, *sources)
        reasons = [
            (re.compile("|".join(keys.split())), why, table is with_effect)
            for table in (without_effect, with_effect)
            for why, keys in table.items()
        ]
        listed = set().union(*self.sources.values()) | {_bare(each.setting.key) for each in self.left_out}
        for key, setting in job.found.items():
            if _bare(setting.key) not in listed:
                found = next(((why, matters) for keys, why, matters in reasons if keys.fullmatch(key)), None)
                self.drop(setting, *_reason(job, key, setting, found))

    @property
    def is_whole(self) -> bool:
        """Whether all that changes results, memory or time is translated."""
        return not any(each.matters for each in self.left_out)

    def tree(self) -> dict[str, Any]:
        """Return the settings as a YAML file has them."""
        found: dict[str, Any] = {}
        for key in sorted(self.lines, key=_section):
            *parents, last = key.split(".")
            node = found
            for parent in parents:
                node = node.setdefault(parent.replace(DOT, "."), {})
            node[last] = self.lines[key][0]
        return found

    def text(self) -> str:
        """Return the YAML with comments."""
        lines = [
            f"# {_plain(self.file)}, a job of {self.system}, {HEAD}",
            *self._text_of(self.tree()),
            *self._report("# "),
        ]
        return "\n".join(lines) + "\n"

    def _text_of(self, node: Mapping[str, Any], *parents: str) -> Iterator[str]:
        for name, value in node.items():
            path, start = (*parents, name.replace(".", DOT)), f"{'  ' * len(parents)}{name}:"
            if (key := ".".join(path)) in self.lines:
                comment = _plain(self.lines[key][1])
                yield f"{start} {written(value)}" + (f"  # {comment}" if comment else "")
            else:
                yield start
                yield from self._text_of(value, *path)

    def report(self) -> str:
        """Return what a terminal shows: assumptions, and settings without a counterpart."""
        return "\n".join(self._report("")).strip()

    def _report(self, indent: str) -> Iterator[str]:
        head = {
            True: "No counterpart, with an effect on results, memory or time:",
            False: "No counterpart, without such an effect:",
        }
        if self.notes:
            yield from ("", f"{indent}Assumed:", *(f"{indent}  {_plain(note)}" for note in self.notes))
        for matters in (True, False):
            by_reason: dict[str, list[str]] = {}
            for each in self.left_out:
                if each.matters == matters:
                    shown = each.setting.text if len(each.setting.text) <= 60 else f"{each.setting.text[:57]}..."
                    by_reason.setdefault(each.why, []).append(_plain(f"{each.setting.key}={shown}"))
            if by_reason:
                yield from ("", indent + head[matters])
            for why, listed in by_reason.items():
                is_short = not matters and len(listed) == 1
                yield f"{indent}  {why}: {listed[0]}" if is_short else f"{indent}  {why}:"
                yield from () if is_short else _listed(listed, f"{indent}    ", one_a_line=matters)


def _bare(key: str) -> str:
    """Return a setting's key without the dashes of an option, and without a value behind it."""
    return key.lstrip("-").partition("=")[0]


def _reason(job: JobSettings, key: str, setting: Setting, found: tuple[str, bool] | None) -> tuple[str, bool]:
    """Return why a setting has no line, and whether it changes a run. ``found``: the reason by its key."""
    for each in (key, setting.key):
        if each in job.unresolved:
            names = ", ".join(setting.missing)
            return (f"its value is not in the file: {names}" if names else job.why.get(each, "cannot be read")), True
    if (switch := job.in_section_that_is_off(key)) is not None:
        return f"{switch} is off", False
    if key in job.passed:
        return job.passed[key]
    is_known, off = found is not None or key in job.read, is_off(key, setting.value)
    if off and (is_known or setting.value in (None, "", [], {})):
        return found if found is not None and not found[1] else (OFF, False)
    if found is not None:
        return found
    return ("nothing here follows from its value" if key in job.read else "no counterpart is known"), True


def is_imported(text: str) -> bool:
    """Whether a text is a translation, which another may replace."""
    return HEAD in text.partition("\n")[0]


def _section(key: str) -> int:
    """Return the place of a setting's section in the YAML."""
    name = key.partition(".")[0]
    return SECTIONS.index(name) if name in SECTIONS else len(SECTIONS)


def _listed(words: Sequence[str], indent: str, one_a_line: bool) -> Iterator[str]:
    """Yield words in lines of at most ``WIDTH`` columns."""
    if one_a_line:
        yield from (indent + word for word in words)
        return
    # the blanks inside a word do not end a line
    text = ", ".join(word.replace(" ", DOT) for word in words)
    wrapped = TextWrapper(WIDTH, indent, indent, break_long_words=False, break_on_hyphens=False).wrap(text)
    yield from (line.replace(DOT, " ") for line in wrapped)


def written(value: Any) -> str:
    """Return a value in one line of a YAML that reads back as the same."""
    match value:
        case str() if re.fullmatch(r"[A-Za-z_~./][\w.+/@-]*", value) and read_scalar(value) == value:
            return value
        case float():
            short = f"{value:.10g}"
            return short if float(short) == value else repr(value)
    return printable(json.dumps(value, ensure_ascii=False))


def _plain(text: str) -> str:
    return printable(re.sub(r"\s+", " ", text.replace("\0", "$")).strip())


def printable(text: str) -> str:
    """Return a text with YAML's escapes for characters that are not printable."""
    codes = ((each, ord(each)) for each in text)
    return "".join(
        each if each.isprintable() else f"\\u{code:04x}" if code < 2**16 else f"\\U{code:08x}" for each, code in codes
    )
