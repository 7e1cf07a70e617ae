"""Words of a shell script: variables, arrays, arithmetic and quotes expanded, without running anything.

A part whose value the script does not have (a variable of the environment, the output of a command) is a marked name.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flexrlhf.imports.libraries import bash_parser
from flexrlhf.imports.settings import MARK

if TYPE_CHECKING:
    from tree_sitter import Node

KNOWN = {"HOME": "~", "PWD": ".", "OLDPWD": ".", "@": "", "*": "", "#": "0", "?": "0", "$": "0", "0": "script"}
"""Variables that every script has."""
_MARKED = re.compile(f"{MARK}[^{MARK}]*{MARK}")


def marked(name: str) -> str:
    """Return the mark of a part whose value is not known."""
    return MARK + re.sub(r"\s+", " ", name) + MARK


def without_marks(text: str) -> str:
    """Return a text as bash has it where nothing is set in the environment."""
    return _MARKED.sub("", text)


def source(node: Node) -> str:
    """Return the text of a node."""
    return (node.text or b"").decode("utf-8", "replace")


@dataclass
class Words:
    """Expansion of words.

    variables:  values by name; a list is an array.
    given:      names that the user gives values, which replace the script's own.
    assumed:    sentences on commands that are not run.
    """

    variables: dict[str, str | list[str]]
    given: frozenset[str] = frozenset()
    assumed: dict[str, None] = field(default_factory=dict)

    def lookup(self, name: str) -> str | None:
        """Return the value of a variable, an array's first; None if the script has none."""
        value = self.variables.get(name, KNOWN.get(name))
        return (value[0] if value else "") if isinstance(value, list) else value

    def words(self, node: Node) -> list[str]:
        """Return the words that an argument expands to: none, one or several."""
        if node.type in ("simple_expansion", "expansion"):
            array = self._array_of(node)
            if array is not None:
                return array
            return _split(self.text(node))
        if node.type == "string":
            parts = [child for child in node.named_children if child.type != "string_content"]
            if len(node.named_children) == 1 and parts and (array := self._array_of(parts[0])) is not None:
                return array
        if node.type == "command_substitution":
            return _split(self.text(node))
        return [self.text(node)]

    def _array_of(self, node: Node) -> list[str] | None:
        """Return the words of ``$@`` or ``${NAME[@]}``; None for another expansion."""
        text = source(node)
        if text in ("$@", "${@}", "$*"):
            positional = self.variables.get("@", [])
            return list(positional) if isinstance(positional, list) else []
        found = re.fullmatch(r"\$\{(\w+)\[[@*]\](?:[:+-].*)?\}", text, re.S)
        if found is None:
            return None
        value = self.variables.get(found[1], [])
        return list(value) if isinstance(value, list) else [value]

    def text(self, node: Node) -> str:
        """Return the text that a node expands to, without splitting it into words."""
        match node.type:
            case "word" | "extglob_pattern" | "regex":
                return _unquoted(source(node)) if not node.named_children else self._joined(node)
            case "number" | "variable_name" | "special_variable_name" | "test_operator" | "heredoc_content":
                return source(node)
            case "raw_string":
                return source(node)[1:-1]
            case "ansi_c_string":
                return source(node)[2:-1].encode().decode("unicode_escape")
            case "string_content":
                return re.sub(r'\\([\\"$`\n])', lambda found: "" if found[1] == "\n" else found[1], source(node))
            case "string":
                return self._joined(node, 1, -1)
            case "translated_string":
                return self._joined(node, 2, -1)
            case "concatenation" | "heredoc_body" | "command_name":
                return self._joined(node)
            case "simple_expansion":
                return self._variable(source(node)[1:])
            case "expansion":
                return self._expansion(node)
            case "arithmetic_expansion":
                return self._arithmetic(node)
            case "command_substitution":
                return self._substitution(node)
        return marked(source(node))

    def _joined(self, node: Node, first: int = 0, last: int = 0) -> str:
        """Return the expanded children of a node, with the text between them as it is."""
        whole, start = source(node).encode(), node.start_byte
        end, place, parts = node.end_byte + last, node.start_byte + first, []
        for child in node.named_children:
            parts.append(_unquoted(whole[place - start : child.start_byte - start].decode("utf-8", "replace")))
            parts.append(self.text(child))
            place = child.end_byte
        parts.append(_unquoted(whole[place - start : end - start].decode("utf-8", "replace")))
        return "".join(parts)

    def _variable(self, name: str) -> str:
        value = self.lookup(name)
        if value is None:
            return marked(f"argument {name} of the script" if name.isdigit() else name)
        return value

    def _expansion(self, node: Node) -> str:
        """Return the value of ``${NAME}``, with a default, an alternative, a cut or a replacement."""
        inside = source(node)[2:-1]
        found = re.match(r"([#!]?)(\w+|[@*#?$])(\[[^\]]*\])?", inside)
        if found is None:
            return marked(inside)
        prefix, name, index = found[1], found[2], found[3]
        value = self.variables.get(name)
        if prefix == "!":
            target = self.lookup(name)
            return self._variable(target) if target else marked(inside)
        if prefix == "#":
            return str(len(value)) if value is not None and index else str(len(self.lookup(name) or ""))
        if index is not None:
            value = self._element(value, index[1:-1])
        elif not isinstance(value, str):
            value = self.lookup(name)
        operator = re.match(r":?[-=?+]|##?|%%?|//?|\^\^?|,,?|:", inside[found.end() :])
        if operator is None:
            return self._variable(name) if value is None else value
        return self._operated(node, name, value, operator[0], found.end() + operator.end())

    def _element(self, value: str | list[str] | None, index: str) -> str | None:
        if value is None:
            return None
        values = value if isinstance(value, list) else [value]
        if index in "@*":
            return " ".join(values)
        place = self.lookup(index.lstrip("$")) or index
        is_place = re.fullmatch(r"-?\d+", place) is not None and -len(values) <= int(place) < len(values)
        return values[int(place)] if is_place else None

    def _operated(self, node: Node, name: str, value: str | None, operator: str, offset: int) -> str:
        """Return a value after an operator of ``${NAME...}``. ``offset``: of the rest, from the name."""
        rest = self._rest(node, node.start_byte + 2 + offset)
        is_set = value is not None and (
            not operator.startswith(":") or bool(without_marks(value) or MARK not in value) and value != ""
        )
        match operator.lstrip(":"):
            case "-" | "=":
                if operator.endswith("=") and not is_set:
                    self.variables[name] = rest
                return value if is_set and value is not None else rest
            case "?":
                return self._variable(name) if value is None else value
            case "+":
                return rest if is_set else ""
            case "#" | "##" | "%" | "%%" if value is not None:
                return _cut(value, rest, operator)
            case "/" | "//" if value is not None:
                old, _, new = rest.partition("/")
                pattern = fnmatch.translate(old).removesuffix(r"\Z").removesuffix(r"\z")
                return re.sub(pattern, lambda _: new, value, count=0 if operator == "//" else 1)
            case "^" | "^^" if value is not None:
                return value.upper() if operator == "^^" else value[:1].upper() + value[1:]
            case "," | ",," if value is not None:
                return value.lower() if operator == ",," else value[:1].lower() + value[1:]
            case "" if value is not None and (part := re.fullmatch(r"\s*(\d+)(?::(\d+))?", rest)):
                return value[int(part[1]) :][: int(part[2]) if part[2] else None]
        return marked(name)

    def _rest(self, node: Node, start: int) -> str:
        """Return the expanded text of ``${NAME...}`` from byte ``start`` up to its bracket."""
        whole, offset, parts = source(node).encode(), node.start_byte, []
        raw = whole[start - offset : -1].decode("utf-8", "replace")
        if "$((" in raw and '"' not in raw:
            # inside of ${...} the parser takes an arithmetic expression for a command
            return self._parsed(raw)
        place = start
        for child in node.named_children:
            if child.start_byte < start:
                continue
            parts.append(_unquoted(whole[place - offset : child.start_byte - offset].decode("utf-8", "replace")))
            parts.append(self.text(child))
            place = child.end_byte
        parts.append(_unquoted(whole[place - offset : -1].decode("utf-8", "replace")))
        return "".join(parts)

    def _parsed(self, text: str) -> str:
        """Return the expansion of a text that stands alone."""
        tree = bash_parser().parse(f'x="{text}"'.encode())
        value = tree.root_node.named_children[0].child_by_field_name("value")
        return marked(text) if value is None else self.text(value)

    def _substitution(self, node: Node) -> str:
        """Return the word that ``$(a && echo B || echo C)`` prints if ``a`` fails, as nothing is run; else a mark."""
        text = re.sub(r"\s+", " ", source(node)).strip()
        last = re.search(r"\|\| echo ([\w./-]+) ?\)$", text)
        if last is not None:
            self.assumed[f"{text} is not run: it is taken as {last[1]}"] = None
            return last[1]
        return marked(text)

    def _arithmetic(self, node: Node) -> str:
        values = [self.number(child) for child in node.named_children]
        if len(values) != 1 or values[0] is None:
            missing = next((self.text(each) for each in _names(node) if MARK in self._variable(source(each))), "")
            return missing if MARK in missing else marked(source(node))
        return str(values[0])

    def number(self, node: Node) -> int | None:
        """Return the value of an arithmetic expression in whole numbers, as bash computes; None if it has none."""
        match node.type:
            case "number" | "word" | "variable_name" | "simple_expansion" | "expansion" | "string" | "subscript":
                is_name = node.type in ("variable_name", "word") and not source(node)[:1].isdigit()
                text = (self._variable(source(node)) if is_name else self.text(node)).strip()
                return int(text) if re.fullmatch(r"[-+]?\d+", text) else None
            case "parenthesized_expression":
                return self.number(node.named_children[0])
            case "unary_expression":
                value = self.number(node.named_children[-1])
                return None if value is None else {"-": -value, "+": value, "!": int(not value)}.get(source(node)[0])
            case "ternary_expression":
                condition, first, second = node.named_children
                chosen = self.number(condition)
                return None if chosen is None else self.number(first if chosen else second)
            case "binary_expression":
                left, right = (self.number(each) for each in (node.named_children[0], node.named_children[-1]))
                sign = source(node.children[1])
                return None if left is None or right is None else _computed(left, sign, right)
        return None


