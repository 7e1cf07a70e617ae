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
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.config.secrets import masked
from flexrlhf.environments.base import EpisodeCall, EpisodeReply, is_stale
from flexrlhf.environments.process_limits import ProcessLimits, begin_limited
from flexrlhf.environments.sessions import (
    BLOCKED,
    EnvStep,
    ProgramSetup,
    Setup,
    children,
    exchange_steps,
    load,
    waiting_limit,
)
from flexrlhf.environments.sources import program_of
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
MOST_FILES = 1 << 16
"""Open files of a process that serves programs, as far as it may have so many."""
CLEAN_UP_SECONDS = 10.0
"""Limit of looking for processes that episodes have left behind."""


@dataclass(eq=False)
class _Play:
    """A call that has arrived, until its reply is there.

    deadline:   of its reply.
    turn:       that the process has, or receives next.
    is_replay:  whether that is replayed, up to the turn of the call.
    is_alone:   whether it is played without others, since its failure was doubtful.
    reply:      once it is there.
    """

    call: EpisodeCall
    deadline: Deadline
    turn: int
    is_replay: bool = False
    is_alone: bool = False
    reply: Future[EpisodeReply] = field(default_factory=Future)


class EpisodeProcess:
    """A worker process, and the episodes in it. A thread exchanges turns and replies with it."""

    def __init__(self, setup: Setup, limits: ProcessLimits, name: str) -> None:
        self._setup, self._limits, self._name = setup, limits, name
        self._directory = ExitStack()
        self._folder: Path | None = None
        self._worker: Worker | None = None
        self.is_async = False
        """Whether episodes run at once; known once something has been loaded."""
        self.cpu_seconds = 0.0
        """Time that all steps together computed."""
        self._load_failure: CallFailure | None = None
        self._begun: set[Key] = set()
        """Episodes that have had a session since the process started."""
        self._open: set[Key] = set()
        self._children: Mapping[int, int] = {}
        """Processes that episodes have started, as of their last turn."""
        self._server = ThreadPoolExecutor(1, "episodes")
        self._arrivals = WorkerContext().Semaphore(0)
        self._arrived: list[_Play] = []
        self._guard = Lock()
        """Of ``_arrived``; all else is used by the thread alone."""
        self._due: list[_Play] = []
        """Calls whose turn is to be sent."""
        self._running: dict[Key, _Play] = {}
        """Calls whose turn the process has."""
        self._groups: list[list[_Play]] = []
        """Calls with doubtful failures, which are played again in groups, one after another and before any others."""
        self._process: int | None = None
        self._is_closing = False

    def submit(self, calls: Sequence[EpisodeCall], deadline: Deadline) -> list[Future[EpisodeReply]]:
        """Return the replies to calls, in order, each of which is there by the deadline. From any thread."""
        plays = [_Play(call, deadline, call.number) for call in calls]
        with self._guard:
            self._arrived += plays
        self._arrivals.release()
        # ends at once if the one before has served these
        self._server.submit(self._serve).add_done_callback(self._pass_on)
        return [play.reply for play in plays]

    def close(self) -> None:
        """End the process, and remove its temporary files; calls under way fail."""
        self._is_closing = True
        if self._worker is not None:
            self._worker.interrupt()
        self._server.submit(self._close).result()

    def _serve(self) -> None:
        """Exchange turns and replies with the process until no call is under way."""
        while not self._is_closing:
            self._take()
            if not (self._due or self._running):
                break
            self._exchange(self._next())
        if not self._open:
            self._clean_up()

    def _pass_on(self, serving: Future[None]) -> None:
        """Pass an error of the thread on to all calls."""
        if (error := serving.exception()) is not None:
            for play in self._all():
                play.reply.set_exception(error)
            self._due, self._running = [], {}

    def _close(self) -> None:
        self._take()
        for play in self._all():
            self._fail(play, CallFailure("late", "its process has been closed"))
        self._end()
        self._directory.close()
        atexit.unregister(self._directory.close)
        self._folder = self._worker = None
        self._is_closing = False

    def _all(self) -> list[_Play]:
        return [*self._running.values(), *self._due]

    def _take(self) -> None:
        """Take the calls that have arrived, and end the ones whose deadline has passed."""
        with self._guard:
            arrived, self._arrived = self._arrived, []
        if arrived:
            step = max(play.call.key[0] for play in arrived)
            known = {key for key in self._open if not is_stale(key, step, self._setup.steps)}
            self._open = known | {play.call.key for play in arrived}
            self._due += arrived
        now = time.monotonic()
        for play in [each for each in self._all() if each.deadline.end <= now]:
            self._fail(play, play.deadline.failure())

    def _next(self) -> list[_Play]:
        """Return the calls whose turns are sent now: all that are due, or the first if turns run one after another."""
        due = self._due
        if self._groups:
            # the other conversations of an episode go on with it
            group = {play.call.episode for play in self._groups[0]}
            others = any(each.call.episode not in group for each in self._running.values())
            due = [] if others else [play for play in due if play.call.episode in group]
        return [*due] if self.is_async else due[: 0 if self._running else 1]

    def _exchange(self, sent: Sequence[_Play]) -> None:
        """Send the turns of ``sent``, and receive replies to any under way."""
        self._begun |= {play.call.episode for play in sent}
        num_begun = len(self._begun)
        doubtful = list[tuple[_Play, EpisodeReply]]()
        for play, reply in self._exchanged(sent):
            decided = reply if not play.is_replay else self._replayed(play.call, play.turn, reply)
            if decided is None and not play.is_replay and (failure := self._load(play.deadline)) is not None:
                decided = EpisodeReply(failure=failure)
            if decided is None:
                # a program is given all turns at once
                if self._setup.program is None:
                    play.turn, play.is_replay = (play.turn + 1 if play.is_replay else 0), True
                self._due.insert(0, play)
            elif _kind(decided) in DOUBTFUL:
                doubtful.append((play, decided))
            else:
                self._finish(play, decided)
        if any(_kind(reply) in EXHAUSTED for _, reply in doubtful):
            self._end()
        plays = [play for play, _ in doubtful]
        of_one = len({play.call.episode for play in plays}) == 1
        if of_one and (all(play.is_alone for play in plays) or num_begun == 1):
            for each in doubtful:
                self._finish(*each)
        else:
            self._confirm(plays)

    def _confirm(self, plays: Sequence[_Play]) -> None:
        """Play calls with doubtful failures again, by halves, then alone."""
        self._leave_groups(plays)
        episodes = list(dict.fromkeys(play.call.episode for play in plays))
        half = (len(episodes) + 1) // 2
        # sequences of an episode go on together
        parts = [part for part in (episodes[:half], episodes[half:]) if part]
        groups = [[play for play in plays if play.call.episode in part] for part in parts]
        for part, group in zip(parts, groups, strict=True):
            for play in group:
                play.turn, play.is_replay, play.is_alone = play.call.number, False, len(part) == 1
        self._groups[:0], self._due[:0] = groups, plays

    def _leave_groups(self, plays: Sequence[_Play]) -> None:
        left = [[play for play in group if play not in plays] for group in self._groups]
        self._groups = [group for group in left if group]

    def _exchanged(self, sent: Sequence[_Play]) -> list[tuple[_Play, EpisodeReply | None]]:
        """Return the calls whose turns have a reply; None if the process does not have the episode."""
        for play in sent:
            self._due.remove(play)
        self._running |= {play.call.key: play for play in sent}
        last = max((play.deadline for play in self._running.values()), key=lambda deadline: deadline.end)
        seconds = waiting_limit(self._setup.seconds) + GRACE_SECONDS if self.is_async else self._setup.seconds
        steps = [_step(play.call, play.turn, self._setup.program is not None) for play in sent]
        replies: dict[Key, EpisodeReply | None] = {}
        failure = CallFailure(BLOCKED, f"took longer than {self._setup.seconds:g} s")
        try:
            before = self._process
            results = self._started().run(exchange_steps, self._setup, steps, seconds=seconds, deadline=last)
            self._children, self._process = results.children, results.process
            self.cpu_seconds += results.cpu_seconds
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
            replies |= {key: EpisodeReply(failure=failure) for key in self._running.keys() - replies.keys()}
        found = [(self._running.pop(key), reply) for key, reply in replies.items() if key in self._running]
        if is_ended:
            self._end()
        return [
            (play, reply and replace(reply, failure=self._named(play.call, play.turn, reply.failure)))
            for play, reply in found
        ]

    def _fail(self, play: _Play, failure: CallFailure) -> None:
        self._finish(play, EpisodeReply(failure=self._named(play.call, play.turn, failure)))

    def _finish(self, play: _Play, reply: EpisodeReply) -> None:
        """End a call with its reply, after all doubts: an episode that blocked its process alone has taken too long."""
        if reply.failure is not None and reply.failure.kind == BLOCKED:
            reply = replace(reply, failure=replace(reply.failure, kind="timeout"))
        self._running.pop(play.call.key, None)
        if play in self._due:
            self._due.remove(play)
        self._leave_groups([play])
        if play.call.ends_with(reply):
            self._open.discard(play.call.key)
        play.reply.set_result(reply)

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
            if self._is_closing:
                self._worker.interrupt()
        return self._worker

    def _clean_up(self) -> None:
        """Follow the end of all episodes: a process that still has children is ended."""
        if self._begun:
            self._begun = {EARLIER}
        if self._children:
            deadline = Deadline.after(CLEAN_UP_SECONDS)
            with suppress(CallFailed):
                self._children = self._started().run(children, self._setup, seconds=CLEAN_UP_SECONDS, deadline=deadline)
            if self._children:
                self._end()

    def _end(self) -> None:
        """End the process with its episodes, what these have started, and their temporary files.

        Calls that it had are sent to another one, which replays their episodes.
        """
        for play in self._running.values():
            play.turn, play.is_replay = play.call.number, False
        self._due, self._running = self._all(), {}
        self._process = None
        if self._worker is not None:
            self._worker.close()
        end_processes(self._children)
        self._children = {}
        self._begun.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)


