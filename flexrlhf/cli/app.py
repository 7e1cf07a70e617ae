"""The application: its commands, one file each."""

from __future__ import annotations

import typer

from flexrlhf.cli.advise import advise
from flexrlhf.cli.data import data
from flexrlhf.cli.doctor import doctor
from flexrlhf.cli.errors import OneSentenceGroup, with_exit_codes
from flexrlhf.cli.export import export
from flexrlhf.cli.join import join
from flexrlhf.cli.plan import plan
from flexrlhf.cli.profile import profile
from flexrlhf.cli.report import report
from flexrlhf.cli.run import run
from flexrlhf.cli.simulate import simulate
from flexrlhf.cli.slurm import slurm
from flexrlhf.cli.verify import verify

app = typer.Typer(
    cls=OneSentenceGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="RLHF by placement ratios.",
)
for command in (data, plan, simulate, advise, profile, doctor, run, join, slurm, export, report, verify):
    app.command()(with_exit_codes(command))
