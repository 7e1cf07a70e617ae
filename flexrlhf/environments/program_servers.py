"""Programs on other machines (``environment.path: http://...`` with ``api: openai``), in the place of a process here.

A server of programs receives an episode as a POST of JSON, ``{row, base_url, api_key, model, seed, options}``, runs its
program, which calls the policy at ``base_url``, and replies with ``{"reward": number}`` once that has ended. Worker
processes load this: the standard library alone.

| a server                                       | the episode                                              |
|------------------------------------------------|----------------------------------------------------------|
| is not reached in CONNECT_SECONDS, or replies  | begins with the next one; each address is tried once     |
| at once with status 429 or 503 (no room)       |                                                          |
| goes away, or ends the connection              | has a failure of the kind ``server``                     |
| replies with another status than 2xx           | has a failure, with the reply's text                     |
| replies with what is no reward                 | has a failure                                            |
| makes no call of the policy in timeout_seconds | has a failure, and its connection is closed              |

The program calls the policy by the address of this machine that has the route to its server. Requests go through no
proxy: the server has to reach this machine, too, so it is of the job's network.
"""

from __future__ import annotations

import json
import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from queue import SimpleQueue
from typing import Any
from urllib.parse import unquote, urlsplit

from flexrlhf.environments.servers import Servers
from flexrlhf.environments.turn_checks import read_reward
from flexrlhf.user_code.call_failures import BadReply, CallFailure, ServerGone

CONNECT_SECONDS = 5.0
"""Limit of connecting to a server, and of sending it an episode."""
SILENCE_SECONDS = 20
"""Time after which a machine that no longer confirms a connection is probed, and three times that until it has gone."""
MOST_BYTES = 1 << 20
"""Longest reply of a server."""
FULL = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""Statuses of a server without room for another episode."""


class ProgramServers:
    """Servers that run programs, for the episodes of a process."""

    def __init__(
        self,
        addresses: Sequence[str],
        options: Mapping[str, Any],
        base_url: Callable[[str], str],
        has_called: Callable[[str], bool],
    ) -> None:
        """
        addresses:  as the YAML has them.
        options:    further arguments of the program.
        base_url:   returns the URL of the policy at an address of this machine.
        has_called: returns whether the program of an episode has called the policy.
        """
        self._servers, self._options = Servers(addresses), dict(options)
        self._base_url, self._has_called = base_url, has_called
        self._outcomes: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._guard = threading.Lock()
        self._connections: dict[str, HTTPConnection | None] = {}
        """Of each episode under way; None before it is there."""
        self._addresses: dict[str, str] = {}

    @property
    def outcomes(self) -> Iterator[dict[str, Any]]:
        """Outcomes of episodes, without end."""
        while True:
            yield self._outcomes.get()

    def address_of(self, key: str) -> str:
        """Return the address of the server that has an episode; empty if none has it."""
        return self._addresses.get(key, "")

    def order(self, order: Mapping[str, Any]) -> None:
        """Begin an episode, or end one whose order has its key alone."""
        key = order["key"]
        if "row" in order:
            self._connections[key] = None
            threading.Thread(target=self._play, args=(key, order), daemon=True).start()
            return
        with self._guard:
            connection = self._connections.pop(key, None)
        if connection is not None:
            _end(connection)

    def _play(self, key: str, order: Mapping[str, Any]) -> None:
        """Report the outcome of an episode."""
        outcome: dict[str, Any] = {"key": key}
        try:
            outcome["reward"] = self._reward(key, order)
        except (ServerGone, BadReply) as error:
            failure = CallFailure.of(error, "raise", "raised")
            outcome |= {"kind": failure.kind, "text": failure.text}
        except _RefusedError as error:
            outcome |= {"kind": error.failure.kind, "text": error.failure.text}
        with self._guard:
            self._connections.pop(key, None)
            self._addresses.pop(key, None)
        self._outcomes.put(outcome)

    def _reward(self, key: str, order: Mapping[str, Any]) -> float:
        """Return the reward of an episode from the first server that takes it."""
        reasons: list[str] = []
        for address in self._servers.in_order(order["episode"]):
            self._addresses[key] = address
            try:
                return self._reward_of(address, key, order)
            except _NotTakenError as error:
                self._servers.leave(address, str(error))
                reasons.append(f"{address}: {error}")
        raise ServerGone("; ".join(reasons))

    def _reward_of(self, address: str, key: str, order: Mapping[str, Any]) -> float:
        parts = urlsplit(address)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            self._send(connection, address, order)
        except (OSError, HTTPException) as error:
            connection.close()
            raise _NotTakenError(f"not reached: {error}") from None
        with self._guard:
            if key not in self._connections:
                # it has been ended meanwhile
                _end(connection)
            else:
                self._connections[key] = connection
        try:
            response = connection.getresponse()
            content = response.read(MOST_BYTES + 1)
        except (OSError, HTTPException) as error:
            reason = f"has gone: {type(error).__name__} {error}".rstrip()
            raise ServerGone(f"{address}: {reason}", self._servers.shown(address)) from None
        finally:
            connection.close()
        text = content[:200].decode(errors="replace")
        if response.status in FULL and not self._has_called(key):
            raise _NotTakenError(f"has no room for another episode: {text}")
        if not HTTPStatus.OK <= response.status < HTTPStatus.MULTIPLE_CHOICES:
            raise _RefusedError(CallFailure("raise", f"{address}: status {response.status}: {text}"))
        return _read(content, address)

    def _send(self, connection: HTTPConnection, address: str, order: Mapping[str, Any]) -> None:
        """Send an episode, with the address of the policy as its server may reach it."""
        parts, sent = urlsplit(address), {name: order[name] for name in ("row", "model", "seed")}
        sent |= {"api_key": order["key"], "base_url": self._base_url(connection.sock.getsockname()[0])}
        headers = {"Content-Type": "application/json"}
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = f"Basic {b64encode(user.encode()).decode()}"
        path = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
        connection.request("POST", path, json.dumps({**sent, "options": self._options}, default=str), headers)
        # the program has the time that it needs; whether its machine is there is probed
        connection.sock.settimeout(None)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            if hasattr(socket, name):
                connection.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), SILENCE_SECONDS)
        if hasattr(socket, "TCP_KEEPCNT"):
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


class _NotTakenError(Exception):
    """A server that has not taken an episode."""


class _RefusedError(Exception):
    """A reply that is no reward."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(failure.text)
        self.failure = failure


def _end(connection: HTTPConnection) -> None:
    """End a connection that a thread may be reading from."""
    with suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)


def _read(content: bytes, address: str) -> float:
    """Return the reward in a reply. Raises BadReply."""
    try:
        found = json.loads(content[:MOST_BYTES])
    except ValueError:
        raise BadReply(f"{address}: replied {content[:60]!r}, which is not JSON") from None
    if not isinstance(found, dict) or "reward" not in found:
        raise BadReply(f'{address}: replied {found!r:.60} instead of {{"reward": number}}')
    return read_reward(found["reward"])
