"""A task set of verifiers for test_environments.py: sums, with a tool that adds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class SumsConfig(vf.ToolsetConfig):
    pass


class Sums(vf.Toolset[SumsConfig]):
    @vf.tool
    async def add(self, first: int, second: int) -> str:
        """Add two numbers."""
        return str(first + second)


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task: SumData, trace: Any) -> float:
        return float(task.answer in trace.branches[-1].messages[-1].content)

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[Sums]:
        return [Sums(SumsConfig())]


class SetConfig(vf.TasksetConfig):
    largest: int = 10


class SumTasks(vf.Taskset[SumTask, SetConfig]):
    def load(self) -> Iterator[SumTask]:
        for number in range(self.config.largest):
            data = SumData(prompt=f"What is {number} + 4?", system_prompt="Add.", answer=str(number + 4))
            yield SumTask(data, self.config.task)


__all__ = ["SumTasks"]

if __name__ == "__main__":
    Sums.run()