def _names(node: Node) -> list[Node]:
    own = [node] if node.type == "variable_name" else []
    return own + [name for child in node.named_children for name in _names(child)]


def _computed(left: int, sign: str, right: int) -> int | None:
    if sign in ("/", "%"):
        if right == 0:
            return None
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if sign == "/" else left - quotient * right
    results = {
        "+": left + right,
        "-": left - right,
        "*": left * right,
        "<": int(left < right),
        ">": int(left > right),
        "<=": int(left <= right),
        ">=": int(left >= right),
        "==": int(left == right),
        "!=": int(left != right),
        "&&": int(bool(left) and bool(right)),
        "||": int(bool(left) or bool(right)),
    }
    if sign == "**" and 0 <= right < 64:
        return int(left**right)
    return results.get(sign)


def _cut(value: str, pattern: str, operator: str) -> str:
    """Return ``value`` without the shortest or longest start (``#``) or end (``%``) that matches ``pattern``."""
    from_start = operator.startswith("#")
    ends = range(len(value) + 1) if (len(operator) == 2) != from_start else range(len(value), -1, -1)
    for end in ends:
        part = value[:end] if from_start else value[end:]
        if fnmatch.fnmatchcase(part, pattern):
            return value[end:] if from_start else value[:end]
    return value


def _unquoted(text: str) -> str:
    """Return a text outside of quotes without its backslashes and continued lines."""
    return re.sub(r"\\(\n|.)", lambda found: "" if found[1] == "\n" else found[1], text, flags=re.S)


def _split(text: str) -> list[str]:
    """Split the value of a variable outside of quotes into words; a mark stays in one piece."""
    kept = _MARKED.sub(lambda found: found[0].replace(" ", "\1"), text.replace("\\\n", " "))
    return [word.replace("\1", " ") for word in kept.split()]


def split_quoted(text: str) -> list[str]:
    """Split a command that is a text, with its quotes; by blanks if they are not closed."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()