def make_process(
    settings: EnvironmentSpec, steps: int = 1, sampling: Mapping[str, float] | None = None
) -> EpisodeProcess:
    """Return a process, which starts with its first call.

    steps:     in which an episode may have turns
    sampling:  temperature, top_p and top_k of the policy, which a program may send with a call
    """
    path, options = settings.path, settings.options
    limits, program = ProcessLimits(settings.memory_mb, settings.open_files), None
    if settings.api is not None:
        # the program has an interpreter of its own, and this process a connection for each of its calls
        values = tuple((sampling or {}).items())
        path, options = program_of(settings)
        program = ProgramSetup(settings.python, limits, values, settings.sequences)
        limits = ProcessLimits(None, MOST_FILES)
    own = settings.tools, json.dumps(options, default=str), settings.tool_format, settings.timeout_seconds
    setup = Setup(path, *own, steps, program)
    return EpisodeProcess(setup, limits, settings.name)


def _kind(reply: EpisodeReply) -> str:
    return "" if reply.failure is None else reply.failure.kind


def _step(call: EpisodeCall, turn: int, is_program: bool) -> EnvStep:
    """Return one step of an episode, as its process receives it."""
    if is_program:
        return EnvStep(call.key, call.number, call=call)
    is_last = call.is_last and turn == len(call.turns)
    if turn > len(call.turns):
        return EnvStep(call.key, turn, is_last=True, is_ended=True)
    if not turn:
        return EnvStep(call.key, 0, is_last=is_last, row=dict(call.row), seed=call.seed)
    return EnvStep(call.key, turn, call.turns[turn - 1], is_last)
