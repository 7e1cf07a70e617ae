"""Commands of a shell script with the values of its variables, as it would start them; nothing is run.

A condition on values that the script has is decided; any other (a file that exists, a command that succeeds) is taken
to fail. Loops run over the words that they have. Functions, texts that a shell gets as its commands (``bash -c``, a
here-document, a file that the script writes) and options of SLURM in comments are followed.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from flexrlhf.api import is_secret_name, read_yaml
from flexrlhf.imports.shell_words import COMPARISONS, Words, marked, parsed, source, without_marks
from flexrlhf.imports.slurm_options import slurm_variables

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_STEPS = 100_000
"""Statements that are followed in loops and functions; the others are as many as the script has."""
MAX_DEPTH = 20
"""Depth of functions that call each other, and of texts that are commands."""
_COMMAND_FLAGS = ("-c", "-lc", "-xc", "-ec", "-lic", "-exc", "-euxc", "-exuc")
_SHELL = re.compile(r"(.*/)?(ba|z|da)?sh")
_RUN_FILES = re.compile(r"(.*/)?((ba|z|da)?sh|sbatch|source|\.)")
"""Commands that run a file of commands."""


@dataclass(frozen=True)
class Command:
    """A command of a script.

    words:     its program and arguments, behind the devices that it sees (``CUDA_VISIBLE_DEVICES=0,1``), if it says so.
    line:      its first line.
    """

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
        known = {name: marked(name) if is_secret_name(name) else value for name, value in (given or {}).items()}
        self._words = Words(dict(known), frozenset(known))
        self._functions: dict[str, Node] = {}
        self._files: dict[str, str] = {}
        self._steps = self._depth = self._inside = 0
        self._follow(text)
        while self._files:  # that another program runs
            self._nested(self._files.pop(next(iter(self._files))))

    @property
    def assumed(self) -> list[str]:
        """Sentences on conditions and commands whose results are not known."""
        return list(self._words.assumed)

    def _follow(self, text: str) -> None:
        for name, value in slurm_variables(text).items():
            self._words.variables.setdefault(name, value)
        tree = parsed(text)
        try:
            self._run(tree.root_node)
        except _Exit:
            return

    def _run(self, node: Node) -> bool:
        """Follow a statement; return whether it succeeds."""
        self._steps += 1
        if self._steps > MAX_STEPS and self._inside:
            self._words.assumed[f"loops and functions are followed for {MAX_STEPS} statements (MAX_STEPS)"] = None
            return True
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
                return self._run_all(node.named_children)
        return True

    def _run_all(self, nodes: list[Node]) -> bool:
        return all([self._run(each) for each in nodes])

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
            new = self._words_of(value)
        elif value is not None:
            new = words.text(value)
        if is_secret_name(name) and isinstance(new, str) and new:
            words.variables[name] = marked(name)
            return
        if appends and isinstance(new, list):
            old = words.variables.get(name, [])
            new = [*(old if isinstance(old, list) else [old]), *new]
        elif appends and isinstance(new, str):
            new = (words.lookup(name) or "") + new
        words.count(new)
        words.variables[name] = new

    def _words_of(self, node: Node) -> list[str]:
        """Return the words of a command, or the elements of an array."""
        others = ("variable_assignment", "file_redirect", "heredoc_redirect", "herestring_redirect", "comment")
        named = (each for each in node.named_children if each.type not in others)
        inner = ((each.named_children or [each])[0] if each.type == "command_name" else each for each in named)
        return [word for each in inner for word in self._words.words(each)]

    def _command(self, node: Node) -> bool:
        words = self._words_of(node)
        self._words.count(words)
        strings = [each for each in node.named_children if each.type == "herestring_redirect" and each.named_children]
        if words[:1] == ["read"] and strings:
            self._words.variables[words[-1]] = self._words.text(strings[0].named_children[0])
            return True
        assigned = [(each.text or b"").decode() for each in node.named_children if each.type == "variable_assignment"]
        visible = [text for text in assigned if text.startswith("CUDA_VISIBLE_DEVICES=")]
        return self._started(words, node.start_point[0] + 1, visible) if words else True

    def _started(self, words: list[str], line: int, visible: Sequence[str] = ()) -> bool:
        name, *arguments = words
        file = next((word for word in words[:2] if word.removeprefix("./") in self._files), None)
        if file is not None and (file == name or _RUN_FILES.fullmatch(name)):
            text = self._files.pop(file.removeprefix("./"))
            return self._call(parsed(text).root_node, words[words.index(file) + 1 :])
        match name:
            case "exit" | "return":
                raise _Exit
            case "true" | ":" | "set" | "echo" | "printf" | "cd" | "mkdir" | "export" | "source" | "." | "sleep":
                return True
            case "read":
                return True
            case "false" | "test":
                return False
        if self._depth < MAX_DEPTH:
            if name in self._functions:
                return self._call(self._functions[name], arguments)
            # a shell that gets its commands as a text, also behind launchers such as srun
            for place, (shell, flag) in enumerate(zip(words, words[1:], strict=False)):
                if flag in _COMMAND_FLAGS and _SHELL.fullmatch(shell) and len(words) > place + 2:
                    return self._nested(words[place + 2])
            if name == "eval":
                return self._nested(" ".join(arguments))
            if name == "ssh" and (own := _behind_host(arguments)):
                return self._nested(" ".join(own))
        self.commands.append(Command((*visible, *words), line))
        return True

    def _nested(self, text: str) -> bool:
        """Follow a text of commands, or of a container's description in YAML that has some."""
        if self._depth >= MAX_DEPTH:
            return True
        self._depth += 1
        plain = re.sub("\0([^\0]*)\0", lambda found: f"${{{found[1]}}}" if found[1].isidentifier() else "", text)
        containers = list(_commands_of_containers(plain))
        for words in containers:
            self._started(words, 1)
        if not containers:
            self._follow(plain)
        self._depth -= 1
        return True

    def _call(self, body: Node, arguments: list[str]) -> bool:
        """Follow a function with arguments, in the place of the script's own."""
        variables = self._words.variables
        own = {name: value for name, value in variables.items() if name in ("@", "#") or name.isdigit()}
        new: dict[str, str | list[str]] = {str(number): word for number, word in enumerate(arguments, 1)}
        self._words.variables = {name: value for name, value in variables.items() if name not in own} | new
        self._words.variables |= {"@": arguments, "#": str(len(arguments))}
        self._depth += 1
        self._inside += 1
        try:
            return self._run(body)
        except _Exit:
            return True
        finally:
            self._depth -= 1
            self._inside -= 1
            for name in (*new, "@", "#"):
                self._words.variables.pop(name, None)
            self._words.variables |= own

    def _redirected(self, node: Node) -> bool:
        """Follow a command with redirections. ``read`` takes the text that follows it, other programs its commands."""
        body = node.child_by_field_name("body")
        documents = [each for each in node.named_children if each.type == "heredoc_redirect"]
        if not documents:
            return self._run(body) if body is not None else True
        words = self._words_of(body) if body is not None and body.type == "command" else []
        text = self._document(documents[0])
        if words[:1] == ["read"]:
            self._words.variables[words[-1]] = text
            return True
        around = [child for each in (node, documents[0]) for child in each.named_children]
        files = [child for child in around if child.type == "file_redirect" and child.named_children]
        written = [self._words.text(child.named_children[-1]) for child in files]
        written += words[1:2] if words[:1] == ["tee"] else []
        if written and words[:1] in (["cat"], ["tee"], []):
            self._files[written[0].removeprefix("./")] = text
        elif not any(re.fullmatch(r"(.*/)?python[\d.]*", word) for word in words):
            self._nested(text)
        rest = [child for child in documents[0].named_children if child.type in ("command", "list", "pipeline")]
        is_shell = any(_SHELL.fullmatch(word) for word in words) or words[:1] in (["cat"], ["tee"])
        return all([self._run(each) for each in ([] if is_shell or body is None else [body]) + rest])

    def _document(self, node: Node) -> str:
        """Return the text of a here-document, which is expanded if its end is not quoted."""
        parts = {child.type: child for child in node.named_children}
        if "heredoc_body" not in parts:
            return ""
        is_quoted = "heredoc_start" in parts and re.search(r"[\\'\"]", source(parts["heredoc_start"])) is not None
        return source(parts["heredoc_body"]) if is_quoted else self._words.text(parts["heredoc_body"])

    def _list(self, node: Node) -> bool:
        left, right = node.named_children[0], node.named_children[-1]
        succeeded = self._run(left)
        is_and = any(child.type == "&&" for child in node.children)
        return self._run(right) if succeeded == is_and else succeeded

    def _if(self, node: Node) -> bool:
        """Follow the branch that is taken; one that only ends the script checks its use and is passed over."""
        branches: list[list[Node | None]] = [[]]
        for child in node.named_children:
            if child.type in ("elif_clause", "else_clause"):
                # the last branch has no condition
                branches.append([*([None] if child.type == "else_clause" else []), *child.named_children])
            else:
                branches[0].append(child)
        for condition, *rest in branches:
            body = [each for each in rest if each is not None]
            if (condition is None or self._run(condition)) and not _only_ends(body):
                return self._run_all(body)
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
                    self._run_all(body)
                return

    def _for(self, node: Node) -> None:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        if variable is None or body is None:
            return
        values = [word for child in node.children_by_field_name("value") for word in self._words.words(child)]
        self._words.count(values)
        self._inside += 1
        try:
            for value in values:
                self._words.variables[source(variable)] = value
                self._run(body)
        finally:
            self._inside -= 1

    def _test(self, node: Node) -> bool:
        """Return the result of a condition; False, with a sentence, if it depends on more than the script."""
        found = self._decided(node)
        if found is None:
            condition = re.sub(r"\s+", " ", source(node))
            self._words.assumed[f"the condition {condition} is taken to be false"] = None
        return bool(found)

    def _decided(self, node: Node) -> bool | None:
        words, named = self._words, node.named_children
        match node.type:
            case "test_command" | "parenthesized_expression":
                return self._decided(named[0]) if len(named) == 1 else None
            case "unary_expression":
                sign = source(node.children[0])
                if sign in ("-z", "-n"):
                    return (without_marks(words.text(named[-1])) == "") == (sign == "-z")
                found = self._decided(named[-1]) if sign == "!" else None
                return None if found is None else not found
            case "binary_expression":
                return self._compared(named[0], source(node.children[1]), named[-1])
        text = words.text(node)
        return None if text.startswith("\0") else without_marks(text) != ""

    def _compared(self, left: Node, sign: str, right: Node) -> bool | None:
        if sign in ("&&", "||", "-a", "-o"):
            is_and = sign in ("&&", "-a")
            known = [each for each in (self._decided(left), self._decided(right)) if each is not None]
            if len(known) == 2:
                return all(known) if is_and else any(known)
            return known[0] if known and known[0] != is_and else None
        first, second = (without_marks(self._words.text(each)) for each in (left, right))
        if sign in ("=", "==", "!="):
            return fnmatch.fnmatchcase(first, second) == (sign != "!=")
        numbers = [int(each) for each in (first or "0", second or "0") if re.fullmatch(r"-?\d+", each)]
        return bool(COMPARISONS[sign](*numbers)) if len(numbers) == 2 and sign in COMPARISONS else None


def _behind_host(arguments: Sequence[str]) -> list[str]:
    """Return the command behind the options and the host of ``ssh``."""
    place = 0
    while place < len(arguments) and arguments[place].startswith("-"):
        place += 2 if arguments[place] in ("-p", "-i", "-l", "-o", "-F", "-J", "-L", "-R") else 1
    return list(arguments[place + 1 :])


def _commands_of_containers(text: str) -> Iterator[list[str]]:
    """Yield ``command`` with ``args`` of each container in a description for Kubernetes."""
    if "apiVersion" not in text and "containers:" not in text:
        return
    for document in re.split(r"(?m)^---\s*$", text):
        try:
            nodes = [read_yaml(document)]
        except yaml.YAMLError:
            continue
        while nodes:
            node = nodes.pop()
            if isinstance(node, dict):
                parts = [node.get(name) for name in ("command", "args")]
                lists = [part for part in parts if isinstance(part, list)]
                if lists:
                    yield [str(word) for part in lists for word in part]
            nodes += list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []


def _only_ends(body: list[Node]) -> bool:
    """Whether a branch ends the script with an error: a check of how it is used."""
    return any(re.match(r"(exit|return)\s+[1-9]", source(child)) for child in body)
