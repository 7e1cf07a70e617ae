"""Failed waits become one sentence: who waited at what, and which ranks have arrived and which have not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch.distributed as dist

from flexrlhf.errors import RunStopped

Cause = Literal["expired", "closed"]
"""How a wait fails: its deadline passes, or a connection closes."""
_SIGNS: dict[Cause, tuple[str, ...]] = {
    "expired": ("timed out", "timeout"),
    "closed": ("connection closed", "connection reset", "broken pipe", "connection was closed", "failed to recv"),
}
"""Words of torch's messages, by their meaning."""
_MOST_NAMED = 8

STORE_CLOSED = "the connection to the job's store closed"


class DeadlineError(RunStopped):
    """Failure of a wait because ranks were missing or had ended."""

    def __init__(self, sentence: str, cause: Cause = "expired") -> None:
        super().__init__(sentence)
        self.cause = cause


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


def listed(items: Sequence[str]) -> str:
    """Return ``items`` with commas, at most the first few of many."""
    rest = len(items) - _MOST_NAMED
    return ", ".join(items) if rest <= 0 else f"{', '.join(items[:_MOST_NAMED])} and {rest} more"


def _cause(text: str) -> Cause | None:
    """Return the cause of a failed wait by torch's message; None for any other error."""
    return next((cause for cause, signs in _SIGNS.items() if any(sign in text for sign in signs)), None)
