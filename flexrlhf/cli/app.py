"""The application: its commands, one file each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import typer

from flexrlhf.cli.advise import advise
from flexrlhf.cli.compare import compare
from flexrlhf.cli.data import data
from flexrlhf.cli.doctor import doctor
from flexrlhf.cli.errors import OneSentenceGroup, with_exit_codes
from flexrlhf.cli.export import export
from flexrlhf.cli.join import join
from flexrlhf.cli.plan import plan
from flexrlhf.cli.profile import profile
from flexrlhf.cli.report import report
from flexrlhf.cli.run import run
from flexrlhf.cli.schema import schema
from flexrlhf.cli.settings import settings
from flexrlhf.cli.simulate import simulate
from flexrlhf.cli.slurm import slurm
from flexrlhf.cli.verify import verify
from flexrlhf.cli.version import Version

COMMANDS: Mapping[str, tuple[Callable[..., None], ...]] = {
    "Train": (run, join, slurm, doctor),
    "Before a run": (plan, data, settings, schema),
    "Which placement, how fast": (advise, simulate, profile),
    "After a run": (report, compare, verify, export),
}
"""Commands by the heading that they have in the help."""


def start(version: Version = False) -> None:
    """RLHF by placement ratios: one YAML, one printed list of instructions, the same numbers under every placement.

    Without a config, `run`, `plan` and others take the quick start's three runs.
    """


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
        app.command(rich_help_panel=group)(with_exit_codes(command))
