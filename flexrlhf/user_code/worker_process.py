"""A worker process for calls that may hang or crash: each call has a deadline, and the next call goes on.

The process is a pool of one, so that loading, which may take long, has another limit than the call after it. A process
that ends takes along what it has started. A spawned process runs the parent's main module again, so a rank's main
module should import little.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

from flexrlhf.user_code.call_failures import CallFailed, CallFailure
from flexrlhf.user_code.deadline import Deadline
from flexrlhf.user_code.processes import WorkerContext, begin, exit_text, kill_group

START_SECONDS = 60.0
"""Limit for a process to start, on a machine that is busy."""
LOAD_SECONDS = 60.0
"""Limit for a user's file to load: it may import much."""

T = TypeVar("T")


class Worker:
    """One process, started at the first call, and again after a call that ended it.

    start:  runs first in the process, with the id of this one
    """

    def __init__(self, start: Callable[[int], None] = begin) -> None:
        self._start = start
        self._pool: ProcessPool | None = None
        self._starter: ThreadPoolExecutor | None = None
        self._call = Future[Any]()
        self._is_interrupted = False

    def load(self, load: Callable[[], T], deadline: Deadline) -> T:
        """Run ``load`` in the process. Raises CallFailed, of kind ``late`` or one that begins with ``load``."""
        try:
            return self.run(load, seconds=LOAD_SECONDS, deadline=deadline)
        except CallFailed as error:
            kind, text = error.failure.kind, error.failure.text
            failure = error.failure if kind == "late" else CallFailure(f"load {kind}", f"could not be loaded: {text}")
            raise CallFailed(failure) from None

    @staticmethod
    def loading_deadline(seconds: float) -> Deadline:
        """Return the end of a call of ``seconds`` that has to start a process and load the function, which comes before
        no limit."""
        return Deadline.after(seconds + LOAD_SECONDS + 2 * START_SECONDS)

    def run(self, function: Callable[..., T], *args: object, seconds: float, deadline: Deadline) -> T:
        """Run ``function(*args)`` in the process.

        Raises CallFailed within ``seconds`` + START_SECONDS, and soon after the deadline.
        """
        limit = min(seconds, deadline.left())
        if limit <= 0:
            raise CallFailed(deadline.failure())
        future: Future[T] = Future()
        try:
            self._call = future = self._schedule(function, args, limit)
            if self._is_interrupted:
                future.cancel()
            error = future.exception(timeout=max(0.0, min(limit + START_SECONDS, deadline.left())))
        except CancelledError:
            raise CallFailed(CallFailure("late", "its process has been closed")) from None
        except (TimeoutError, BrokenProcessPool) as unfinished:
            error = unfinished
        match error:
            case None:
                return future.result()
            case TimeoutError():
                is_ended = future.done()
                if not is_ended:
                    self.close()
                if limit < seconds or deadline.left() <= 0:
                    raise CallFailed(deadline.failure())
                if is_ended:
                    raise CallFailed(CallFailure("timeout", f"took longer than {seconds:g} s"))
                raise CallFailed(CallFailure("start", f"no worker process within {START_SECONDS:g} s"))
            case ProcessExpired():
                kill_group(error.pid)
                raise CallFailed(CallFailure("crash", f"ended its process, {exit_text(error.exitcode)}"))
            case BrokenProcessPool():
                self.close()
                raise CallFailed(
                    CallFailure("crash", "its worker process ended at the start of this call, or before it")
                )
        # such as memory that is used up where errors are caught
        raise CallFailed(CallFailure.of(error, "raise", "raised"))

    def stop(self) -> None:
        """Start to end the process; ``close`` waits for it."""
        if self._pool is not None:
            self._pool.stop()

    def interrupt(self) -> None:
        """End the call under way, or the next one, before ``close``. From another thread."""
        self._is_interrupted = True
        self._call.cancel()

    def close(self) -> None:
        """End the process, and all that it has started."""
        self._is_interrupted = False
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None
        if self._starter is not None:
            self._starter.shutdown()
            self._starter = None

    def _schedule(self, function: Callable[..., T], args: tuple[object, ...], limit: float) -> Future[T]:
        """Submit from a thread that stays: a process ends with the thread that started it, and a step's threads end."""
        if self._pool is not None and not self._pool.active:
            self.close()
        for _ in range(2):
            if self._pool is None or self._starter is None:
                self._pool = ProcessPool(1, initializer=self._start, initargs=(os.getpid(),), context=WorkerContext())
                self._starter = ThreadPoolExecutor(1)
            try:
                return self._starter.submit(self._pool.schedule, function, args=args, timeout=limit).result()
            except RuntimeError:
                # its process has ended since the call before, which the pool sees only now
                self.close()
        raise BrokenProcessPool("no process takes a call")
