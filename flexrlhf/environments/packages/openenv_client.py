"""Environments that OpenEnv serves: a session for each episode, by the messages of its WebSocket."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from flexrlhf.api import Address, ServerGone, Turn

MOST_BYTES = 100 << 20
"""Longest message that is read, as of OpenEnv's own client."""
CLOSE_SECONDS = 1.0
"""Time in which a server confirms that a session has ended."""
FULL = "CAPACITY_REACHED"
"""Code of the error of a server that has no room for another session."""


class OpenEnvClient:
    """One episode of ``openenv:URL``.

    url:      of the server
    action:   field of the action that has the policy's text; null: the text is the action, as JSON
    message:  field of the observation that has the text for the policy; null: the observation as JSON
    connect_seconds: limit of connecting to the server
    options:  arguments of the environment's reset, in addition to seed
    """

    library, extra = "websockets", "openenv"

    def __init__(
        self,
        url: str,
        action: str | None = "message",
        message: str | None = None,
        connect_seconds: float = 5.0,
        **options: Any,
    ) -> None:
        self._address, self._seconds = Address(url), connect_seconds
        self._action, self._message, self._options = action, message, options
        self._socket: Any = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Open a session; the row's column ``reset``, if any, has further arguments. Raises ServerGone."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        proxy = self._address.proxy()
        try:
            self._socket = await connect(
                self._socket_url,
                open_timeout=self._seconds,
                close_timeout=CLOSE_SECONDS,
                max_size=MOST_BYTES,
                proxy=None if proxy is None else proxy.url,
            )
        except (OSError, WebSocketException) as error:
            raise ServerGone(f"not reached: {error}{self._address.unreachable()}") from None
        arguments = {"seed": seed % 2**31, **self._options, **row.get("reset", {})}
        return self._text((await self._exchange("reset", arguments))["observation"])

    async def step(self, reply: str) -> Turn:
        """Send the action of a reply. Text that is no JSON object, where one is needed, has a message about it."""
        action = {self._action: reply} if self._action is not None else _object(reply)
        if action is None:
            return Turn("no action: expected a JSON object")
        result = await self._exchange("step", action)
        return Turn(self._text(result["observation"]), result.get("reward") or 0.0, bool(result.get("done")))

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()

    async def _exchange(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of the reply to a message. Raises ServerGone, and ValueError for an error of the server."""
        from websockets.exceptions import ConnectionClosed

        try:
            # a server without room says so and closes: what it has said is read below
            with suppress(ConnectionClosed):
                await self._socket.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(await self._socket.recv())
        except (OSError, ConnectionClosed) as error:
            raise ServerGone(f"has gone: {error}") from None
        found: dict[str, Any] = reply.get("data", {})
        if reply.get("type") != "error":
            return found
        if found.get("code") == FULL:
            raise ServerGone(f"has no room for another session: {found.get('message')}")
        raise ValueError(f"the server replied to {kind} with {found.get('message')!r} ({found.get('code')})")

    @property
    def _socket_url(self) -> str:
        parts = urlsplit(self._address.url)
        scheme = "wss" if parts.scheme in ("https", "wss") else "ws"
        return parts._replace(scheme=scheme, path=f"{parts.path.rstrip('/')}/ws").geturl()

    def _text(self, observation: Mapping[str, Any]) -> str:
        value = observation if self._message is None else observation.get(self._message, "")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
