"""The command line: parse and validate, then import the heavy part. ``plan`` never imports torch."""

from __future__ import annotations

from flexrlhf.cli.app import app
from flexrlhf.launch.lifetime import ending

__all__ = ["app", "main"]


def main() -> None:
    """Run the command that the process was started with, and end the process."""
    with ending():
        app()
