"""Secret of a job that nobody has set, for machines that mount one directory of runs: node 0 writes it there, into a
file that only this user may read, until all machines agree."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from flexrlhf.config.job_secret import JobSecret
from flexrlhf.launch import shared_directories
from flexrlhf.launch.lifetime import changed_environment
from flexrlhf.launch.shared_directories import DirectoryFacts
from flexrlhf.plan.plan import Plan

NAME = "secret"


@contextmanager
def made_secret(plans: Sequence[Plan]) -> Iterator[str]:
    """Set a secret for the body, on node 0, and yield its file; an empty name if there is a secret already."""
    if JobSecret.here().value:
        yield ""
        return
    with DirectoryFacts.probed(plans[:1], makes_probes=True) as (facts,):
        if facts.problem:
            # the agreement reports it
            yield ""
            return
        file, secret = Path(facts.path) / facts.probe / NAME, token_hex()
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(secret)
        with changed_environment({JobSecret.VARIABLE: secret}):
            yield str(file)


@contextmanager
def found_secret(file: str) -> Iterator[None]:
    """Set the secret in ``file``, which node 0 names, for the body, if this machine has none and finds it there."""
    secret = _read(Path(file)) if file and not JobSecret.here().value else ""
    with changed_environment({JobSecret.VARIABLE: secret} if secret else {}):
        yield


def _read(file: Path) -> str:
    """Return the text of a file that other users cannot have written or read; empty if there is none."""
    limit = time.monotonic() + shared_directories.SEEN_SECONDS
    while not file.exists() and time.monotonic() < limit:
        time.sleep(0.1)
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as opened:
            mode = os.fstat(opened.fileno()).st_mode
            is_own = stat.S_ISREG(mode) and not stat.S_IMODE(mode) & 0o077 and file.name == NAME
            return opened.read() if is_own else ""
    except OSError:
        return ""
