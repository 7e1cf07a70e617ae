"""Environments for test_environment_limits.py: they count turns, and do what the row names at its turn."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from flexrlhf.environments.base import Turn

LIBRARY = ctypes.PyDLL(None)
"""Functions of it keep the interpreter's lock."""


class OwnText(str):
    """A text that only this file can read."""


class LyingText(OwnText):
    """A text that has another length and other bytes than it says."""

    def __len__(self) -> int:
        return 1

    def encode(self, *arguments: Any) -> bytes:
        return b"fine"


class NoText:
    """An object that is said to be a text."""

    __class__ = str  # type: ignore[assignment]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Counting:
    """Counts the turns of an episode, in words that depend on all of them."""

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        self.row, self.turn, self.said = row, 0, [f"row {row['name']}"]
        return self.at(0) or self.said[0]

    def step(self, reply: str) -> Any:
        self.turn += 1
        self.said.append(reply)
        return self.at(self.turn) or self.good()

    def good(self) -> Turn:
        return Turn(" ".join(self.said), reward=float(self.turn), is_done=self.turn == 3)

    def at(self, turn: int) -> Any:
        return None


class Misbehaving(Counting):
    def at(self, turn: int) -> Any:
        return getattr(self, self.row["does"])() if self.row.get("at") == turn else None

    def raises(self) -> None:
        raise ValueError("no such\nthing")

    def raises_what_has_no_text(self) -> None:
        raise Unprintable

    def recurses(self) -> None:
        self.recurses()

    def interrupts(self) -> None:
        raise KeyboardInterrupt

    def exits(self) -> None:
        sys.exit(3)

    def hangs(self) -> None:
        time.sleep(1000)

    def hangs_in_c(self) -> None:
        LIBRARY.sleep(1000)

    def loops(self) -> None:
        while True:
            pass

    def hangs_and_ignores_signals(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)

    def catches_all_and_hangs(self) -> None:
        while True:
            try:
                time.sleep(1000)
            except BaseException:  # noqa: B036
                continue

    def dies(self) -> None:
        os._exit(7)

    def dies_quietly(self) -> None:
        os._exit(0)

    def reads_nowhere(self) -> None:
        ctypes.string_at(0)

    def aborts(self) -> None:
        os.abort()

    def kills_itself(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def kills_its_group(self) -> None:
        os.killpg(0, signal.SIGKILL)

    def kills_its_parent(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)

    def kills_its_parents_group(self) -> None:
        os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)

    def is_alarmed(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(1000)

    def takes_memory(self) -> None:
        self.taken = bytes(1 << 32)

    def takes_memory_bit_by_bit(self) -> None:
        self.taken = []
        while True:
            self.taken.append(bytes(1 << 24))

    def opens_files(self) -> None:
        self.files = []
        while True:
            self.files.append(Path(os.devnull).open())  # noqa: SIM115

    def prints(self) -> None:
        while True:
            print("spam" * 100)

    def prints_by_a_child(self) -> None:
        self.keep(subprocess.Popen(["yes", "spam" * 100]).pid)
        time.sleep(1000)

    def closes_its_output(self) -> None:
        sys.stdout.close()
        print("spam")

    def closes_all_files(self) -> None:
        os.closerange(3, 1000)

    def writes_to_all_files(self) -> None:
        # its pipes keep the numbers that they have in the process that starts it, which may be above its own limit
        for number in range(3, 1000):
            try:
                os.write(number, b"garbage" * 10)
            except OSError:
                continue

    def forks_and_hangs(self) -> None:
        self.keep(self.forked(lambda: time.sleep(1000)))
        time.sleep(1000)

    def forks_a_daemon_and_hangs(self) -> None:
        self.daemon()
        time.sleep(1000)

    def forks_and_returns_twice(self) -> Any:
        os.fork()
        return self.good()

    def leaves_a_process(self) -> Any:
        self.keep(subprocess.Popen(["sleep", "1000"]).pid)
        return self.good()

    def leaves_a_daemon(self) -> Any:
        self.daemon()
        return self.good()

    def leaves_a_process_and_raises(self) -> None:
        self.leaves_a_process()
        self.raises()

    def leaves_files(self) -> Any:
        Path(tempfile.mkdtemp(), "file").write_text("left")
        return self.good()

    def ends_the_process_later(self) -> Any:
        threading.Timer(0.05, os._exit, [9]).start()
        return self.good()

    def returns_nothing(self) -> Any:
        return Turn(None)  # type: ignore[arg-type]

    def returns_a_text(self) -> Any:
        return "fine"

    def returns_a_pair(self) -> Any:
        return ("fine", 1.0)

    def has_no_reward(self) -> Turn:
        return Turn("fine", reward=math.nan)

    def has_a_text_as_reward(self) -> Turn:
        return Turn("fine", reward="1.0")  # type: ignore[arg-type]

    def is_done_perhaps(self) -> Turn:
        return Turn("fine", is_done="no")  # type: ignore[arg-type]

    def says_a_number(self) -> Turn:
        return Turn(7)  # type: ignore[arg-type]

    def says_without_a_role(self) -> Turn:
        return Turn([{"content": "fine"}])

    def says_no_text(self) -> Turn:
        return Turn([{"role": "user", "content": 7}])

    def says_half_a_character(self) -> Turn:
        return Turn("\ud83d")

    def says_too_much(self) -> Turn:
        return Turn("a" * (1 << 21))

    def says_too_much_in_all(self) -> Turn:
        return Turn([{"role": "user", "content": "a" * (1 << 19)}] * 3)

    def says_too_much_in_roles(self) -> Turn:
        return Turn([{"role": "a" * 1_000_000, "content": ""}] * 200)

    def says_too_much_by_a_subclass(self) -> Turn:
        return Turn(LyingText("a" * (1 << 21)))

    def says_half_a_character_by_a_subclass(self) -> Turn:
        return Turn([{"role": "user", "content": LyingText("\ud83d")}])

    def says_too_many_messages(self) -> Turn:
        return Turn([{"role": "user", "content": ""}] * 5000)

    def says_an_object(self) -> Turn:
        return Turn(f"here is {object()}")

    def is_no_text(self) -> Turn:
        return Turn(NoText())  # type: ignore[arg-type]

    def says_gigabytes(self) -> Turn:
        return Turn("a" * (1 << 32))

    def says_its_own_text(self) -> Turn:
        return Turn(OwnText("fine"))

    def keep(self, process: int) -> None:
        """Write the id of a process that the test looks for."""
        with Path(self.row["processes"]).open("a") as file:
            file.write(f"{process}\n")

    def forked(self, run: Any) -> int:
        child = os.fork()
        if not child:
            run()
            os._exit(0)
        return child

    def daemon(self) -> None:
        def begin() -> None:
            os.setsid()
            self.keep(self.forked(lambda: time.sleep(1000)))

        os.waitpid(self.forked(begin), 0)


class Waiting(Misbehaving):
    """The same, asynchronously."""

    async def reset(self, row: dict[str, Any], seed: int) -> Any:
        self.row, self.turn, self.said = row, 0, [f"row {row['name']}"]
        return await self.then(0) or self.said[0]

    async def step(self, reply: str) -> Any:
        self.turn += 1
        self.said.append(reply)
        await asyncio.sleep(0.01)
        return await self.then(self.turn) or self.good()

    async def then(self, turn: int) -> Any:
        value = self.at(turn)
        return await value if asyncio.iscoroutine(value) else value

    async def waits(self) -> None:
        await asyncio.sleep(1000)

    async def waits_again_and_again(self) -> None:
        while True:
            try:
                await asyncio.sleep(1000)
            except BaseException:  # noqa: B036
                continue

    async def has_a_task_that_exits(self) -> None:
        asyncio.get_running_loop().create_task(self.exiting())
        await asyncio.sleep(1000)

    async def exiting(self) -> None:
        sys.exit(3)
