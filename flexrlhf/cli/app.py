"""The application: its commands by their groups, and its version."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, zip_longest
from typing import Annotated, Any, Self

import typer
from typer.core import TyperCommand, TyperGroup

from flexrlhf.cli.errors import one_sentence_usage, print_error, with_exit_codes
from flexrlhf.config.plugins import SHIPPED, Plugin, load_plugin
from flexrlhf.errors import UserError

HEADINGS: Mapping[str, tuple[str, ...]] = {
    "Train": ("run", "join", "serve-reward", "slurm", "doctor"),
    "Before a run": ("plan", "data", "settings", "schema"),
    "Which placement, how fast": ("advise", "size", "simulate", "profile", "import"),
    "After a run": ("chat", "serve-model", "report", "compare", "verify", "export"),
}
"""Commands of this package by the heading that they have in the help."""
OF_OTHERS = "Of other packages"


def print_version(is_given: bool) -> None:
    """Print the versions of this package, of Python and of torch, and exit."""
    if is_given:
        others = ", ".join((f"Python {platform.python_version()}", f"torch {_version('torch')}"))
        typer.echo(f"flexrlhf {_version('flexrlhf')} ({others})")
        raise typer.Exit


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


Version = Annotated[
    bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
]


def start(with_version: Version = False) -> None:
    """RLHF by placement ratios: one YAML, one printed list of instructions, the same numbers under every placement.

    Without a config, `run`, `plan` and others take the quick start's three runs.
    """


WITHOUT_VALUE = {"--resume": "auto"}
"""Options that may be without a value, which typer's cannot, and the value that stands for none."""


class _Command(TyperCommand):
    """Command with the options of ``WITHOUT_VALUE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command, none of which is empty, as a variable that a shell lacks would be."""
        for before, word in zip(("", *args), args, strict=False):
            if not word.strip() or (word.startswith("--") and word.endswith("=") and word.count("=") == 1):
                option = word[:-1] or (before if before.startswith("-") else "an argument")
                raise typer.BadParameter(f"{option} is empty", ctx=ctx)
        pairs = zip_longest(args, args[1:], fillvalue="-")
        found = (
            (word, WITHOUT_VALUE[word]) if word in WITHOUT_VALUE and after.startswith("-") else (word,)
            for word, after in pairs
        )
        return super().parse_args(ctx, list(chain.from_iterable(found)))


class _Commands(dict[str, Any]):
    """Commands by name, of which only the one that is used is loaded."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(SHIPPED["commands"]))

    def with_others(self) -> Self:
        """Return the commands with those of other packages."""
        for name in Plugin.of_group("commands"):
            self.setdefault(name, None)
        return self

    def get(self, name: str, default: Any = None) -> Any:
        """Return a command. Raises UserError for one that cannot be loaded."""
        if name not in self:
            self.with_others()
        if name not in self:
            return default
        if self[name] is None:
            self[name] = _command(name, load_plugin("commands", name))
        return self[name]


def _command(name: str, function: Any) -> Any:
    single = typer.Typer(**SETTINGS)
    single.command(name, cls=_Command)(with_exit_codes(function))
    return typer.main.get_command(single)


class _CommandGroup(TyperGroup):
    """Commands under headings, whose errors of usage are one sentence, as all others are, not a frame of several
    lines."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = self._named = _Commands()

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the options before a command. Without any word, typer's error is the help."""
        if not args:
            return super().make_context(info_name, args, parent, **extra)
        with one_sentence_usage(None):
            return super().make_context(info_name, args, parent, **extra)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; one that cannot be loaded ends the program with a sentence."""
        try:
            return super().get_command(ctx, cmd_name)
        except UserError as error:
            print_error(str(error))
            raise typer.Exit(2) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a list of the commands under each heading, one line each."""
        known = {name for names in HEADINGS.values() for name in names}
        others = tuple(name for name in self._named.with_others() if name not in known)
        width = max(map(len, (*known, *others)))
        for title, names in {**HEADINGS, OF_OTHERS: others}.items():
            if names:
                with formatter.section(title):
                    limit = formatter.width - width - 4
                    formatter.write_dl([(f"{name:<{width}}", self._line(name, limit)) for name in names])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the plug-ins of other packages."""
        others = [each for each in Plugin.of_others() if each.group != "commands"]
        if others:
            with formatter.section("Plug-ins of other packages"):
                formatter.write_dl([(each.title, f"{each.package} {each.version}") for each in others])

    def _line(self, name: str, limit: int) -> str:
        try:
            return str(self._named.get(name).get_short_help_str(limit))
        except UserError as error:
            return str(error)

    def invoke(self, ctx: Any) -> Any:
        """Parse the options of a command and call it."""
        with one_sentence_usage(ctx):
            return super().invoke(ctx)


SETTINGS: Mapping[str, Any] = {
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    # plain text: the library for frames and colours would take half of the time of a help
    "rich_markup_mode": None,
    "context_settings": {
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["--help", "-h"],
    },
}
app = typer.Typer(cls=_CommandGroup, **SETTINGS)
app.callback()(start)
