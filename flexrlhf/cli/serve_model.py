"""``flexrlhf serve-model``: the policy of a run behind OpenAI's protocol, for evaluation harnesses and agents."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import typer

from flexrlhf.cli.chat import ChatRun
from flexrlhf.cli.served_address import Device, Host, Port, Secret, secret_of, serve_until_ended
from flexrlhf.cli.working import working
from flexrlhf.config.environment_settings import ToolFormat
from flexrlhf.errors import UserError, nearest
from flexrlhf.text import counted

Name = Annotated[str | None, typer.Option(help="model in requests; default: the name of the directory")]
Sampler = Annotated[
    Literal["auto", "vllm", "transformers"],
    typer.Option("--engine", help="auto: vllm on a GPU if it is installed, else transformers"),
]
Rows = Annotated[int, typer.Option("--batch", min=1, help="sequences that are sampled at once")]
ReplyTokens = Annotated[
    int | None, typer.Option("--tokens", min=1, help="most of a reply without max_tokens; default: the run's, or 256")
]
Form = Annotated[
    str, typer.Option("--tool-format", help="how calls of tools are written, as in environment.tool_format")
]


def serve_model(
    run: ChatRun,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    secret: Secret = None,
    name: Name = None,
    engine: Sampler = "auto",
    device: Device = None,
    batch: Rows = 16,
    tokens: ReplyTokens = None,
    tool_format: Form = "hermes",
) -> None:
    """Serve the trained policy in OpenAI's protocol.

    Clients have http://HOST:PORT/v1 as their base_url. Ends on Ctrl-C or SIGTERM.
    """
    if tool_format not in (known := get_args(ToolFormat)):
        raise UserError(f"--tool-format {tool_format!r}: expected {', '.join(known)}{nearest(tool_format, known)}")
    model, token = name or run.resolve().name, secret_of(secret)
    from flexrlhf.runs.served_policy import load_policy
    from flexrlhf.serving.policy_server import PolicyServer

    with working(f"loading {run}"):
        policy = load_policy(run, engine, device or "auto", batch, tokens, tool_format, token)
    try:
        try:
            server = PolicyServer(policy, model, None, host, port)
        except OSError as error:
            raise UserError(f"--host {host} --port {port}: {error.strerror}; give others") from None
        serve_until_ended(server, f"{run} as model {model}", host, "/v1", secret)
    finally:
        policy.close()
    typer.echo(f"ended after {counted(policy.num_calls, 'call')}")
