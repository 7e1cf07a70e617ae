"""``flexrlhf chat``: a conversation with the policy of a run in the terminal, next to the one that it started from."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.cli.working import working
from flexrlhf.display.plain_lines import width_of_output
from flexrlhf.errors import UserError

ChatRun = Annotated[Path, typer.Argument(help="directory of a run, such as runs/NAME, or of a model")]
Before = Annotated[bool, typer.Option("--before", help="also the policy that the run started from, side by side")]
Tokens = Annotated[int | None, typer.Option("--tokens", min=1, help="most of a reply; default: the run's, or 256")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest tokens")]


def chat(run: ChatRun, before: Before = False, tokens: Tokens = None, temperature: Temperature = 0.0) -> None:
    """Talk to the trained policy.

    Every line is a prompt; from a pipe, all of its lines. Without a chat template each line stands alone.
    """
    from flexrlhf.runs.conversation import Policies

    found = Policies.find(run)
    limit = tokens or found.limit
    if before and found.before is None:
        raise UserError(f"--before: {run} names no policy that it started from; leave it out")
    with working("loading the policy"):
        after = found.load(found.after)
        first = None if found.before is None or not before else found.load(found.before)
    for line in _lines():
        if first is None:
            after.reply(line, limit, temperature, lambda text: typer.echo(text, nl=False))
            typer.echo()
        else:
            replies = [speaker.reply(line, limit, temperature) for speaker in (first, after)]
            typer.echo("\n".join(_side_by_side(["before", "after"], replies, width_of_output())))


def _lines() -> Iterator[str]:
    """Yield the lines that are typed or piped, until their end."""
    is_typed = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_typed else "")
        except EOFError:
            return
        if line.strip():
            if not is_typed:
                typer.echo(f"> {line}")
            yield line.strip()


def _side_by_side(titles: list[str], texts: list[str], width: int) -> Iterator[str]:
    column = max(20, (min(width, 120) - 3) // 2)
    wrapped = [[title, *textwrap.wrap(text, column)] for title, text in zip(titles, texts, strict=True)]
    yield from (f"{left:<{column}} | {right}".rstrip() for left, right in zip_longest(*wrapped, fillvalue=""))
