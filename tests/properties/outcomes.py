"""Commands with broken inputs, run in this process, and the problem with each one's outcome."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import FrameType

import pytest
from typer.testing import CliRunner

from flexrlhf.cli import app

CPU_SECONDS, SECONDS = 10, 60
"""Limits of one command: CPU time, and wall time for when other work slows the machine."""
LONGEST = 2000
"""Characters of a sentence, which may contain a long path."""
NOT_FOR_USERS = re.compile(r"Traceback|<class '|object at 0x|pydantic|NoneType")


class DeadlineExceeded(BaseException):
    """End of a command that takes too long; no handler of exceptions catches it."""


@dataclass(frozen=True)
class Case:
    """One command with a broken input.

    arguments:  arguments of the command line
    damage:     description of the damage, for messages
    """

    arguments: tuple[str, ...]
    damage: str

    def dry(self) -> Case:
        """The same command, without starting ranks."""
        words = ("--dry-run",) if self.arguments[0] == "run" else ()
        return replace(self, arguments=(*self.arguments, *words))


@dataclass(frozen=True)
class Outcome:
    """End of one command.

    exit_code:  exit code of the process; None if it ended in another way
    sentence:   output on stderr
    problem:    why this is wrong; None for a result or one clear sentence
    """

    exit_code: int | None
    sentence: str = ""
    problem: str | None = None


@dataclass
class Outcomes:
    """Outcomes of a test's commands: number by exit code, and problems by kind."""

    exit_codes: Counter[int | None] = field(default_factory=Counter)
    sentences: set[str] = field(default_factory=set)
    problems: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, number: int, case: Case, ended: Outcome) -> None:
        """Count one command."""
        self.exit_codes[ended.exit_code] += 1
        self.sentences.add(re.sub(r"[0-9]+|'[^']*'", "", ended.sentence)[-60:])
        if ended.problem is not None:
            command = shlex.join(("flexrlhf", *case.arguments)).encode(errors="backslashreplace").decode()
            kind = re.sub(r"[0-9]+", "#", ended.problem.split("\n")[-1])[:90]
            self.problems[kind].append(f"case {number}: {command:.300}\n{case.damage:.500}\n{ended.problem:.900}")

    def check(self, least_refused: float) -> None:
        """Fail for any problem, and if too small a fraction of commands was refused: then nothing was broken."""
        total, wrong = self.exit_codes.total(), sum(map(len, self.problems.values()))
        print(f"{total} cases, exit codes {dict(self.exit_codes)}, about {len(self.sentences)} sentences")
        reports = [f"--- {len(cases)} times {kind}\n" + "\n\n".join(cases[:2]) for kind, cases in self.problems.items()]
        assert not wrong, f"{wrong} of {total}, {len(reports)} kinds:\n" + "\n\n".join(reports)
        assert self.exit_codes[2] >= least_refused * total, self.exit_codes


def run_cases(template: Path, count: int, seed: int, make_case: Callable[[Random], Case]) -> Outcomes:
    """Run ``count`` cases, each in a fresh copy of the directory ``template``, which ``make_case`` may damage.

    The copy is the current directory.
    """
    outcomes, work, before = Outcomes(), template.with_name(f"{template.name}-case"), Path.cwd()
    try:
        for number in range(count):
            shutil.copytree(template, work, symlinks=True)
            os.chdir(work)
            case = make_case(Random(f"{seed}-{number}"))
            outcomes.add(number, case, outcome(case))
            os.chdir(before)
            shutil.rmtree(work)
    finally:
        os.chdir(before)
        shutil.rmtree(work, ignore_errors=True)
    return outcomes


def outcome(case: Case) -> Outcome:
    """Run a command in the current directory."""
    before = contents(Path.cwd())
    try:
        with deadline():
            result = CliRunner().invoke(app, list(case.arguments), prog_name="flexrlhf")
    except DeadlineExceeded as error:
        return Outcome(None, problem=f"ran into the deadline {error}")
    except BaseException as error:  # a panic of a library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | pytest.fail.Exception):
            raise
        return Outcome(None, problem=f"{type(error).__name__}: {error}{_where(error)}")
    code, error = result.exit_code, result.exception
    if error is not None and not isinstance(error, SystemExit):
        return Outcome(code, problem=f"{type(error).__name__}: {error}{_where(error)}"[-1500:])
    return Outcome(code, result.stderr, problem_of(code, result.stderr) or left_behind(code, before))


def _where(error: BaseException) -> str:
    """Places of ours and the last one of a traceback."""
    places, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(
            f"{code.co_filename.partition('flexrlhf/')[2] or code.co_filename}:{trace.tb_lineno} {code.co_name}"
        )
        trace = trace.tb_next
    ours = [place for place in places if not place.startswith("/")]
    return "\n" + "\n".join([*places[-1:], *ours[-3:]])


def problem_of(exit_code: int, stderr: str) -> str | None:
    """Return the problem with an exit code and the output on stderr."""
    lines = [line for line in stderr.split("\n") if line and not line.endswith("(--force: continuing)")]
    if exit_code == 0:
        return f"succeeds with words on stderr: {stderr}" if lines else None
    if exit_code != 2:
        return f"exit code {exit_code}: {stderr}"
    if len(lines) != 1 or not lines[0].startswith("flexrlhf: "):
        return f"{len(lines)} lines on stderr: {stderr}"
    if len(lines[0]) > LONGEST:
        return f"a sentence of {len(lines[0])} characters: {lines[0]}"
    if not lines[0].isprintable():
        return f"a sentence that cannot be printed: {lines[0]!r}"
    if NOT_FOR_USERS.search(lines[0]):
        return f"a sentence of the implementation: {lines[0]}"
    return None


def left_behind(exit_code: int, before: dict[str, int]) -> str | None:
    """Return the files that a refused command has written."""
    after = contents(Path.cwd()) if exit_code else before
    changed = sorted(after.items() ^ before.items())
    return f"a refused command has changed files: {changed[:5]}" if changed else None


def contents(directory: Path) -> dict[str, int]:
    """Files and directories with their sizes."""
    return {str(path): path.lstat().st_size for path in directory.rglob("*")}


@contextmanager
def deadline() -> Iterator[None]:
    """Raise DeadlineExceeded after ``CPU_SECONDS`` of this process, or when ``SECONDS`` have passed."""

    def end(number: int, frame: FrameType | None) -> None:
        assert frame is not None
        raise DeadlineExceeded("\n" + "".join(traceback.format_stack(frame)[-3:]))

    handlers = {number: signal.signal(number, end) for number in (signal.SIGPROF, signal.SIGUSR2)}
    waiting = threading.Timer(SECONDS, os.kill, (os.getpid(), signal.SIGUSR2))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
