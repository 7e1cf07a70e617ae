"""Calls of a user's code while a run is planned: it may end its process, or never return.

Values are computed in a process of their own. Objects, as a graph is, are made in this process, under a timer.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from flexrlhf.config.code_loading import python_command
from flexrlhf.errors import UserError
from flexrlhf.user_code.call_failures import Caught
from flexrlhf.user_code.process_directories import process_directory
from flexrlhf.user_code.processes import exit_text, is_killed_with_parent, kill_group

PLANNING_SECONDS = 60.0
"""Time that a user's code has to load and to return while a run is planned."""
MEMORY_BYTES = 4 * 2**30
"""Memory that it may write meanwhile: there is more than the code alone on the machine that plans."""


def run_apart(module: str, task: Any, name: str, number: int = 1) -> list[Any]:
    """Run ``python -m MODULE``, which calls ``serve_call``, in ``number`` processes at once; return their replies.

    task:  argument of the call, and ``name``: of the code, for messages.

    Raises UserError for code that raises, ends its process, or has not returned after PLANNING_SECONDS.
    """
    with process_directory() as folder:
        given, replies = folder / "task.json", [folder / f"reply-{each}.json" for each in range(number)]
        given.write_text(json.dumps(task))
        end = time.monotonic() + PLANNING_SECONDS
        processes = [
            subprocess.Popen(
                python_command(module, str(given), str(file)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for file in replies
        ]
        try:
            codes = [process.wait(max(0.0, end - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            raise UserError(f"{name} has not returned within {PLANNING_SECONDS:g} s") from None
        finally:
            for process in processes:
                kill_group(process.pid)
                process.wait()
        return [_read(file, code, name) for file, code in zip(replies, codes, strict=True)]


def _read(file: Path, code: int, name: str) -> Any:
    if not file.exists():
        raise UserError(f"{name} ended the process that called it, {exit_text(code)}")
    found = json.loads(file.read_text())
    if found["sentence"]:
        raise UserError(found["sentence"])
    if found["problem"]:
        raise UserError(f"{name} {found['problem']}")
    return found["value"]


def serve_call(function: Callable[[Any], Any]) -> None:
    """Be the process of ``run_apart``: call ``function`` with the task, write what it returns as JSON, and end."""
    is_killed_with_parent()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    given, place = map(Path, sys.argv[1:])
    task, sentence, value = json.loads(given.read_text()), "", None
    with Caught("raise", "raised") as caught:
        try:
            value = function(task)
        except UserError as error:
            sentence = str(error)
    reply = {"value": value, "sentence": sentence, "problem": caught.failure.text if caught.failure else ""}
    written = place.with_suffix(".writing")
    written.write_text(json.dumps(reply))
    written.rename(place)
    # threads of the user's code may never end
    os._exit(0)


class _EndOfTimeError(BaseException):
    """End of the time of a user's code, which catches exceptions itself."""


class _EndOfProcessError(BaseException):
    """Call of a user's code that would end this process without a word."""


@contextmanager
def bounded_here(name: str) -> Iterator[None]:
    """Bound the time of a user's code in this process, in the main thread; name the code that would end the process.

    Raises UserError.
    """
    process, leave = os.getpid(), os._exit

    def leaving(code: int) -> None:
        if os.getpid() != process:
            leave(code)
        raise _EndOfProcessError(exit_text(code))

    is_main = threading.current_thread() is threading.main_thread()
    try:
        os._exit = leaving  # type: ignore[assignment]
        with _alarm() if is_main else nullcontext():
            yield
    except _EndOfTimeError:
        raise UserError(f"{name} has not returned within {PLANNING_SECONDS:g} s") from None
    except _EndOfProcessError as error:
        raise UserError(f"{name} ends the process that calls it, {error}") from None
    finally:
        os._exit = leave


@contextmanager
def _alarm() -> Iterator[None]:
    """Raise an error after PLANNING_SECONDS, and again each second: code may catch it."""

    def late(*_: object) -> None:
        raise _EndOfTimeError

    left, begin = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
    # an alarm that is due before is of the caller's own
    if 0 < left <= PLANNING_SECONDS:
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    try:
        signal.setitimer(signal.ITIMER_REAL, PLANNING_SECONDS, 1.0)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - begin)) if left else 0)
