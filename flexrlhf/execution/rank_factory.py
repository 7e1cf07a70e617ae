"""A process that has loaded what every rank needs, and forks ranks: N ranks cost one import and share its pages.

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
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.util import _exit_function  # type: ignore[attr-defined]
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

from flexrlhf.errors import RunStopped
from flexrlhf.execution.lifetime import changed_environment, ending, quiet_torch
from flexrlhf.placement.hosts import under_torchrun
from flexrlhf.rewards.processes import is_killed_with_parent
from flexrlhf.text import counted

LOADED = ("flexrlhf.execution.worker",)
"""Modules that every rank needs."""
RESPONSE_SECONDS = 300.0
"""Longest wait for the factory to have loaded its modules and forked a rank."""
PR_SET_NAME, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 15, 36, 37
"""Constants of <sys/prctl.h>: the name of a process in lists; whether it adopts orphans among its descendants."""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that schedulers send to every process; the factory ends with its launcher."""
_LOADING = {"OPENBLAS_NUM_THREADS": "1"}
"""Variables while modules are loaded: numpy would start threads."""
_OF_RANKS = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "FLEXRLHF_"),
    # set by torch and pytest themselves
    *("TORCHINDUCTOR_CACHE_DIR", "PYTEST_CURRENT_TEST"),
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
            is_copy = self._is_copied and not problem_after(self._modules)
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
            [sys.executable, "-m", *command],
            env=environment,
            cwd=directory,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def close(self) -> None:
        """End the process; what it has forked goes on."""
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
            _send(self._channel, request, streams)
            message, _ = _receive(self._channel)
            return message["pid"], message["problem"], message["error"]
        except TimeoutError:
            reason = f"has not responded for {RESPONSE_SECONDS:g} s"
        except (EOFError, ConnectionError):
            reason = f"has ended (exit code {self._process.wait(RESPONSE_SECONDS)})"
        self.close()
        raise RunStopped(f"the process that loads the libraries of this machine's ranks {reason}")


@contextmanager
def starting_factory(is_needed: bool = True, is_copied: bool = False) -> Iterator[RankFactory | None]:
    """Start a factory; none under torchrun, which starts ranks. ``is_copied``: as of ``RankFactory``."""
    if not is_needed or under_torchrun():
        yield None
        return
    quiet_torch()
    with RankFactory(is_copied) as factory:
        yield factory


def _spawn(channel: socket.socket, environment: Mapping[str, str], modules: Sequence[str]) -> Process:
    """Start a factory that loads its modules, and serves ``channel``."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(channel.fileno()), str(os.getpid()), *modules],
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
            serve(channel, launcher, ())
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


def _send(channel: socket.socket, message: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Send a message, and descriptors with it."""
    data = json.dumps(message).encode()
    socket.send_fds(channel, [len(data).to_bytes(8, "big")], streams)
    channel.sendall(data)


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a message and its descriptors. Raises EOFError when the other side has closed."""
    head, streams, _, _ = socket.recv_fds(channel, 8, 3)
    size, data = int.from_bytes(head, "big"), b""
    while len(data) < size:
        data += channel.recv(size - len(data)) or _raise_eof()
    return json.loads(data) if head else _raise_eof(), streams


def _raise_eof() -> NoReturn:
    raise EOFError


def serve(channel: socket.socket, launcher: int, modules: Sequence[str]) -> None:
    """Load modules and fork on request, until the launcher, a process, closes the channel. Its forks end in here."""
    is_killed_with_parent()
    # it may have died before
    if os.getppid() != launcher:
        return
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"rank-factory")
    problem = problem_after(modules)
    # no collection writes to the pages of what is there, which so remain shared
    gc.freeze()
    while True:
        try:
            request, streams = _receive(channel)
        except (EOFError, ConnectionError):
            return
        pid = error = 0
        if not problem:
            pid, error = _fork(channel, request, streams)
        for stream in streams:
            os.close(stream)
        _send(channel, {"pid": pid, "problem": problem, "error": error}, ())


def problem_after(modules: Sequence[str]) -> str:
    """Load modules; return why a fork of this process could not work then, empty where it can."""
    was_enabled = gc.isenabled()
    gc.disable()
    with changed_environment(_LOADING):
        for module in modules:
            import_module(module)
        import torch
    if was_enabled:
        gc.enable()
    threads = len(os.listdir("/proc/self/task")) - 1
    if threads:
        return f"they start {counted(threads, 'thread')}"
    # torch knows in a child alone whether its parent has looked for a GPU
    if (pid := os.fork()) == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return "they initialise CUDA" if os.waitpid(pid, 0)[1] else ""


def _fork(channel: socket.socket, request: Mapping[str, Any], streams: Sequence[int]) -> tuple[int, int]:
    """Return the pid of a grandchild that runs the request, or the number of an error."""
    read_end, write_end = os.pipe()
    try:
        if (middle := os.fork()) == 0:
            _fork_again(write_end)
            for descriptor in (read_end, write_end, channel.detach()):
                os.close(descriptor)
            _run(request, streams)
        os.waitpid(middle, 0)
        pid = int(os.read(read_end, 32))
        return max(pid, 0), max(-pid, 0)
    except OSError as error:
        return 0, error.errno or 1
    finally:
        os.close(read_end)
        os.close(write_end)


def _fork_again(write_end: int) -> None:
    """Return in a child of this process, which ends once it has written the child's pid or the number of an error."""
    middle = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or 1)
    if pid:
        os.write(write_end, str(pid).encode())
        os._exit(0)
    while os.getppid() == middle:
        time.sleep(0.001)


def _run(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Be the requested process, ``python -m COMMAND``, and end with its exit code."""
    with ending():
        os.setsid()
        # those that are registered are of other processes; multiprocessing does the same
        atexit._clear()
        atexit.register(_exit_function)
        ctypes.CDLL(None).prctl(PR_SET_NAME, request["name"].encode())
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        if not sys.flags.safe_path:
            sys.path[0] = request["directory"]
        sys.argv = list(request["fork"])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    with ending(), socket.socket(fileno=int(sys.argv[1])) as launchers:
        serve(launchers, int(sys.argv[2]), sys.argv[3:])
