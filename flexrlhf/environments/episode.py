"""One episode: an environment, tools, or both. Worker processes load this: the standard library alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexrlhf.environments.base import EpisodeReply
from flexrlhf.environments.tool_runs import Functions, ToolRuns, finished, has_steps, tool_methods
from flexrlhf.environments.turn_checks import MAX_OF_EPISODE, num_characters, read_messages, read_reward, read_turn
from flexrlhf.user_code.call_failures import BadReply

Texts = tuple[tuple[str, str], ...]
"""Messages as (role, content)."""


class Episode:
    """Turns of one episode.

    A turn with calls of tools is replied to by the tools, any other one by the environment's ``step``; without
    ``step`` it ends the episode. An environment in TRL's form has no ``step``, or one that is a tool: its other methods
    are tools, ``reset`` receives the row's columns by name, and ``get_reward()``, or else its attribute ``reward``, is
    the reward.

    environment:  null: tools alone
    tools:        by name
    tool_format:  how calls of tools are written
    """

    def __init__(self, environment: Any, tools: Functions, tool_format: str) -> None:
        self._environment = environment
        self._has_step = environment is not None and has_steps(type(environment))
        methods = {} if self._has_step or environment is None else tool_methods(environment)
        self._tools = ToolRuns({**tools, **methods}, tool_format)
        self.turn = 0
        self._characters = 0

    async def reset(self, row: Mapping[str, Any], seed: int) -> EpisodeReply:
        """Begin the episode."""
        if self._environment is None:
            return EpisodeReply()
        reset = self._environment.reset
        return EpisodeReply(self._read(await finished(reset(row, seed) if self._has_step else reset(**row))))

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
        self._count(messages)
        return EpisodeReply(messages, reward, is_done, calls, failed)

    async def truncated(self) -> EpisodeReply:
        """End the episode for want of room, with the rest of its reward."""
        return EpisodeReply(reward=await (self._truncate() if self._has_step else self._reward()), is_done=True)

    async def close(self) -> None:
        """End the episode."""
        if hasattr(self._environment, "close"):
            await finished(self._environment.close())

    def _read(self, value: Any) -> Texts:
        messages = read_messages(value)
        self._count(messages)
        return messages

    def _count(self, messages: Texts) -> None:
        """Count the characters of a reply. Raises BadReply for too many in the episode."""
        self._characters += num_characters(messages)
        if self._characters > MAX_OF_EPISODE:
            raise BadReply(f"the replies of the episode have {self._characters} characters; {MAX_OF_EPISODE} are read")

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
