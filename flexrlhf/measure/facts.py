"""Facts that a preflight collects on every host and rank, as JSON between ranks and launchers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from flexrlhf.launch.shared_directories import DirectoryFacts
from flexrlhf.launch.terms import Terms
from flexrlhf.measure.checks import Check

UNLIMITED = 2**40
"""Open files of a process without a limit."""


@dataclass(frozen=True)
class HostFacts:
    """Facts of one machine.

    node, host:   its number and name
    ranks:        that it starts
    terms:        what must be the same on all machines
    libraries:    check of the libraries that its plans need
    input_problem: why models or data cannot be read; empty where they can
    device:       of its ranks: cpu or cuda
    devices:      CUDA devices
    problem:      why its ranks cannot have the device of the cluster; empty where they can
    cores:        that its processes may use
    memory:       bytes of host memory that are free
    shared:       free bytes of /dev/shm; None where there is none
    open_files:   limit of a process
    disk:         check of the space for what the runs write
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
        """Return these facts without the files and settings that are those of the ``first`` host: they are long."""
        return replace(self, terms=self.terms.without_equals(first.terms))


@dataclass(frozen=True)
class RankFacts:
    """Facts of one rank.

    rank, node:   its number, and that of its machine
    device:       name of its CUDA device; empty on CPUs
    total, free:  bytes of that device's memory
    tflops:       of a matrix product while all ranks of its machine compute one; None: not measured
    """

    rank: int
    node: int
    device: str = ""
    total: int = 0
    free: int = 0
    tflops: float | None = None


@dataclass(frozen=True)
class ClockFacts:
    """Clock of a node against that of node 0, in seconds: difference, and how exactly it is measured."""

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
    """Everything that a preflight has collected so far; None for what it has not come to.

    directories:  of the runs, as the ranks see those of rank 0
    unreachable:  sentences about machines that do not reach each other
    """

    hosts: tuple[HostFacts, ...]
    ranks: tuple[RankFacts, ...] = ()
    clocks: tuple[ClockFacts, ...] | None = None
    directories: SharedFacts | None = None
    unreachable: tuple[str, ...] | None = None
    groups: GroupFacts | None = None
    links: tuple[LinkFacts, ...] | None = None


@dataclass(frozen=True)
class SurveyRequest:
    """Request of a launcher to its ranks.

    host:     facts of the machine
    nodes:    machines of the job
    seconds:  longest wait for another rank
    """

    host: HostFacts
    nodes: int
    seconds: float


_HOST, _RANK = TypeAdapter(HostFacts), TypeAdapter(RankFacts)
_JOB, _REQUEST = TypeAdapter(JobFacts), TypeAdapter(SurveyRequest)


def dump_host(facts: HostFacts) -> str:
    """Return the facts of a host as JSON."""
    return _HOST.dump_json(facts).decode()


def load_host(text: str | bytes) -> HostFacts:
    """Return the facts of a host from JSON."""
    return _HOST.validate_json(text)


def dump_rank(facts: RankFacts) -> str:
    """Return the facts of a rank as JSON."""
    return _RANK.dump_json(facts).decode()


def load_rank(text: str | bytes) -> RankFacts:
    """Return the facts of a rank from JSON."""
    return _RANK.validate_json(text)


def dump_job(facts: JobFacts) -> str:
    """Return the facts of a job as JSON."""
    return _JOB.dump_json(facts).decode()


def load_job(text: str | bytes) -> JobFacts:
    """Return the facts of a job from JSON."""
    return _JOB.validate_json(text)


def write_request(path: Path, request: SurveyRequest) -> None:
    """Write a request for the ranks of this machine."""
    path.write_bytes(_REQUEST.dump_json(request))


def read_request(path: Path) -> SurveyRequest:
    """Return the request of this machine's launcher."""
    return _REQUEST.validate_json(path.read_bytes())
