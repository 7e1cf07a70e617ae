"""Failures of calls, of a user's code and of services, and how they are reported. Worker processes load this."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from errno import EMFILE, ENFILE
from threading import Lock
from types import TracebackType
from typing import Self

from flexrlhf.config.code_loading import line_of
from flexrlhf.errors import is_exhaustion, one_line


@dataclass(frozen=True)
class CallFailure:
    """The reason why a call returned nothing that can be used.

    kind:  failures of one kind are reported once
    text:  the reason, for a person
    """

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException, kind: str, verb: str) -> CallFailure:
        """Return the failure of a call that raised.

        Memory and open files are kinds of their own: another call of the process may have used them up.
        """
        if isinstance(error, BadReply):
            return cls("reply", str(error))
        if isinstance(error, ServerGone):
            # each server is named once
            return cls(f"server {error.address}".rstrip(), str(error))
        # str(error) may raise
        line = line_of(error)
        if isinstance(error, MemoryError) or is_exhaustion(RuntimeError(line)):
            kind = "memory"
        elif isinstance(error, OSError) and error.errno in (EMFILE, ENFILE):
            kind = "files"
        return cls(kind, f"{verb} {line}")


class CallFailed(Exception):
    """A call or a request without a usable reply, and why."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class BadReply(ValueError):
    """A reply of another form than is read."""


class ServerGone(Exception):
    """A server of episodes that is not reached, or has been lost. ``address``: of the server that had the episode."""

    def __init__(self, text: str, address: str = "") -> None:
        super().__init__(text)
        self.address = address


class Caught:
    """Context that catches whatever a user's code raises, ``sys.exit`` too: it costs a reply, not the process.

    passes:  errors that are not caught
    """

    def __init__(self, kind: str, verb: str, passes: tuple[type[BaseException], ...] = ()) -> None:
        self._kind, self._verb, self._passes = kind, verb, passes
        self.failure: CallFailure | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if isinstance(error, self._passes):
            return False
        if error is not None:
            self.failure = CallFailure.of(error, self._kind, self._verb)
        return True


class WarnOnce:
    """Writer of one line for each kind of failure of a source. Several threads may use it.

    ``name``: the source as the YAML has it, such as ``reward.url``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._kinds: set[str] = set()
        self._lock = Lock()

    def __call__(self, failure: CallFailure | None) -> None:
        """Write one line to stderr, unless there was one of this kind."""
        if failure is None:
            return
        with self._lock:
            is_first = failure.kind not in self._kinds
            self._kinds.add(failure.kind)
        if is_first:
            text = one_line(failure.text)
            print(f"flexrlhf: {self._name}: {text}; further ones are only counted", file=sys.stderr)
