"""Facts that a preflight collects on every host and rank, and results of its checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import TypeAdapter

from flexrlhf.api import DirectoryFacts, Terms, table

Result = Literal["ok", "warning", "FAILS", "skipped"]
MOST_PARTS = 4
"""Hosts or ranks that a line shows."""
_WORST: tuple[Result, ...] = ("FAILS", "warning", "ok", "skipped")


@dataclass(frozen=True)
class Check:
    """One line of a preflight.

    name:    of the check
    result:  ``FAILS`` if a run would end early or give other results, ``warning`` if it may
    seen:    values that were measured
    advice:  for the user; empty if all is well
    """

    name: str
    result: Result
    seen: str
    advice: str = ""


def united(name: str, parts: Iterable[Check]) -> Check:
    """Return the checks of several hosts or runs as one line: the worst result, with its values and places."""
    found = list(parts)
    worst = min((part.result for part in found), key=_WORST.index)
    shown = [part for part in found if part.result == worst]
    return Check(name, worst, _joined(part.seen for part in shown), _joined(part.advice for part in shown))


def failed(checks: Iterable[Check]) -> list[str]:
    """Return the names of the checks that fail."""
    return [check.name for check in checks if check.result == "FAILS"]


def format_checks(checks: Sequence[Check]) -> str:
    """Return a table with a line for each check."""
    rows = [(each.name, each.result, " -> ".join(filter(None, (each.seen, each.advice)))) for each in checks]
    return "\n".join(table(rows, "<<<"))


def closing_line(checks: Sequence[Check]) -> str:
    """Return how many checks there were, and which of them fail or warn."""
    names = {result: [check.name for check in checks if check.result == result] for result in _WORST}
    if names["FAILS"]:
        return f"{len(names['FAILS'])} of {len(checks)} checks failed: {', '.join(names['FAILS'])}"
    warned = f", with warnings: {', '.join(names['warning'])}" if names["warning"] else ""
    return f"{len(checks) - len(names['skipped'])} checks passed{warned}"


def _joined(texts: Iterable[str]) -> str:
    """Return distinct texts with semicolons, at most the first few of many."""
    distinct = list(dict.fromkeys(filter(None, texts)))
    more = [f"{len(distinct) - MOST_PARTS} more"] if len(distinct) > MOST_PARTS else []
    return "; ".join([*distinct[:MOST_PARTS], *more])


UNLIMITED = 2**40
"""Open files of a process without a limit."""


@dataclass(frozen=True)
class HostFacts:
    """Facts of one machine.

    node, host:   its number and name
    ranks:        that it starts
    terms:        that must be the same on all machines
    libraries:    check of the libraries that its plans need
    input_problem:  why models or data cannot be read; empty if they can
    device:       of its ranks: cpu or cuda
    devices:      CUDA devices
    problem:      why its ranks cannot have the device of the cluster; empty if they can
    cores:        that its processes may use
    memory:       bytes of host memory that are free
    shared:       free bytes of /dev/shm; None if there is none
    open_files:   limit of a process
    disk:         check of the space for the files of the runs
    directories:  of the runs
    """

    node: int
    host: str
    ranks: tuple[int, ...]
    terms: Terms
    libraries: Check
    input_problem: str
    device: str
    devices: int
    problem: str
    cores: int
    memory: int
    shared: int | None
    open_files: int
    disk: Check
    directories: tuple[DirectoryFacts, ...] = ()

    @property
    def name(self) -> str:
        """Name of the machine for messages."""
        return f"node {self.node} (host {self.host})"

    def without_equals(self, first: HostFacts) -> HostFacts:
        """Return these facts without the files and settings that the ``first`` host has, too: they are long."""
        return replace(self, terms=self.terms.without_equals(first.terms))


@dataclass(frozen=True)
class RankFacts:
    """Facts of one rank.

    rank, node:   its number, and its machine's
    device:       name of its CUDA device; empty on CPUs
    gpu:          that device's own number, which no other device has; empty on CPUs
    total, free:  bytes of that device's memory
    tflops:       of a matrix product while all ranks of its machine compute one; None: not measured
    """

    rank: int
    node: int
    device: str = ""
    total: int = 0
    free: int = 0
    tflops: float | None = None
    gpu: str = ""


@dataclass(frozen=True)
class ClockFacts:
    """Clock of a node against node 0's, in seconds: difference, and how exactly it is measured."""

    node: int
    difference: float
    uncertainty: float


@dataclass(frozen=True)
class LinkFacts:
    """Bandwidth between two nodes, or of two ranks of one.

    ends:   the two nodes, the same twice for a link within one
    ranks:  pairs of ranks that sent at the same time
    gb_s:   of all pairs together, in the slower direction
    """

    ends: tuple[int, int]
    ranks: int
    gb_s: float


@dataclass(frozen=True)
class GroupFacts:
    """Process groups that were made.

    groups:      of the plans
    seconds:     it took to make them and to sum over each
    pairs:       of ranks that exchanged a message
    open_files:  most of a rank while they existed
    backend:     gloo or nccl
    """

    groups: int
    seconds: float
    pairs: int
    open_files: int
    backend: str


@dataclass(frozen=True)
class SharedFacts:
    """Directories of the runs on rank 0's machine, as the other ranks see them.

    problems:  rank → why it cannot use them
    apart:     ranks on machines with directories of their own, whose files are copied to rank 0's
    """

    problems: dict[int, str] = field(default_factory=dict)
    apart: tuple[int, ...] = ()


@dataclass(frozen=True)
class JobFacts:
    """Everything that a preflight has collected so far; None for parts that it has not come to.

    directories:  of the runs on rank 0's machine, as the ranks see them
    unreachable:  sentences about machines that do not reach each other
    """

    hosts: tuple[HostFacts, ...]
    ranks: tuple[RankFacts, ...] = ()
    clocks: tuple[ClockFacts, ...] | None = None
    directories: SharedFacts | None = None
    unreachable: tuple[str, ...] | None = None
    groups: GroupFacts | None = None
    links: tuple[LinkFacts, ...] | None = None


HOST_FACTS, RANK_FACTS, JOB_FACTS = TypeAdapter(HostFacts), TypeAdapter(RankFacts), TypeAdapter(JobFacts)
"""JSON of facts, between ranks and launchers."""
