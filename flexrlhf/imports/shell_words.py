"""Words of a shell script: variables, arrays, arithmetic and quotes expanded, without running anything.

A part whose value the script does not have (a variable of the environment, the output of a command, an expansion of a
rare form) is a marked name.
"""

from __future__ import annotations

import fnmatch
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING

from flexrlhf.api import UserError
from flexrlhf.imports.settings import MARK, library

if TYPE_CHECKING:
    from tree_sitter import Node, Parser, Tree

MAX_NESTING = 150
"""Depth of statements and expressions inside one another."""
MAX_CUTS = 50
"""Names in one word that are read without braces."""
MAX_TEXT = 131_072
"""Longest word, in characters, as Linux has it for an argument."""
MAX_EXPANDED = 20_000_000
"""Characters of all words of a script."""
LONGEST_CUT = 2_000
"""Characters of a value that patterns (``${NAME%PATTERN}``) are tried on."""

KNOWN = {"HOME": "~", "PWD": ".", "OLDPWD": ".", "@": "", "*": "", "#": "0", "?": "0", "$": "0", "0": "script"}
"""Variables that every script has."""
COMPARISONS: dict[str, Callable[[int, int], int]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_ARITHMETIC = COMPARISONS | {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda left, right: int(left / right),
    "%": lambda left, right: int(math.fmod(left, right)),
    "==": operator.eq,
    "!=": operator.ne,
}
_MARKED = re.compile(f"{MARK}[^{MARK}]*{MARK}")


@cache
def bash_parser() -> Parser:
    """Return a parser of bash. Raises UserError if it is not installed."""
    tree_sitter, bash = (library(name, "shell scripts") for name in ("tree_sitter", "tree_sitter_bash"))
    parser: Parser = tree_sitter.Parser(tree_sitter.Language(bash.language()))
    return parser


def parsed(text: str) -> Tree:
    """Return the syntax of a script. Raises UserError for one that is nested more deeply than is read."""
    data = text.encode("utf-8", "replace")
    tree = bash_parser().parse(data)
    _check_nesting(tree)
    for _ in range(MAX_CUTS):
        # the grammar ends a word at the second $NAME in it, which it reads with braces
        if not (places := _cut_names(tree, data)):
            break
        data = re.sub(rb"\$(\w+)", partial(_with_braces, places), data)
        tree = bash_parser().parse(data)
    return tree


def _cut_names(tree: Tree, data: bytes) -> set[int]:
    """Return the places of dollar signs at which a word ends though a name follows."""
    places = [found.start() for found in re.finditer(rb"(?<=[^\s\\])\$(?=[A-Za-z_])", data)]
    nodes = ((place, tree.root_node.descendant_for_byte_range(place, place + 1)) for place in places)
    ends = {"concatenation", "word", "command_name", "variable_assignment"}
    return {place for place, node in nodes if node is not None and node.parent and node.parent.type in ends}


def _with_braces(places: set[int], found: re.Match[bytes]) -> bytes:
    return b"${%b}" % found[1] if found.start() in places else found[0]


def _check_nesting(tree: Tree) -> None:
    cursor, depth = tree.walk(), 0
    while True:
        if depth > MAX_NESTING:
            raise UserError(f"import: a script that is nested more than {MAX_NESTING} levels deep (MAX_NESTING)")
        if cursor.goto_first_child():
            depth += 1
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return
            depth -= 1


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
    expanded:   characters of words so far.
    """

    variables: dict[str, str | list[str]]
    given: frozenset[str] = frozenset()
    assumed: dict[str, None] = field(default_factory=dict)
    expanded: int = 0

    def count(self, value: str | list[str]) -> None:
        """Count the characters of a value. Raises UserError for one, or a script, with more than are read."""
        texts = [value] if isinstance(value, str) else value
        self.expanded += sum(map(len, texts)) + len(texts)
        if max(map(len, texts), default=0) > MAX_TEXT:
            raise UserError(f"import: a script with a word of more than {MAX_TEXT} characters (MAX_TEXT)")
        if self.expanded > MAX_EXPANDED:
            raise UserError(f"import: a script whose words have more than {MAX_EXPANDED} characters (MAX_EXPANDED)")

    def lookup(self, name: str) -> str | None:
        """Return the value of a variable, an array's first; None if the script has none."""
        value = self.variables.get(name, KNOWN.get(name))
        return (value[0] if value else "") if isinstance(value, list) else value

    def words(self, node: Node) -> list[str]:
        """Return the words that an argument expands to: none, one or several."""
        is_quoted = node.type == "string" and len(node.named_children) == 1
        array = self._array_of(node.named_children[0] if is_quoted else node)
        if array is not None:
            return array
        if node.type in ("simple_expansion", "expansion", "command_substitution"):
            # outside of quotes a value is split; a mark stays in one piece
            kept = _MARKED.sub(lambda found: found[0].replace(" ", "\1"), self.text(node).replace("\\\n", " "))
            return [word.replace("\1", " ") for word in kept.split()]
        return [self.text(node)]

    def _array_of(self, node: Node) -> list[str] | None:
        """Return the words of ``$@`` or ``${NAME[@]}``; None for another expansion."""
        found = re.fullmatch(r"\$\{(\w+)\[[@*]\](?:[:+-].*)?\}|\$@|\$\{@\}|\$\*", source(node), re.S)
        if found is None or node.type not in ("simple_expansion", "expansion"):
            return None
        value = self.variables.get(found[1] or "@", [])
        return list(value) if isinstance(value, list) else [value]

    def text(self, node: Node) -> str:
        """Return the text that a node expands to, without splitting it into words."""
        match node.type:
            case "word" | "extglob_pattern" | "regex" | "concatenation" | "heredoc_body" | "command_name":
                return self._joined(node)
            case "number" | "variable_name" | "special_variable_name" | "test_operator" | "heredoc_content":
                return source(node)
            case "raw_string":
                return source(node)[1:-1]
            case "string_content":
                return _in_quotes(source(node))
            case "string":
                return self._joined(node, 1, -1)
            case "simple_expansion" | "expansion" | "arithmetic_expansion" | "command_substitution":
                # between two expansions in a string the parser gives the blanks to the second one
                inner = re.sub(r"^(\s|\\\n)+", "", source(node))
                blanks = source(node).removesuffix(inner)
                return _in_quotes(blanks) + self._expanded(node, inner, len(blanks))
        return marked(source(node))

    def _expanded(self, node: Node, text: str, start: int) -> str:
        match node.type:
            case "simple_expansion":
                return self._variable(text[1:])
            case "expansion":
                return self._expansion(node, text[2:-1], start + 2)
            case "arithmetic_expansion":
                return self._arithmetic(node, text)
        return self._substitution(re.sub(r"\s+", " ", text))

    def _joined(self, node: Node, first: int = 0, last: int = 0) -> str:
        """Return the expanded children of a node, with the text between them, from byte ``first`` on."""
        whole, place, parts = node.text or b"", first, []
        for child in node.named_children:
            start = child.start_byte - node.start_byte
            if start >= first:
                parts += [_unquoted(whole[place:start]), self.text(child)]
                place = child.end_byte - node.start_byte
        text = "".join([*parts, _unquoted(whole[place : len(whole) + last])])
        self.count(text)
        return text

    def _variable(self, name: str) -> str:
        value = self.lookup(name)
        return marked(f"argument {name} of the script" if name.isdigit() else name) if value is None else value

    def _expansion(self, node: Node, inside: str, start: int) -> str:
        """Return the value of ``${NAME}``, with a default, an alternative or a cut; its name is at byte ``start``."""
        found = re.match(r"(#?)(\w+|[@*#?$])(?:\[([^\]]*)\])?(:?[-=?+]|##?|%%?|$)", inside)
        if found is None:
            return marked(inside)
        prefix, name, index, sign = found.groups()
        if prefix:
            value = self.variables.get(name)
            return str(len(value)) if isinstance(value, list) and index else marked(inside)
        element = self.lookup(name) if index is None else self._element(name, index)
        is_set = element is not None and (not sign.startswith(":") or without_marks(element) != "")
        rest = self._rest(node, start + len(inside[: found.end()].encode()))
        match sign.lstrip(":"):
            case "-" | "=" if not is_set:
                if sign.endswith("="):
                    self.variables[name] = rest
                return rest
            case "+":
                return rest if is_set else ""
            case "#" | "##" | "%" | "%%" if element is not None:
                if len(element) > LONGEST_CUT:
                    return marked(inside[:80])
                return _cut(element, rest, sign)
        return self._variable(name) if element is None else element

    def _element(self, name: str, index: str) -> str | None:
        value = self.variables.get(name, [])
        values = value if isinstance(value, list) else [value]
        if index in "@*":
            return " ".join(values)
        place = self.lookup(index.lstrip("$")) or index
        return values[int(place)] if place.isdigit() and int(place) < len(values) else None

    def _rest(self, node: Node, first: int) -> str:
        """Return the expanded text of ``${NAME...}`` from byte ``first`` up to its bracket."""
        raw = (node.text or b"")[first:-1].decode("utf-8", "replace")
        if "$((" not in raw or '"' in raw:
            return self._joined(node, first, -1)
        # inside of ${...} the parser takes an arithmetic expression for a command
        tree = parsed(f'x="{raw}"')
        value = tree.root_node.named_children[0].child_by_field_name("value")
        return marked(raw) if value is None else self.text(value)

    def _substitution(self, text: str) -> str:
        """Return the word that ``$(a && echo B || echo C)`` prints if ``a`` fails, as nothing is run; else a mark."""
        last = re.search(r"\|\| echo ([\w./-]+) ?\)$", text)
        if last is None:
            return marked(text)
        self.assumed[f"{text} is not run: it is taken as {last[1]}"] = None
        return last[1]

    def _arithmetic(self, node: Node, text: str) -> str:
        values = [self.number(child) for child in node.named_children]
        if len(values) == 1 and values[0] is not None:
            return str(values[0])
        names = (self._variable(source(each)) for each in _names(node))
        return next((name for name in names if MARK in name), marked(text))

    def number(self, node: Node) -> int | None:
        """Return the value of an arithmetic expression in whole numbers, as bash computes; None if it has none."""
        match node.type:
            case "number" | "word" | "variable_name" | "simple_expansion" | "expansion" | "string" | "subscript":
                is_name = node.type in ("variable_name", "word") and not source(node)[:1].isdigit()
                text = (self._variable(source(node)) if is_name else self.text(node)).strip()
                return int(text) if re.fullmatch(r"[-+]?\d{1,19}", text) else None
            case "parenthesized_expression":
                return self.number(node.named_children[0])
            case "binary_expression":
                left, right = (self.number(each) for each in (node.named_children[0], node.named_children[-1]))
                sign = source(node.children[1])
                if left is not None and right is not None and sign in _ARITHMETIC and (right or sign not in "/%"):
                    whole = int(_ARITHMETIC[sign](left, right))
                    return (whole + 2**63) % 2**64 - 2**63  # as bash, in 64 bits
        return None


def _names(node: Node) -> list[Node]:
    own = [node] if node.type == "variable_name" else []
    return own + [name for child in node.named_children for name in _names(child)]


def _cut(value: str, pattern: str, sign: str) -> str:
    """Return ``value`` without the shortest or longest start (``#``) or end (``%``) that matches ``pattern``."""
    from_start = sign.startswith("#")
    ends = range(len(value) + 1) if (len(sign) == 2) != from_start else range(len(value), -1, -1)
    for end in ends:
        if fnmatch.fnmatchcase(value[:end] if from_start else value[end:], pattern):
            return value[end:] if from_start else value[:end]
    return value


def _in_quotes(text: str) -> str:
    """Return a text of a double-quoted string without its backslashes and continued lines."""
    return re.sub(r'\\([\\"$`\n])', lambda found: "" if found[1] == "\n" else found[1], text)


def _unquoted(text: bytes) -> str:
    """Return a text outside of quotes without its backslashes and continued lines."""
    plain = text.decode("utf-8", "replace")
    return re.sub(r"\\(\n|.)", lambda found: "" if found[1] == "\n" else found[1], plain, flags=re.S)
