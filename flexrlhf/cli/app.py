"""The application: its commands by their groups, and its version."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, zip_longest
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from flexrlhf.cli.advise import advise
from flexrlhf.cli.chat import chat
from flexrlhf.cli.doctor import doctor
from flexrlhf.cli.errors import OneSentenceGroup, with_exit_codes
from flexrlhf.cli.import_job import import_
from flexrlhf.cli.plan import data, plan
from flexrlhf.cli.profile import profile
from flexrlhf.cli.results import compare, export, report
from flexrlhf.cli.run import join, run
from flexrlhf.cli.serve_reward import serve_reward
from flexrlhf.cli.settings import schema, settings
from flexrlhf.cli.simulate import simulate
from flexrlhf.cli.size import size
from flexrlhf.cli.slurm import slurm
from flexrlhf.cli.verify import verify

COMMANDS: Mapping[str, tuple[Callable[..., None], ...]] = {
    "Train": (run, join, serve_reward, slurm, doctor),
    "Before a run": (plan, data, settings, schema),
    "Which placement, how fast": (advise, size, simulate, profile, import_),
    "After a run": (chat, report, compare, verify, export),
}
"""Commands by the heading that they have in the help."""


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


app = typer.Typer(
    cls=OneSentenceGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # plain text: the library for frames and colours would take half of the time of a help
    rich_markup_mode=None,
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["--help", "-h"],
    },
)
app.callback()(start)
for group, commands in COMMANDS.items():
    for command in commands:
        # `import` is a word of Python
        name = command.__name__.rstrip("_").replace("_", "-")
        app.command(name, cls=_Command, rich_help_panel=group)(with_exit_codes(command))
