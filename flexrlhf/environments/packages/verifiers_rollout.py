"""Episodes of ``verifiers:TASKSET``: a program whose rollouts of verifiers have the policy as their model.

    agent ── server of verifiers, which records its calls ── endpoint of the episode (``environment.api``)

The interpreter ``environment.python``, which runs this file, needs verifiers, and nothing of this package.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

HARNESS = "flexrlhf_policy"
"""Module by which verifiers finds the harness."""
MOST_TASKS = 1000
"""Tasks that are read of a set without an end."""
NO_ROOM = "context_length_exceeded"
"""Code of a call that is refused since the conversation can have no further turn."""


class VerifiersRollout:
    """Facts of ``verifiers:TASKSET``.

    library, extra:  what its interpreter needs, and this package's extra that installs it
    program:         the function of this file that plays an episode
    """

    library, extra, program = "verifiers.v1", "verifiers", "run"


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the program, with verifiers loaded, as that may take longer than a turn."""
    if name != VerifiersRollout.program:
        raise AttributeError(name)
    import verifiers.v1  # noqa: F401

    return _run


async def _run(
    row: Mapping[str, Any], api: Any, name: str, environment: Mapping[str, Any] | None = None, **options: Any
) -> float:
    """Play an episode: the task of the row's column ``idx``, or by the seed; return its reward.

    name:         of the task set, whose package is installed
    environment:  settings of verifiers' environment, as its ``[env]`` has them
    options:      settings of the task set

    Raises RuntimeError for a rollout that fails.
    """
    import verifiers.v1 as verifiers

    served = await _started(json.dumps({**(environment or {}), "taskset": {"id": name, **options}}))
    task = served.tasks[row.get("idx", api.seed % len(served.tasks))]
    # of a client verifiers reads the key from a variable
    variable = f"FLEXRLHF_{api.api_key}"
    os.environ[variable] = api.api_key
    try:
        client = verifiers.EvalClientConfig(base_url=api.base_url, api_key_var=variable)
        episode = await served.environment.run_episode(task, verifiers.ModelContext(api.model, client))
    finally:
        del os.environ[variable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
    return float(sum(trace.reward for trace in episode.traces if trace.agent.trainable))


@dataclass
class _Served:
    """An environment of verifiers, and the tasks of its set."""

    environment: Any
    tasks: Sequence[Any]


async def _started(settings: str) -> _Served:
    """Return an environment, which is served until the process ends. Raises what its start does."""
    ready, serving = _serving(settings)
    await asyncio.wait([ready, serving], return_when=asyncio.FIRST_COMPLETED)
    return ready.result() if ready.done() else serving.result()


@functools.cache
def _serving(settings: str) -> tuple[asyncio.Future[_Served], asyncio.Task[Any]]:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[_Served] = loop.create_future()
    return ready, loop.create_task(_serve(json.loads(settings), ready))


async def _serve(settings: dict[str, Any], ready: asyncio.Future[_Served]) -> None:
    import verifiers.v1 as verifiers

    sys.modules.setdefault(HARNESS, _harness_module())
    kind = verifiers.env_config_type(settings["taskset"]["id"], settings.get("id", ""))
    for name, setting in kind.model_fields.items():
        given = settings.get(name) or {}
        if isinstance(setting.default, verifiers.AgentConfig) and not (given.get("model") or setting.default.model):
            settings[name] = {"runtime": {"type": "subprocess"}, "harness": {"id": HARNESS}, **given}
    environment = verifiers.load_environment(verifiers.resolve_env_config(settings))
    taskset = environment.taskset
    tasks = list(taskset if taskset.bounded else taskset.take(MOST_TASKS))
    async with environment.serving():
        # each rollout has a server of its own, which ends with it: a shared one keeps a client for each key
        environment._interception = None
        ready.set_result(_Served(environment, tasks))
        await asyncio.Event().wait()


def _harness_module() -> ModuleType:
    """Return a module with a harness, as verifiers loads one: its class exists where verifiers does."""
    import verifiers.v1 as verifiers
    from verifiers.v1.dialects.chat import message_to_wire

    class PolicyHarness(verifiers.Harness[verifiers.HarnessConfig]):  # type: ignore[misc]
        """Agent with the tools of its task, in this process: it needs no ``uv`` and no download."""

        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(message) for message in prompt or []]
            stopped = await _converse(messages, ctx.model, endpoint, secret, mcp_urls)
            return verifiers.ProgramResult(exit_code=int(bool(stopped)), stdout="", stderr=stopped)

    module = ModuleType(HARNESS)
    module.__dict__.update(PolicyHarness=PolicyHarness, __all__=["PolicyHarness"])
    return module


async def _converse(
    messages: list[dict[str, Any]], model: str, endpoint: str, secret: str, mcp_urls: Mapping[str, str]
) -> str:
    """Make an agent's turns until one calls no tool, or there is no room for another; return why it was stopped."""
    import httpx
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False, verify=False))
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        tools, places, connections = await connect_mcp(servers, stack)
        while True:
            body = {"model": model, "messages": messages, **({"tools": tools} if tools else {})}
            headers = {"Authorization": f"Bearer {secret}"}
            reply = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
            if reply.is_error:
                return "" if NO_ROOM in reply.text else reply.text
            message = reply.json()["choices"][0]["message"]
            messages.append(message)
            for call in message.get("tool_calls") or ():
                function = call["function"]
                if function["name"] in places:
                    content = await call_mcp(connections, places, function["name"], json.loads(function["arguments"]))
                else:
                    content = f"error: no tool {function['name']!r}; there are {', '.join(places)}"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if not message.get("tool_calls"):
                return ""
