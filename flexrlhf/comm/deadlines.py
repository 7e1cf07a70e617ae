"""Waits of a rank for others, and failed ones as one sentence: who waited at what, who has arrived and who has not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from flexrlhf.errors import RunStopped

Cause = Literal["expired", "closed"]
"""How a wait fails: its deadline passes, or a connection closes."""
_SIGNS: dict[Cause, tuple[str, ...]] = {
    "expired": ("timed out", "timeout"),
    "closed": (
        *("connection closed", "connection reset", "broken pipe", "connection was closed", "failed to recv"),
        # NCCL's, of a communicator that has failed
        *("remote process exited", "communicator was aborted"),
    ),
}
"""Words of torch's messages, by their meaning."""
POLL_SECONDS = 1e-4
"""Time between two looks at a device."""

STORE_CLOSED = "the connection to the job's store closed"


class DeadlineError(RunStopped):
    """Failure of a wait because ranks were missing or had ended."""

    def __init__(self, sentence: str, cause: Cause = "expired") -> None:
        super().__init__(sentence)
        self.cause = cause


@dataclass(frozen=True)
class Waiting:
    """A wait of this rank for ``ranks``, since a time of ``time.monotonic`` and for ``seconds`` at most."""

    ranks: tuple[int, ...]
    since: float
    seconds: float


class Waits:
    """The wait of a rank's main thread: its watch ends the process if the wait cannot end by itself.

    current:  None while it waits for no other rank.
    """

    def __init__(self) -> None:
        self.current: Waiting | None = None

    @contextmanager
    def on(self, ranks: Sequence[int], seconds: float) -> Iterator[None]:
        """Wait for ``ranks`` inside, ``seconds`` at most."""
        self.current = Waiting(tuple(ranks), time.monotonic(), seconds)
        try:
            yield
        finally:
            self.current = None


def await_device(work: dist.Work, seconds: float) -> None:
    """Wait until a device has done ``work``: with NCCL its own wait holds up the main stream, and not the host.

    Raises RuntimeError after ``seconds``, or if the communicator has failed, whose work counts as completed.
    """
    limit = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > limit:
            raise RuntimeError(f"timed out after {seconds:g} s")
        time.sleep(POLL_SECONDS)
    if (error := work.exception()) is not None:
        raise error


@contextmanager
def deadline(what: str, explain: Callable[[Cause], str]) -> Iterator[None]:
    """Raise DeadlineError for a failed wait: ``what`` waited, and ``explain`` returns for whom, or what closed."""
    try:
        yield
    except dist.DistNetworkError as error:
        raise DeadlineError(f"{what}: {STORE_CLOSED}", "closed") from error
    except RuntimeError as error:
        cause = _cause(str(error).lower())
        if cause is None:
            raise
        try:
            explanation = explain(cause)
        except RuntimeError:
            # the store that it reads is gone, too
            explanation = STORE_CLOSED
        raise DeadlineError(f"{what}: {explanation}", cause) from error


def _cause(text: str) -> Cause | None:
    """Return the cause of a failed wait by torch's message; None for any other error."""
    return next((cause for cause, signs in _SIGNS.items() if any(sign in text for sign in signs)), None)
