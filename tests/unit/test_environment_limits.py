"""Environments that misbehave cost their own episode, are ended in time, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.environments.base import EpisodeCall, EpisodeReply
from flexrlhf.environments.episodes import Episodes
from flexrlhf.environments.process_limits import OUTPUT_BURST, OUTPUT_RATE, allowed_bytes, can_keep_signals
from flexrlhf.user_code.processes import descendants

FILE = Path(__file__).with_name("misbehaving_environments.py")
TURNS = ("one", "two", "three")
SECONDS = 0.7
GOOD = ""
"""Kind of an episode that is to be right."""
PERHAPS = "perhaps"
"""Kind of an episode of which either is right, as long as others are."""
BEHAVIOURS: list[tuple[str, int, str, str]] = [
    # name, turn, kind of failure, words
    ("raises", 0, "raise", r"raised ValueError: no such thing \(misbehaving_environments\.py, line \d+\)"),
    ("raises", 2, "raise", "raised ValueError: no such thing"),
    ("raises_what_has_no_text", 1, "raise", r"raised misbehaving_environments.Unprintable: <exception str\(\) failed>"),
    ("recurses", 1, "raise", "raised RecursionError"),
    ("interrupts", 1, "raise", "raised KeyboardInterrupt"),
    ("exits", 2, "raise", "raised SystemExit: 3"),
    ("hangs", 0, "timeout", "took longer than 0.7 s"),
    ("hangs", 2, "timeout", "took longer than 0.7 s"),
    ("hangs_in_c", 1, "timeout", "took longer than 0.7 s"),
    ("loops", 1, "timeout", "took longer than 0.7 s"),
    ("hangs_and_ignores_signals", 2, "timeout", "took longer than 0.7 s"),
    ("catches_all_and_hangs", 1, "timeout", "took longer than 0.7 s"),
    ("dies", 0, "crash", "exit code 7"),
    ("dies", 2, "crash", "exit code 7"),
    ("dies_quietly", 1, "timeout", "took longer than 0.7 s"),
    ("reads_nowhere", 1, "crash", "killed by SIGSEGV"),
    ("aborts", 2, "crash", "killed by SIGABRT"),
    ("kills_itself", 1, "crash", "killed by SIGKILL"),
    ("kills_its_group", 2, "crash", "killed by SIGKILL"),
    ("kills_its_parent", 1, "raise", "raised PermissionError"),
    ("kills_its_parents_group", 1, "raise", "raised PermissionError"),
    ("is_alarmed", 1, "crash", "killed by SIGALRM"),
    ("takes_memory", 0, "memory", "raised MemoryError"),
    ("takes_memory_bit_by_bit", 2, "memory", "raised MemoryError"),
    ("opens_files", 1, "files", "raised OSError.*Too many open files"),
    ("prints", 1, "timeout", "took longer than 0.7 s"),
    ("prints_by_a_child", 2, "timeout", "took longer than 0.7 s"),
    ("closes_its_output", 1, "raise", "raised ValueError: I/O operation on closed file"),
    ("closes_all_files", 1, "crash|timeout", "exit code|took longer"),
    ("writes_to_all_files", 1, "crash|timeout", "exit code|took longer"),
    ("forks_and_hangs", 1, "timeout", "took longer than 0.7 s"),
    ("forks_a_daemon_and_hangs", 2, "timeout", "took longer than 0.7 s"),
    ("forks_and_returns_twice", 1, GOOD, ""),
    ("leaves_a_process", 1, GOOD, ""),
    ("leaves_a_daemon", 2, GOOD, ""),
    ("leaves_a_process_and_raises", 1, "raise", "raised ValueError"),
    ("leaves_files", 1, GOOD, ""),
    ("ends_the_process_later", 1, PERHAPS, ""),
    ("returns_nothing", 0, "reply", "messages are Turn"),
    ("returns_a_text", 1, "reply", r"step returned 'fine' \(str\) instead of a Turn"),
    ("returns_a_pair", 2, "reply", r"step returned \('fine', 1\.0\) \(tuple\) instead of a Turn"),
    ("has_no_reward", 1, "reply", r"reward is nan \(float\) instead of a finite number"),
    ("has_a_text_as_reward", 1, "reply", r"reward is '1\.0' \(str\) instead of a finite number"),
    ("is_done_perhaps", 1, "reply", r"is_done is 'no' \(str\) instead of True or False"),
    ("says_a_number", 1, "reply", r"messages are 7 \(int\) instead of"),
    ("says_without_a_role", 2, "reply", "a message is .* instead of a mapping with role and content"),
    ("says_no_text", 1, "reply", r"the content of a message is 7 \(int\) instead of a text"),
    ("says_half_a_character", 1, "reply", r"a character that is none, '\\ud83d', at 0"),
    ("says_too_much", 2, "reply", "a text has 2097152 characters; at most 1048576 are read"),
    ("says_too_much_in_all", 1, "reply", "messages have 1048584 characters, roles counted"),
    ("says_too_much_in_roles", 1, "reply", "messages have 2000000 characters, roles counted; at most 1048576 are read"),
    ("says_too_much_by_a_subclass", 2, "reply", "a text has 2097152 characters; at most 1048576 are read"),
    ("says_half_a_character_by_a_subclass", 1, "reply", r"a character that is none, '\\ud83d', at 0"),
    ("says_too_many_messages", 1, "reply", "a reply has more than 4096 messages"),
    ("says_an_object", 2, "reply", r"a text has '<object object at 0x\w+', the address of an object, which no other"),
    ("is_no_text", 1, "raise", "raised TypeError: descriptor '__str__' requires a 'str' object"),
    ("says_gigabytes", 1, "memory", "raised MemoryError"),
]
WAITING = [
    ("waits", 1, "timeout", "took longer than 0.7 s"),
    ("waits_again_and_again", 2, "timeout", "took longer than 0.7 s"),
    ("has_a_task_that_exits", 1, "timeout", "took longer than 0.7 s"),
    ("hangs", 1, "timeout", "took longer than 0.7 s"),
    ("raises", 2, "raise", "raised ValueError"),
    ("exits", 1, "raise", "raised SystemExit: 3"),
    ("dies", 2, "crash", "exit code 7"),
    ("takes_memory", 1, "memory", "raised MemoryError"),
    ("returns_a_text", 1, "reply", "step returned 'fine'"),
]


@pytest.mark.parametrize(
    ("kind", "behaviours", "goes_on"),
    [("Misbehaving", BEHAVIOURS, "together"), ("Waiting", WAITING, "together"), ("Waiting", WAITING, "each by itself")],
)
def test_an_environment_that_misbehaves_costs_its_episode(
    kind: str,
    behaviours: Sequence[Any],
    goes_on: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(descendants(os.getpid()))
    kept = tmp_path / "processes"
    rows: list[dict[str, Any]] = [
        {"does": name, "at": turn, "processes": str(kept)}
        for name, turn, _, _ in behaviours
        if can_keep_signals() or not name.startswith("kills_its_parent")
    ]
    rows = [{**row, "name": str(place)} for place, row in enumerate([*rows, *[{}] * len(rows)])]
    episodes = Episodes(environment(kind, memory_mb=192, open_files=64), 4)
    try:
        began = time.monotonic()
        if goes_on == "together":
            found = replies_of(episodes, rows)
        else:
            with ThreadPoolExecutor(len(rows)) as threads:
                found = list(threads.map(partial(replies_of_row, episodes, rows), range(len(rows))))
        seconds = time.monotonic() - began
    finally:
        episodes.close()
    for row, replies in zip(rows, found, strict=True):
        expected = next((each for each in behaviours if each[:2] == (row.get("does"), row.get("at"))), None)
        assert_as_expected(f"{FILE}:{kind}", row, replies, expected)
    output = capfd.readouterr().err
    assert len(output) < 4 * (2 * OUTPUT_BURST + OUTPUT_RATE * seconds)
    left = [int(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    assert not [process for process in left if lives(process)]
    assert not set(descendants(os.getpid())) - before - resource_trackers()
    assert set(tmp_path.iterdir()) <= {kept}


def test_output_has_a_rate() -> None:
    assert allowed_bytes(paid=0.0, now=1000.0) == allowed_bytes(paid=1000.0, now=1000.0) == OUTPUT_BURST
    assert allowed_bytes(paid=1002.0, now=1000.0) == OUTPUT_BURST - 2 * OUTPUT_RATE
    assert allowed_bytes(paid=1009.0, now=1000.0) == 0


def environment(kind: str, **settings: Any) -> EnvironmentSpec:
    return EnvironmentSpec(path=f"{FILE}:{kind}", **{"timeout_seconds": SECONDS} | settings)


def calls_of(rows: Sequence[dict[str, Any]], turns: Sequence[str]) -> list[EpisodeCall]:
    return [EpisodeCall((4, place), row, 0, tuple(turns)) for place, row in enumerate(rows)]


def replies_of(episodes: Episodes, rows: Sequence[dict[str, Any]]) -> list[list[EpisodeReply]]:
    """Play all turns; return the replies of each row, until its end."""
    found: list[list[EpisodeReply]] = [[] for _ in rows]
    for turn in range(len(TURNS) + 1):
        calls = [
            call
            for call, replies in zip(calls_of(rows, TURNS[:turn]), found, strict=True)
            if not replies or not (replies[-1].failure or replies[-1].is_done)
        ]
        for call, reply in zip(calls, episodes.replies(calls, 60.0), strict=True):
            found[call.key[1]].append(reply)
    return found


def replies_of_row(episodes: Episodes, rows: Sequence[dict[str, Any]], place: int) -> list[EpisodeReply]:
    """Play the turns of one row, whatever others do."""
    found: list[EpisodeReply] = []
    while not found or not (found[-1].failure or found[-1].is_done):
        found += episodes.replies([calls_of(rows, TURNS[: len(found)])[place]], 60.0)
    return found


def assert_as_expected(path: str, row: dict[str, Any], replies: Sequence[EpisodeReply], expected: Any) -> None:
    *good, last = replies
    name, turn, kind, words = expected or ("", 3, GOOD, "")
    if kind == PERHAPS:
        return
    if kind == GOOD:
        good, turn = list(replies), 4
        assert last.is_done, replies
    assert len(good) == turn, (name, replies)
    for number, reply in enumerate(good):
        said = " ".join([f"row {row['name']}", *TURNS[:number]])
        assert (reply.messages, reply.reward, reply.failure) == ((("", said),), float(number), None), (name, number)
    if kind != GOOD:
        assert last.failure is not None and re.fullmatch(kind, last.failure.kind), (name, last)
        part = f"turn {turn}" if turn else "reset"
        # a process that ends at once may end before its call is known to have begun
        words = rf"ended its process, {words}|its worker process ended" if last.failure.kind == "crash" else words
        sentence = rf"{re.escape(path)}: step 4, row {row['name']}, {part}: .*({words})"
        assert re.match(sentence, last.failure.text), (name, last.failure.text, sentence)


def lives(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def resource_trackers() -> set[int]:
    """Processes of multiprocessing that stay until this process ends."""
    return {
        process
        for process in descendants(os.getpid())
        if b"resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()
    }


KILLED = """
import os, signal
from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.environments.base import EpisodeCall
from flexrlhf.environments.episode_process import make_process
from flexrlhf.user_code.deadline import Deadline

if __name__ == "__main__":
    process = make_process(EnvironmentSpec(path="writer.py:Writer"))
    (reply,) = process.submit([EpisodeCall((0, 0), {}, 0)], Deadline.after(60))
    print(reply.result().failure, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
WRITER = """
import os
from multiprocessing import resource_tracker

class Writer:
    def reset(self, row, seed):
        pipe = resource_tracker._resource_tracker._fd
        if pipe is not None:
            os.write(pipe, b"nonsense\\n")
        return "go"

    def step(self, reply): ...
"""


def test_a_killed_process_leaves_no_warning_and_a_directory_that_the_next_one_removes(tmp_path: Path) -> None:
    """Its environment writes to the pipe of Python's resource tracker, if it has that."""
    place = tmp_path / "tmp"
    place.mkdir()
    (tmp_path / "killed.py").write_text(KILLED)
    (tmp_path / "writer.py").write_text(WRITER)
    environment = {**os.environ, "TMPDIR": str(place)}
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "killed.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode == -signal.SIGKILL and not ended.stderr, ended.stderr
        assert len([*place.iterdir()]) == 1
