"""Sessions of one process, an episode each. Worker processes load this: here alone an environment's code runs.

Episodes whose environment or tools have ``async`` methods run concurrently, on an event loop that also runs between
calls; others run one after another. A call that waits longer than its limit is cancelled; one that blocks the process
is ended with it, by the process that called.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from inspect import CORO_CREATED, getcoroutinestate, iscoroutinefunction
from typing import Any, TypeVar

from flexrlhf.config.secrets import expanded_setting
from flexrlhf.environments.base import EpisodeCall, EpisodeReply, is_stale
from flexrlhf.environments.episode import Episode
from flexrlhf.environments.process_limits import ProcessLimits, news
from flexrlhf.environments.programs import Programs
from flexrlhf.environments.servers import ServedEpisode, Servers
from flexrlhf.environments.sources import addresses_of, load_environment
from flexrlhf.environments.tool_runs import load_tools
from flexrlhf.user_code.call_failures import CallFailed, CallFailure, Caught
from flexrlhf.user_code.processes import descendants

BLOCKED = "blocked"
"""Kind of failure of a call that may have waited only for another one, which blocked its process."""
PUNCTUAL = 0.2
"""Part of the limit by which the end of a waiting call may be late if nothing blocks the process."""
RESERVE = 8 << 20
"""Bytes that a process frees once its memory is used up."""
CLOSE_SECONDS = 1.0
"""Limit of ``close`` after a failure."""
T = TypeVar("T")
MakeEpisode = Callable[[tuple[int, int]], Episode | ServedEpisode]
"""Function that makes the episode of a key."""


@dataclass(frozen=True)
class Setup:
    """Settings of an environment, as a process receives them.

    path, tools, tool_format: as in EnvironmentSpec
    options:  as JSON
    seconds:  limit of one step
    steps:    of training in which an episode may have turns
    program:  how the program of ``path`` runs; None: that is a class
    """

    path: str | None
    tools: tuple[str, ...]
    options: str
    tool_format: str
    seconds: float
    steps: int = 1
    program: ProgramSetup | None = None


@dataclass(frozen=True)
class ProgramSetup:
    """Settings of the process of a program.

    python:    its interpreter; None: that of this process
    limits:    of that interpreter
    sampling:  temperature, top_p and top_k of the policy
    sequences: conversations of an episode
    """

    python: str | None
    limits: ProcessLimits
    sampling: tuple[tuple[str, float], ...]
    sequences: int


@dataclass(frozen=True)
class EnvStep:
    """One step of an environment.

    key:      of the episode
    number:   of the turn; 0 is the reset
    text:     of the policy's turn
    is_last:  whether no turn follows
    row, seed: of the episode, for the reset
    is_ended: whether the episode ends in place of the turn
    call:     of a program, which itself is given all turns again
    """

    key: tuple[int, int]
    number: int
    text: str = ""
    is_last: bool = False
    row: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    is_ended: bool = False
    call: EpisodeCall | None = None


def load(setup: Setup) -> bool | CallFailure:
    """Load environment and tools, once in a process. Return whether they are ``async``, or why they do not load."""
    try:
        return _sessions(setup).load()
    except CallFailed as error:
        return error.failure


@dataclass(frozen=True)
class StepResults:
    """Replies to steps.

    replies:    by episode; None if this process does not have it, or has not loaded anything
    children:   processes that episodes have started, as ``descendants`` returns them
    is_blocked: whether no other episode of this process can go on
    cpu_seconds: that the process, and others that have ended in it, computed
    process:    its id
    """

    replies: Mapping[tuple[int, int], EpisodeReply | None]
    children: Mapping[int, int]
    is_blocked: bool
    cpu_seconds: float
    process: int


def exchange_steps(setup: Setup, steps: Sequence[EnvStep]) -> StepResults:
    """Begin one step of each of some sessions, and return the replies that are there since the last exchange.

    ``async`` sessions await the first of them, or the news that another step has arrived; other ones run their steps.
    """
    return _sessions(setup).results(_sessions(setup).exchange(steps))


def waiting_limit(seconds: float) -> float:
    """Return how long ``async`` turns may take whose limit is ``seconds`` each, if none blocks the process."""
    return seconds + min(0.5 + seconds / 4, 5.0)


def children(setup: Setup) -> dict[int, int]:
    """Return the processes that episodes have left behind."""
    return _sessions(setup).children()


@dataclass(frozen=True)
class _UnderWay:
    """A step under way: its coroutine, the result of that, and the time of its start."""

    coroutine: Coroutine[Any, Any, EpisodeReply | None]
    result: Future[EpisodeReply | None]
    began: float


class _Sessions:
    """Sessions of this process."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process = os.getpid()
        self._make: MakeEpisode | None = None
        self._programs: Programs | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._episodes: dict[tuple[int, int], Episode | ServedEpisode] = {}
        self._under_way: dict[tuple[int, int], _UnderWay] = {}
        self._computed = sum(os.times()[:4])
        self._reserve = bytes(RESERVE)
        self._of_loading: dict[int, int] = {}
        self.is_blocked = False

    def load(self) -> bool | CallFailure:
        with Caught("raise", "raised", passes=(CallFailed,)) as caught:
            if self._setup.program is not None and self._programs is None:
                self._programs = _programs(self._setup, self._setup.program)
                self._start_loop()
                self._of_loading = descendants(self._process)
            if self._make is None and self._programs is None:
                self._make, is_async = _factory(self._setup)
                if is_async:
                    self._start_loop()
                self._of_loading = descendants(self._process)
        self._end_copies()
        # loading is no step
        self._computed = sum(os.times()[:4])
        return caught.failure or self._loop is not None

    def _start_loop(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def exchange(self, steps: Sequence[EnvStep]) -> dict[tuple[int, int], EpisodeReply | None]:
        """Begin ``steps``, and return the replies that are there; ``steps`` that are not ``async`` are run."""
        if self._make is None and self._programs is None:
            return {step.key: None for step in steps}
        if self._loop is None:
            return {step.key: _at_once(self._reply(step)) for step in steps}
        for step in steps:
            coroutine = self._reply(step)
            result = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            result.add_done_callback(lambda _: news().set())
            self._under_way[step.key] = _UnderWay(coroutine, result, time.monotonic())
        limit = waiting_limit(self._setup.seconds)
        oldest = min((each.began for each in self._under_way.values()), default=0.0)
        news().wait(limit if self._programs is not None else max(0.0, oldest + limit - time.monotonic()))
        # before the look at results: one that comes behind it is seen by the next exchange
        news().clear()
        done = {key: each for key, each in self._under_way.items() if each.result.done()}
        found = {key: each.result.result() for key, each in done.items()}
        late = {
            key: each
            for key, each in self._under_way.items()
            if key not in done and time.monotonic() - each.began >= limit and self._programs is None
        }
        if late:
            # one does not end when it is cancelled, or blocks all others, or has ended the loop
            running, has_loop = asyncio.current_task(self._loop), self._loop.is_running()
            self.is_blocked = running is not None or not has_loop
            for key, each in late.items():
                is_own = running is None or running.get_coro() is each.coroutine
                has_begun = getcoroutinestate(each.coroutine) != CORO_CREATED
                found[key] = self._late(key, is_certain=has_loop and has_begun and is_own)
        self._under_way = {key: each for key, each in self._under_way.items() if key not in found}
        return found

    def results(self, replies: Mapping[tuple[int, int], EpisodeReply | None]) -> StepResults:
        """Return ``replies`` with the time computed since the last ones."""
        before, self._computed = self._computed, sum(os.times()[:4])
        is_blocked = self.is_blocked or (self._programs is not None and self._programs.is_stuck)
        return StepResults(replies, self.children(), is_blocked, self._computed - before, self._process)

    def children(self) -> dict[int, int]:
        """Return the processes that have been started since loading."""
        if sys.platform != "linux":
            return {}
        try:
            # that there are none is seen at once
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return {}
        found = descendants(self._process)
        return {process: found[process] for process in found.keys() - self._of_loading.keys()}

    async def _reply(self, step: EnvStep) -> EpisodeReply | None:
        """Return the reply to one step, whatever the environment does, but for blocking the process."""
        began = time.monotonic()
        # the time of a program counts while it waits for no turn
        limit = asyncio.timeout(self._setup.seconds) if self._loop is not None and self._programs is None else None
        reply: EpisodeReply | None = None
        with Caught("raise", "raised") as caught:
            try:
                async with limit or nullcontext():
                    reply = await self._run(step)
            except MemoryError:
                # room to report it
                self._reserve = b""
                raise
        self._end_copies()
        seconds = time.monotonic() - began
        failure = caught.failure
        if limit is not None and limit.expired():
            failure = self._late(step.key, is_certain=seconds < self._setup.seconds * (1 + PUNCTUAL)).failure
        if failure is None:
            return reply and replace(reply, seconds=seconds)
        with Caught("raise", "raised"):
            async with nullcontext() if limit is None else asyncio.timeout(CLOSE_SECONDS):
                await self._close(step.key)
        text = failure.text.encode(errors="backslashreplace").decode()
        return EpisodeReply(seconds=seconds, failure=replace(failure, text=text))

    def _late(self, key: tuple[int, int], is_certain: bool) -> EpisodeReply:
        """Return the reply of a step that takes too long. ``is_certain``: whether no other one may have delayed it."""
        kind, episode = "timeout" if is_certain else BLOCKED, self._episodes.get(key)
        where = f"{episode.address}: " if isinstance(episode, ServedEpisode) else ""
        return EpisodeReply(failure=CallFailure(kind, f"{where}took longer than {self._setup.seconds:g} s"))

    async def _run(self, step: EnvStep) -> EpisodeReply | None:
        if self._programs is not None:
            assert step.call is not None, "a program is given whole calls"
            return await self._programs.play(step.call)
        assert self._make is not None, "nothing is loaded"
        if step.number == 0:
            # also episodes that no last call has ended
            steps = self._setup.steps
            for key in [key for key in self._episodes if key == step.key or is_stale(key, step.key[0], steps)]:
                await self._close(key)
            episode = self._episodes[step.key] = self._make(step.key)
            reply = await episode.reset(step.row, step.seed)
        else:
            found = self._episodes.get(step.key)
            if found is None or found.turn != step.number - 1:
                return None
            episode = found
            reply = await (episode.truncated() if step.is_ended else episode.reply(step.text, step.is_last))
        if reply.is_done or step.is_last:
            await self._close(step.key)
        return reply

    async def _close(self, key: tuple[int, int]) -> None:
        """End an episode, if there is one; what its ``close`` raises is of no matter any more."""
        if episode := self._episodes.pop(key, None):
            with Caught("raise", "raised", passes=(asyncio.CancelledError,)):
                await episode.close()

    def _end_copies(self) -> None:
        """End this process if it is a copy that an environment has made of the one with the episodes."""
        if os.getpid() != self._process:
            os._exit(0)


@functools.cache
def _sessions(setup: Setup) -> _Sessions:
    return _Sessions(setup)


def _programs(setup: Setup, program: ProgramSetup) -> Programs:
    assert setup.path is not None, "a program has a place"
    options = expanded_setting(json.loads(setup.options), "environment.options")
    own = program.limits, dict(program.sampling), program.sequences
    return Programs(setup.path, options, program.python, setup.tool_format, setup.seconds, *own, setup.steps)


def _factory(setup: Setup) -> tuple[MakeEpisode, bool]:
    """Return a function that makes an episode, and whether any of its parts is ``async``."""
    kind, make_environment = (None, None) if setup.path is None else load_environment(setup.path)
    tools = load_tools(setup.tools)
    options = expanded_setting(json.loads(setup.options), "environment.options")
    parts = [*tools.values(), *(getattr(kind, name) for name in dir(kind) if not name.startswith("_"))]

    addresses = addresses_of(setup.path)
    servers = Servers(addresses) if addresses else None

    def make(*address: str) -> Episode:
        return Episode(make_environment and make_environment(*address, **options), tools, setup.tool_format)

    def make_of_key(key: tuple[int, int]) -> Episode | ServedEpisode:
        return make() if servers is None else ServedEpisode(servers, key, make)

    return make_of_key, any(map(iscoroutinefunction, parts))


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a coroutine without an event loop waits")
