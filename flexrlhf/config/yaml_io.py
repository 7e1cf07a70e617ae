"""Reading and writing of YAML by the rules of YAML 1.2, where PyYAML follows those of 1.1.

``on`` is a word (a placement key of ours) and not true; ``1e-6`` is a number and not a text; ``2026-01-31`` and
``1:30`` are texts, and ``010`` is ten.
A key that a mapping has twice is refused, where PyYAML would take the last one.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import yaml

_REPLACED = ("bool", "int", "float", "timestamp", "value")
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")
_FLOAT = re.compile(
    r"^([-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
_INT = re.compile(r"^([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_NO_TEXT = re.compile("[\0\ud800-\udfff]")

MAX_CHARACTERS = 2_000_000
"""Longest document, which is read in some seconds."""
MAX_VALUES = 100_000
"""Most values of a document; few lines of anchors may stand for billions."""
LARGEST_BITS = 1000
"""Of a whole number: the largest float has 1024."""


class _Loader(yaml.SafeLoader):
    """Loader of plain data only, like the one that it derives from."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse repeated keys here: later, a merge (``<<``) adds keys that may be repeated."""
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            same = (key.tag, key.value)
            if same in first:
                problem = f"the key {key.value!r} is given twice, first in line {first[same].line + 1}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            first[same] = key.start_mark
        return node

    def construct_yaml_int(self, node: Any) -> int:
        """Read digits as decimal ones, whatever the first is."""
        text = self.construct_scalar(node)
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


class _SettingsLoader(_Loader):
    """Loader of settings, which a person has written and other tools read, too."""

    def construct_yaml_int(self, node: Any) -> int:
        """Refuse a number that begins with 0: readers of YAML 1.1 take ``010`` as 8."""
        text = self.construct_scalar(node)
        if re.fullmatch(r"[-+]?0[0-9]+", text):
            value = super().construct_yaml_int(node)
            problem = f"{text} is {value} here, and another number to readers of YAML 1.1; write {value}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_yaml_int(node)


_SettingsLoader.add_constructor("tag:yaml.org,2002:int", _SettingsLoader.construct_yaml_int)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes texts which the loader would read as another type."""


for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in _REPLACED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
    _kind.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def read_settings(text: str) -> Any:
    """Return the data of a document of settings, without a number that begins with 0. Raises yaml.YAMLError."""
    return read_yaml(text, _SettingsLoader)


def read_yaml(text: str, loader: type[_Loader] = _Loader) -> Any:
    """Return the data of one document. Raises yaml.YAMLError with the problem and its place in one line."""
    try:
        return _read(text, loader)
    except yaml.YAMLError as error:
        raise yaml.YAMLError(_explained(error)) from None


def _read(text: str, loader: type[_Loader]) -> Any:
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"it has {len(text)} characters, more than the {MAX_CHARACTERS} that any config needs")
    try:
        data = yaml.load(text, loader)  # noqa: S506 (derives from SafeLoader)
        if _num_values(data, {}) > MAX_VALUES:
            raise yaml.YAMLError(f"its anchors repeat more than {MAX_VALUES} values")
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except ValueError as error:
        # PyYAML's own constructors: a number of more digits than Python reads, a tag that does not fit its text
        raise yaml.YAMLError(str(error).partition(";")[0]) from None
    except (TypeError, LookupError, AttributeError):
        raise yaml.YAMLError("a tag does not fit its value") from None
    return data


def _num_values(value: Any, known: dict[int, int]) -> int:
    """Return the number of values in ``value``, each as often as anchors repeat it. ``known``: numbers by identity.

    Raises RecursionError for a value that contains itself, and YAMLError for one that no setting takes.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > LARGEST_BITS:
        raise yaml.YAMLError("a whole number is larger than any setting takes")
    if isinstance(value, str) and _NO_TEXT.search(value):
        raise yaml.YAMLError("a text contains a null character or half of a surrogate pair")
    if not isinstance(value, dict | list):
        if not isinstance(value, str | int | float | None):
            raise yaml.YAMLError("a tag makes a value that no setting takes")
        return 1
    if id(value) not in known:
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_num_values(part, known) for part in parts)
    return known[id(value)]


def write_yaml(data: Any) -> str:
    """Return a document that ``read_yaml`` reads back as the same data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)


def _explained(error: yaml.YAMLError) -> str:
    """Return the problem and its place in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        problem = f"{error.context}, {error.problem}" if str(error.problem).startswith("but ") else error.problem
        variable = (mark.buffer or "")[max(0, mark.pointer - 1) : mark.pointer + 1] == "${"
        hint = "; within [] or {} put a text with ${NAME} in quotes" if variable else ""
        return f"{problem} (line {mark.line + 1}, column {mark.column + 1}){hint}"
    if isinstance(error, yaml.reader.ReaderError) and 0xDC80 <= error.character <= 0xDCFF:
        encoding = sys.getfilesystemencoding()
        return f"its character {error.position + 1} is none in the locale's encoding, {encoding}; set PYTHONUTF8=1"
    if isinstance(error, yaml.reader.ReaderError):
        return f"{error.reason} (#x{error.character:02x}, character {error.position + 1})"
    return " ".join(str(error).split())
