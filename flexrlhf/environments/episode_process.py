"""A worker process for episodes, whose environments may misbehave.

| what an environment does                             | its episode   | others of its process               |
|------------------------------------------------------|---------------|-------------------------------------|
| raises, ``sys.exit``, returns nonsense               | has a failure | go on                               |
| takes longer than ``timeout_seconds``                | has a failure | are replayed in a new process       |
| ends its process (os._exit, a signal)                | has a failure | are replayed in a new process       |
| uses up memory or open files                         | has a failure | are replayed in a new process       |
| waits too long, ``async``                            | has a failure | go on                               |
| prints without end                                   | goes on       | go on; a part of it is shown        |
| leaves processes behind                              | goes on       | go on; the process ends after them  |
| the deadline of all calls passes                     | has a failure | of calls under way, have a failure  |

An episode is in one process from turn to turn; another process replays it from its reset, with the turns of the
policy so far. A failure that another episode of the process may have caused (its end, its memory) is confirmed alone.

Calls of ``async`` episodes join the ones under way when they come, and have their replies when these are there.

Of processes that an environment starts, one stays behind that has left the session of its parent, if the environment
ends its own process in the same turn. A limit of memory is of each process, not of all that it starts.
"""

from __future__ import annotations

import atexit
import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.config.secrets import masked
from flexrlhf.environments.base import EpisodeCall, EpisodeReply
from flexrlhf.environments.process_limits import ProcessLimits, begin_limited
from flexrlhf.environments.sessions import (
    BLOCKED,
    EnvStep,
    Setup,
    StepResults,
    children,
    exchange_steps,
    is_stale,
    load,
    run_steps,
    waiting_limit,
)
from flexrlhf.user_code.call_failures import CallFailed, CallFailure
from flexrlhf.user_code.deadline import Deadline
from flexrlhf.user_code.process_directories import process_directory
from flexrlhf.user_code.processes import WorkerContext, end_processes
from flexrlhf.user_code.worker_process import Worker

Key = tuple[int, int]
EARLIER = (-1, -1)
"""Key in place of all episodes that have ended."""
EXHAUSTED = frozenset({"memory", "files", "load memory", "load files"})
"""Kinds of failures after which a process is ended, to free what it uses."""
DOUBTFUL = EXHAUSTED | {"crash", "load crash", BLOCKED}
"""Kinds of failures that another episode of the process may have caused."""
GRACE_SECONDS = 1.0
"""Time in which a process itself ends ``async`` turns that take too long."""
CLEAN_UP_SECONDS = 10.0
"""Limit of looking for processes that episodes have left behind."""


@dataclass(eq=False)
class _Play:
    """A call under way in a process that runs episodes at once.

    deadline:   of its reply.
    turn:       that the process has or receives.
    is_replay:  whether that is replayed, up to the turn of the call.
    reply:      once it is there.
    """

    call: EpisodeCall
    deadline: Deadline
    turn: int
    is_replay: bool = False
    reply: Future[EpisodeReply] = field(default_factory=Future)


