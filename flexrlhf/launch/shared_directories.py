"""Directories of runs that machines share: node 0 makes a probe directory in each, the others read and write there, and
none is left."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from flexrlhf.plan.plan import Plan

SHARED, OWN = "shared", "own"
"""Words for the directories of the runs on a machine: rank 0's, or others of its own."""
PROBE_BYTES = 2**20
"""Bytes that node 0 writes: a full disk takes empty files."""
SEEN_SECONDS = 5.0
"""Time in which a file must be seen on another machine; shared file systems cache directories."""
_PROBE = ".preflight-"
"""Beginning of the name of a probe directory."""


@dataclass(frozen=True)
class DirectoryFacts:
    """A directory of runs, on one host.

    path:     as the YAML has it
    place:    absolute
    problem:  why nothing can be written there; empty if it can
    probe:    name of the probe directory that node 0 made in it; empty elsewhere
    """

    path: str
    place: str
    problem: str = ""
    probe: str = ""

    def sees_rank(self, rank: int) -> bool:
        """Return whether the file of a rank comes in the probe within SEEN_SECONDS."""
        limit = time.monotonic() + SEEN_SECONDS
        while not self._file_of(rank).exists():
            if time.monotonic() > limit:
                return False
            time.sleep(0.1)
        return True

    def _write(self, rank: int) -> str:
        """Write the file of ``rank`` into the probe; return why it cannot be written, empty if it is."""
        try:
            self._file_of(rank).write_text("here")
        except OSError as error:
            return f"cannot write in {Path(self.path).absolute()} ({error.strerror})"
        return ""

    def _file_of(self, rank: int) -> Path:
        return Path(self.path) / self.probe / f"rank-{rank}"

    @staticmethod
    def look(directories: Sequence[DirectoryFacts], rank: int) -> Sharing:
        """Look for the file of node 0 in the probe of each of ``directories``, and write one of ``rank`` there."""
        seen = [each.path for each in directories if each.sees_rank(0)]
        missing = [each.path for each in directories if each.path not in seen]
        if seen and missing:
            return Sharing(False, f"shares {seen[0]} with node 0 and not {missing[0]}; set one runs: for all of them")
        if missing:
            return Sharing(False)
        written = (each._write(rank) for each in directories if rank != 0)
        return Sharing(True, "; ".join(filter(None, written)))

    @staticmethod
    @contextmanager
    def probed(plans: Sequence[Plan], makes_probes: bool) -> Iterator[list[DirectoryFacts]]:
        """Yield facts of the distinct ``runs`` of ``plans``, with a probe directory in each if ``makes_probes``.

        At the end the probes and the directories made for them are removed.
        """
        paths = list(dict.fromkeys(plan.spec.runs for plan in plans))
        made: list[Path] = []
        try:
            yield [_probed(path, made) if makes_probes else _facts(path) for path in paths]
        finally:
            for directory in reversed(made):
                if directory.name.startswith(_PROBE):
                    shutil.rmtree(directory, ignore_errors=True)
                else:
                    # another process may have begun to use it
                    with suppress(OSError):
                        directory.rmdir()


@dataclass(frozen=True)
class Sharing:
    """Directories of runs on node 0, as another machine sees them.

    shares:   whether it has the same ones; else it has others of these names.
    problem:  why it cannot use them, in words; empty if it can.
    """

    shares: bool
    problem: str = ""


def _facts(path: str, problem: str = "", probe: str = "") -> DirectoryFacts:
    return DirectoryFacts(path, str(Path(path).absolute()), problem, probe)


def _probed(path: str, made: list[Path]) -> DirectoryFacts:
    """Write a file durably in a new probe directory. ``made``: gets every directory that is made."""
    probe = f"{_PROBE}{token_hex(6)}"
    target = Path(path).absolute() / probe
    try:
        for directory in reversed([each for each in (target, *target.parents) if not each.exists()]):
            directory.mkdir()
            made.append(directory)
        with (target / "rank-0").open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return _facts(path, error.strerror or str(error))
    return _facts(path, probe=probe)
