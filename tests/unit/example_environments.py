"""Environments and tools for test_environments.py, which names this file as a user would."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import os
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from flexrlhf.environments.base import Turn


class Guess:
    """A number to guess; ``limit`` is an option."""

    def __init__(self, limit: int = 10) -> None:
        self.limit, self.turns = limit, 0

    def reset(self, row: dict[str, Any], seed: int) -> list[dict[str, str]]:
        self.number = seed % self.limit
        return [{"role": "user", "content": f"{row['greeting']}: guess a number below {self.limit}"}]

    def step(self, reply: str) -> Turn:
        self.turns += 1
        is_right = reply.strip() == str(self.number)
        return Turn(f"{'right' if is_right else 'wrong'} at {self.turns}", float(is_right), is_right)


class Process:
    """Says which process it is in, and which modules are there."""

    def reset(self, row: dict[str, Any], seed: int) -> str:
        self.turns = 0
        return str(os.getpid())

    def step(self, reply: str) -> Turn:
        self.turns += 1
        if reply == "die":
            os._exit(1)
        if reply == "modules":
            return Turn(
                "modules " + " ".join({"torch", "numpy", "transformers", "pydantic", "yaml"} & set(sys.modules))
            )
        return Turn(f"{os.getpid()} {self.turns}")


class Open:
    """Says how many episodes of its process are open."""

    count: ClassVar[list[int]] = [0]

    def reset(self, row: dict[str, Any], seed: int) -> str:
        self.count[0] += 1
        return str(self.count[0])

    def step(self, reply: str) -> Turn:
        if reply == "raise":
            raise ValueError(reply)
        return Turn(str(self.count[0]), is_done=reply == "done")

    def close(self) -> None:
        self.count[0] -= 1
        raise RuntimeError("too late to matter")


class Together:
    """Says how many episodes of its process wait at the same time."""

    waiting: ClassVar[set[object]] = set()
    most: ClassVar[list[int]] = [0]

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        return ""

    async def step(self, reply: str) -> Turn:
        self.waiting.add(self)
        self.most[0] = max(self.most[0], len(self.waiting))
        await asyncio.sleep(0.2)
        self.waiting.discard(self)
        return Turn(str(self.most[0]))


class Sleeper:
    """Replies after the time that the row and the policy say, in seconds; it may die in place of that."""

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        await asyncio.sleep(row.get("seconds", 0))
        return str(os.getpid())

    async def step(self, reply: str) -> Turn:
        if reply == "die":
            os._exit(7)
        await asyncio.sleep(float(reply))
        return Turn(str(os.getpid()))


class Counter:
    """TRL's form: no ``step``; the public methods are tools."""

    def reset(self, start: int, **columns: Any) -> str:
        self.count = start
        return f"the count is {start}"

    def add(self, number: int) -> int:
        """Add to the count.

        Args:
            number: To add.
        """
        if number < 0:
            raise ValueError("only up")
        self.count += number
        return self.count

    async def look(self) -> dict[str, int]:
        """Look at the count."""
        return {"count": self.count}

    def get_reward(self) -> float:
        return float(self.count)

    def close(self) -> None:
        pass


class NotAsync:
    def reset(self, row: dict[str, Any], seed: int) -> Any:
        return asyncio.sleep(1)

    def step(self, reply: str) -> Turn:
        return Turn()


class Late:
    def reset(self, row: dict[str, Any], seed: int) -> str:
        time.sleep(1000)
        return ""

    def step(self, reply: str) -> Turn:
        return Turn()


class Chance:
    """Ends its episodes in every process but the first one."""

    def reset(self, row: dict[str, Any], seed: int) -> str:
        self.is_done = Path(row["file"]).exists()
        Path(row["file"]).touch()
        return ""

    def step(self, reply: str) -> Turn:
        if reply == "die":
            os._exit(1)
        return Turn(is_done=self.is_done)


class Secret:
    """Draws anew in every process."""

    def reset(self, row: dict[str, Any], seed: int) -> str:
        return f"secret {os.getpid()}"

    def step(self, reply: str) -> Turn:
        if reply == "die":
            os._exit(1)
        return Turn("again")

    def truncate(self) -> float:
        return 0.5


def multiply(first: float, second: float) -> float:
    """Multiply two numbers.

    Args:
        first: One factor.
        second: The other one.
    """
    return first * second


no_class = 7


def an_object() -> object:
    """Return an object."""
    return object()


def objects_inside() -> object:
    """Return objects in a list."""
    return {"found": [lambda: None]}


def some_bytes() -> object:
    """Return bytes."""
    return b"x"


def a_set() -> object:
    """Return texts without an order."""
    return {"a", "b"}


def keys_that_are_none() -> object:
    """Return what JSON has not."""
    return {(1, 2): 3}


def half_a_million() -> str:
    """Return a long text."""
    return "x" * 500_000


def lies() -> str:
    """Return a text that has another length than it says."""

    class Lying(str):
        def __len__(self) -> int:
            return 1

    return Lying("x" * 2_000_000)


def raises_an_object() -> str:
    """Raise an object."""
    raise ValueError(object())


def a_date() -> dict[str, Any]:
    """Return values with one text each."""
    return {"day": datetime.date(2026, 1, 31), "price": decimal.Decimal("1.50")}
