"""One episode: an environment, tools, or both. Worker processes load this: the standard library alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexrlhf.environments.base import EpisodeReply
from flexrlhf.environments.tool_runs import Functions, ToolRuns, finished, tool_methods
from flexrlhf.environments.turn_checks import read_messages, read_reward, read_turn


class Episode:
    """Turns of one episode.

    A turn with calls of tools is replied to by the tools, any other one by the environment's ``step``; without
    ``step`` it ends the episode. An environment without ``step`` has TRL's form: its other methods are tools,
    ``reset`` receives the row's columns by name, and ``get_reward()``, or else its attribute ``reward``, is the reward.

    environment:  null: tools alone
    tools:        by name
    tool_format:  how calls of tools are written
    """

    def __init__(self, environment: Any, tools: Functions, tool_format: str) -> None:
        self._environment = environment
        self._has_step = hasattr(environment, "step")
        methods = {} if self._has_step or environment is None else tool_methods(environment)
        self._tools = ToolRuns({**tools, **methods}, tool_format)
        self.turn = 0

    async def reset(self, row: Mapping[str, Any], seed: int) -> EpisodeReply:
        """Begin the episode."""
        if self._environment is None:
            return EpisodeReply()
        reset = self._environment.reset
        return EpisodeReply(read_messages(await finished(reset(row, seed) if self._has_step else reset(**row))))

    async def reply(self, text: str, is_last: bool) -> EpisodeReply:
        """Return the reply to a turn. ``is_last``: whether no turn follows."""
        messages, calls, failed = await self._tools.run(text)
        reward, is_done = 0.0, not calls
        if not calls and self._has_step:
            messages, reward, is_done = read_turn(await finished(self._environment.step(text)))
        if (is_done or is_last) and not self._has_step:
            reward = await self._reward()
        elif is_last and not is_done:
            reward += await self._truncate()
        self.turn += 1
        return EpisodeReply(messages, reward, is_done, calls, failed)

    async def truncated(self) -> EpisodeReply:
        """End the episode for want of room, with the rest of its reward."""
        return EpisodeReply(reward=await (self._truncate() if self._has_step else self._reward()), is_done=True)

    async def close(self) -> None:
        """End the episode."""
        if hasattr(self._environment, "close"):
            await finished(self._environment.close())

    async def _truncate(self) -> float:
        """Return the rest of the reward of an episode that its environment has not ended."""
        if not hasattr(self._environment, "truncate"):
            return 0.0
        return read_reward(await finished(self._environment.truncate()))

    async def _reward(self) -> float:
        """Return the reward of an episode in TRL's form."""
        if hasattr(self._environment, "get_reward"):
            return read_reward(await finished(self._environment.get_reward()))
        return read_reward(getattr(self._environment, "reward", 0.0))
