"""Options of commands that serve: an address, and a secret; and the time until they end."""

from __future__ import annotations

import os
import signal
import threading
from typing import Annotated, Literal

import typer

from flexrlhf.errors import UserError
from flexrlhf.serving.token_server import TokenServer

Host = Annotated[str, typer.Option(help="address to listen on; 0.0.0.0: all of this machine's")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")]
Secret = Annotated[
    str | None,
    typer.Option(
        metavar="VARIABLE",
        help="environment variable whose value a request has as Authorization: Bearer; without it nobody needs one",
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None, typer.Option(help="of a model; default: auto, a GPU if there is one")
]


def secret_of(variable: str | None) -> str | None:
    """Return the secret in an environment variable; None without one. Raises UserError."""
    if variable is None:
        return None
    value = os.environ.get(variable, "")
    if not value or not value.isascii() or not value.isprintable():
        # the secret itself is not shown
        shown = variable if variable.isupper() and variable.isidentifier() else "***"
        raise UserError(f"--secret {shown}: expected an environment variable with one line of ASCII; export it first")
    return value


def serve_until_ended(server: TokenServer, what: str, host: str, path: str, secret: str | None) -> None:
    """Serve until Ctrl-C or SIGTERM, and print where. ``secret``: the variable of it."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with server.serving():
        place = f"http://{f'[{host}]' if ':' in host else host}:{server.port}{path}"
        allowed = "anyone who reaches it" if secret is None else f"requests with the secret of {secret}"
        typer.echo(f"serves {what} at {place} to {allowed}; Ctrl-C ends it")
        ended.wait()