class EpisodeProcess:
    """A worker process, and the episodes in it."""

    def __init__(self, setup: Setup, limits: ProcessLimits, name: str) -> None:
        self._setup, self._limits, self._name = setup, limits, name
        self._directory = ExitStack()
        self._folder: Path | None = None
        self._worker: Worker | None = None
        self.is_async = False
        self.cpu_seconds = 0.0
        """Time that all steps together computed."""
        self._load_failure: CallFailure | None = None
        self._begun: set[Key] = set()
        """Episodes that have had a session since the process started."""
        self._open: set[Key] = set()
        self._children: Mapping[int, int] = {}
        """Processes that episodes have started, as of their last turn."""
        self._lock = Lock()
        """Held by whoever calls the process."""
        self._arrivals = WorkerContext().Semaphore(0)
        self._arrived: list[_Play] = []
        self._running: dict[Key, _Play] = {}
        self._guard = Lock()
        """Of ``_open`` and ``_arrived``."""
        self._server = ThreadPoolExecutor(1, "episodes")
        self._num_ends = 0
        self._process: int | None = None
        self._is_closing = False

    def replies(self, calls: Sequence[EpisodeCall], deadline: Deadline) -> list[EpisodeReply]:
        """Return one reply a call, in order; other threads may call at the same time."""
        step = max(call.key[0] for call in calls)
        with self._guard:
            known = {key for key in self._open if not is_stale(key, step, self._setup.steps)}
            self._open = known | {call.key for call in calls}
        replies: list[EpisodeReply] = []
        while len(replies) < len(calls) and not self.is_async:
            with self._lock:
                # whether they are async is stored once something has been loaded
                if not self.is_async:
                    replies += map(_decided, self._confirmed(calls[len(replies) :][:1], deadline))
        replies += self._together(calls[len(replies) :], deadline)
        with self._guard:
            self._open -= {call.key for call, reply in zip(calls, replies, strict=True) if call.ends_with(reply)}
            is_idle = not self._open
        if is_idle:
            with self._lock:
                if not self._open:
                    self._clean_up(deadline)
        return replies

    def _together(self, calls: Sequence[EpisodeCall], deadline: Deadline) -> list[EpisodeReply]:
        """Return the replies to calls of episodes that run at once, with others that are under way."""
        plays = [_Play(call, deadline, call.number) for call in calls]
        with self._guard:
            self._arrived += plays
        self._arrivals.release()
        # ends once no call is under way, at once if another one has served these
        serving = self._server.submit(self._serve)
        for play in plays:
            either: tuple[Future[Any], ...] = (play.reply, serving)
            wait(either, return_when=FIRST_COMPLETED)
            if not play.reply.done():
                # what has ended it
                serving.result()
        return [play.reply.result() for play in plays]

    def _serve(self) -> None:
        """Exchange steps and replies with the process until no call is under way."""
        due: list[_Play] = []
        while True:
            with self._lock:
                with self._guard:
                    if self._is_closing:
                        return
                    arrived, self._arrived = self._arrived, []
                self._running |= {play.call.key: play for play in arrived}
                due = [play for play in (*due, *arrived) if play.call.key in self._running]
                late = [play for play in self._running.values() if play.deadline.left() <= 0]
                for play in late:
                    self._finish(play, self._failed(play, play.deadline.failure()))
                if not self._running:
                    return
                due = self._exchange([play for play in due if play not in late])

    def _exchange(self, due: Sequence[_Play]) -> list[_Play]:
        """Send the turns of ``due``, and receive replies to any under way; return the plays that have a next turn."""
        found = self._exchanged(due)
        following, doubtful = list[_Play](), list[tuple[_Play, EpisodeReply]]()
        for play, reply in found:
            decided = reply if not play.is_replay else self._replayed(play.call, play.turn, reply)
            if decided is None and not play.is_replay and (failure := self._load(play.deadline)) is not None:
                decided = EpisodeReply(failure=failure)
            if decided is None:
                play.turn, play.is_replay = (play.turn + 1 if play.is_replay else 0), True
                following.append(play)
            elif _kind(decided) in DOUBTFUL:
                doubtful.append((play, decided))
            else:
                self._finish(play, decided)
        if doubtful:
            before = self._num_ends
            calls, replies = [play.call for play, _ in doubtful], [reply for _, reply in doubtful]
            last = max((play.deadline for play, _ in doubtful), key=lambda deadline: deadline.end)
            others = bool(self._begun - {call.key for call in calls})
            for (play, _), reply in zip(doubtful, self._settled(calls, replies, others, last), strict=True):
                self._finish(play, _decided(reply))
            if self._num_ends > before:
                # the others have lost their process
                following = list(self._running.values())
                for play in following:
                    play.turn, play.is_replay = play.call.number, False
        return following

    def _exchanged(self, due: Sequence[_Play]) -> list[tuple[_Play, EpisodeReply | None]]:
        """Return the plays whose turns have a reply; None if the process does not have the episode."""
        self._begun |= {play.call.key for play in due}
        last = max((play.deadline for play in self._running.values()), key=lambda deadline: deadline.end)
        seconds = waiting_limit(self._setup.seconds) + GRACE_SECONDS
        sent = [_step(play.call, play.turn) for play in due]
        replies: dict[Key, EpisodeReply | None] = {}
        failure = CallFailure(BLOCKED, f"took longer than {self._setup.seconds:g} s")
        try:
            before = self._process
            results = self._started().run(exchange_steps, self._setup, sent, seconds=seconds, deadline=last)
            self._receive(results)
            replies, is_ended = dict(results.replies), results.is_blocked
            if self._process != before and len(self._running) > len(sent):
                # another one has taken this call: the calls under way have ended with theirs
                is_ended, replies = True, {}
                failure = CallFailure("crash", "its worker process ended between two calls")
        except CallFailed as error:
            is_ended = True
            if error.failure.kind != "timeout":
                failure = error.failure
            elif len(self._running) == 1:
                failure = replace(failure, kind="timeout")
        if is_ended:
            self._end()
            replies |= {key: EpisodeReply(failure=failure) for key in self._running.keys() - replies.keys()}
        found = [(self._running[key], reply) for key, reply in replies.items()]
        return [
            (play, reply and replace(reply, failure=self._named(play.call, play.turn, reply.failure)))
            for play, reply in found
        ]

    def _receive(self, results: StepResults) -> None:
        self._children, self._process = results.children, results.process
        self.cpu_seconds += results.cpu_seconds

    def _failed(self, play: _Play, failure: CallFailure) -> EpisodeReply:
        return EpisodeReply(failure=self._named(play.call, play.turn, failure))

    def _finish(self, play: _Play, reply: EpisodeReply) -> None:
        del self._running[play.call.key]
        play.reply.set_result(reply)

    def close(self) -> None:
        """End the process, and remove its temporary files; calls under way have failed."""
        self._is_closing = True
        self._arrivals.release()
        with self._lock:
            with self._guard:
                arrived, self._arrived = self._arrived, []
                self._is_closing = False
            for play in (*self._running.values(), *arrived):
                play.reply.set_result(self._failed(play, CallFailure("late", "its process has been closed")))
            self._running.clear()
            self._end()
            self._directory.close()
            atexit.unregister(self._directory.close)
            self._folder = self._worker = None

    def _confirmed(
        self, calls: Sequence[EpisodeCall], deadline: Deadline, is_second: bool = False
    ) -> list[EpisodeReply]:
        """Return replies of calls that run together."""
        others = bool(self._begun - {call.key for call in calls})
        return self._settled(calls, self._replies(calls, deadline), others, deadline, is_second)

    def _settled(
        self,
        calls: Sequence[EpisodeCall],
        replies: list[EpisodeReply],
        others: bool,
        deadline: Deadline,
        is_second: bool = False,
    ) -> list[EpisodeReply]:
        """Return ``replies`` of calls that ran together; doubtful failures are confirmed by halves, then alone.

        others:     whether the process had other episodes.
        is_second:  whether this is a confirmation.
        """
        doubtful = [index for index, reply in enumerate(replies) if _kind(reply) in DOUBTFUL]
        if any(_kind(replies[index]) in EXHAUSTED for index in doubtful):
            self._end()
        half = (len(doubtful) + 1) // 2
        again = [doubtful[:half], doubtful[half:]] if len(calls) > 1 else [doubtful if others and not is_second else []]
        for part in filter(None, again):
            found = self._confirmed([calls[index] for index in part], deadline, is_second=True)
            for index, reply in zip(part, found, strict=True):
                replies[index] = reply
        return replies

    def _replies(self, calls: Sequence[EpisodeCall], deadline: Deadline) -> list[EpisodeReply]:
        """Return replies of calls that run together; episodes that the process does not have are replayed."""
        last = {index: call.number for index, call in enumerate(calls)}
        found = self._run_steps(calls, last, deadline)
        replies = {index: reply for index, reply in found.items() if reply is not None}
        absent = [index for index in last if index not in replies]
        if absent and (failure := self._load(deadline)):
            replies |= {index: EpisodeReply(failure=failure) for index in absent}
        for turn in range(max((last[index] + 1 for index in absent), default=0)):
            due = {index: turn for index in absent if index not in replies and turn <= last[index]}
            for index, reply in self._run_steps(calls, due, deadline).items():
                if (decided := self._replayed(calls[index], turn, reply)) is not None:
                    replies[index] = decided
        return [replies[index] for index in last]

    def _replayed(self, call: EpisodeCall, turn: int, reply: EpisodeReply | None) -> EpisodeReply | None:
        """Return the reply to ``call`` by the ``reply`` to a turn of its replay; None if another turn follows."""
        failure, replied = None if reply is None else reply.failure, call.replied
        if reply is None:
            failure = self._named(call, turn, CallFailure("crash", "its worker process ended during a replay"))
        elif turn < call.number and reply.is_done:
            text = f"its replay ended here, after {call.number} recorded turns: it is not deterministic"
            failure = self._named(call, turn, CallFailure("replay", text))
        elif failure is None and turn < len(replied) and reply.digest != replied[turn]:
            text = "its replay replied otherwise than before: it is not deterministic"
            failure = self._named(call, turn, CallFailure("replay", text))
        if failure is not None:
            return EpisodeReply(failure=failure)
        return reply if turn == call.number else None

    def _run_steps(
        self, calls: Sequence[EpisodeCall], turns: Mapping[int, int], deadline: Deadline
    ) -> dict[int, EpisodeReply | None]:
        """Return the replies to turns, by place of their calls; None if the process does not have the episode."""
        if not turns:
            return {}
        self._begun |= {calls[index].key for index in turns}
        sent = [_step(calls[index], turn) for index, turn in turns.items()]
        seconds = waiting_limit(self._setup.seconds) + GRACE_SECONDS if self.is_async else self._setup.seconds
        replies: Sequence[EpisodeReply | None] = [EpisodeReply(failure=deadline.failure())] * len(sent)
        if deadline.left() > 0:
            try:
                worker = self._started()
                results = worker.run(run_steps, self._setup, sent, seconds=seconds, deadline=deadline)
                replies = [results.replies[step.key] for step in sent]
                self._receive(results)
                if results.is_blocked:
                    self._end()
            except CallFailed as error:
                # also its pipe, to which it may have written
                self._end()
                failure = error.failure
                if failure.kind == "timeout":
                    kind = "timeout" if len(sent) == 1 else BLOCKED
                    failure = CallFailure(kind, f"took longer than {self._setup.seconds:g} s")
                replies = [EpisodeReply(failure=failure)] * len(sent)
        return {
            index: reply and replace(reply, failure=self._named(calls[index], turn, reply.failure))
            for (index, turn), reply in zip(turns.items(), replies, strict=True)
        }

    def _load(self, deadline: Deadline) -> CallFailure | None:
        """Load the environment; return why it does not load. Loading that takes too long is not tried again."""
        if self._load_failure is not None:
            return self._load_failure
        try:
            found = self._started().load(partial(load, self._setup), deadline)
        except CallFailed as error:
            self._end()
            if error.failure.kind == "load timeout":
                self._load_failure = error.failure
            return replace(error.failure, text=f"{self._name}: {self._masked(error.failure.text)}")
        if isinstance(found, CallFailure):
            return CallFailure(f"load {found.kind}", f"{self._name}: could not be loaded: {self._masked(found.text)}")
        self.is_async = found
        return None

    def _named(self, call: EpisodeCall, turn: int, failure: CallFailure | None) -> CallFailure | None:
        """Return a failure with the name of its turn."""
        if failure is None:
            return None
        step, row = call.key
        part = f"turn {turn}" if turn else "reset"
        return replace(failure, text=f"{self._name}: step {step}, row {row}, {part}: {self._masked(failure.text)}")

    def _masked(self, text: str) -> str:
        """Return a text without the values of environment variables that the settings name."""
        return masked(text, (self._setup.options, self._setup.path or ""))

    def _started(self) -> Worker:
        if self._worker is None:
            # removed at the latest when this process exits, or by a later one if it is killed
            self._folder = self._directory.enter_context(process_directory()) / "episodes"
            atexit.register(self._directory.close)
            self._folder.mkdir(mode=0o700)
            paid = WorkerContext().Value("d", 0.0)
            self._worker = Worker(partial(begin_limited, self._limits, str(self._folder), paid, self._arrivals))
        return self._worker

    def _clean_up(self, deadline: Deadline) -> None:
        """Follow the end of all episodes: a process that still has children is ended."""
        if self._begun:
            self._begun = {EARLIER}
        if self._children and deadline.left() > 0:
            try:
                left: Mapping[int, int] = self._started().run(
                    children, self._setup, seconds=CLEAN_UP_SECONDS, deadline=deadline
                )
            except CallFailed:
                left = self._children
            if left:
                self._end()

    def _end(self) -> None:
        """End the process with its episodes, what these have started, and their temporary files."""
        self._num_ends += 1
        self._process = None
        if self._worker is not None:
            self._worker.close()
        end_processes(self._children)
        self._children = {}
        self._begun.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)


