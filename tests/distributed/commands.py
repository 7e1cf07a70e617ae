"""Start the command as a user does, in a directory of its own, and inspect the processes that it starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from forked import RANK_ENVIRONMENT, Forked

PROGRAM = ("-m", "flexrlhf")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def start(
    arguments: list[str], directory: Path, program: Sequence[str] = PROGRAM, is_forked: bool = True
) -> subprocess.Popen[str]:
    """``flexrlhf`` with one thread per rank, in its own session, so that a signal reaches it as from a terminal.

    ``is_forked``: with libraries that are loaded already, unlike a user's.
    """
    environment = {**os.environ, **RANK_ENVIRONMENT}
    if is_forked and program == PROGRAM:
        return Forked([*program[1:], *arguments], directory, environment)
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def children(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks, in their order."""
    return ranks_of(process.pid)


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks of a launcher, which has another child that forks them."""
    return [pid for pid in children_of(launcher) if comm_of(pid).startswith("rank ")]


def comm_of(pid: int) -> str:
    """Name of a process in lists."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


def children_of(pid: int) -> list[int]:
    """Process ids of the children of a process, oldest first."""
    tasks = Path(f"/proc/{pid}/task")
    return sorted(int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split())


def name_of(pid: int) -> str:
    """Command line of a process; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and has not been waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def read_until(process: subprocess.Popen[str], sign: str) -> str:
    """Output of the command up to the first line with ``sign``; a command that does not print it in time is ended."""
    assert process.stdout is not None
    seen, deadline = "", threading.Timer(120, process.terminate)
    deadline.daemon = True
    deadline.start()
    for line in process.stdout:
        seen += line
        if sign in line:
            deadline.cancel()
            return seen
    raise AssertionError(f"{sign!r} was never printed:\n{seen}")
