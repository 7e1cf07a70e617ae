"""Watch over a rank, in a thread: it ends the process if a wait of the main thread cannot end by itself.

A rank waits inside torch, where no signal handler of Python runs, and a connection whose packets are lost blocks for a
quarter of an hour; NCCL closes none, whatever becomes of a rank. The thread reads signals from a pipe, checks the job's
store every second, where a rank that fails leaves its sentence, and measures waits.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from flexrlhf.comm.deadlines import DeadlineError
from flexrlhf.comm.progress import Beat
from flexrlhf.comm.store import second_connection
from flexrlhf.comm.world import World
from flexrlhf.errors import some_of
from flexrlhf.launch.failures import sentence_of, write_error
from flexrlhf.launch.lifetime import has_launcher
from flexrlhf.runs.flight_log import FlightLogs
from flexrlhf.trainer.flight_record import FlightRecord
from flexrlhf.trainer.stop_requests import StopRequests

CHECK_SECONDS = 1.0
GRACE_SECONDS = 10.0
"""Time after its deadline in which a wait has to fail by itself."""
CLOSE_SECONDS = 5.0
"""Longest wait for the threads of a watch that is closed; one that waits for a lost store does not return."""
CLOSED_SECONDS = 3.0
"""Time that a rank has to end by itself once the job's store is closed or another rank has failed."""
FAILED = "failed"
"""Key of the job's store with the number and the sentence of the first rank that has failed."""
LEAVE_SECONDS = 10.0
"""Time that a rank which has failed has to end: loggers upload, and its processes end."""
REQUEST_SECONDS = 1.0
"""Time after SIGTERM in which a launcher that got it, too, has made a request of it."""
_SILENCE_SECONDS = (10.0, 60.0)


def silence_limit(timeout_seconds: float) -> float:
    """Return the seconds after which a connection without a sign of life counts as lost: 10 to 60."""
    shortest, longest = _SILENCE_SECONDS
    return max(shortest, min(longest, timeout_seconds))


