"""Servers that run episodes: which one an episode has. Worker processes load this: the standard library alone.

| a server                                  | its episodes                                                         |
|-------------------------------------------|----------------------------------------------------------------------|
| is not reached when an episode begins     | begin with the next one; each address is tried once                  |
| is lost in the middle                     | have a failure, with its address                                     |
| does not reply, with its connection open  | have a failure after ``timeout_seconds``, with its address           |
| was not reached in the last RETRY_SECONDS | try the others first                                                 |

An episode's first server is a function of its step and row, so that servers share the episodes and a replay finds the
same one. No result depends on the choice if servers are equal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flexrlhf.config.secrets import expanded_url, masked
from flexrlhf.environments.base import EpisodeReply
from flexrlhf.environments.episode import Episode
from flexrlhf.user_code.call_failures import ServerGone

RETRY_SECONDS = 30.0
"""Time in which a server that was not reached is the last one that an episode tries."""


class Servers:
    """Addresses of equal servers, for the episodes of a process."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """``addresses``: as the YAML has them, with names of variables."""
        self._named = addresses
        self._addresses = [expanded_url(each, "environment.path") for each in addresses]
        self._absent_until: dict[str, float] = {}

    def in_order(self, key: tuple[int, int]) -> list[str]:
        """Return the addresses in the order in which the episode of ``key`` tries them."""
        turn, count = sum(key), len(self._addresses)
        first = turn % count
        others = self._addresses[first + 1 :] + self._addresses[:first]
        # if one is gone, all others share its episodes
        second = turn // count % max(1, len(others))
        order = [self._addresses[first], *others[second:], *others[:second]]
        now = time.monotonic()
        return sorted(order, key=lambda address: self._absent_until.get(address, now) > now)

    def leave(self, address: str, reason: str) -> None:
        """Try a server that was not reached after the others for a while; say so the first time."""
        if address not in self._absent_until and len(self._addresses) > 1:
            text = self.shown(f"server {address}: {reason}; its episodes begin with the next one")
            print(f"flexrlhf: environment: {text}", file=sys.stderr)
        self._absent_until[address] = time.monotonic() + RETRY_SECONDS

    def shown(self, text: str) -> str:
        """Return a text without the values of variables that addresses name."""
        return masked(text, self._named)


class ServedEpisode:
    """Turns of one episode that a server runs.

    address:  of the server that has the episode, or is tried; empty before its reset
    """

    def __init__(self, servers: Servers, key: tuple[int, int], make: Callable[[str], Episode]) -> None:
        """``make``: returns an episode of the server at an address, which raises ServerGone without it."""
        self._servers, self._key, self._make = servers, key, make
        self._episode: Episode | None = None
        self.address = ""

    @property
    def turn(self) -> int:
        """Number of turns that have a reply."""
        return 0 if self._episode is None else self._episode.turn

    async def reset(self, row: Mapping[str, Any], seed: int) -> EpisodeReply:
        """Begin the episode, with the first server that replies. Raises ServerGone if none does."""
        reasons: list[str] = []
        for address in self._servers.in_order(self._key):
            self.address, self._episode = address, self._make(address)
            try:
                return await self._episode.reset(row, seed)
            except ServerGone as error:
                self._servers.leave(address, str(error))
                reasons.append(f"{address}: {error}")
                await self._episode.close()
        raise ServerGone("; ".join(reasons))

    async def reply(self, text: str, is_last: bool) -> EpisodeReply:
        """Return the reply to a turn. Raises ServerGone, with the address."""
        try:
            return await self._begun.reply(text, is_last)
        except ServerGone as error:
            raise ServerGone(f"{self.address}: {error}", self._servers.shown(self.address)) from None

    async def truncated(self) -> EpisodeReply:
        """End the episode for want of room, with the rest of its reward. Raises ServerGone, with the address."""
        try:
            return await self._begun.truncated()
        except ServerGone as error:
            raise ServerGone(f"{self.address}: {error}", self._servers.shown(self.address)) from None

    async def close(self) -> None:
        """End the episode."""
        if self._episode is not None:
            await self._episode.close()

    @property
    def _begun(self) -> Episode:
        assert self._episode is not None, "an episode begins by its reset"
        return self._episode
