"""Commands of a shell script with the values of its variables, as it would start them; nothing is run.

A condition on values that the script has is decided; any other (a file that exists, a command that succeeds) is taken
to fail. Loops run over the words that they have. Functions are followed.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexrlhf.imports.libraries import bash_parser
from flexrlhf.imports.shell_words import Words, source, without_marks

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_STEPS = 20_000
"""Nodes of a script that are followed, loops and functions included."""
MAX_DEPTH = 20
"""Depth of functions that call each other, and of texts that are commands."""


@dataclass(frozen=True)
class Command:
    """A command of a script. ``line``: its first line."""

    words: tuple[str, ...]
    line: int


class _Exit(Exception):
    """End of the script by ``exit``, or of a function by ``return``."""


class ShellScript:
    """A shell script that has been followed.

    commands:  programs that it would start, in order.
    assumed:   sentences on conditions and commands whose results are not known.
    """

    def __init__(self, text: str, given: Mapping[str, str] | None = None) -> None:
        self.commands: list[Command] = []
        self._words = Words(dict(given or {}), frozenset(given or {}))
        self._functions: dict[str, Node] = {}
        self._steps = self._depth = 0
        self._follow(text)

    @property
    def assumed(self) -> list[str]:
        """Sentences on conditions and commands whose results are not known."""
        return list(self._words.assumed)

    def _follow(self, text: str) -> None:
        tree = bash_parser().parse(text.encode())
        try:
            self._run(tree.root_node)
        except _Exit:
            return

    def _run(self, node: Node) -> bool:
        """Follow a statement; return whether it succeeds."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _Exit
        match node.type:
            case "variable_assignment":
                self._assign(node)
            case "variable_assignments" | "declaration_command":
                for child in node.named_children:
                    if child.type == "variable_assignment":
                        self._assign(child)
            case "command":
                return self._command(node)
            case "redirected_statement":
                return self._redirected(node)
            case "list":
                return self._list(node)
            case "negated_command":
                return not self._run(node.named_children[0])
            case "test_command" | "binary_expression" | "unary_expression" | "parenthesized_expression":
                return self._test(node)
            case "if_statement":
                return self._if(node)
            case "case_statement":
                self._case(node)
            case "for_statement":
                self._for(node)
            case "function_definition":
                name = node.child_by_field_name("name")
                body = node.child_by_field_name("body")
                if name is not None and body is not None:
                    self._functions[source(name)] = body
            case "pipeline" | "program" | "compound_statement" | "subshell" | "do_group" | "else_clause" | "ERROR":
                return all([self._run(child) for child in node.named_children])
        return True

    def _assign(self, node: Node) -> None:
        name_node, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name_node is None:
            return
        name, words = source(name_node), self._words
        if name in words.given or "[" in name:
            return
        appends = any(child.type == "+=" for child in node.children)
        new: str | list[str] = ""
        if value is not None and value.type == "array":
            new = [word for child in value.named_children if child.type != "comment" for word in words.words(child)]
        elif value is not None:
            new = words.text(value)
        if appends:
            old = words.variables.get(name, [] if isinstance(new, list) else "")
            if isinstance(old, list):
                new = [*old, *(new if isinstance(new, list) else [new])]
            elif isinstance(new, str):
                new = old + new
        words.variables[name] = new

    def _command(self, node: Node) -> bool:
        words: list[str] = []
        for child in node.named_children:
            if child.type == "variable_assignment":
                continue
            inner = child.named_children[0] if child.type == "command_name" and child.named_children else child
            if inner.type not in ("file_redirect", "heredoc_redirect", "herestring_redirect", "comment"):
                words += self._words.words(inner)
        if not words:
            for child in node.named_children:
                if child.type == "variable_assignment":
                    self._assign(child)
            return True
        return self._started(words, node.start_point[0] + 1)

    def _started(self, words: list[str], line: int) -> bool:
        name, *arguments = words
        match name:
            case "exit" | "return":
                raise _Exit
            case "shift":
                positional = self._words.variables.get("@")
                if isinstance(positional, list):
                    self._set_arguments(positional[int(arguments[0]) if arguments and arguments[0].isdigit() else 1 :])
                return True
            case "eval" if self._depth < MAX_DEPTH:
                return self._nested(" ".join(arguments))
            case "true" | ":" | "set" | "echo" | "printf" | "cd" | "mkdir" | "export" | "source" | "." | "sleep":
                return True
            case "false":
                return False
            case "[" | "test":
                return False
        if name in self._functions and self._depth < MAX_DEPTH:
            return self._call(self._functions[name], arguments)
        # a shell that gets its commands as a text, also behind launchers such as srun
        if (
            len(words) > 2
            and any(
                flag in ("-c", "-lc", "-xc", "-ec") and shell.rpartition("/")[2] in ("bash", "sh")
                for shell, flag in zip(words, words[1:], strict=False)
            )
            and self._depth < MAX_DEPTH
        ):
            return self._nested(words[-1])
        self.commands.append(Command(tuple(words), line))
        return True

    def _nested(self, text: str) -> bool:
        self._depth += 1
        self._follow(re.sub("\0([^\0]*)\0", lambda found: f"${{{found[1]}}}" if found[1].isidentifier() else "", text))
        self._depth -= 1
        return True

    def _set_arguments(self, arguments: list[str]) -> None:
        variables = self._words.variables
        for number in range(1, 10):
            variables.pop(str(number), None)
        variables.update({str(number): word for number, word in enumerate(arguments[:9], 1)})
        variables["@"], variables["#"] = list(arguments), str(len(arguments))

    def _call(self, body: Node, arguments: list[str]) -> bool:
        kept = {name: value for name, value in self._words.variables.items() if name in ("@", "#") or name.isdigit()}
        self._set_arguments(arguments)
        self._depth += 1
        try:
            return self._run(body)
        except _Exit:
            return True
        finally:
            self._depth -= 1
            self._set_arguments([])
            del self._words.variables["@"], self._words.variables["#"]
            self._words.variables.update(kept)

    def _redirected(self, node: Node) -> bool:
        """Follow a command with redirections; ``read`` takes the text that follows it, ``cat > FILE`` writes one."""
        body = node.child_by_field_name("body")
        here = next((child for child in node.named_children if child.type == "heredoc_redirect"), None)
        if body is not None and here is not None and body.type == "command":
            words = [
                word
                for child in body.named_children
                for word in self._words.words(
                    child.named_children[0] if child.type == "command_name" and child.named_children else child
                )
            ]
            text = next((child for child in here.named_children if child.type == "heredoc_body"), None)
            if words[:1] == ["read"] and text is not None:
                self._words.variables[words[-1]] = self._words.text(text)
                return True
        return True if body is None else self._run(body)

    def _list(self, node: Node) -> bool:
        left, right = node.named_children[0], node.named_children[-1]
        succeeded = self._run(left)
        is_and = any(child.type == "&&" for child in node.children)
        return self._run(right) if succeeded == is_and else succeeded

    def _if(self, node: Node) -> bool:
        """Follow the branch that is taken; one that only ends the script checks its use and is passed over."""
        clauses, current = [], (None, [])  # type: ignore[var-annotated]
        for child in node.children:
            if child.type in ("elif_clause", "else_clause"):
                clauses.append(child)
            elif child.is_named:
                current[1].append(child)
        condition, *body = current[1]
        if self._run(condition) and not _only_ends(body):
            return all([self._run(each) for each in body])
        for clause in clauses:
            named = clause.named_children
            if clause.type == "else_clause":
                return True if _only_ends(named) else all([self._run(each) for each in named])
            if self._run(named[0]) and not _only_ends(named[1:]):
                return all([self._run(each) for each in named[1:]])
        return True

    def _case(self, node: Node) -> None:
        subject = node.child_by_field_name("value")
        value = "" if subject is None else without_marks(self._words.text(subject))
        for item in node.named_children:
            if item.type != "case_item":
                continue
            patterns = item.children_by_field_name("value")
            if any(fnmatch.fnmatchcase(value, self._words.text(each)) for each in patterns):
                body = [child for child in item.named_children if child not in patterns]
                if not _only_ends(body):
                    for child in body:
                        self._run(child)
                return

    def _for(self, node: Node) -> None:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        if variable is None or body is None:
            return
        values = [word for child in node.children_by_field_name("value") for word in self._words.words(child)]
        for value in values:
            self._words.variables[source(variable)] = value
            self._run(body)

    def _test(self, node: Node) -> bool:
        """Return the result of a condition; False, with a sentence, if it depends on more than the script."""
        found = self._decided(node)
        if found is None:
            condition = re.sub(r"\s+", " ", source(node))
            self._words.assumed[f"the condition {condition} is taken to be false"] = None
        return bool(found)

    def _decided(self, node: Node) -> bool | None:
        words = self._words
        match node.type:
            case "test_command" | "parenthesized_expression":
                inner = node.named_children
                return self._decided(inner[0]) if len(inner) == 1 else None
            case "negated_command":
                found = self._decided(node.named_children[0])
                return None if found is None else not found
            case "unary_expression":
                operator, operand = source(node.children[0]), node.named_children[-1]
                if operator == "!":
                    found = self._decided(operand)
                    return None if found is None else not found
                if operator in ("-z", "-n"):
                    return (without_marks(words.text(operand)) == "") == (operator == "-z")
                if operator == "-v":
                    return words.lookup(words.text(operand)) is not None
                return None
            case "binary_expression":
                return self._compared(node)
        text = words.text(node)
        return None if text.startswith("\0") else without_marks(text) != ""

    def _compared(self, node: Node) -> bool | None:
        left, right = node.named_children[0], node.named_children[-1]
        operator = next((source(child) for child in node.children[1:-1]), "")
        if operator in ("&&", "||", "-a", "-o"):
            sides = self._decided(left), self._decided(right)
            is_and, known = operator in ("&&", "-a"), [side for side in sides if side is not None]
            if len(known) == 2:
                return all(known) if is_and else any(known)
            return known[0] if known and known[0] != is_and else None
        first, second = (without_marks(self._words.text(each)) for each in (left, right))
        if operator in ("=", "==", "!="):
            return fnmatch.fnmatchcase(first, second) == (operator != "!=")
        if operator == "=~":
            try:
                return re.search(second, first) is not None
            except re.error:
                return None
        numbers = [int(each) for each in (first or "0", second or "0") if re.fullmatch(r"-?\d+", each)]
        if len(numbers) != 2:
            return None
        low, high = numbers
        results = {"-eq": low == high, "-ne": low != high, "-lt": low < high, "-le": low <= high}
        results |= {"-gt": low > high, "-ge": low >= high, "<": low < high, ">": low > high}
        return results.get(operator)


def _only_ends(body: list[Node]) -> bool:
    """Whether a branch ends the script with an error: a check of how it is used."""
    return any(re.match(r"(exit|return)\s+[1-9]", source(child)) for child in body)
