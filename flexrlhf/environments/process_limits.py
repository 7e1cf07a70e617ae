"""Limits of a process that runs episodes: memory, open files, output, signals. The standard library alone.

A process that exceeds its memory or its files gets an error from the system (MemoryError, OSError), its output is cut,
it leaves no core file, and its temporary files are in a directory that is removed. Where Linux allows (6.12), it can
end no process but the ones that it has started; these then gain no privileges, as by sudo.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import struct
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Semaphore

from flexrlhf.user_code.processes import begin, set_process_option

OUTPUT_RATE = 1024
"""Bytes a second that a process may write to the terminal in the long run, its successors included."""
OUTPUT_BURST = 8192
"""Bytes that it may write at once."""
CUT = b"\nflexrlhf: further output of this environment's process is left out, as it writes more than 1 KiB a second\n"
PR_SET_NO_NEW_PRIVS = 38
"""Constant of <sys/prctl.h>, which restricting itself requires of a process."""
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
"""System calls of <linux/landlock.h>, the same ones on all architectures."""
LANDLOCK_SCOPE_SIGNAL = 2
"""Restriction of signals to processes that are restricted with this one."""


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of one process.

    memory_mb:   memory that it may write, in MiB: its heap, the stacks of its threads, mapped memory of its own
    open_files:  file descriptors
    """

    memory_mb: int | None
    open_files: int


def begin_limited(
    limits: ProcessLimits, folder: str, paid: Synchronized[float], arrivals: Semaphore, parent: int
) -> None:
    """Begin as a worker of process ``parent`` does, with limits.

    folder:    for temporary files
    paid:      time (monotonic) up to which the output so far uses the rate up; shared with the processes before and
               after
    arrivals:  released by ``parent`` for each further call, which sets ``news``
    """
    if can_keep_signals():
        _keep_signals()
    _bound_output(paid)
    begin(parent)
    threading.Thread(target=_announce, args=(arrivals,), daemon=True).start()
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # there are as many processes as the machine should have threads
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    limit_process(limits)


def limit_process(limits: ProcessLimits) -> None:
    """Limit this process, and the ones that it starts."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, limits.open_files)
    if limits.memory_mb is not None:
        _limit(resource.RLIMIT_DATA, limits.memory_mb << 20)


@functools.cache
def news() -> threading.Event:
    """Return the event of this process that a call has arrived, or has ended."""
    return threading.Event()


def _announce(arrivals: Semaphore) -> None:
    while arrivals.acquire():
        news().set()


def allowed_bytes(paid: float, now: float) -> int:
    """Return the number of bytes that may be written at ``now``, if output is paid up to ``paid``."""
    return max(0, min(OUTPUT_BURST, round((now - paid) * OUTPUT_RATE) + OUTPUT_BURST))


def _limit(kind: int, value: int) -> None:
    """Set a limit, which is never raised."""
    _, hard = resource.getrlimit(kind)
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (most, most))


def can_keep_signals() -> bool:
    """Return whether this Linux can restrict signals: Landlock's sixth version does."""
    version = 1
    if sys.platform != "linux":
        return False
    found: int = ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), version)
    return found >= 6


def _keep_signals() -> None:
    """Let this process and all that it starts send signals to each other only."""
    library = ctypes.CDLL(None)
    # file accesses and network ports that are restricted: none
    rules = ctypes.create_string_buffer(struct.pack("=QQQ", 0, 0, LANDLOCK_SCOPE_SIGNAL), 24)
    number = library.syscall(LANDLOCK_CREATE_RULESET, rules, ctypes.c_size_t(24), 0)
    set_process_option(PR_SET_NO_NEW_PRIVS, 1)
    library.syscall(LANDLOCK_RESTRICT_SELF, number, 0)
    os.close(number)


def _bound_output(paid: Synchronized[float]) -> None:
    """Have stdout and stderr of this process, and of all that it starts, read by a thread, which writes a part."""
    shown = os.dup(2)
    reader, writer = os.pipe()
    for number in (1, 2):
        os.dup2(writer, number)
    os.close(writer)
    threading.Thread(target=_forward, args=(reader, shown, paid), daemon=True).start()


def _forward(reader: int, shown: int, paid: Synchronized[float]) -> None:
    is_cut = False
    while data := os.read(reader, 1 << 16):
        now = time.monotonic()
        with paid:
            allowed = allowed_bytes(paid.value, now)
            part = data[: 0 if is_cut and allowed < OUTPUT_BURST // 2 else allowed]
            paid.value = max(paid.value, now) + len(part) / OUTPUT_RATE
        with suppress(OSError):
            os.write(shown, part if len(part) == len(data) or is_cut else part + CUT)
        is_cut = len(part) < len(data)
