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

Of processes that an environment starts, one stays behind that has left the session of its parent, if the environment
ends its own process in the same turn. A limit of memory is of each process, not of all that it starts.
"""

from __future__ import annotations

import atexit
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.config.secrets import masked
from flexrlhf.environments.base import EpisodeCall, EpisodeReply
from flexrlhf.environments.process_limits import ProcessLimits, begin_limited
from flexrlhf.environments.sessions import BLOCKED, EnvStep, Setup, children, is_stale, load, run_steps, waiting_limit
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

    def replies(self, calls: Sequence[EpisodeCall], deadline: Deadline) -> list[EpisodeReply]:
        """Return one reply a call, in order."""
        with self._lock:
            replies: list[EpisodeReply] = []
            while len(replies) < len(calls):
                # whether they are async is stored once something has been loaded
                size = len(calls) if self.is_async else 1
                replies += map(_decided, self._confirmed(calls[len(replies) : len(replies) + size], deadline))
            step = max(call.key[0] for call in calls)
            self._open = {key for key in self._open if not is_stale(key, step, self._setup.steps)}
            for call, reply in zip(calls, replies, strict=True):
                (self._open.discard if call.ends_with(reply) else self._open.add)(call.key)
            if not self._open:
                self._clean_up(deadline)
            return replies

    def close(self) -> None:
        """End the process, and remove its temporary files."""
        with self._lock:
            self._end()
            self._directory.close()
            atexit.unregister(self._directory.close)
            self._folder = self._worker = None

    def _confirmed(
        self, calls: Sequence[EpisodeCall], deadline: Deadline, is_second: bool = False
    ) -> list[EpisodeReply]:
        """Return replies of calls that run together; doubtful failures are confirmed by halves, then alone."""
        others = self._begun - {call.key for call in calls}
        replies = self._replies(calls, deadline)
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
                failure = None if reply is None else reply.failure
                replied = calls[index].replied
                if reply is None:
                    failure = self._named(
                        calls[index], turn, CallFailure("crash", "its worker process ended during a replay")
                    )
                elif turn < last[index] and reply.is_done:
                    text = f"its replay ended here, after {last[index]} recorded turns: it is not deterministic"
                    failure = self._named(calls[index], turn, CallFailure("replay", text))
                elif failure is None and turn < len(replied) and reply.digest != replied[turn]:
                    text = "its replay replied otherwise than before: it is not deterministic"
                    failure = self._named(calls[index], turn, CallFailure("replay", text))
                if failure is not None:
                    replies[index] = EpisodeReply(failure=failure)
                elif turn == last[index] and reply is not None:
                    replies[index] = reply
        return [replies[index] for index in last]

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
                replies, self._children = results.replies, results.children
                self.cpu_seconds += results.cpu_seconds
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
            self._worker = Worker(partial(begin_limited, self._limits, str(self._folder), paid))
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
