"""Checks of the sources of scores before a run starts. A user's file is read here, not run: it may do anything."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexrlhf.config.code_checks import check_function, definitions, python_file
from flexrlhf.config.proxies import Address, check_certificates
from flexrlhf.config.reward_sources import FunctionSource, RewardSource, RuleSource, ServiceSource
from flexrlhf.config.secrets import expanded
from flexrlhf.errors import UserError, nearest, shown
from flexrlhf.rewards.solutions import is_read
from flexrlhf.rewards.worker_calls import FORMS, form_of, required_columns

OWN_COLUMNS = ("num_tokens", "conversation")
"""Arguments that a function may take in addition to the columns of the data."""
_PACKAGES = {
    "math": ("math_verify", "math-verify", "math"),
    "reasoning-gym": ("reasoning_gym", "reasoning-gym", "reasoning"),
}
"""Rule → module and package that it needs, and the extra with it."""


@dataclass(frozen=True)
class SourceChecks:
    """Checks of the sources of scores of one section.

    sources:  of the section
    name:     of the section, ``reward`` or ``cost``
    """

    sources: Sequence[RewardSource]
    name: str = "reward"

    def _section(self, index: int) -> str:
        return self.name if len(self.sources) == 1 else f"{self.name}.{index}"

    def check(self) -> None:
        """Raise UserError for the first source that could not be called, models aside.

        A name that a module imports by ``import *``, or a module of another kind than a Python file, is not checked.
        """
        for index, source in enumerate(self.sources):
            section = self._section(index)
            match source:
                case FunctionSource():
                    _check_function(source, section)
                case ServiceSource():
                    _check_service(source, section)
                case RuleSource(pattern=str(pattern)):
                    _check_pattern(pattern, f"{section}.pattern")
                case RuleSource(rule="math" | "reasoning-gym" as rule):
                    module, package, extra = _PACKAGES[rule]
                    if find_spec(module) is None:
                        raise UserError(
                            f"{section}.rule: {rule} needs the package {package}; install flexrlhf[{extra}]"
                        )

    def check_forms(self) -> None:
        """Raise UserError for the first source that no machine could call: a function without a name,
        an expression or an address that is none.
        """
        for index, source in enumerate(self.sources):
            section = self._section(index)
            match source:
                case FunctionSource(function=reference) if not reference.rpartition(":")[0]:
                    check_function(reference, f"{section}.function")
                case ServiceSource():
                    # the others may be whole only where the run is started
                    whole = [url for url in source.url if "${" not in url]
                    _check_addresses(section, whole, whole)
                case RuleSource(pattern=str(pattern)):
                    _check_pattern(pattern, f"{section}.pattern")

    def check_present_functions(self) -> bool:
        """Check functions as ``check`` does, where their files are there; return whether all of them are."""
        functions = {index: source for index, source in enumerate(self.sources) if isinstance(source, FunctionSource)}
        present = {index for index, source in functions.items() if Path(source.function.rpartition(":")[0]).is_file()}
        for index in sorted(present):
            _check_function(functions[index], self._section(index))
        return len(present) == len(functions)

    def check_columns(self, columns: Collection[str], path: str, with_functions: bool = True) -> None:
        """Raise UserError for the first source that needs a column that no row of ``path`` has.

        A service needs a label that is written in the YAML; a function needs its parameters without a default, where
        its ``def`` can be read. ``with_functions``: whether the files of functions have been checked, so that they are
        read.
        """
        for index, source in enumerate(self.sources):
            section = self._section(index)
            match source:
                case FunctionSource() if with_functions:
                    needed = [(f"{section}.function: {source.function} takes", key) for key in _needed(source)]
                case ServiceSource() if "label" in source.model_fields_set:
                    needed = [(f"{section}.label:", source.label)]
                case RuleSource(rule="exact_answer" | "gsm8k" | "math"):
                    needed = [(f"{section}.answer:", source.answer)]
                case RuleSource(rule="reasoning-gym"):
                    needed = [(f"{section}.rule: reasoning-gym reads", "entry")]
                case _:
                    needed = []
            for words, column in needed:
                if column not in columns:
                    raise UserError(
                        f"{words} {shown(column)}, no column of {path}{nearest(column, columns)}; "
                        f"there are {', '.join(columns)}"
                    )

    def solutions_read(self, rows: Sequence[Mapping[str, Any]], most: int) -> Iterator[tuple[str, int, int, Any]]:
        """Yield (setting, solutions tried, how many its rule cannot read, the first of these) for each rule
        that reads solutions. Of ``rows`` at most ``most`` are tried, evenly spaced; none without its package.
        """
        for index, source in enumerate(self.sources):
            if not isinstance(source, RuleSource) or source.rule not in ("gsm8k", "math"):
                continue
            if source.rule == "math" and find_spec(_PACKAGES["math"][0]) is None:
                continue
            given = [
                value for row in rows[:: -(-len(rows) // most) or 1] if (value := row.get(source.answer)) is not None
            ]
            unread = [value for value in given if not is_read(source.rule, value)]
            section = self._section(index)
            yield f"{section}.answer", len(given), len(unread), next(iter(unread), None)

    def check_solutions(self, rows: Sequence[Mapping[str, Any]], path: str) -> None:
        """Raise UserError for a rule that can read none of some solutions in ``rows``."""
        for setting, tried, unread, first in self.solutions_read(rows, 8):
            if tried and unread == tried:
                raise UserError(f"{setting}: the rule cannot read the solutions in {path}, such as {shown(first)}")


def _check_function(source: FunctionSource, section: str) -> None:
    check_function(source.function, f"{section}.function")
    _check_form(source.function, f"{section}.function")


def _needed(source: FunctionSource) -> list[str]:
    """Return the columns that a function cannot be called without; none if its parameters are not certain."""
    own = OWN_COLUMNS if source.separator is None else (*OWN_COLUMNS, "steps")
    place, _, name = source.function.rpartition(":")
    file = python_file(place, "function")
    signature = _signature(ast.parse(file.read_bytes()), name) if file else None
    form = None if signature is None else form_of(signature)
    if signature is None or form is None:
        return []
    return [column for column in required_columns(signature, form) if column not in own]


def _signature(module: ast.Module, name: str) -> inspect.Signature | None:
    """Return the signature of a function; None if a decorator or a second ``def`` may change it."""
    match [node for other, node in definitions(module.body) if other == name]:
        case [ast.FunctionDef(args=parameters, decorator_list=[])]:
            return inspect.Signature(list(_parameters(parameters)))
    return None


def _parameters(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a ``def``. A default is None here, whatever it is."""
    kinds = inspect.Parameter
    first_named = len(arguments.posonlyargs)
    by_place = [*arguments.posonlyargs, *arguments.args]
    first_default = len(by_place) - len(arguments.defaults)
    for place, one in enumerate(by_place):
        kind = kinds.POSITIONAL_ONLY if place < first_named else kinds.POSITIONAL_OR_KEYWORD
        yield inspect.Parameter(one.arg, kind, default=kinds.empty if place < first_default else None)
    if arguments.vararg is not None:
        yield inspect.Parameter(arguments.vararg.arg, kinds.VAR_POSITIONAL)
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield inspect.Parameter(one.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
    if arguments.kwarg is not None:
        yield inspect.Parameter(arguments.kwarg.arg, kinds.VAR_KEYWORD)


def _check_pattern(pattern: str, key: str) -> None:
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"{key}: no regular expression: {error}, found {shown(pattern)}") from None


