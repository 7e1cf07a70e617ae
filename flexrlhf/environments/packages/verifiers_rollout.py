"""Environments of verifiers: its rollouts run here as they are, and their model is the policy.

A rollout of verifiers calls a model when it needs a turn, where ours is called for a reply. So its harness, the program
that makes an agent's turns, is one of ours: it waits for the policy's next turn, sends it through verifiers' own
endpoint, which records it, and runs the tools of the task.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from flexrlhf.api import Messages, Turn, parse_calls

VerifiersMessage = dict[str, Any]
HARNESS = "flexrlhf_policy"
"""Module by which verifiers finds the harness."""
MOST_TASKS = 1000
"""Tasks that are read of a set without an end."""


class VerifiersRollout:
    """One episode of ``verifiers:TASKSET``: its task is the one of the row's column ``idx``, or by the seed.

    name:         of the task set, whose package is installed
    tool_format:  how the policy writes calls of tools: hermes, llama3 or a regular expression
    environment:  settings of verifiers' environment, as its ``[env]`` has them
    options:      settings of the task set
    """

    library, extra = "verifiers.v1", "verifiers"

    def __init__(
        self, name: str, tool_format: str = "hermes", environment: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._settings = json.dumps({**(environment or {}), "taskset": {"id": name, **options}})
        self._agent = _PolicyAgent(tool_format)
        self._messages = 0
        self._rollout: asyncio.Task[Any] | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> Messages:
        """Begin the rollout; return the messages of its prompt."""
        served = await _started(self._settings)
        task = served.tasks[row.get("idx", seed % len(served.tasks))]
        self._agent.upstream = served.upstream
        AGENT.set(self._agent)
        self._rollout = asyncio.create_task(served.environment.run_episode(task, served.context))
        return (await self._reply()).messages

    async def step(self, reply: str) -> Turn:
        """Continue the rollout with a turn of the policy."""
        self._agent.texts.put_nowait(reply)
        return await self._reply()

    async def truncate(self) -> float:
        """End the rollout, which waits for a turn; return its reward."""
        self._agent.texts.put_nowait(None)
        return (await self._reply()).reward

    async def close(self) -> None:
        """End the rollout, if it has not ended."""
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.wait([self._rollout])

    async def _reply(self) -> Turn:
        """Wait until the rollout needs a turn, or ends. Raises RuntimeError for one that fails."""
        assert self._rollout is not None, "an episode without a reset"
        turn = asyncio.create_task(self._agent.conversations.get())
        await asyncio.wait([turn, self._rollout], return_when=asyncio.FIRST_COMPLETED)
        if turn.done():
            messages = turn.result()[self._messages :]
            # and the turn of the policy itself
            self._messages += len(messages) + 1
            return Turn(messages)
        turn.cancel()
        episode = await self._rollout
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
        return Turn(reward=sum(trace.reward for trace in episode.traces if trace.agent.trainable), is_done=True)


@dataclass
class _PolicyAgent:
    """The policy as an agent of a rollout.

    tool_format:    how it writes calls of tools
    conversations:  the ones that need its turn
    texts:          its turns; None: no further one
    upstream:       replies of the model, by rollout, as in ``_Served``
    """

    tool_format: str
    conversations: asyncio.Queue[list[VerifiersMessage]] = field(default_factory=asyncio.Queue)
    texts: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    upstream: dict[str, VerifiersMessage] = field(default_factory=dict)

    async def turn(self, messages: list[VerifiersMessage]) -> VerifiersMessage | None:
        """Return the policy's turn in a conversation, as a message of a model; None for none."""
        self.conversations.put_nowait(list(messages))
        text = await self.texts.get()
        if text is None:
            return None
        calls, _ = parse_calls(text, self.tool_format)
        if not calls:
            return {"role": "assistant", "content": text}
        tools = [
            {
                "id": f"call_{place}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for place, call in enumerate(calls)
        ]
        return {"role": "assistant", "content": text, "tool_calls": tools}


AGENT: ContextVar[_PolicyAgent] = ContextVar("agent")
"""The policy of the rollout that a coroutine is a part of."""


@dataclass
class _Served:
    """An environment of verifiers.

    tasks:     of its set
    context:   model of its agents
    upstream:  replies that the model is about to give, by rollout
    """

    environment: Any
    tasks: Sequence[Any]
    context: Any
    upstream: dict[str, VerifiersMessage]


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
            settings[name] = {"runtime": {"type": "subprocess"}, **given, "harness": {"id": HARNESS}}
    environment = verifiers.load_environment(verifiers.resolve_env_config(settings))
    taskset = environment.taskset
    tasks = list(taskset if taskset.bounded else taskset.take(MOST_TASKS))
    upstream: dict[str, VerifiersMessage] = {}
    client = verifiers.EvalClientConfig(base_url=await _endpoint(upstream), api_key_var="NONE")
    async with environment.serving():
        ready.set_result(_Served(environment, tasks, verifiers.ModelContext("policy", client), upstream))
        await asyncio.Event().wait()


async def _endpoint(upstream: dict[str, VerifiersMessage]) -> str:
    """Serve the model that verifiers calls, which gives the replies in ``upstream``; return its address."""
    from aiohttp import web

    async def complete(request: web.Request) -> web.Response:
        message = upstream.pop(request.headers["X-Session-ID"])
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        head = {"id": "policy", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    application = web.Application(client_max_size=1 << 30)
    application.router.add_post("/chat/completions", complete)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


def _harness_module() -> ModuleType:
    """Return a module with a harness, as verifiers loads one: its class exists where verifiers does."""
    import verifiers.v1 as verifiers
    from verifiers.v1.dialects.chat import message_to_wire

    class PolicyHarness(verifiers.Harness[verifiers.HarnessConfig]):  # type: ignore[misc]
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
            stopped = await _converse(messages, trace.id, endpoint, secret, mcp_urls)
            return verifiers.ProgramResult(exit_code=int(bool(stopped)), stdout="", stderr=stopped)

    module = ModuleType(HARNESS)
    module.__dict__.update(PolicyHarness=PolicyHarness, __all__=["PolicyHarness"])
    return module


async def _converse(
    messages: list[VerifiersMessage], rollout: str, endpoint: str, secret: str, mcp_urls: Mapping[str, str]
) -> str:
    """Make an agent's turns until one calls no tool; return why the rollout was stopped before."""
    import httpx
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

    agent = AGENT.get()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        tools, places, connections = await connect_mcp(servers, stack)
        while True:
            message = await agent.turn(messages)
            if message is None:
                return ""
            agent.upstream[rollout] = message
            body = {"model": "policy", "messages": messages, **({"tools": tools} if tools else {})}
            headers = {"Authorization": f"Bearer {secret}"}
            reply = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
            if reply.is_error:
                return reply.text
            messages.append(message)
            for call in message.get("tool_calls", ()):
                function = call["function"]
                if function["name"] in places:
                    arguments = json.loads(function["arguments"])
                    content = await call_mcp(connections, places, function["name"], arguments)
                else:
                    content = f"error: no tool {function['name']!r}; there are {', '.join(places)}"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if "tool_calls" not in message:
                return ""
