"""Kinds of faults of the drill: where they may be injected, how, and the end and output that a run must have then."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from commands import children_of, comm_of
from drill_jobs import Job, Service
from drilled import PLANTED

ALONE = ("one host", "shadows")
LINKED = ("two hosts", "four ranks")
ANY = (*ALONE, *ALONE, *LINKED)
LAST_ROUND = 4.5
"""Latest round of an injection: the run is not yet complete."""
DISK_MB = 48
LINK_DOWN_SECONDS = 5.0
PAUSE_SECONDS = 3.0
SERVICE_DOWN_SECONDS = 1.5
SECONDS_TO_END = 25.0
"""Time to end after a rank has ended: launchers wait up to seven seconds for each other, and ranks have ten to end."""
SECONDS_OF_WATCHES = 25.0
"""Of a run that waits in vain, after its deadline: three to see who responds, ten of grace, and the launchers' own."""
SECONDS_TO_FINISH = 90.0


@dataclass(frozen=True)
class Target:
    """The rank that a fault happens to, at the moment of the injection.

    rank, host:  its number, and its host's.
    pid:         its process.
    runs:        directory that contains the run's.
    closed:      peer of a closed socket.
    """

    rank: int
    host: int
    pid: int
    runs: Path
    closed: str


Inject = Callable[[Job, Target, Service], None]


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    name:     name in the table.
    shapes:   names of the shapes that it is injected into.
    ends:     how the run does: it ``fails``, ``finishes``, or one of them: nothing may need a socket any more; or the
              launcher of the host ``dies`` silently, and the others fail.
    inject:   acts from outside.
    pattern:  regular expression of the closing sentence; ``RANK`` and ``HOST`` are the fault's.
    printed:  part of a line before it.
    action:   of the rank itself.
    waits:    whether the rank waits for the injection in its instruction: always, never, or None: now and then.
    damage:   done to the newest checkpoint once the run has ended.
    waited:   whether the run ends by its deadline, and not at once.
    last:     latest round: some instructions of the last step need it no more.
    """

    name: str
    shapes: tuple[str, ...]
    ends: Literal["fails", "finishes", "either", "dies"]
    inject: Inject
    pattern: str = ""
    printed: str = ""
    action: str = "none"
    waits: bool | None = None
    damage: str = ""
    waited: bool = False
    last: float = LAST_ROUND

    def seconds(self, timeout_seconds: float) -> float:
        """Longest time from the injection to the end of a run with this deadline."""
        if self.ends == "finishes":
            return SECONDS_TO_FINISH
        return timeout_seconds + SECONDS_OF_WATCHES if self.waited else SECONDS_TO_END

    def misnamed(self, job: Job, target: Target) -> str:
        """Errors in exit codes and sentences of the launchers, in words; or an empty string."""
        if self.ends == "dies":
            return self._wrong_survivors(job, target)
        expected = {"fails": (1,), "finishes": (0,), "either": (0, 1)}[self.ends]
        if len(set(job.codes)) > 1 or job.codes[0] not in expected:
            return f"exit codes {job.codes}"
        if "Traceback" in "".join(job.outputs) and self.action != "exception":
            return "a traceback"
        if self.printed not in job.outputs[0]:
            return f"no line has {self.printed!r}"
        return self._wrong_sentence(job, target) if job.codes[0] else ""

    def _wrong_survivors(self, job: Job, target: Target) -> str:
        ends = zip(job.codes, job.sentences(), strict=True)
        wrong = [
            f"exit code {code}: {sentence}"
            for host, (code, sentence) in enumerate(ends)
            if (code != -signal.SIGKILL if host == target.host else code != 1 or not self._names(sentence, job, target))
        ]
        return " | ".join(wrong)

    def _wrong_sentence(self, job: Job, target: Target) -> str:
        sentences = job.sentences()
        wrong = [each for each in sentences if not each.endswith("/failure")]
        if self.name in ("link down", "packets lost"):
            # each side names the other
            others = zip(sentences, reversed(job.hosts), strict=True)
            wrong += [sentence for sentence, host in others if f"host {host}" not in sentence]
        elif len({sentence for sentence in sentences}) > 1:
            wrong += sentences
        return " | ".join([*wrong, *(each for each in sentences if not self._names(each, job, target))])

    def _names(self, sentence: str, job: Job, target: Target) -> bool:
        pattern = self.pattern.replace("RANK", str(target.rank)).replace("HOST", re.escape(job.hosts[target.host]))
        return re.search(pattern, sentence) is not None


def _kill(_: Job, target: Target, __: Service) -> None:
    os.kill(target.pid, signal.SIGKILL)


def _kill_launcher(job: Job, target: Target, _: Service) -> None:
    os.kill(job.launchers[target.host].pid, signal.SIGKILL)


def _kill_factory(job: Job, target: Target, _: Service) -> None:
    (factory,) = (pid for pid in children_of(job.launchers[target.host].pid) if comm_of(pid) == "rank-factory")
    os.kill(factory, signal.SIGKILL)


def _stop(_: Job, target: Target, __: Service) -> None:
    os.kill(target.pid, signal.SIGSTOP)


def _pause(_: Job, target: Target, __: Service) -> None:
    os.kill(target.pid, signal.SIGSTOP)
    time.sleep(PAUSE_SECONDS)
    os.kill(target.pid, signal.SIGCONT)


def _nothing(_: Job, __: Target, ___: Service) -> None: ...


def _fill(_: Job, target: Target, __: Service) -> None:
    block = b"0" * 65536
    with (target.runs / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(block)
        except OSError:
            return


def _forbid_writing(_: Job, target: Target, __: Service) -> None:
    """Mount the directory over itself, read-only, on the host of the rank alone."""
    inside = ["nsenter", "--target", str(target.pid), "--mount", "mount"]
    # in a place that no process writes to: a mount with open files does not become read-only
    aside = target.runs.with_name("read-only")
    aside.mkdir()
    subprocess.run([*inside, "--bind", str(target.runs), str(aside)], check=True)
    subprocess.run([*inside, "-o", "remount,bind,ro", str(aside)], check=True)
    subprocess.run([*inside, "--bind", str(aside), str(target.runs)], check=True)


def _link_down(job: Job, _: Target, __: Service) -> None:
    assert job.link is not None
    job.link.set("down")


def _link_down_for_a_while(job: Job, target: Target, service: Service) -> None:
    _link_down(job, target, service)
    time.sleep(LINK_DOWN_SECONDS)
    assert job.link is not None
    job.link.set("up")


def _lose_packets(job: Job, _: Target, __: Service) -> None:
    assert job.link is not None
    job.link.lose_packets()


def _service_down(_: Job, __: Target, service: Service) -> None:
    service.stop()


def _service_down_for_a_while(_: Job, __: Target, service: Service) -> None:
    service.stop()
    time.sleep(SERVICE_DOWN_SECONDS)
    service.start()


KILLED = r"^flexrlhf: rank RANK \(.*host HOST\) ended the run at step \d+, .*, killed by SIGKILL"
STUCK = r"^flexrlhf: rank \d+ \(.*the deadline of \d+ s passed, waiting for .*rank RANK \(.*host HOST.*does not respond"
RAISED = rf"^flexrlhf: rank RANK \(.*host HOST\) ended the run at step \d+, .*, exit code 1: RuntimeError: {PLANTED}"
UNWRITABLE = r"^flexrlhf: rank \d+ \(.*ended the run at step \d+, .*runs.*cannot be written \({}\)"
CLOSED = r"^flexrlhf: (?=.*rank RANK \().*(connection .*|store has )closed"
LOST = r"^flexrlhf: .*node [01] \(host "
SILENT = r"^flexrlhf: .*host HOST"
UNSCORED = r"^flexrlhf: rank \d+ \(.*have a score that is not a finite number "
REFUSED = "/score: ConnectError All connection attempts failed"

KINDS = {
    kind.name: kind
    for kind in (
        Kind("SIGKILL", ANY, "fails", _kill, KILLED),
        Kind("launcher killed", ANY, "dies", _kill_launcher, SILENT, waited=True),
        Kind("factory killed", ANY, "finishes", _kill_factory),
        Kind("SIGSTOP", ANY, "fails", _stop, STUCK, waited=True),
        Kind("SIGSTOP, then SIGCONT", ANY, "finishes", _pause),
        Kind("exception", ANY, "fails", _nothing, RAISED, action="exception"),
        Kind("full disk", ANY, "fails", _fill, UNWRITABLE.format("No space left on device"), waits=True),
        Kind("read-only disk", ANY, "fails", _forbid_writing, UNWRITABLE.format("Read-only file system"), waits=True),
        Kind("truncated shard", ANY, "fails", _kill, KILLED, damage="truncated"),
        Kind("flipped bit", ANY, "fails", _kill, KILLED, damage="flipped"),
        Kind("closed socket", ANY, "either", _nothing, CLOSED, action="socket", waited=True),
        Kind("link down for 5 s", LINKED, "finishes", _link_down_for_a_while),
        Kind("link down", LINKED, "fails", _link_down, LOST, waited=True),
        Kind("packets lost", LINKED, "fails", _lose_packets, LOST, waited=True),
        Kind("slow rank", ANY, "finishes", _nothing, action="slow"),
        Kind("service down for a while", ("service",), "finishes", _service_down_for_a_while),
        Kind("service down", ("service",), "fails", _service_down, UNSCORED, REFUSED, waited=True, last=3.5),
    )
}
