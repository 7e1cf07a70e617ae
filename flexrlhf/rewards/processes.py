"""Start and end of a worker process. Worker processes load this: the standard library alone.

A worker leads a session of its own, so that its children can be ended with it. The kernel ends it when its rank dies:
a thread of its own could not, while a function has the interpreter's lock. Its children may then stay, and
so may, always, those that have left its process group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.context import SpawnContext, SpawnProcess

WATCH_SECONDS = 1.0
END_SECONDS = 1.0
"""Limit for a worker to end by itself before it is killed."""
PR_SET_PDEATHSIG = 1
"""Constant of <sys/prctl.h>: the signal that this process gets when the thread that started it ends."""


class WorkerProcess(SpawnProcess):
    """A process that ends with all of its group."""

    def terminate(self) -> None:
        """Send SIGTERM, and after at most END_SECONDS SIGKILL, to the process and all that it has started."""
        super().terminate()
        self.join(END_SECONDS)
        if self.pid is not None:
            kill_group(self.pid)


class WorkerContext(SpawnContext):
    """Context that spawns processes: a rank has threads of torch and gloo, which a fork would copy in any state."""

    Process = WorkerProcess


def kill_group(leader: int) -> None:
    """End the rest of the group of worker ``leader``. One that died before ``begin`` leads none."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def begin(parent: int) -> None:
    """Lead a group, and end with the thread of process ``parent`` that started this one.

    Elsewhere than on Linux: end within WATCH_SECONDS of the process, unless a function has the interpreter's lock.
    """
    os.setsid()
    if not is_killed_with_parent():
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    # it may have died before
    if os.getppid() != parent:
        os._exit(1)


def is_killed_with_parent() -> bool:
    """Have the kernel kill this process when the thread that started it ends; return whether it does that."""
    if sys.platform != "linux":
        return False
    arguments = [ctypes.c_ulong(value) for value in (signal.SIGKILL, 0, 0, 0)]
    done: int = ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, *arguments)
    return done == 0


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os._exit(1)
