"""Launcher of ranks in a Ray cluster: an actor for each, in the placement groups of the plan, driven from here."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

from flexrlhf.errors import Interrupted, RankFailure
from flexrlhf.launch.failures import Failure
from flexrlhf.launch.launchers.job_start import JobStart
from flexrlhf.launch.ray_job.attempt import Attempt, compare_machines, print_places
from flexrlhf.launch.ray_job.cluster import connected
from flexrlhf.launch.ray_job.ranks import actor_ranks
from flexrlhf.launch.ray_job.reservation import reserved
from flexrlhf.launch.start import HANDLED, SAVING, STOPPED, saving_on_signals, signal_handlers_restored


def start(job: JobStart) -> bool:
    """Run all ranks in the Ray cluster, again from the newest checkpoint after a failure, ``max_restarts`` times."""
    saves = all(order.spec.checkpoint.on_signal for order in job.orders)
    with TemporaryDirectory(prefix="flexrlhf-") as directory:
        stop = Path(directory) / "stop"
        with connected(), saving_on_signals(stop, saves), _ending_on_signals(SAVING if saves else ()):
            try:
                _run(job, stop)
            except (SignalException, KeyboardInterrupt):
                raise Interrupted(STOPPED) from None
        return stop.exists()


def _run(job: JobStart, stop: Path) -> None:
    """Run attempts until one ends well. Raises RankFailure with the failure of the last one."""
    terms = job.make_terms()
    with ExitStack() as stack:
        for number in range(job.max_restarts + 1):
            with (
                reserved(job.plans[0].cluster, job.orders[0].spec.cluster.device) as groups,
                actor_ranks(groups) as ranks,
            ):
                compare_machines(ranks, job, terms)
                print_places(ranks)
                if number == 0:
                    stack.enter_context(job.directories(True))
                attempt = Attempt(ranks, job, stop)
                failure = attempt.run(number)
            if failure is None:
                return
            _raise_or_print(failure, attempt.record, number, job.max_restarts)


def _raise_or_print(failure: Failure, record: Path | None, number: int, max_restarts: int) -> None:
    """Raise the failure of the last attempt, and print that of another one. What a user must mend is not retried."""
    if number == max_restarts or failure.kind == "user":
        raise RankFailure("; ".join(filter(None, (failure.sentence, f"record: {record}" if record else ""))))
    print(f"flexrlhf: {failure.sentence}; restart {number + 1} of {max_restarts}", file=sys.stderr, flush=True)


@contextmanager
def _ending_on_signals(others: Sequence[signal.Signals]) -> Iterator[None]:
    """Let signals end the ranks, except Ctrl-C, which does by itself, and ``others``."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        raise SignalException(f"ended by {signal.Signals(number).name}", signal.Signals(number))

    with signal_handlers_restored():
        for number in HANDLED:
            if number not in (*others, signal.SIGINT):
                signal.signal(number, end)
        yield
