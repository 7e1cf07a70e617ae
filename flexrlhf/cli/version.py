"""``flexrlhf --version``."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer


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