def _check_addresses(section: str, written: Sequence[str], addresses: Sequence[str]) -> None:
    """Raise UserError for one of ``addresses`` without a host, or with a port that cannot exist.

    ``written``: as the YAML has them.
    """
    # slow to load, and few plans need it
    import httpx

    for url, address in zip(written, addresses, strict=True):
        try:
            host = httpx.URL(address).host
        except httpx.InvalidURL:
            host = ""
        if not host:
            raise UserError(
                f"{section}.url: expected an address such as http://localhost:8000/score, found {shown(url)}"
            )
        if not Address(address).has_port:
            raise UserError(f"{section}.url: no such port, use 1 to 65535, found {shown(url)}")


def _check_service(source: ServiceSource, section: str) -> None:
    addresses = [Address.expanded(url, f"{section}.url").url for url in source.url]
    _check_addresses(section, source.url, addresses)
    check_certificates()
    for address in addresses:
        Address(address).proxy()
    for header, value in source.headers.items():
        sent = header + expanded(value, f"{section}.headers.{header}")
        if not sent.isascii() or "\n" in sent:
            raise UserError(f"{section}.headers.{header}: a header is one line of ASCII, found {shown(value)}")


def _check_form(reference: str, key: str) -> None:
    """Raise UserError for a function that is called in none of the forms, where its ``def`` can be read."""
    place, _, name = reference.rpartition(":")
    file = python_file(place, key)
    signature = _signature(ast.parse(file.read_bytes()), name) if file else None
    if signature is not None and form_of(signature) is None:
        raise UserError(f"{key}: {name}{_shown(signature)} in {file} is neither {FORMS}")


def _shown(signature: inspect.Signature) -> str:
    return f"({', '.join(str(one).partition('=')[0] for one in signature.parameters.values())})"
