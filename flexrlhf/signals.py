"""Signals that end a command, from its first instant on: each has an exit code and a sentence.

``__main__`` loads this before all else, so it imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager

# of typing, which would load before the signals are handled
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    Handler = Callable[[int, FrameType | None], object]

COMMANDS = ("run", "join", "doctor", "profile", "verify")
"""Commands that start ranks; Ctrl-C ends the others without a word."""
AGAIN_SECONDS = 1.0
"""Time in which signals after the first one count as the same."""
SWALLOWED_SECONDS = 5.0
"""Time after which an end that a library has prevented is tried again."""


class StopSignal(KeyboardInterrupt):
    """End of a command by a signal before its ranks run. ``number``: of the signal."""

    SAVING = (signal.SIGTERM, signal.SIGUSR1)
    """Signals of schedulers before they end a job."""
    ENDING = tuple(
        getattr(signal, name)
        for name in (
            *("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR2", "SIGALRM", "SIGXCPU"),
            *("SIGVTALRM", "SIGPROF", "SIGIO", "SIGPWR"),
        )
        if hasattr(signal, name)
    )
    """Signals that would end a process without a word, and are not errors of its own."""
    SENT = ENDING[:5]
    """The ones that users and schedulers send; a script may have handlers of its own for others."""

    def __init__(self, number: int) -> None:
        super().__init__(self.sentence(number))
        self.number = number

    @staticmethod
    def sentence(number: int, moment: str = "before the first step; nothing is to be saved") -> str:
        """Return the sentence about a signal that has ended a command at a ``moment``."""
        return f"stopped by {signal.Signals(number).name} {moment}"

    @staticmethod
    def exit_code(number: int) -> int:
        """Return 143 for a signal of schedulers, after which the same command goes on, and 130 for another."""
        return 128 + (signal.SIGTERM if number in StopSignal.SAVING else signal.SIGINT)


class Ending:
    """Handler that raises an exception, one for all signals that come at once.

    number:  of the first signal; 0 before any.
    is_over: whether it raises no more, since the command ends by a signal that another handler has got.
    """

    def __init__(self, make: Callable[[int], BaseException] = StopSignal, is_repeated: bool = False) -> None:
        """Raise nothing yet.

        make:         makes the exception from a signal's number.
        is_repeated:  whether it is raised again if the process has not ended by then.
        """
        self._make, self._is_repeated = make, is_repeated
        self.number, self._raised = 0, -AGAIN_SECONDS
        self.is_over = False

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Raise the exception, of the first signal."""
        now = time.monotonic()
        if self.is_over or now - self._raised < AGAIN_SECONDS:
            return
        self.number, self._raised = self.number or number, now
        if self._is_repeated:
            signal.setitimer(signal.ITIMER_REAL, SWALLOWED_SECONDS)
        raise self._make(self.number)

    @classmethod
    def begin_command(cls) -> None:
        """Let signals raise StopSignal from here on, if this process handles them; Ctrl-C raises KeyboardInterrupt."""
        if signal.getsignal(signal.SIGTERM) is _end:
            handle(cls(is_repeated=True))
        elif signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @staticmethod
    def check_stopped() -> None:
        """Raise StopSignal again if a signal has raised it and a library, or the end of an object, has caught it."""
        before = signal.getsignal(signal.SIGTERM)
        if isinstance(before, Ending) and before.number:
            raise StopSignal(before.number)

    @staticmethod
    def end_command(code: int | None) -> None:
        """Let signals end this process, which has done its work, with ``code``; None: it goes on to its end."""
        if is_handled():
            handle(lambda *_: None if code is None else os._exit(code))

    @staticmethod
    def silencer() -> Callable[[], None]:
        """Return what makes the handler that is now installed raise no more."""
        before = signal.getsignal(signal.SIGTERM)

        def end() -> None:
            if isinstance(before, Ending):
                before.is_over = True

        return end


def handle(handler: Handler) -> None:
    """Handle the signals of ``StopSignal.ENDING``; not SIGHUP where the process survives it, as by nohup, nor ones
    that a script handles itself."""
    is_ours = is_handled()
    for number in StopSignal.ENDING:
        before = signal.getsignal(number)
        is_ignored = number == signal.SIGHUP and before is signal.SIG_IGN
        if not is_ignored and (number in StopSignal.SENT or is_ours or before is signal.SIG_DFL):
            signal.signal(number, handler)


@contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """Handle signals meanwhile, as ``handle`` does; other threads than the main one get none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in StopSignal.ENDING}
    handle(handler)
    try:
        yield
    finally:
        for number, each in before.items():
            # None: a handler that is not Python's, which stays
            if each is not None:
                signal.signal(number, each)


def end_at_once(command: str) -> None:
    """Let signals end this process at once while ``command`` is loaded, of which nothing is to be cleared up."""
    if command in COMMANDS:
        handle(_end)
        os.register_at_fork(after_in_child=restore)
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def is_handled() -> bool:
    """Whether this process handles the signals of ``StopSignal.ENDING`` before its ranks run."""
    return isinstance(signal.getsignal(signal.SIGTERM), Ending) or signal.getsignal(signal.SIGTERM) is _end


def restore() -> None:
    """Let each signal end this process as the system does, if they are handled: in a fork of a command."""
    if is_handled():
        for number in StopSignal.ENDING:
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)


def _end(number: int, _: FrameType | None) -> None:
    os.write(2, f"flexrlhf: {StopSignal.sentence(number)}\n".encode())
    os._exit(StopSignal.exit_code(number))
