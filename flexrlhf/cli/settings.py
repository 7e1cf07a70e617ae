"""``flexrlhf settings``."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from flexrlhf.config.algorithms import ALGORITHMS
from flexrlhf.config.setting_search import find_settings, format_sections, keys_from


def complete_settings_text(incomplete: str) -> list[str]:
    """Return the keys and the algorithms that begin as ``incomplete``."""
    keys = [key.removesuffix("=") for key in keys_from(incomplete)]
    return [*keys, *(name for name in ALGORITHMS if name.startswith(incomplete))]


Text = Annotated[
    str | None,
    typer.Argument(
        help="a key or the start of one, an algorithm, or a word in a key; default: all",
        autocompletion=complete_settings_text,
    ),
]


def settings(text: Text = None) -> None:
    """List the settings of the YAML: values, default, meaning.

    All of them, or those of a section (`models.actor.optimizer`), of an algorithm (`grpo`), or with a word in their
    keys (`learning_rate`).
    """
    width = shutil.get_terminal_size((100, 24)).columns
    typer.echo(format_sections(find_settings(text), width))
