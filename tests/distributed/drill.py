"""The drill: faults injected into random instructions of random ranks of toy runs, and how the runs end.

``PYTHONPATH=.:tests python tests/distributed/drill.py --count 80 --seed 1`` prints a line for each injection and a
table. A run ends within its deadline with a sentence that names the cause, or goes on; nothing of it is left; and
``--resume auto`` then gives the results of a run without the fault, to the last bit. Two hosts are network namespaces,
which only root makes.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml
from cases import Assets, make_assets
from drill_jobs import DRILLED, KEPT, SHAPES, STEPS, Job, Service, Shape, is_locked, running, until
from drill_kinds import DISK_MB, KINDS, LAST_ROUND, Kind, Target
from drilled import GO, REACHED, Planned
from safetensors.torch import load_file

from benchmarks.two_hosts import can_link
from flexrlhf.metrics import METRICS
from flexrlhf.runs.run_directory import RunDirectory

START_SECONDS = 150.0
FIRST_ROUND = 2.0
"""First round of injections: checkpoints exist by then."""
ATTEMPTS = 2
PART = 30
"""Injections after which the runs are resumed."""
assert LAST_ROUND < STEPS


@dataclass(frozen=True)
class Injection:
    """A fault to inject.

    number:   index in the drill.
    kind:     kind of fault.
    shape:    hosts and ranks of the run.
    planned:  rank and instruction.
    """

    number: int
    kind: Kind
    shape: Shape
    planned: Planned

    @property
    def name(self) -> str:
        """Name of the run."""
        return f"run-{self.number:03d}"


@dataclass(frozen=True)
class Outcome:
    """Outcome of an injection: how it fell short of each promise in words, empty if it did not.

    injection:  of which.
    place:      instruction and rank in words; empty if nothing could be injected.
    seconds:    from the injection to the end.
    late:       it did not end in time, or did not go on.
    misnamed:   exit codes and sentences.
    left:       processes, files and locks.
    resumed:    the results of the resumed run.
    sentence:   that it ended with.
    """

    injection: Injection
    place: str = ""
    seconds: float = 0.0
    late: str = ""
    misnamed: str = ""
    left: str = ""
    resumed: str = ""
    sentence: str = ""

    @property
    def problems(self) -> list[str]:
        """Violated promises."""
        unreached = [] if self.place else ["nothing was injected"]
        return [*unreached, *filter(None, (self.late, self.misnamed, self.left, self.resumed))]

    def __str__(self) -> str:
        injection = self.injection
        head = (
            f"{injection.number:3d} {injection.kind.name}, {injection.shape.name}: {self.place}, {self.seconds:.1f} s"
        )
        return "\n".join([head, f"      {self.sentence}", *(f"      FELL SHORT: {each}" for each in self.problems)])


def plan_injections(count: int, seed: int, kinds: Sequence[str] = (), first: int = 0) -> list[Injection]:
    """Choose ``count`` injections: every kind equally often, its shape, rank and instruction at random."""
    rng = random.Random(seed)
    names = list(kinds) or list(KINDS)
    rng.shuffle(names)
    return [_planned(first + n, KINDS[names[n % len(names)]], rng) for n in range(count)]


def _planned(number: int, kind: Kind, rng: random.Random) -> Injection:
    shape = SHAPES[rng.choice(kind.shapes)]
    rank, place = rng.randrange(shape.ranks), rng.uniform(FIRST_ROUND, kind.last)
    stays, choice = rng.random() < 0.5, rng.random()
    waits = stays if kind.waits is None else kind.waits
    is_own = kind.action != "none"
    return Injection(number, kind, shape, Planned(kind.action, rank, place, waits and not is_own, choice))


class Drill:
    """A folder with the toys and the runs of a drill, and the baselines of their shapes."""

    def __init__(self, folder: Path, service: Service) -> None:
        self._folder, self._service = folder, service
        self._assets: Assets = make_assets(folder)
        self._baselines: dict[str, Path] = {}

    def run(self, injections: Sequence[Injection]) -> Iterator[Outcome]:
        """Inject all, then resume the runs of each shape in one command, and compare them with its baseline."""
        outcomes: list[Outcome] = []
        for injection in injections:
            outcome = self._copied(injection, outcomes) or self._injected(injection)
            print(outcome, flush=True)
            outcomes.append(outcome)
        for name in dict.fromkeys(each.injection.shape.name for each in outcomes):
            yield from self._resumed(SHAPES[name], [each for each in outcomes if each.injection.shape.name == name])

    def _injected(self, injection: Injection) -> Outcome:
        """Inject; once more if the run had ended before, as on a busy machine."""
        for _ in range(ATTEMPTS):
            outcome = self._inject(injection)
            if outcome.place:
                break
        return outcome

    def _copied(self, injection: Injection, outcomes: Sequence[Outcome]) -> Outcome | None:
        """Damage a copy of what another fault has left; None if there is none, or nothing is to be damaged."""
        ended = [
            each.injection
            for each in outcomes
            if each.place and not _is_finished(self._run_directory(each.injection.name))
        ]
        whole = [each for each in ended if len(RunDirectory(self._run_directory(each.name)).checkpoints) > 1]
        if not injection.kind.damage or not whole:
            return None
        donor = random.Random(injection.number).choice([each for each in whole if not each.kind.damage] or whole)
        copy = replace(injection, shape=donor.shape)
        runs = self._folder / copy.name / "runs"
        shutil.copytree(self._run_directory(donor.name), runs / copy.name)
        self._config(copy.shape, copy.name, runs)
        _repair(copy, runs, runs / copy.name)
        return Outcome(copy, f"{(runs.parent / 'damaged').read_text()}after {donor.kind.name}")

    def _inject(self, injection: Injection) -> Outcome:
        folder = self._folder / injection.name
        with suppress(FileNotFoundError):
            folder.rename(folder.with_name(f"{folder.name}.{time.time():.0f}"))
        runs = folder / "runs"
        runs.mkdir(parents=True)
        injection.planned.write(folder)
        if injection.kind.name == "full disk":
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "drill", str(runs)], check=True)
        config = self._config(injection.shape, injection.name, runs)
        with running(injection.shape, [str(config)], folder, DRILLED, folder) as job:
            until(lambda: (folder / REACHED).exists() or job.has_ended, START_SECONDS)
            is_missed = job.has_ended and injection.kind.action == "none"
            if is_missed or not (folder / REACHED).exists():
                job.wait(0)
                return Outcome(injection, sentence=" | ".join(job.sentences()))
            return self._struck(injection, job, folder)

    def _struck(self, injection: Injection, job: Job, folder: Path) -> Outcome:
        """Act on the rank that has come to the instruction, and await the end."""
        kind, planned, directory = injection.kind, injection.planned, folder / "runs" / injection.name
        reached = json.loads((folder / REACHED).read_text())
        host = planned.rank // injection.shape.per_host
        target = Target(planned.rank, host, reached["pid"], folder / "runs", reached["closed"])
        job.note_processes()
        try:
            kind.inject(job, target, self._service)
        except (ProcessLookupError, subprocess.CalledProcessError) as error:
            # its run has just ended
            return Outcome(injection, sentence=str(error))
        finally:
            (folder / GO).touch()
        began, limit = time.monotonic(), kind.seconds(injection.shape.seconds)
        is_in_time = job.wait(limit)
        seconds = time.monotonic() - began
        self._service.start()
        place = f"step {reached['step']}, {reached['instruction']} of rank {planned.rank}"
        place += f" (socket of the {target.closed})" if target.closed else ""
        outcome = Outcome(
            injection,
            place,
            seconds,
            "" if is_in_time else f"no end in {limit:.0f} s",
            kind.misnamed(job, target) if is_in_time else "",
            _left(job, folder, directory),
            sentence=" | ".join(dict.fromkeys(job.sentences())),
        )
        if outcome.misnamed:
            (folder / "output.txt").write_text("\n=====\n".join(job.outputs))
        _repair(injection, folder / "runs", directory)
        return outcome

    def _resumed(self, shape: Shape, outcomes: list[Outcome]) -> Iterator[Outcome]:
        """Go on with the runs of a shape; each one that ends the command is left out of the next one."""
        found = {each.injection.name: each for each in outcomes if each.place}
        yield from (each for each in outcomes if not each.place)
        baseline = self._baseline(shape)
        pending = list(found)
        while pending:
            configs = [str(self._folder / name / "config.yaml") for name in pending]
            with running(shape, [*configs, "--resume", "auto"], self._folder) as job:
                is_in_time = job.wait(START_SECONDS + 30 * len(pending))
                output, last = job.outputs[0], " | ".join(job.sentences())
            ended = [name for name in pending if _is_finished(self._run_directory(name))]
            for name in ended:
                directory = self._run_directory(name)
                is_silent = found[name].injection.kind.damage and not _names_damage(output, directory)
                misnamed = "the damaged checkpoint is not named" if is_silent else found[name].misnamed
                found[name] = replace(found[name], misnamed=misnamed, resumed=_difference(directory, baseline))
            pending = [name for name in pending if name not in ended]
            if pending:
                why = last if is_in_time else "it did not end"
                found[pending[0]] = replace(found[pending[0]], resumed=f"not resumed: {why}")
                del pending[0]
        yield from found.values()

    def _baseline(self, shape: Shape) -> Path:
        """Directory of the run of ``shape`` without a fault, on one host."""
        if shape.name not in self._baselines:
            name = f"baseline-{shape.name.replace(' ', '-')}"
            folder = self._folder / name
            folder.mkdir()
            config = self._config(shape, name, folder / "runs")
            with running(replace(shape, hosts=1), [str(config)], folder) as job:
                assert job.wait(2 * START_SECONDS) and job.codes == [0], job.outputs[0]
            self._baselines[shape.name] = folder / "runs" / name
        return self._baselines[shape.name]

    def _config(self, shape: Shape, name: str, runs: Path) -> Path:
        path = runs.parent / "config.yaml"
        raw = shape.raw(self._assets, self._service.url) | {"name": name, "runs": str(runs)}
        path.write_text(yaml.safe_dump(raw))
        return path

    def _run_directory(self, name: str) -> Path:
        return self._folder / name / "runs" / name


def _left(job: Job, folder: Path, directory: Path) -> str:
    """Leftovers of a job that has ended, in words."""
    processes = job.left()
    # nobody removes the files of a launcher that is killed
    is_killed = -signal.SIGKILL in job.codes
    files = [path.name for path in (folder / "tmp").glob("flexrlhf-*") if not is_killed]
    found = [f"processes {processes}"] * bool(processes) + [f"temporary files {files}"] * bool(files)
    return ", ".join(found + ["a lock"] * is_locked(directory))


def _repair(injection: Injection, runs: Path, directory: Path) -> None:
    """Make room on a disk that was filled; damage a shard of the newest checkpoint if this is the fault."""
    (runs / "filler").unlink(missing_ok=True)
    if injection.kind.damage:
        checkpoints = [each.path for each in RunDirectory(directory).checkpoints]
        assert len(checkpoints) in range(1, KEPT + 1), checkpoints
        rng = random.Random(injection.number)
        shard = rng.choice(sorted(checkpoints[0].glob("*.safetensors")))
        content = bytearray(shard.read_bytes())
        place = rng.randrange(len(content))
        if injection.kind.damage == "truncated":
            del content[place:]
        else:
            content[place] ^= 1 << rng.randrange(8)
        shard.write_bytes(content)
        (runs.parent / "damaged").write_text(f"{checkpoints[0].name}: {shard.name} ")


def _names_damage(output: str, directory: Path) -> bool:
    damaged = (directory.parent.parent / "damaged").read_text()
    return any(f"{directory.name}/" in line and damaged in line for line in output.splitlines())


def _difference(directory: Path, baseline: Path) -> str:
    """Difference of a finished run from the baseline in words, or an empty string."""
    if _rows(directory) != _rows(baseline):
        return f"metrics of step {_first_difference(_rows(directory), _rows(baseline))} differ"
    return _differing_weights(directory, baseline)


def _is_finished(directory: Path) -> bool:
    with suppress(FileNotFoundError):
        return bool(json.loads((directory / "status.json").read_text())["state"] == "finished")
    return False


def _rows(directory: Path) -> list[dict[str, object]]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in METRICS.times} for line in lines]


def _first_difference(found: list[dict[str, object]], expected: list[dict[str, object]]) -> int:
    pairs = enumerate(zip(found, expected, strict=False))
    return next((step for step, (one, other) in pairs if one != other), min(len(found), len(expected)))


def _differing_weights(directory: Path, baseline: Path) -> str:
    for file in sorted(baseline.glob("*/model.safetensors")):
        expected, found = load_file(file), load_file(directory / file.relative_to(baseline))
        different = [n for n in expected if n not in found or not torch.equal(expected[n], found[n])]
        if different or expected.keys() != found.keys():
            return f"weights of {file.parent.name} differ: {different[:2]}"
    return ""


def table(outcomes: Sequence[Outcome]) -> str:
    """Table: injections of each kind that kept each promise."""
    lines = [
        f"{'fault':26s}{'injected':>9s}{'in time':>9s}{'named':>9s}{'nothing left':>14s}{'resumed':>9s}{'slowest':>9s}"
    ]
    for name in [*dict.fromkeys(each.injection.kind.name for each in outcomes), "all"]:
        found = [each for each in outcomes if each.place and name in (each.injection.kind.name, "all")]
        promises = ("late", "misnamed", "left", "resumed")
        kept = [sum(not getattr(each, promise) for each in found) for promise in promises]
        slowest = max((each.seconds for each in found), default=0.0)
        counts = "".join(f"{n:{width}d}" for n, width in zip([len(found), *kept], (9, 9, 9, 14, 9), strict=True))
        lines.append(f"{name:26s}{counts}{slowest:7.1f} s")
    return "\n".join(lines)


@contextmanager
def new_drill(folder: Path) -> Iterator[Drill]:
    """A drill in ``folder``; its mounts are undone at the end."""
    service = Service()
    try:
        yield Drill(folder, service)
    finally:
        service.stop()
        for runs in folder.glob("run-*/runs"):
            if runs.is_mount():
                subprocess.run(["umount", "--lazy", str(runs)], check=False)


def cannot_drill() -> str:
    """Why this user cannot run a drill; empty if they can."""
    if not can_link():
        return "needs the right to make network namespaces (and iproute2)"
    with tempfile.TemporaryDirectory() as place:
        command = ["unshare", "--mount", "mount", "-t", "tmpfs", "drill", place]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return "needs the right to mount file systems"
    return ""


def main() -> int:
    """Run a drill; exit code 1 if a promise was violated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="number of injections")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=[], choices=list(KINDS), help="all without")
    parser.add_argument("--folder", type=Path, help="for the runs, which stay there; a temporary one without")
    options = parser.parse_args()
    if problem := cannot_drill():
        print(f"drill: {problem}")
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with new_drill(folder) as drill:
            planned = plan_injections(options.count, options.seed, options.kinds)
            parts = [planned[start : start + PART] for start in range(0, len(planned), PART)]
            outcomes = []
            for part in parts:
                outcomes += drill.run(part)
                print(f"\n{table(outcomes)}\n", flush=True)
    short = [each for each in outcomes if each.problems]
    print("\n".join(["fell short:" if short else "nothing fell short", *map(str, short)]), flush=True)
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
