"""``flexrlhf serve-reward``: the scores of a function or of a reward model, as a service for other machines."""

from __future__ import annotations

from keyword import iskeyword
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.cli.served_address import Device, Host, Port, Secret, secret_of, serve_until_ended
from flexrlhf.cli.working import working
from flexrlhf.config.strict_model import LEAST_SECONDS
from flexrlhf.errors import UserError
from flexrlhf.text import counted

Served = Annotated[str, typer.Argument(metavar="PATH", help="file.py:name, or the directory of a sequence classifier")]
Label = Annotated[str, typer.Option(help="parameter of the function that receives the labels of a request")]
Workers = Annotated[int | None, typer.Option(min=1, max=1024, help="calls of a function at a time; default: 1")]
Timeout = Annotated[
    float | None, typer.Option(min=LEAST_SECONDS, help="limit of a function's call in seconds; default: 10")
]
Batch = Annotated[int | None, typer.Option(min=1, help="sequences of one pass of a model; default: 16")]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="a model reads the last so many tokens of a text; default: its positions")
]


def serve_reward(
    path: Served,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    secret: Secret = None,
    label: Label = "label",
    workers: Workers = None,
    timeout: Timeout = None,
    device: Device = None,
    batch: Batch = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Serve scores to runs elsewhere.

    A run names the service as reward: {url: http://HOST:PORT/}. Ends on Ctrl-C or SIGTERM.
    """
    of_functions = {"workers": workers, "timeout": timeout}
    of_models = {"device": device, "batch": batch, "max-tokens": max_tokens}
    is_model = Path(path).is_dir()
    for option, value in (of_functions if is_model else of_models).items():
        if value is not None:
            kinds = ("a function", "a model") if is_model else ("a model", "a function")
            raise UserError(f"--{option} {value}: goes with {kinds[0]}, and {path} is {kinds[1]}; remove it")
    if not label.isidentifier() or iskeyword(label):
        raise UserError(f"--label {label!r}: expected the name of a parameter, such as label")
    if timeout is not None and not isfinite(timeout):
        raise UserError(f"--timeout {timeout}: expected a finite number of seconds")
    token = secret_of(secret)
    from flexrlhf.runs.score_server import ScoreServer
    from flexrlhf.runs.served_scores import load_scores

    with working(f"loading {path}"):
        source = load_scores(path, workers or 1, timeout or 10.0, device or "auto", batch or 16, max_tokens)
    try:
        server = ScoreServer(source, host, port, token, label)
        serve_until_ended(server, path, host, "/", secret)
    finally:
        source.close()
    typer.echo(f"ended after {counted(server.requests, 'request')}")
