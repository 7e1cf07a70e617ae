"""Start and end of a worker process, and its output. Worker processes load this: the standard library alone.

A worker leads a session of its own, so that its children can be ended with it; on Linux also children that have left
its session, if the worker is ended from here. The kernel ends it when its rank dies: a thread of its own could not,
while a function has the interpreter's lock. Its children may then stay.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any, TextIO

from flexrlhf.config.proxies import call_directly

WATCH_SECONDS = 1.0
END_SECONDS = 1.0
"""Limit for a worker to end by itself before it is killed."""
PR_SET_PDEATHSIG = 1
"""Constant of <sys/prctl.h>: the signal that this process gets when the thread that started it ends."""
PR_SET_CHILD_SUBREAPER = 36
"""Constant of <sys/prctl.h>: whether this process becomes the parent of its children's orphans."""

_SAFE_PATH = ("PYTHONSAFEPATH", "of a rank")
"""Variable by which Python finds no module in the current directory, and its value in a rank."""


class WorkerProcess(SpawnProcess):
    """A process that ends with all of its group."""

    def terminate(self) -> None:
        """Send SIGTERM, and after at most END_SECONDS SIGKILL, to the process and all that it has started."""
        children = {} if self.pid is None else descendants(self.pid)
        super().terminate()
        self.join(END_SECONDS)
        if self.pid is not None:
            kill_group(self.pid)
        end_processes(children)


class WorkerContext(SpawnContext):
    """Context that spawns processes: a rank has threads of torch and gloo, which a fork would copy in any state."""

    Process = WorkerProcess

    def __init__(self) -> None:
        super().__init__()
        start_quiet_tracker()


def start_quiet_tracker() -> None:
    """Start the process that removes semaphores of this one and its workers, which after a kill would warn of each."""
    quiet = "ignore:resource_tracker:UserWarning"
    sys.warnoptions.append(quiet)
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(quiet)


def _leave_tracker() -> None:
    """Close the pipe to the tracker of the parent: what a user's code writes to open files would end it.

    Semaphores that this process makes itself get a tracker of their own.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
        tracker._fd = None


def keep_children_safe() -> None:
    """Let Python processes that this one starts find no module in the current directory: a threading.py there is none.

    A worker's own children do again.
    """
    os.environ.setdefault(*_SAFE_PATH)


def kill_group(leader: int) -> None:
    """End the rest of the group of worker ``leader``. One that died before ``begin`` leads none."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def exit_text(code: int) -> str:
    """Return how a process ended: by its exit code, negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    # real-time signals have no names
    known = {int(each): each.name for each in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"


def descendants(process: int) -> dict[int, int]:
    """Return the processes that ``process`` has started, and all that they have: id → time of its start, in ticks.

    There are none elsewhere than on Linux.
    """
    children: dict[int, dict[int, int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, parent, start = _state_of(stat)
            children.setdefault(parent, {})[int(stat.parent.name)] = start
    found: dict[int, int] = {}
    pending = [process]
    while pending:
        started = children.get(pending.pop(), {})
        found |= started
        pending += started
    return found


def end_processes(found: Mapping[int, int]) -> None:
    """End processes, as ``descendants`` returns them; not others that have their ids by now.

    Waits until they have ended, at most END_SECONDS: a busy machine runs a killed process only later.
    """
    for process, start in found.items():
        if _is_running(process, start):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS
    while any(_is_running(*each) for each in found.items()) and time.monotonic() < deadline:
        time.sleep(0.005)


def _is_running(process: int, start: int) -> bool:
    """Return whether the process that began at ``start`` has not ended, whoever has to await it."""
    with suppress(OSError):
        state, _, began = _state_of(Path(f"/proc/{process}/stat"))
        return began == start and state not in "ZX"
    return False


def _state_of(stat: Path) -> tuple[str, int, int]:
    """Return the letter of a process's state, its parent, and the time of its start in ticks."""
    # the name, in parentheses, may have any character
    fields = stat.read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[19])


def begin(parent: int) -> None:
    """Lead a group, and end with the thread of process ``parent`` that started this one.

    Elsewhere than on Linux: end within WATCH_SECONDS of the process, unless a function has the interpreter's lock.
    """
    keep_output()
    call_directly()
    _leave_tracker()
    if os.environ.get(_SAFE_PATH[0]) == _SAFE_PATH[1]:
        # what a user's function starts finds its modules as elsewhere
        del os.environ[_SAFE_PATH[0]]
    os.setsid()
    if sys.platform == "linux":
        set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    if not is_killed_with_parent():
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    # it may have died before
    if os.getppid() != parent:
        os._exit(1)


class _Output(io.FileIO):
    """Standard stream that drops what cannot be written, because its reader has gone or its disk is full.

    Results are in files: a run does not end for its output.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _with_output(stream: TextIO | None) -> TextIO:
    """Return a standard stream whose writes do not fail, one that is no file as it is. ``stream``: None if closed."""
    if stream is None:
        return Path(os.devnull).open("w")
    try:
        buffer = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
    except (OSError, ValueError):
        return stream
    is_line = getattr(stream, "line_buffering", False)
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=is_line)


def keep_output() -> None:
    """Let no write to the standard streams of this process fail, and no other file have the number of a closed one."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout, sys.stderr = (_with_output(each) for each in (sys.stdout, sys.stderr))


def is_killed_with_parent() -> bool:
    """Have the kernel kill this process when the thread that started it ends; return whether it does that."""
    if sys.platform != "linux":
        return False
    return set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)


def set_process_option(option: int, value: int) -> bool:
    """Call prctl(2), which Linux has; return whether it succeeded."""
    done: int = ctypes.CDLL(None).prctl(option, *(ctypes.c_ulong(each) for each in (value, 0, 0, 0)))
    return done == 0


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os._exit(1)