class RankWatch:
    """Thread that ends this rank on SIGTERM, with a record of where it was, and when it waits in vain."""

    def __init__(self, world: World, timeout_seconds: float, stop_file: Path | None = None) -> None:
        """Watch from ``__enter__`` on.

        timeout_seconds:  the longest wait of the runs.
        stop_file:        exists if SIGTERM is a request to save and end, which schedulers send to every process.
        """
        self._world = world
        self._stop_file = stop_file
        self._limit = silence_limit(timeout_seconds)
        self._store = second_connection(world.store)
        self._flight: FlightRecord | None = None
        self._contact = time.monotonic()
        self._failed_since: float | None = None
        self._neighbour = (world.rank + 1) % world.size
        self._beat, self._beat_since = "", time.monotonic()
        self._silence_of_ranks = max(_SILENCE_SECONDS[0], timeout_seconds)
        self._silence = f"has not responded for {self._limit:g} s"
        self._closed = threading.Event()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._threads = [
            threading.Thread(target=work, name=f"rank {world.rank} watch", daemon=True)
            for work in (self._watch, self._check_waits)
        ]

    def __enter__(self) -> Self:
        if self._handles_signals():
            signal.signal(signal.SIGTERM, _do_nothing)
            signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            # a process that is forked shares the pipe and would end this one with itself
            os.register_at_fork(after_in_child=_restore_signals)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._report(error)
        self._closed.set()
        os.write(self._write, b"\0")
        # the interpreter ends threads that are left, and one in a call of torch would abort the process
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        if self._handles_signals():
            _restore_signals()

    def _handles_signals(self) -> bool:
        """Whether SIGTERM means the end: to a rank of torchrun it is a request to save."""
        return has_launcher() and threading.current_thread() is threading.main_thread()

    @contextmanager
    def over(self, flight: FlightRecord) -> Iterator[None]:
        """Watch one run: its record is written when the body fails, and its log removed when it does not."""
        self._flight = flight
        with ExitStack() as stack:
            stack.push(self._record_error)
            yield
        flight.close()
        self._flight = None

    def _record_error(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._flight is not None:
            self._flight.progress.report_end(sentence_of(error))
            self._record(sentence_of(error), traceback.format_exception(error))
            self._report(error)

    def _report(self, error: BaseException) -> None:
        """Report ``error`` to the launcher and the other ranks, and end this process soon, wherever it may block."""
        write_error(error)
        with suppress(RuntimeError):
            sentence = f"{self._name} ended ({sentence_of(error)})"
            self._store.compare_set(FAILED, "", json.dumps([self._world.rank, sentence]))
        if has_launcher():
            faulthandler.dump_traceback_later(LEAVE_SECONDS, exit=True)

    def _watch(self) -> None:
        """End the process on SIGTERM, or when the job's store is silent."""
        while not self._closed.is_set():
            ready, _, _ = select.select([self._read], [], [], CHECK_SECONDS)
            if ready and signal.SIGTERM in os.read(self._read, 64) and not self._is_request():
                self._record(FlightLogs.TERMINATED)
                _die_of_sigterm()
            if time.monotonic() - self._contact > self._limit and not self._closed.is_set():
                self._end(f"{self._here}: the job's store {self._silence}")

    def _is_request(self) -> bool:
        """Return whether the launcher has got the signal, too, so that the ranks save; else it is the end."""
        deadline = time.monotonic() + REQUEST_SECONDS
        while self._stop_file is not None and time.monotonic() < deadline:
            if self._stop_file.exists():
                return self._stop_file.read_text() != StopRequests.END_NOW
            time.sleep(REQUEST_SECONDS / 20)
        return False

    def _check_waits(self) -> None:
        """Check in turn that the store responds and no wait is too long. ``_watch`` notices if this blocks."""
        number = 0
        while not self._closed.is_set():
            number += 1
            try:
                beat = Beat(number, self._world.waits.current is not None)
                self._store.set(Beat.key(self._world.rank), json.dumps(astuple(beat)))
                # a set does not wait for a response
                has_failed = self._store.check([FAILED])
                self._contact = time.monotonic()
                problem = self._overlong_wait() or (self._failed_rank() if has_failed else self._silent_rank())
            except RuntimeError:
                # its server has ended; at the end of a job this rank is about to end, too
                self._silence = "has closed: the process that serves it has ended"
                self._contact = time.monotonic() - self._limit + CLOSED_SECONDS
                return
            if problem is not None:
                self._end(problem)
            self._closed.wait(CHECK_SECONDS)

    def _overlong_wait(self) -> str | None:
        """Return whom the main thread waits for long after its deadline; None if it does not."""
        waiting = self._world.waits.current
        if waiting is None or time.monotonic() - waiting.since < waiting.seconds + GRACE_SECONDS:
            return None
        if self._flight is not None:
            return f"{self._here}: {self._flight.progress.explain('expired', waiting.ranks, waiting.seconds)}"
        others = some_of([f"rank {rank}" for rank in waiting.ranks if rank != self._world.rank])
        return f"{self._here}: the deadline of {waiting.seconds:g} s passed, waiting for {others}"

    def _failed_rank(self) -> str | None:
        """Return which other rank has failed, once this one has had the time to notice it and to end by itself."""
        rank, sentence = json.loads(self._store.get(FAILED))
        self._failed_since = self._failed_since or time.monotonic()
        if rank == self._world.rank or time.monotonic() - self._failed_since < CLOSED_SECONDS:
            return None
        return f"{self._here}: {sentence}"

    def _silent_rank(self) -> str | None:
        """Return that the next rank gives no sign of life, though this one may wait for it inside a library."""
        key, now = Beat.key(self._neighbour), time.monotonic()
        beat = self._store.get(key).decode() if self._store.check([key]) else ""
        if beat != self._beat:
            self._beat, self._beat_since = beat, now
        if not beat or now - self._beat_since < self._silence_of_ranks:
            return None
        name = f"rank {self._neighbour}"
        if self._flight is not None:
            name = self._flight.progress.where(self._neighbour, self._store)
        return f"{self._here}: {name} has given no sign of life for {self._silence_of_ranks:g} s"

    @property
    def _here(self) -> str:
        return str(self._world) if self._flight is None else self._flight.progress.here

    @property
    def _name(self) -> str:
        return str(self._world) if self._flight is None else self._flight.progress.name

    def _end(self, sentence: str) -> None:
        error = DeadlineError(sentence)
        self._record(sentence)
        write_error(error)
        if not has_launcher():
            print(f"flexrlhf: {sentence}", file=sys.stderr, flush=True)
        os._exit(1)

    def _record(self, reason: str, stack: list[str] | None = None) -> None:
        if self._flight is not None:
            self._flight.write(reason, stack)
            if not has_launcher():
                self._flight.directory.flights.write_timeline()


def _do_nothing(_: int, __: FrameType | None) -> None:
    """Handle a signal in Python: with the default action it would not reach the pipe."""


def _restore_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _die_of_sigterm() -> None:
    """End as without a handler. Python sets handlers in the main thread alone, C in any."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(128 + signal.SIGTERM)
