"""The process of a factory: loads modules once and forks processes on request of its launcher."""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.util import _exit_function  # type: ignore[attr-defined]
from typing import Any, NoReturn

from flexrlhf.launch.lifetime import changed_environment, ending
from flexrlhf.signals import StopSignal
from flexrlhf.text import counted
from flexrlhf.user_code.processes import is_killed_with_parent

PR_SET_NAME = 15
"""Constant of <sys/prctl.h>: the name of a process in lists."""
_LOADING = {"OPENBLAS_NUM_THREADS": "1"}
"""Variables while modules are loaded: numpy would start threads."""


def serve(channel: socket.socket, launcher: int, modules: Sequence[str]) -> None:
    """Load modules and fork on request, until the launcher, a process, closes the channel. Its forks end in here."""
    is_killed_with_parent()
    # it may have died before
    if os.getppid() != launcher:
        return
    # schedulers send them to every process; the factory ends with its launcher
    for number in StopSignal.ENDING:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"rank-factory")
    problem = problem_after(modules)
    # no collection writes to the pages of these objects, which so remain shared
    gc.freeze()
    while True:
        try:
            request, streams = receive(channel)
        except (EOFError, ConnectionError):
            return
        pid = error = 0
        if not problem:
            pid, error = _fork(channel, request, streams)
        for stream in streams:
            os.close(stream)
        send(channel, {"pid": pid, "problem": problem, "error": error}, ())


def problem_after(modules: Sequence[str]) -> str:
    """Load modules; return why a fork of this process could not work then, empty if it can."""
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
        for number in StopSignal.ENDING:
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        sys.argv = list(request["fork"])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def send(channel: socket.socket, message: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Send a message, and descriptors with it."""
    data = json.dumps(message).encode()
    socket.send_fds(channel, [len(data).to_bytes(8, "big")], streams)
    channel.sendall(data)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a message and its descriptors. Raises EOFError when the other side has closed."""
    head, streams, _, _ = socket.recv_fds(channel, 8, 3)
    size, data = int.from_bytes(head, "big"), b""
    while len(data) < size:
        data += channel.recv(size - len(data)) or _raise_eof()
    return json.loads(data) if head else _raise_eof(), streams


def _raise_eof() -> NoReturn:
    raise EOFError


if __name__ == "__main__":
    with ending(), socket.socket(fileno=int(sys.argv[1])) as launchers:
        serve(launchers, int(sys.argv[2]), sys.argv[3:])
