"""A process that has loaded the libraries of a rank, and forks ranks: N ranks cost one import and share its pages.

    launcher ── starts ── factory (torch, transformers, ours; one thread, no CUDA) ── forks ── ranks

The command is its own launcher: it loads the modules, which its checks need, too, and the factory is a copy of it.
Where a process has threads or modules of a user's (a notebook, a script), the factory is a new process that loads them.

A rank becomes a child of the launcher, as if that had started it: an intermediate process ends at once, and the kernel
gives its child to the nearest ancestor that adopts orphans, which the launcher is for that moment. So the launcher
waits for ranks, signals them and reads their exit codes by itself, and they need the factory no more. Python's
forkserver has neither, and loads the main script again in every child (docs/decisions.md). Loads no torch.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from flexrlhf.config.code_loading import python_command
from flexrlhf.errors import RunStopped
from flexrlhf.launch import fork_server
from flexrlhf.launch.lifetime import ending, quiet_torch
from flexrlhf.placement.hosts import Hosts

LOADED = ("flexrlhf.launch.worker",)
"""Modules that every rank needs."""
RESPONSE_SECONDS = 300.0
"""Longest wait for the factory to have loaded its modules and forked a rank."""
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
"""Constants of <sys/prctl.h>: whether a process adopts orphans among its descendants."""
_OF_RANKS = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "FLEXRLHF_"),
    # set by torch and pytest themselves
    *("TORCHINDUCTOR_CACHE_DIR", "PYTEST_CURRENT_TEST"),
    # its launcher alone loads it, and no factory
    "RAY_",
)
"""Beginnings of variables that no library reads while it is loaded."""


class Process(Protocol):
    """A child of this process; subprocess.Popen is one, too."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def kill(self) -> None: ...


class ForkedProcess:
    """A forked process, and a child of this one.

    pid:         of the process, which leads a session of its own.
    returncode:  exit code, negative for a signal; None until ``poll`` or ``wait`` has seen the end.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class RankFactory:
    """The factory of this machine, as its launcher uses it. Where it cannot fork, ranks load libraries by themselves.

    It can on Linux, while the libraries that are loaded have started no thread and not looked for a GPU.
    """

    def __init__(self, is_copied: bool = False, modules: Sequence[str] = LOADED) -> None:
        """Start nothing yet.

        is_copied:  load the modules in this process, and copy it, if that can be forked.
        modules:    that it loads.
        """
        self._is_copied, self._modules = is_copied, tuple(modules)
        self._process: Process | None = None
        self._channel: socket.socket | None = None
        self._variables: dict[str, str] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, environment: Mapping[str, str] = os.environ) -> None:
        """Start the process, which loads its modules in the background, unless it runs already.

        Libraries read the environment while they are loaded, so for another one the process starts anew.
        """
        variables = {name: value for name, value in environment.items() if not name.startswith(_OF_RANKS)}
        if self._process is not None and self._process.poll() is None and self._variables == variables:
            return
        self.close()
        if sys.platform != "linux":
            return
        self._channel, other = socket.socketpair()
        with other:
            is_copy = self._is_copied and not fork_server.problem_after(self._modules)
            self._process = _copy(other, self._channel) if is_copy else _spawn(other, variables, self._modules)
        self._variables, self._is_copied = variables, False

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        name: str,
        directory: Path = Path(),
        streams: Sequence[int] = (0, 1, 2),
    ) -> Process:
        """Start ``python -m COMMAND`` in a session of its own, in a fork of the factory.

        environment:  its variables, all of them.
        name:         in lists of processes, at most 15 characters.
        directory:    that it works in.
        streams:      descriptors of its standard streams.

        Raises RunStopped when the factory ends or does not respond, OSError when it cannot fork.
        """
        self.start(environment)
        if self._channel is not None:
            request = {"fork": list(command), "environment": dict(environment), "name": name}
            request["directory"] = str(directory.absolute())
            with _adopting_orphans():
                pid, problem, error = self._response(request, streams)
            if error:
                raise OSError(error, os.strerror(error))
            if not problem:
                return ForkedProcess(pid)
            print(f"flexrlhf: {name} loads its libraries by itself: {problem}", file=sys.stderr)
        stdin, stdout, stderr = streams
        return subprocess.Popen(
            python_command(*command),
            env=environment,
            cwd=directory,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def close(self) -> None:
        """End the process; its forks go on."""
        if self._process is None or self._channel is None:
            return
        self._channel.close()
        # it has no state, and while it loads modules it does not notice
        self._process.kill()
        self._process.wait(RESPONSE_SECONDS)
        self._process = self._channel = None

    def _response(self, request: Mapping[str, Any], streams: Sequence[int]) -> tuple[int, str, int]:
        """Return pid, problem and error number of a fork."""
        assert self._channel is not None and self._process is not None, "a factory that has started"
        self._channel.settimeout(RESPONSE_SECONDS)
        try:
            fork_server.send(self._channel, request, streams)
            message, _ = fork_server.receive(self._channel)
            return message["pid"], message["problem"], message["error"]
        except TimeoutError:
            reason = f"has not responded for {RESPONSE_SECONDS:g} s"
        except (EOFError, ConnectionError):
            reason = f"has ended (exit code {self._process.wait(RESPONSE_SECONDS)})"
        self.close()
        raise RunStopped(f"the process that loads the libraries of this machine's ranks {reason}")

    @classmethod
    @contextmanager
    def starting(cls, is_needed: bool = True, is_copied: bool = False) -> Iterator[RankFactory | None]:
        """Start a factory; none under torchrun, which starts ranks. ``is_copied``: load the modules in this
        process, and copy it, if that can be forked."""
        if not is_needed or Hosts.under_torchrun():
            yield None
            return
        quiet_torch()
        with cls(is_copied) as factory:
            yield factory


@cache
def lasting_factory() -> RankFactory:
    """Return the factory that all engines of this process use until it ends, so that libraries are loaded once."""
    factory = RankFactory()
    atexit.register(factory.close)
    return factory


def _spawn(channel: socket.socket, environment: Mapping[str, str], modules: Sequence[str]) -> Process:
    """Start a factory that loads its modules, and serves ``channel``."""
    return subprocess.Popen(
        python_command(fork_server.__name__, str(channel.fileno()), str(os.getpid()), *modules),
        env=environment,
        pass_fds=[channel.fileno()],
        start_new_session=True,
    )


def _copy(channel: socket.socket, other: socket.socket) -> Process:
    """Start a factory that is a copy of this process, and serves ``channel``. ``other``: its other end."""
    sys.stdout.flush()
    sys.stderr.flush()
    launcher = os.getpid()
    if (pid := os.fork()) == 0:
        # whatever happens, the caller's code does not go on here
        with ending():
            atexit._clear()
            other.close()
            os.setsid()
            fork_server.serve(channel, launcher, ())
    return ForkedProcess(pid)


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Let this process become the parent of descendants whose own parent ends."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(before.value))
