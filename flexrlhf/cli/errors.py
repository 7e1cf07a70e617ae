"""Exit codes: what a user can correct, and how a job ended, is one sentence on stderr without a traceback."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import typer

from flexrlhf.errors import Interrupted, Preempted, RankFailure, RunStopped, UserError

EXIT_CODES: dict[type[Exception], int] = {
    UserError: 2,
    RankFailure: 1,
    RunStopped: 1,
    Interrupted: 130,
    Preempted: 143,
}
Options = ParamSpec("Options")


def with_exit_codes(command: Callable[Options, None]) -> Callable[Options, None]:
    """Return ``command`` with the errors of ``EXIT_CODES`` printed and turned into exit codes."""

    @wraps(command)
    def call(*args: Options.args, **kwargs: Options.kwargs) -> None:
        try:
            _check_current_directory()
            command(*args, **kwargs)
        except tuple(EXIT_CODES) as error:
            print_error(str(error))
            raise typer.Exit(_exit_code(error)) from None

    return call


def _check_current_directory() -> None:
    """Raise UserError where the current directory has been deleted, against which paths are read."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the current directory does not exist any more; change to another one") from None


def print_error(sentence: str) -> None:
    """Print a sentence on stderr, behind the program's name."""
    typer.echo(f"flexrlhf: {sentence}", err=True)


def _exit_code(error: Exception) -> int:
    return next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