def make_process(settings: EnvironmentSpec, steps: int = 1) -> EpisodeProcess:
    """Return a process, which starts with its first call. ``steps``: in which an episode may have turns."""
    options = json.dumps(settings.options, default=str)
    setup = Setup(settings.path, settings.tools, options, settings.tool_format, settings.timeout_seconds, steps)
    return EpisodeProcess(setup, ProcessLimits(settings.memory_mb, settings.open_files), settings.name)


def _decided(reply: EpisodeReply) -> EpisodeReply:
    """Return a reply after all doubts: an episode that blocked its process alone has taken too long."""
    if reply.failure is None or reply.failure.kind != BLOCKED:
        return reply
    return replace(reply, failure=replace(reply.failure, kind="timeout"))


def _kind(reply: EpisodeReply) -> str:
    return "" if reply.failure is None else reply.failure.kind


def _step(call: EpisodeCall, turn: int) -> EnvStep:
    """Return one step of an episode, as its process receives it."""
    is_last = call.is_last and turn == len(call.turns)
    if turn > len(call.turns):
        return EnvStep(call.key, turn, is_last=True, is_ended=True)
    if not turn:
        return EnvStep(call.key, 0, is_last=is_last, row=dict(call.row), seed=call.seed)
    return EnvStep(call.key, turn, call.turns[turn - 1], is_last)
