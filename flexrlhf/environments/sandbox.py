"""A tool that runs Python code which a model has written: ``tools: [flexrlhf.environments.sandbox:python]``.

It keeps code from harm by accident, not from an attack. The code runs in a process of its own with limits of time,
memory, file size and open files, an empty environment, and a temporary directory that is removed. Where the kernel
allows namespaces of users, it has no network, can end no other process, and all that it has started ends with it.

**It reads every file that the run's user may read, and writes wherever that user may write.** Code that is to be kept
from files needs a container: for the run as a whole, or an environment of a package that has containers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

SECONDS = 5.0
"""Limit of a run."""
MEMORY_MB = 512
FILE_MB = 64
OPEN_FILES = 64
MAX_OUTPUT = 10_000
"""Characters of output that are returned."""
RUN = """
import ast, ctypes, os, resource, sys
seconds, memory, size, files = (int(value) for value in sys.argv[1:])
for kind, value in (("CPU", seconds), ("DATA", memory << 20), ("FSIZE", size << 20), ("NOFILE", files), ("CORE", 0)):
    resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (value, value))
# new namespaces of users, network, processes and interprocess communication
if ctypes.CDLL(None).unshare(0x10000000 | 0x40000000 | 0x20000000 | 0x08000000) == 0:
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
source = sys.stdin.read()
sys.argv[1:] = []
body = ast.parse(source, "code").body
last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
names = {"__name__": "__main__"}
exec(compile(ast.Module(body, []), "code", "exec"), names)
if last is not None:
    value = eval(compile(ast.Expression(last.value), "code", "eval"), names)
    if value is not None:
        print(repr(value))
"""
"""Program that sets limits, then runs the code of its standard input; the value of a last expression is printed."""


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
            [sys.executable, "-I", "-X", "utf8", "-c", RUN, *limits],
            stdin=source,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            status = process.wait(SECONDS)
            # 1 is that of an error, which is in the output
            ending = "" if status in (0, 1) else f"ended with code {status}"
        except subprocess.TimeoutExpired:
            ending = f"ended after {SECONDS:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read(4 * MAX_OUTPUT).decode(errors="replace")
    return "\n".join(filter(None, [_cut(text), ending]))


def _cut(text: str) -> str:
    """Return output without the inner part of a traceback, and not too long."""
    head, traceback, tail = text.rpartition("Traceback (most recent call last):\n")
    if traceback:
        text = head + tail.rstrip().rpartition("\n")[2]
    return text.rstrip() if len(text) <= MAX_OUTPUT else f"{text[:MAX_OUTPUT]}\n(cut)"
