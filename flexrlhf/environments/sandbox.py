"""A tool that runs Python code which a model has written: ``tools: [flexrlhf.environments.sandbox:python]``.

It keeps code from harm by accident, not from an attack. The code runs in a process of its own with limits of time,
memory, file size and open files, an empty environment, and a temporary directory that is removed. All that it has
started ends with it. The memory of its processes together, also what they share, is measured several times a second.

Where the kernel allows namespaces of users, it has no network, can end no other process, and has its own /dev/shm, of
limited size, and System V memory, semaphores and queues; else files in /dev/shm stay.

**It reads every file that the run's user may read, and writes wherever that user may write.** Code that is to be kept
from files needs a container: for the run as a whole, or an environment of a package that has containers.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

from flexrlhf.user_code.processes import descendants, end_processes

SECONDS = 5.0
"""Limit of a run."""
MEMORY_MB = 512
FILE_MB = 64
OPEN_FILES = 64
MAX_OUTPUT = 10_000
"""Characters of output that are returned."""
TOO_MUCH = 254
"""Code with which a run ends whose processes have too much memory together."""
RUN = """
import ast, ctypes, glob, os, resource, signal, sys, time
seconds, memory, size, files = (int(value) for value in sys.argv[1:])
library = ctypes.CDLL(None)
PDEATHSIG, DUMPABLE, SUBREAPER = 1, 4, 36
def option(number, value):
    library.prctl(number, *(ctypes.c_ulong(each) for each in (value, 0, 0, 0)))
def write(path, text):
    with open(path, "w") as file:
        file.write(text)
def below(process):
    for path in glob.glob(f"/proc/{process}/task/*/children"):
        try:
            with open(path) as file:
                children = file.read().split()
        except OSError:
            continue
        for child in children:
            yield int(child)
            yield from below(child)
def shared_out(process):
    try:
        with open(f"/proc/{process}/smaps_rollup") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0
def end_all():
    while found := list(below(os.getpid())):
        for process in found:
            try:
                os.kill(process, signal.SIGKILL)
            except OSError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
def watch(child):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    end_all()
                    os._exit(os.waitstatus_to_exitcode(ended[1]) & 255)
        except ChildProcessError:
            os._exit(1)
        if sum(map(shared_out, below(os.getpid()))) > memory << 10:
            end_all()
            os._exit(254)
        signal.sigtimedwait([signal.SIGCHLD], 0.05)
option(PDEATHSIG, signal.SIGKILL)
option(SUBREAPER, 1)
user, group = os.getuid(), os.getgid()
# new namespaces of users, mounts, network, processes and interprocess communication
alone = library.unshare(0x10000000 | 0x00020000 | 0x40000000 | 0x20000000 | 0x08000000) == 0
if alone:
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{user} {user} 1")
    write("/proc/self/gid_map", f"{group} {group} 1")
    library.mount(None, b"/", None, ctypes.c_ulong(0x4000 | 0x40000), None)  # private, recursively
    library.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(2 | 4), f"size={size}m".encode())
# of this process's own memory, which its parent namespace may read
option(DUMPABLE, 1)
child = os.fork()
if child:
    watch(child)
option(PDEATHSIG, signal.SIGKILL)
if alone:
    # the first process of a namespace: when it ends the kernel ends all others, whatever sessions they lead
    code = os.fork()
    if code:
        while True:
            ended, status = os.wait()
            if ended == code:
                os._exit(os.waitstatus_to_exitcode(status) & 255)
    option(PDEATHSIG, signal.SIGKILL)
for kind, value in (("CPU", seconds), ("DATA", memory << 20), ("FSIZE", size << 20), ("NOFILE", files), ("CORE", 0)):
    resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (value, value))
source = sys.stdin.read()
sys.argv[1:] = []
os.environ.clear()
body = ast.parse(source, "code").body
last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
names = {"__name__": "__main__"}
exec(compile(ast.Module(body, []), "code", "exec"), names)
if last is not None:
    value = eval(compile(ast.Expression(last.value), "code", "eval"), names)
    if value is not None:
        print(repr(value))
"""
"""Program that sets limits, then runs the code of its standard input; the value of a last expression is printed.

It watches the memory of all processes that it starts, and ends them.
"""
ADDRESS = re.compile(r"(<\w(?:[^<>\n]|<\w+>){0,300}? at) 0x[0-9a-fA-F]+")


def python(code: str) -> str:
    """Run Python code and return what it prints. The value of a last expression is printed, too.

    Args:
        code: The code. It has a few seconds, no network and no state of earlier runs.

    Returns:
        The output, with the last line of an error if there is one.
    """
    limits = [str(int(value)) for value in (SECONDS + 1, MEMORY_MB, FILE_MB, OPEN_FILES)]
    with (
        tempfile.TemporaryDirectory(prefix="flexrlhf-code-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as source,
    ):
        source.write(code.encode(errors="replace"))
        source.seek(0)
        process = subprocess.Popen(
            # as isolated as by -I, which ignores the seed of hashes: output is to be the same in a replay
            [sys.executable, "-P", "-s", "-X", "utf8", "-c", RUN, *limits],
            stdin=source,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        try:
            status = process.wait(SECONDS)
            # 1 is that of an error, which is in the output
            ending = "" if status in (0, 1) else f"ended with code {status}"
            if status == TOO_MUCH:
                ending = f"ended, as its processes have more than {MEMORY_MB} MB of memory together"
        except subprocess.TimeoutExpired:
            ending = f"ended after {SECONDS:g} s"
        finally:
            _end(process)
        output.seek(0)
        text = output.read(4 * MAX_OUTPUT).decode(errors="replace")
    return "\n".join(filter(None, [_cut(text), ending]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process that watches, and all that it has started: of a namespace the kernel does."""
    left = descendants(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end_processes(left)


def _cut(text: str) -> str:
    """Return output without the inner part of a traceback, and not too long."""
    head, traceback, tail = text.rpartition("Traceback (most recent call last):\n")
    if traceback:
        text = head + tail.rstrip().rpartition("\n")[2]
    # an object's address differs in a replay
    text = ADDRESS.sub(r"\1 0x...", text)
    return text.rstrip() if len(text) <= MAX_OUTPUT else f"{text[:MAX_OUTPUT]}\n(cut)"
