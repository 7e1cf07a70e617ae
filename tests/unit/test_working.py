"""What a command shows on a terminal while it works for longer than a second."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

SCRIPT = """
import sys, time
from flexrlhf.cli.working import working
with working("searching"):
    time.sleep(float(sys.argv[1]))
print("done")
"""


@pytest.mark.parametrize(("seconds", "is_shown"), [(0.1, False), (2.0, True)])
def test_a_terminal_shows_long_work(seconds: float, is_shown: bool) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-c", SCRIPT, str(seconds)]
    with subprocess.Popen(command, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(slave)
        output = b""
        while data := _read(master):
            output += data
        os.close(master)
    assert process.returncode == 0 and output.endswith(b"done\r\n")
    assert (b"searching" in output) == is_shown, output


def test_a_pipe_shows_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, "1.5"], capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"done\n", b"")


def _read(end: int) -> bytes:
    try:
        return os.read(end, 4096)
    except OSError:
        # the other side has closed it
        return b""
