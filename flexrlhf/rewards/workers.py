"""Worker processes for calls that may hang or crash: each call has a deadline, and the next call goes on.

| what happens                                  | the batch         | the worker                         |
|-----------------------------------------------|-------------------|------------------------------------|
| the call takes longer than its limit          | has no scores     | is killed; a new one starts        |
| the process dies (os._exit, a signal)         | has no scores     | a new one starts                   |
| the call raises, or ``sys.exit``              | has no scores     | goes on                            |
| loading takes longer than LOAD_SECONDS        | has no scores     | is killed; no further one is tried |
| loading raises                                | has no scores     | goes on, and tries again           |
| no process within START_SECONDS               | has no scores     | a new one starts                   |
| three calls in a row take longer              | the step's others | goes on with the next step         |
|                                               | have no scores    |                                    |
| the step's deadline passes                    | and all left have | is killed; a new one starts        |
|                                               | no scores         |                                    |
| this process dies                             | -                 | is killed, see ``processes``       |

Each worker is a pool of one, so that loading, which may take long, has another limit than the call after it. A worker
that ends takes along what it has started. A spawned process runs the parent's main module again, so a rank's main
module should import little.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from queue import SimpleQueue
from typing import TypeVar

from pebble import ProcessExpired, ProcessPool

from flexrlhf.rewards.base import CallFailed, Reply, Sample, Score, ScoreBatch, ScoreFailure, failed_reply, make_batches
from flexrlhf.rewards.limits import CircuitBreaker, Deadline, WarnOnce
from flexrlhf.rewards.processes import WorkerContext, begin, kill_group
from flexrlhf.rewards.worker_calls import failure_of

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

    def run(self, function: Callable[..., T], *args: object, seconds: float, deadline: Deadline) -> T:
        """Run ``function(*args)`` in the process.

        Raises CallFailed within ``seconds`` + START_SECONDS, and soon after the deadline.
        """
        limit = min(seconds, deadline.left())
        if limit <= 0:
            raise CallFailed(deadline.failure())
        future: Future[T] = Future()
        try:
            future = self._schedule(function, args, limit)
            error = future.exception(timeout=max(0.0, min(limit + START_SECONDS, deadline.left())))
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
                    raise CallFailed(ScoreFailure("timeout", f"took longer than {seconds:g} s"))
                raise CallFailed(ScoreFailure("start", f"no worker process within {START_SECONDS:g} s"))
            case ProcessExpired():
                kill_group(error.pid)
                raise CallFailed(ScoreFailure("crash", f"ended its process, {_exit(error.exitcode)}"))
            case BrokenProcessPool():
                self.close()
                raise CallFailed(
                    ScoreFailure("crash", "its worker process ended at the start of this call, or before it")
                )
        # such as memory that is used up where errors are caught
        raise CallFailed(failure_of(error, "raise", "raised"))

    def stop(self) -> None:
        """Start to end the process; ``close`` waits for it."""
        if self._pool is not None:
            self._pool.stop()

    def close(self) -> None:
        """End the process, and all that it has started."""
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


def loaded(worker: Worker, load: Callable[[], T], deadline: Deadline) -> T:
    """Run ``load`` in a worker. Raises CallFailed, of kind ``late`` or one that begins with ``load``."""
    try:
        return worker.run(load, seconds=LOAD_SECONDS, deadline=deadline)
    except CallFailed as error:
        kind, text = error.failure.kind, error.failure.text
        failure = error.failure if kind == "late" else ScoreFailure(f"load {kind}", f"could not be loaded: {text}")
        raise CallFailed(failure) from None


class Workers:
    """Worker processes that share batches.

    count:    number of processes
    seconds:  limit of one call
    load:     runs in a process before its calls; it has to load once only
    """

    def __init__(self, count: int, seconds: float, load: Callable[[], ScoreFailure | None] | None = None) -> None:
        self._workers = [Worker() for _ in range(count)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._load, self._seconds = load, seconds
        self._given_up: ScoreFailure | None = None

    def replies(
        self, call: Callable[[ScoreBatch], Reply], batches: Sequence[ScoreBatch], deadline: Deadline
    ) -> list[Reply]:
        """Return one reply a batch, by the deadline and the time to end a process.

        A batch takes at most LOAD_SECONDS + ``seconds`` + 2 START_SECONDS of one worker.
        """
        breaker = CircuitBreaker(deadline)
        with ThreadPoolExecutor(len(self._workers)) as threads:
            return list(threads.map(lambda batch: self._reply(call, batch, breaker, deadline), batches))

    def close(self) -> None:
        """End all processes, within a few seconds."""
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.close()

    def _reply(
        self, call: Callable[[ScoreBatch], Reply], batch: ScoreBatch, breaker: CircuitBreaker, deadline: Deadline
    ) -> Reply:
        failure = breaker.failure()
        reply = failed_reply(batch, failure) if failure else self._call(call, batch, deadline)
        breaker.record(reply)
        return reply

    def _call(self, call: Callable[[ScoreBatch], Reply], batch: ScoreBatch, deadline: Deadline) -> Reply:
        # there are as many threads as workers
        worker = self._idle.get_nowait()
        try:
            if failure := self._prepare(worker, deadline):
                return failed_reply(batch, failure)
            return worker.run(call, batch, seconds=self._seconds, deadline=deadline)
        except CallFailed as error:
            return failed_reply(batch, error.failure)
        finally:
            self._idle.put(worker)

    def _prepare(self, worker: Worker, deadline: Deadline) -> ScoreFailure | None:
        """Return why the worker cannot be called.

        Loading that takes too long is not tried again: steps would wait for it.
        """
        if self._load is None or self._given_up:
            return self._given_up
        try:
            return loaded(worker, self._load, deadline)
        except CallFailed as error:
            if error.failure.kind == "load timeout":
                self._given_up = error.failure
            return error.failure


class WorkerSource:
    """A source of scores that worker processes call, batch by batch.

    The columns of a batch are the data rows' own, as lists.

    separator:  of steps, which the call receives; None: responses are not split
    """

    def __init__(
        self,
        call: Callable[[ScoreBatch], Reply],
        workers: Workers,
        batch_size: int,
        warn: WarnOnce,
        separator: str | None = None,
    ) -> None:
        self._call, self._workers, self._warn = call, workers, warn
        self._batch_size, self._separator = batch_size, separator

    def score(self, samples: Sequence[Sample], deadline: Deadline) -> list[Score]:
        """Return one score a sample; bounded in time as ``Workers.replies``."""
        batches = make_batches(samples, self._batch_size, self._separator)
        replies = self._workers.replies(self._call, batches, deadline)
        for reply in replies:
            self._warn(reply.failure)
        return [score for reply in replies for score in reply.scores]

    def close(self) -> None:
        self._workers.close()


def _exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
