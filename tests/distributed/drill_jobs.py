"""Jobs of the drill: their configs, their launchers on one host or two, their output and their remains."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from cases import Assets, Case
from commands import PROGRAM, is_alive
from drilled import VARIABLE
from processes import descendants
from toys import SHAPE, WORDS

from benchmarks.two_hosts import Link, linked_hosts

Raw = dict[str, Any]
STEPS, KEPT = 6, 3
PORT = 29500
DRILLED = ("-m", "drilled")
FOLDER = str(Path(__file__).parent)


@dataclass(frozen=True)
class Shape:
    """A toy run.

    name:     of it.
    case:     its setting and placement; None: responses that a service scores.
    ranks:    of it.
    hosts:    that they are on.
    seconds:  its ``timeout_seconds``.
    """

    name: str
    case: Case | None
    ranks: int
    hosts: int
    seconds: float

    def raw(self, assets: Assets, service: str) -> Raw:
        """The config, but for its name and directory. ``service``: address of the one that scores."""
        raw = _scored(assets, service) if self.case is None else yaml.safe_load(assets.spec(self.case).dump())
        return raw | {
            "steps": STEPS,
            "timeout_seconds": self.seconds,
            "checkpoint": {"every": 1, "keep_last": KEPT},
            # an instruction lasts long enough to be hit
            "debug": {"run_delay_seconds": 0.02},
        }

    @property
    def per_host(self) -> int:
        """Ranks of a host."""
        return self.ranks // self.hosts


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("one host", Case("two", "co-located", 2), 2, 1, 12),
        Shape("shadows", Case("corrected", "lag-every-3", 2), 2, 1, 12),
        Shape("two hosts", Case("corrected", "lag", 2), 2, 2, 15),
        Shape("four ranks", Case("two", "halves", 4), 4, 2, 15),
        Shape("service", None, 2, 1, 16),
    )
}


def _scored(assets: Assets, service: str) -> Raw:
    algorithm = {"name": "grpo", "kl": None, "prompts_per_step": 4, "samples_per_prompt": 4, "invalid_scores": "stop"}
    return {
        "algorithm": algorithm,
        "models": {"actor": {"init": {**SHAPE, "vocab_size": 64}, "optimizer": {"learning_rate": 1e-3}}},
        "reward": {"url": service, "retries": 20, "timeout_seconds": 2},
        "data": {
            **{"path": str(assets.directory / "ppo.jsonl"), "tokenizer": str(assets.directory / "tokenizer")},
            **{"max_prompt_tokens": 8, "max_response_tokens": 4},
        },
        "cluster": {"devices": 2, "device": "cpu"},
        "seed": 7,
    }


class Service:
    """Reward service on a port of its own, which may go down and come back; it counts a word's first letters."""

    def __init__(self) -> None:
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self.start()
        self.url = f"http://127.0.0.1:{self._port}/score"

    def start(self) -> None:
        if self._server is None:
            self._server = ThreadingHTTPServer(("127.0.0.1", self._port), _Scores)
            self._server.daemon_threads = True
            self._port = self._server.server_address[1]
            threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Scores(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
        scores = [sum(text.count(word[0]) for word in WORDS[:6]) / 4 for text in queries]
        body = json.dumps({"rewards": scores}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Not in the drill's output."""


@dataclass
class Job:
    """Launchers of a run, one a host, which run.

    launchers:  of the hosts, in order.
    hosts:      their names.
    link:       between two hosts; None for one.
    outputs:    of each launcher, once it has ended.
    """

    launchers: list[subprocess.Popen[str]]
    hosts: tuple[str, ...]
    link: Link | None
    outputs: list[str] = field(default_factory=list)
    _readers: list[threading.Thread] = field(default_factory=list)
    _seen: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outputs = ["" for _ in self.launchers]
        self._readers = [threading.Thread(target=self._read, args=(n,)) for n in range(len(self.launchers))]
        for reader in self._readers:
            reader.start()

    def _read(self, number: int) -> None:
        self.outputs[number], _ = self.launchers[number].communicate()

    @property
    def has_ended(self) -> bool:
        """Whether all launchers have."""
        return all(launcher.poll() is not None for launcher in self.launchers)

    def note_processes(self) -> None:
        """Note the processes of the job, all of which have to end."""
        for launcher in self.launchers:
            self._seen.update({pid: start for pid in descendants(launcher.pid) if (start := started(pid))})

    def wait(self, seconds: float) -> bool:
        """Wait for the end. Returns whether it came in time; every process has ended then, or is killed."""
        limit = time.monotonic() + seconds
        while not self.has_ended and time.monotonic() < limit:
            time.sleep(0.05)
        is_in_time = self.has_ended
        if not is_in_time:
            self.note_processes()
            self.kill()
        for reader in self._readers:
            reader.join(30)
        return is_in_time

    def kill(self) -> list[int]:
        """Kill every process that is left. Returns them."""
        alive = self._alive()
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return alive

    def _alive(self) -> list[int]:
        """Processes of the job that run; another process may have the number of one that has ended."""
        return [pid for pid, start in self._seen.items() if is_alive(pid) and started(pid) == start]

    def left(self) -> list[int]:
        """Processes that have not ended ten seconds after the launchers."""
        limit = time.monotonic() + 10
        while self._alive() and time.monotonic() < limit:
            time.sleep(0.05)
        return self.kill()

    def sentences(self) -> list[str]:
        """Last line of each launcher."""
        return [output.strip().splitlines()[-1] if output.strip() else "" for output in self.outputs]

    @property
    def codes(self) -> list[int | None]:
        return [launcher.returncode for launcher in self.launchers]


@contextmanager
def running(
    shape: Shape, arguments: list[str], directory: Path, program: Sequence[str] = PROGRAM, fault: Path | None = None
) -> Iterator[Job]:
    """``flexrlhf run`` on the hosts of ``shape``; each host has its own mounts. ``fault``: directory of the planned
    fault."""
    temporary = directory / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (FOLDER, os.environ.get("PYTHONPATH"))))
    if fault is not None:
        environment[VARIABLE] = str(fault)
    if shape.hosts == 1:
        command = ["unshare", "--mount", sys.executable, *program, "run", *arguments]
        yield from _ended(Job([_start(command, directory, environment)], (socket.gethostname(),), None))
        return
    with linked_hosts() as link:
        nodes = ["--nnodes", "2", "--rdzv-endpoint", f"{link.addresses[0]}:{PORT}", "--node-rank"]
        commands = [link.command(n, ["run", *arguments, *nodes, str(n)], program) for n in (0, 1)]
        yield from _ended(Job([_start(each, directory, environment) for each in commands], link.hosts, link))


def _start(command: list[str], directory: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _ended(job: Job) -> Iterator[Job]:
    try:
        yield job
    finally:
        job.note_processes()
        job.kill()
        job.wait(10)


def started(pid: int) -> str:
    """Start of a process in ticks of the kernel; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_locked(directory: Path) -> bool:
    """Whether a process still has the lock of a run's directory."""
    with (directory / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def until(condition: Callable[[], bool], seconds: float, pause: float = 0.002) -> bool:
    """Wait for a condition. Returns whether it came in time."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(pause)
    return True
