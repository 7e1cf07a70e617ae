"""Programs of a user's own that call the policy as a model of OpenAI's API (``environment.api``): their episodes.

    program ── HTTP ── server of this process ── turns and replies ── the rank that samples

A call of the program is a reply of the environment, and the policy's turn is the response. A call whose conversation
goes on with an earlier call and its response belongs to the same sequence; any other one begins a further sequence of
the episode, as sub-agents do, or an agent that edits what was said. Which sequence a call belongs to follows from its
messages alone, so that calls may be made at once. Worker processes load this: the standard library alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from http import HTTPStatus
from queue import SimpleQueue
from typing import Any, Literal

from flexrlhf.environments import program_runner
from flexrlhf.environments.base import EpisodeCall, EpisodeReply, ProgramTurn, SequenceRecord, is_stale
from flexrlhf.environments.call_forms import marks_of, split_thoughts
from flexrlhf.environments.process_limits import ProcessLimits, news
from flexrlhf.environments.program_servers import ProgramServers
from flexrlhf.environments.sources import addresses_of
from flexrlhf.environments.tool_calls import read_reply
from flexrlhf.serving.model_calls import CalledFunction, CallRefused, ModelCall, ModelReply
from flexrlhf.serving.policy_server import PolicyServer
from flexrlhf.serving.sent_replies import same_reply
from flexrlhf.user_code.call_failures import CallFailed, CallFailure, Caught

END_SECONDS = 1.0
"""Time in which a program that is cancelled has to end, so that its process can go on with others."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's code of a call of a conversation that can have no further turn."""
_OF_JOB = ("FLEXRLHF_TOKEN", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Beginnings of environment variables of a job."""
MODEL = "policy"
"""Name of the policy."""


@dataclass
class _Sequence:
    """A conversation of a program with the policy.

    record:   turns so far, of which the program may have received only some, and digests of the replies to them
    said:     the last call of the program
    given:    response to it; None: it has none yet
    text:     of the turn that the response is of, with a stop string at its end
    waiting:  of the server, for that response
    replies:  of the program: its first call, and what it did after each turn
    is_full:  why it can have no further turn
    is_limited: whether that is by a limit of the run
    was_refused: whether the program has called for one, and that was by a limit
    """

    record: SequenceRecord = SequenceRecord()
    said: ModelCall | None = None
    given: ModelReply | None = None
    text: str = ""
    waiting: Future[ModelReply] | None = None
    replies: list[EpisodeReply] = field(default_factory=list)
    is_full: str = ""
    is_limited: bool = True
    was_refused: bool = False

    def follows(self, call: ModelCall) -> ModelCall | None:
        """Return what ``call`` adds to this conversation; None if it is of another one."""
        said, given = self.said, self.given
        if said is None or given is None or said.tools != call.tools or (said.prompt is None) != (call.prompt is None):
            return None
        if call.prompt is not None:
            # the row has the stop string, which the program may write again
            for before in (f"{said.prompt}{self.text}", f"{said.prompt}{given.content}"):
                if call.prompt.startswith(before):
                    return replace(call, prompt=call.prompt[len(before) :])
            return None
        count = len(said.messages)
        added = call.messages[count + 1 :]
        # replies that the program has written itself are no turns
        is_next = bool(added) and call.messages[:count] == said.messages and same_reply(call.messages[count], given)
        return replace(call, messages=added) if is_next and all(each["role"] != "assistant" for each in added) else None


class _Program:
    """One episode: a program, and its conversations with the policy. All but ``wait`` runs on one event loop."""

    def __init__(self, programs: Programs, call: EpisodeCall, sequences: int) -> None:
        """``call``: a call of the episode, not necessarily its first; the program replays the earlier turns in it."""
        self.key, self.episode = secrets.token_urlsafe(16), call.episode
        records = call.siblings or (SequenceRecord(call.turns, call.replied),)
        self._sequences = [_Sequence(record) for record in records] + [
            _Sequence() for _ in range(sequences - len(records))
        ]
        self._programs, self._loop = programs, asyncio.get_running_loop()
        self._changed, self._clock = asyncio.Event(), self._loop.call_later(programs.seconds, self._expire)
        self._refused, self._last_refusal, self._left = 0, "", set(range(sequences))
        self.has_ended = False
        """Whether the program has ended, as its process has reported."""
        self._failure: CallFailure | None = None
        self._reward: float | None = None

    async def play(self, call: EpisodeCall) -> EpisodeReply:
        """Return the reply to a call of one of its sequences, when the program has made its next one, or has ended."""
        sequence = self._sequences[call.sequence]
        if len(call.turns) > len(sequence.record.turns):
            sequence.record = SequenceRecord(call.turns, call.replied)
        if call.is_failed:
            self.fail(CallFailure("tokens", call.reason))
        elif call.is_ended or call.is_last:
            limits = "environment.max_turns, or data.max_response_tokens has no room for one"
            sequence.is_full = call.reason or f"this conversation can have no further turn: {limits}"
            sequence.is_limited = not call.reason
        self._give(sequence)
        while (found := self._found(sequence, call)) is None:
            await self._changed.wait()
        return found

    def _found(self, sequence: _Sequence, call: EpisodeCall) -> EpisodeReply | None:
        if self._failure is None and call.number < len(sequence.replies):
            return sequence.replies[call.number]
        if self._failure is None and self._reward is None:
            return None
        self._left.discard(call.sequence)
        if not self._left:
            self._programs.forget(self)
        if self._failure is not None or self._reward is None:
            return EpisodeReply(failure=self._failure)
        reward = 0.0 if call.sequence else self._reward
        calls = 0 if sequence.given is None else len(sequence.given.calls)
        is_done, refused = not sequence.was_refused, self._take_refused()
        return EpisodeReply(reward=reward, is_done=is_done, tool_calls=calls, refused_calls=refused)

    def receive(self, call: ModelCall, waiting: Future[ModelReply]) -> None:
        """Receive a call of the program, which waits for its response."""
        if self._failure is not None or self._reward is not None:
            waiting.set_exception(_refusal("the episode has ended"))
            return
        # of several that begin alike the longest: the others have been left
        following = [each for each in self._sequences if each.waiting is None and self._goes_on(each, call)]
        sequence = max(following, key=lambda each: len(each.replies), default=None)
        added = call if sequence is None else sequence.follows(call)
        assert added is not None, "a call that goes on adds something"
        reply = EpisodeReply(call=added.text)
        if sequence is None:
            sequence = self._new(reply.digest)
        if sequence is None:
            # a client that has lost its connection calls again
            sequence = next((each for each in self._sequences if each.waiting is not None and each.said == call), None)
            if sequence is not None and sequence.waiting is not None:
                sequence.waiting.set_exception(_refusal("the call was made again"))
                sequence.waiting = waiting
                return
        number = 0 if sequence is None else len(sequence.replies)
        if sequence is None and any(len(each.replies) < len(each.record.replied) for each in self._sequences):
            refusal = self._not_repeated()
        elif sequence is None:
            refusal = (
                f"environment.sequences is {len(self._sequences)}, and the messages go on with none of the earlier "
                f"conversations: send them as they were, or raise it"
            )
        else:
            # a program that is played again has had the turns before
            refusal = sequence.is_full if number >= len(sequence.record.turns) else ""
            sequence.was_refused = bool(refusal) and sequence.is_limited
        if sequence is None or refusal:
            self.refuse(refusal)
            waiting.set_exception(_refusal(refusal, TOO_LONG if sequence is not None and sequence.is_full else None))
            return
        self._clock.cancel()
        calls = 0 if sequence.given is None else len(sequence.given.calls)
        reply = replace(reply, tool_calls=calls, refused_calls=self._take_refused())
        sequence.said, sequence.given, sequence.waiting = call, None, waiting
        sequence.replies.append(reply)
        self._give(sequence)
        self._notify()

    @staticmethod
    def _goes_on(sequence: _Sequence, call: ModelCall) -> bool:
        """Whether a call goes on with a conversation, as it did before if that is played again."""
        added, number = sequence.follows(call), len(sequence.replies)
        recorded = sequence.record.replied[number : number + 1]
        return added is not None and recorded in ((), (EpisodeReply(call=added.text).digest,))

    def _new(self, digest: int) -> _Sequence | None:
        """Return the sequence of a conversation that begins: the recorded one that began alike, or the next one."""
        unused = [each for each in self._sequences if not each.replies]
        again = (each for each in unused if each.record.replied[:1] == (digest,))
        return next(again, None) or next((each for each in unused if not each.record.replied), None)

    def _give(self, sequence: _Sequence) -> None:
        """Give a turn to the call that waits for it, or the reason why there is none."""
        waiting, number = sequence.waiting, len(sequence.replies)
        if waiting is None:
            return
        if number <= len(sequence.record.turns):
            assert sequence.said is not None, "a call that waits has been made"
            turn = ProgramTurn.read(sequence.record.turns[number - 1])
            with Caught("raise", "raised") as reading:
                sequence.given, sequence.text = _response(turn, sequence.said, self._programs.tool_format), turn.text
            if reading.failure is not None:
                self.fail(reading.failure)
                return
            assert sequence.given is not None, "a turn without a failure has been read"
            waiting.set_result(sequence.given)
        elif sequence.is_full:
            sequence.was_refused = sequence.is_limited
            self.refuse(sequence.is_full)
            waiting.set_exception(_refusal(sequence.is_full, TOO_LONG))
        else:
            return
        sequence.waiting = None
        self._start_clock()

    def _start_clock(self) -> None:
        """Limit the time of a program that waits for no turn."""
        self._clock.cancel()
        if all(each.waiting is None for each in self._sequences):
            self._clock = self._loop.call_later(self._programs.seconds, self._expire)

    def _expire(self) -> None:
        self.fail(
            CallFailure("timeout", f"{self._programs.where(self.key)}took longer than {self._programs.seconds:g} s")
        )

    def _not_repeated(self) -> str:
        """End an episode that is played again and makes another call than before; return why."""
        failure = CallFailure("replay", "its replay replied otherwise than before: it is not deterministic")
        self.fail(failure)
        return failure.text

    def refuse(self, sentence: str) -> None:
        """Count a call that could not be had."""
        # what is played again has been counted
        is_new = all(len(each.replies) >= len(each.record.replied) for each in self._sequences)
        self._refused, self._last_refusal = self._refused + is_new, sentence

    def _take_refused(self) -> int:
        refused, self._refused = self._refused, 0
        return refused

    def end(self, outcome: Mapping[str, Any]) -> None:
        """End the episode as its program has ended: by its reward, or a failure.

        A program that raises since it could have no further turn has no reward.
        """
        self.has_ended = True
        was_limited = any(each.was_refused for each in self._sequences)
        if "kind" not in outcome and not self.has_called:
            self.fail(CallFailure("reply", f"it returned before its first call of the policy{self._reason}"))
        elif "kind" in outcome and not was_limited:
            self.fail(CallFailure(outcome["kind"], f"{outcome['text']}{self._reason}"))
        elif self._failure is None:
            self._reward = 0.0 if "kind" in outcome else outcome["reward"]
            self._stop("the episode has ended")

    @property
    def _reason(self) -> str:
        """End of a sentence about a failure: what a call was refused for, if one was."""
        return f"; its last refused call: {self._last_refusal}" if self._last_refusal else ""

    @property
    def has_called(self) -> bool:
        """Whether the program has called the policy."""
        return any(each.replies for each in self._sequences)

    def fail(self, failure: CallFailure) -> None:
        """End the episode without its program."""
        if self._failure is None and self._reward is None:
            self._failure = failure
            self._programs.cancel(self)
            self._stop(f"the episode has failed: {failure.text}")

    def _stop(self, reason: str) -> None:
        self._clock.cancel()
        for each in self._sequences:
            if each.waiting is not None:
                each.waiting.set_exception(_refusal(reason))
                each.waiting = None
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Programs:
    """Programs of one process: the server that they call, and the interpreter that they run in."""

    def __init__(
        self,
        reference: str,
        options: Mapping[str, Any],
        python: str | None,
        tool_format: str,
        seconds: float,
        limits: ProcessLimits,
        sampling: Mapping[str, float],
        sequences: int = 1,
        steps: int = 1,
    ) -> None:
        """Start both, and load the program.

        reference:  of it, ``path/to/file.py:name`` or ``module:name``, or addresses of servers that run it
        options:    arguments of it, in addition to the row and the address of the policy
        python:     interpreter; None: that of this process
        tool_format: how the policy writes calls of tools
        seconds:    limit of the time between a turn and the next call
        limits:     of that interpreter
        sampling:   temperature, top_p and top_k of the policy
        sequences:  conversations of an episode
        steps:      of training in which an episode may have turns

        Raises CallFailed for a program that cannot be loaded.
        """
        self.seconds, self.tool_format, self._sequences, self._steps = seconds, tool_format, sequences, steps
        self._programs: dict[str, _Program] = {}
        self._by_episode: dict[tuple[int, int], _Program] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_stuck = False
        """Whether a program does not end, so that the others need another process."""
        self._sampling, self._guard = sampling, threading.Lock()
        self._policy: dict[str, PolicyServer] = {}
        """Servers of the policy, by the address of this machine that they listen on."""
        addresses = addresses_of(reference)
        self._process: ProgramProcess | ProgramServers = (
            ProgramServers(addresses, options, self._base_url, self._has_called)
            if addresses
            else ProgramProcess(reference, python, options, limits)
        )
        threading.Thread(target=self._listen, daemon=True).start()

    async def play(self, call: EpisodeCall) -> EpisodeReply:
        """Return the reply to a call of an episode, whose program is started if it does not run."""
        self._loop = asyncio.get_running_loop()
        program = self._by_episode.get(call.episode)
        if program is None:
            for each in [each for each in self._programs.values() if is_stale(each.episode, call.key[0], self._steps)]:
                each.fail(CallFailure("late", "no step goes on with it"))
                self.forget(each)
            program = _Program(self, call, self._sequences)
            self._programs[program.key] = self._by_episode[call.episode] = program
            order = {"key": program.key, "row": dict(call.row), "seed": call.seed, "model": MODEL}
            here = (
                {"episode": call.episode}
                if isinstance(self._process, ProgramServers)
                else {"base_url": self._base_url()}
            )
            self._process.order({**order, **here})
        return await program.play(call)

    def _base_url(self, host: str = "127.0.0.1") -> str:
        """Return the URL of the policy at ``host``, an address of this machine, where it is served from now on."""
        with self._guard:
            if host not in self._policy:
                self._policy[host] = PolicyServer(self, MODEL, self._sampling, host)
                threading.Thread(target=self._policy[host].serve_forever, daemon=True).start()
            port = self._policy[host].port
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    def _has_called(self, key: str) -> bool:
        program = self._programs.get(key)
        return program is not None and program.has_called

    def where(self, key: str) -> str:
        """Return the beginning of a sentence about an episode: the address of its server, if it has one."""
        address = self._process.address_of(key) if isinstance(self._process, ProgramServers) else ""
        return f"{address}: " if address else ""

    def knows(self, key: str) -> bool:
        """Whether ``key`` is of an episode."""
        return key in self._programs

    def reply(self, key: str, call: ModelCall) -> ModelReply:
        """Return the policy's turn, for which a thread of the server waits as long as the episode lasts."""
        waiting: Future[ModelReply] = Future()

        def receive() -> None:
            program = self._programs.get(key)
            if program is None:
                waiting.set_exception(_refusal("the episode has ended"))
                return
            with Caught("raise", "raised") as receiving:
                program.receive(call, waiting)
            if receiving.failure is not None:
                program.fail(receiving.failure)
                waiting.set_exception(_refusal(receiving.failure.text))

        self._on_loop(receive)
        return waiting.result()

    def refused(self, key: str, sentence: str) -> None:
        """Count a call that the server has refused."""
        self._on_loop(lambda: self._programs[key].refuse(sentence) if key in self._programs else None)

    def forget(self, program: _Program) -> None:
        """Leave an episode that has ended; its program may still have to end."""
        self._by_episode.pop(program.episode, None)
        if program.has_ended:
            self._programs.pop(program.key, None)

    def cancel(self, program: _Program) -> None:
        """End a program; one that does not end in END_SECONDS costs its process."""
        assert self._loop is not None, "a program has been called"
        self._process.order({"key": program.key})
        if isinstance(self._process, ProgramProcess):
            self._loop.call_later(END_SECONDS, self._check_ended, program)

    def _check_ended(self, program: _Program) -> None:
        if not program.has_ended:
            self.is_stuck = True
            news().set()

    def _listen(self) -> None:
        """Receive the outcomes of programs; this process ends as the one of the programs does."""
        for outcome in self._process.outcomes:
            self._on_loop(partial(self._end, outcome))
        assert isinstance(self._process, ProgramProcess), "outcomes of servers have no end"
        code = self._process.wait()
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(max(code, 1))

    def _end(self, outcome: Mapping[str, Any]) -> None:
        if (program := self._programs.get(outcome["key"])) is not None:
            program.end(outcome)
            if self._by_episode.get(program.episode) is not program:
                self._programs.pop(program.key, None)

    def _on_loop(self, action: Callable[[], object]) -> None:
        assert self._loop is not None, "a program has been called"
        self._loop.call_soon_threadsafe(action)


class ProgramProcess:
    """Process of an interpreter that has loaded a program (``program_runner``).

    outcomes:  of its episodes, until it ends
    """

    def __init__(self, reference: str, python: str | None, options: Mapping[str, Any], limits: ProcessLimits) -> None:
        """Start it. Raises CallFailed for a program that cannot be loaded, or called with ``options``."""
        read_orders, orders = os.pipe()
        outcomes, write_outcomes = os.pipe()
        command = [python or sys.executable, "-P", program_runner.__file__, str(read_orders), str(write_outcomes)]
        try:
            self._process = subprocess.Popen(
                command, pass_fds=(read_orders, write_outcomes), stdin=subprocess.DEVNULL, env=_environment()
            )
        except OSError as error:
            raise CallFailed(CallFailure("start", f"{command[0]} could not be started: {error.strerror}")) from None
        finally:
            os.close(read_orders)
            os.close(write_outcomes)
        self._orders, self.outcomes = SimpleQueue[str | None](), _lines(outcomes)
        # a process that reads no more holds up nobody
        threading.Thread(target=self._write, args=(orders,), daemon=True).start()
        self.order({"reference": reference, "options": dict(options), **asdict(limits)})
        loaded = next(self.outcomes, None)
        if loaded is None:
            raise CallFailed(CallFailure("crash", f"{command[0]} ended with exit status {self.wait()} at its start"))
        if "kind" in loaded:
            raise CallFailed(CallFailure(loaded["kind"], loaded["text"]))

    def order(self, order: Mapping[str, Any]) -> None:
        """Send an order; a process that has ended is noticed by its outcomes."""
        self._orders.put(json.dumps(order, default=str) + "\n")

    def wait(self) -> int:
        """Wait for the end of the process, to which no order is sent any more; return its exit status."""
        self._orders.put(None)
        return self._process.wait()

    def _write(self, pipe: int) -> None:
        with suppress(OSError), os.fdopen(pipe, "w", encoding="utf-8") as orders:
            while (order := self._orders.get()) is not None:
                orders.write(order)
                orders.flush()


def _environment() -> dict[str, str]:
    """Return this process's environment without the job's: a program is no rank, and has no secret of the job."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_JOB)}


def _lines(pipe: int) -> Iterator[dict[str, Any]]:
    """Yield the values of the JSON lines of a pipe, until it is closed."""
    with os.fdopen(pipe, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _refusal(sentence: str, code: str | None = None) -> CallRefused:
    return CallRefused(HTTPStatus.BAD_REQUEST, sentence, code=code)


def _response(turn: ProgramTurn, call: ModelCall, tool_format: str) -> ModelReply:
    """Return a turn as its call receives it: in front of a stop string; calls of tools apart if there are tools."""
    ends = [place for stop in call.stop if (place := turn.text.find(stop)) >= 0]
    content, reasoning, calls = turn.text[: min(ends, default=None)], "", tuple[CalledFunction, ...]()
    if call.prompt is None and call.tools:
        content, reasoning, calls = read_reply(content, tool_format, call.tools, turn.is_thinking)
    elif call.prompt is None:
        content, reasoning = split_thoughts(content, marks_of(tool_format), turn.is_thinking)
    finish: Literal["stop", "length", "tool_calls"] = "stop" if turn.is_ended or ends else "length"
    return ModelReply(content, reasoning, calls, "tool_calls" if calls else finish, turn.prompt_tokens, turn.tokens)
