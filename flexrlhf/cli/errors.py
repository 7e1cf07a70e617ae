"""Exit codes: a mistake that a user can correct, or the end of a job, is one sentence on stderr, not a traceback."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import typer
from pydantic import ValidationError

from flexrlhf.config.secrets import without_secrets
from flexrlhf.config.spec_problems import plain_problem
from flexrlhf.data.hub import check_endpoint
from flexrlhf.errors import Interrupted, Preempted, RankFailure, RunStopped, UserError, is_exhaustion, one_line
from flexrlhf.signals import Ending, StopSignal

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing, which name no file."""
EXIT_CODES: dict[type[Exception], int] = {UserError: 2, RankFailure: 1, RunStopped: 1, Interrupted: 130, Preempted: 143}
Options = ParamSpec("Options")
_USAGE_ERROR: Any = typer.BadParameter.__base__
"""Base of all errors in a command line, which typer has but does not export."""


@contextmanager
def one_sentence_usage(group: Any) -> Iterator[None]:
    """Context in which an error of usage ends the program with a sentence. ``group``: of the commands, once parsed."""
    try:
        yield
    except _USAGE_ERROR as error:
        # an option without its value is an error without a context
        is_of_command = error.ctx is not None and error.ctx.parent is not None
        name = error.ctx.info_name if is_of_command else getattr(group, "invoked_subcommand", None)
        if isinstance(error.__cause__, ValidationError):
            error.message = plain_problem(error.__cause__.errors(include_url=False)[0])
        message = re.sub(r"\. Did you mean (.*)\?$", r" (did you mean \1?)", error.format_message()).rstrip(".")
        prefix, help_of = (f"{name}: ", f"flexrlhf {name}") if name else ("", "flexrlhf")
        print_error(f"{prefix}{message[:1].lower()}{message[1:]}; see {help_of} --help")
        raise typer.Exit(2) from None


def with_exit_codes(command: Callable[Options, None]) -> Callable[Options, None]:
    """Return ``command`` with the errors of ``EXIT_CODES`` printed and turned into exit codes."""

    def code_of(*args: Options.args, **kwargs: Options.kwargs) -> int:
        try:
            Ending.begin_command()
            _check_current_directory()
            check_endpoint()
            command(*args, **{name: _in_home(value) for name, value in kwargs.items()})
        except tuple(EXIT_CODES) as error:
            print_error(str(error))
            return next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
        except typer.Exit as end:
            return end.exit_code
        except (OSError, MemoryError, ImportError, RuntimeError) as error:
            sentence = _system_sentence(error)
            if not sentence:
                raise
            print_error(sentence)
            return 2
        return 0

    @wraps(command)
    def call(*args: Options.args, **kwargs: Options.kwargs) -> None:
        try:
            code = code_of(*args, **kwargs)
        except StopSignal as stop:
            print_error(str(stop))
            code = stop.exit_code(stop.number)
        except KeyboardInterrupt:
            code = EXIT_CODES[Interrupted]
        sys.stdout.flush()
        Ending.end_command(code)
        if code:
            raise typer.Exit(code)

    return call


def _system_sentence(error: Exception) -> str:
    """Return a sentence about a file, or about exhausted memory; empty for an error of ours."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"the output cannot be written ({error.strerror})"
    if isinstance(error, OSError) and "temporary directory" in str(error.strerror):
        return f"{error.strerror}; make room in one, or set TMPDIR to another"
    return f"memory is exhausted ({str(error) or 'MemoryError'})" if is_exhaustion(error) else ""


def _in_home(value: Any) -> Any:
    """Return an option's value with home directories in the place of ``~``, which no shell expands behind ``=``."""
    match value:
        case Path():
            return Path(os.path.expanduser(str(value)))
        case str():
            return os.path.expanduser(value)
        case list():
            return [_in_home(each) for each in value]
    return value


def _check_current_directory() -> None:
    """Raise UserError if the current directory has been deleted, against which paths are read."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the current directory does not exist any more; change to another one") from None


def print_error(sentence: str) -> None:
    """Print a sentence on stderr, behind the program's name, in one line and without secrets that a user has typed."""
    typer.echo(f"flexrlhf: {one_line(without_secrets(sentence))}", err=True)
