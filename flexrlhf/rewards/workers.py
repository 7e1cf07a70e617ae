"""Worker processes that call sources of scores: each call has a deadline, and the next call goes on.

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
| this process dies                             | -                 | is killed, see ``user_code``       |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from flexrlhf.rewards.base import Reply, Sample, Score, ScoreBatch, make_batches
from flexrlhf.rewards.limits import CircuitBreaker
from flexrlhf.user_code.call_failures import CallFailed, CallFailure, WarnOnce
from flexrlhf.user_code.deadline import Deadline
from flexrlhf.user_code.worker_process import Worker


class Workers:
    """Worker processes that share batches.

    count:    number of processes
    seconds:  limit of one call
    load:     runs in a process before its calls; it has to load once only
    """

    def __init__(self, count: int, seconds: float, load: Callable[[], CallFailure | None] | None = None) -> None:
        self._workers = [Worker() for _ in range(count)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._load, self._seconds = load, seconds
        self._given_up: CallFailure | None = None

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
        reply = Reply.failed(batch, failure) if failure else self._call(call, batch, deadline)
        breaker.record(reply)
        return reply

    def _call(self, call: Callable[[ScoreBatch], Reply], batch: ScoreBatch, deadline: Deadline) -> Reply:
        # there are as many threads as workers
        worker = self._idle.get_nowait()
        try:
            if failure := self._prepare(worker, deadline):
                return Reply.failed(batch, failure)
            return worker.run(call, batch, seconds=self._seconds, deadline=deadline)
        except CallFailed as error:
            return Reply.failed(batch, error.failure)
        finally:
            self._idle.put(worker)

    def _prepare(self, worker: Worker, deadline: Deadline) -> CallFailure | None:
        """Return why the worker cannot be called.

        Loading that takes too long is not tried again: steps would wait for it.
        """
        if self._load is None or self._given_up:
            return self._given_up
        try:
            return worker.load(self._load, deadline)
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
