"""Environments that OpenEnv serves: a session for each episode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flexrlhf.api import Turn


class OpenEnvClient:
    """One episode of ``openenv:URL``.

    url:      of the server
    action:   field of the action that has the policy's text; null: the text is the action, as JSON
    message:  field of the observation that has the text for the policy; null: the observation as JSON
    options:  arguments of the environment's reset, in addition to seed
    """

    library, extra = "openenv", "openenv"

    def __init__(self, url: str, action: str | None = "message", message: str | None = None, **options: Any) -> None:
        from openenv import GenericEnvClient

        self._action, self._message, self._options = action, message, options
        self._client = GenericEnvClient(base_url=url)

    async def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Open a session; the row's column ``reset``, if any, has further arguments."""
        await self._client.connect()
        result = await self._client.reset(seed=seed % 2**31, **self._options, **row.get("reset", {}))
        return self._text(result.observation)

    async def step(self, reply: str) -> Turn:
        """Send the action of a reply. Text that is no JSON object, where one is needed, has a message about it."""
        action = {self._action: reply} if self._action is not None else _object(reply)
        if action is None:
            return Turn("no action: expected a JSON object")
        result = await self._client.step(action)
        return Turn(self._text(result.observation), result.reward or 0.0, bool(result.done))

    async def close(self) -> None:
        """End the session."""
        await self._client.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        value = observation if self._message is None else observation.get(self._message, "")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
