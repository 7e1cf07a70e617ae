"""An HTTP service as a source of scores, in the form of OpenRLHF's remote reward models.

Request: POST of JSON ``{"query": [prompt + response, ...], "prompts": [...], "labels": [...]}``; with level token also
``"num_tokens": [...]``, with a separator ``"steps": [[...], ...]``. Reply: ``{"rewards": [...]}``,
``{"scores": [...]}`` or the list alone.

| the service                                   | what happens                                                    |
|-----------------------------------------------|-----------------------------------------------------------------|
| is slow: no whole reply in timeout_seconds    | retry                                                           |
| refuses the connection, or drops it           | retry                                                           |
| replies with another status than 2xx          | retry                                                           |
| replies with what is not JSON, no list,       | retry                                                           |
| another number of scores, no numbers, or more |                                                                 |
| than MOST_BYTES                               |                                                                 |
| returns NaN or an infinity for a response     | the response has that score; no retry                           |
| returns null for a response, or, with level   | no score for that response; no retry                            |
| token or step, a list of another length       |                                                                 |
| failed 1 + retries times                      | no scores for the batch                                         |
| no usable reply in deadline_seconds           | no scores for the batch                                         |
| timed out for three batches in a row          | no scores for the step's batches that are not yet under way     |
| is not done by the step's deadline            | no scores for the batches that are left                         |

A retry comes after a random pause of up to FIRST_PAUSE_SECONDS, twice as long each time, and goes to the next of
several URLs. Batches go to the URLs in turn. At most ``concurrency`` batches are under way; the deadline of a batch
runs from when it is. A service that stays dead costs its scores; whether the run then stops is not decided here.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ssl import SSLContext
from typing import Any

import httpx
from pydantic_core import from_json
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from flexrlhf.config.proxies import Address, check_certificates
from flexrlhf.config.reward_sources import ServiceSource
from flexrlhf.config.secrets import expanded, masked
from flexrlhf.rewards.base import Reply, Sample, Score, ScoreBatch, make_batches
from flexrlhf.rewards.limits import CircuitBreaker
from flexrlhf.rewards.replies import read_reply
from flexrlhf.text import bytes_text
from flexrlhf.user_code.call_failures import BadReply, CallFailed, CallFailure, WarnOnce
from flexrlhf.user_code.deadline import Deadline

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
MOST_BYTES = 2**28
"""Longest reply: scores of a batch, also one a token, take some megabytes."""
HTTP_ERRORS = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError)
"""Bases of all errors of a request."""
Clients = Sequence[httpx.AsyncClient]
"""A client for each URL of a service."""


class HttpService:
    """A service at one or several URLs. ``first_pause``: the longest pause before the first retry, in seconds."""

    def __init__(self, source: ServiceSource, warn: WarnOnce, first_pause: float = FIRST_PAUSE_SECONDS) -> None:
        self._source, self._warn, self._first_pause = source, warn, first_pause
        # raises UserError for an environment variable that this rank lacks, or a proxy that it cannot use
        self._headers()
        for url in source.url:
            Address.expanded(url, "url").proxy()
        check_certificates()
        # counts on from step to step, so that steps of one batch use all URLs, too
        self._turns = itertools.count()

    def score(self, samples: Sequence[Sample], deadline: Deadline) -> list[Score]:
        """Return one score a sample; bounded by the deadline, and the time in which a name server fails.

        Not from a thread with an event loop.
        """
        replies = asyncio.run(
            self._replies(make_batches(samples, self._source.batch_size, self._source.separator), deadline)
        )
        for reply in replies:
            self._warn(reply.failure)
        return [score for reply in replies for score in reply.scores]

    def close(self) -> None:
        """Do nothing: connections live as long as one ``score``."""

    async def _replies(self, batches: Sequence[ScoreBatch], deadline: Deadline) -> list[Reply]:
        """Return one reply a batch, each sent once fewer than ``concurrency`` others are under way."""
        concurrency, breaker = asyncio.Semaphore(self._source.concurrency), CircuitBreaker(deadline)

        async def reply(clients: Clients, batch: ScoreBatch, turn: int) -> Reply:
            async with concurrency:
                failure = breaker.failure()
                found = Reply.failed(batch, failure) if failure else await self._send(clients, batch, turn, deadline)
                breaker.record(found)
                return found

        # with the certificates that the environment names
        certificates = httpx.create_ssl_context()
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self._client(url, certificates)) for url in self._source.url]
            return await asyncio.gather(*(reply(clients, batch, next(self._turns)) for batch in batches))

    def _client(self, url: str, certificates: SSLContext) -> httpx.AsyncClient:
        """Return a client for the requests to ``url``, by its proxy if it has one."""
        proxy = Address.expanded(url, "url").proxy()
        return httpx.AsyncClient(
            headers=self._headers(),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            timeout=None,
            limits=httpx.Limits(max_connections=self._source.concurrency),
            verify=certificates,
            trust_env=False,
            proxy=None if proxy is None else proxy.url,
        )

    async def _send(self, clients: Clients, batch: ScoreBatch, turn: int, deadline: Deadline) -> Reply:
        """Return the reply to one batch, after as many requests as it takes."""
        failures: list[CallFailure] = []
        content = self._content(batch)
        limit = min(self._source.deadline_seconds, deadline.left())
        try:
            async with asyncio.timeout(limit):
                return await self._retrying()(self._request, clients, batch, content, turn, failures)
        except CallFailed as error:
            return Reply.failed(batch, error.failure)
        except TimeoutError:
            late = CallFailure("deadline", f"no scores within {self._source.deadline_seconds:g} s")
            late = deadline.failure() if limit < self._source.deadline_seconds else late
            further = f"; last {failures[-1].text}" if failures else ""
            return Reply.failed(batch, replace(late, text=late.text + further))

    async def _request(
        self, clients: Clients, batch: ScoreBatch, content: bytes, turn: int, failures: list[CallFailure]
    ) -> Reply:
        """Send one request, to the next URL with every failure of the batch so far. Raises CallFailed."""
        place = (turn + len(failures)) % len(clients)
        url, client = self._source.url[place], clients[place]
        try:
            async with asyncio.timeout(self._source.timeout_seconds):
                address, headers = Address.expanded(url, "url").url, {"Content-Type": "application/json"}
                async with client.stream("POST", address, content=content, headers=headers) as response:
                    reply = await _received(response)
            return read_reply(_scores(reply), batch, self._source.level)
        except (*HTTP_ERRORS, BadReply) as error:
            failures.append(self._failure(url, error))
            raise CallFailed(failures[-1]) from None

    def _content(self, batch: ScoreBatch) -> bytes:
        """Return the request's JSON, escaped to ASCII: half a surrogate pair cannot be sent otherwise."""
        labels = batch.columns.get(self._source.label, [None] * len(batch))
        queries = [prompt + response for prompt, response in zip(batch.prompts, batch.responses, strict=True)]
        content = {"query": queries, "prompts": batch.prompts, "labels": labels}
        lengths = {"num_tokens": batch.num_tokens} if self._source.level == "token" else {}
        steps = {} if batch.steps is None else {"steps": batch.steps}
        return json.dumps(content | lengths | steps).encode()

    def _retrying(self) -> AsyncRetrying:
        return AsyncRetrying(
            stop=stop_after_attempt(1 + self._source.retries),
            wait=wait_random_exponential(multiplier=self._first_pause, max=LONGEST_PAUSE_SECONDS),
            retry=retry_if_exception_type(CallFailed),
            reraise=True,
        )

    def _headers(self) -> dict[str, str]:
        """Return the further headers, with the values of environment variables."""
        return {name: expanded(value, f"headers.{name}") for name, value in self._source.headers.items()}

    def _failure(self, url: str, error: Exception) -> CallFailure:
        """Return why a request failed, without the values of environment variables."""
        failure = self._described(url, error)
        return replace(failure, text=masked(failure.text, [*self._source.url, *self._source.headers.values()]))

    def _described(self, url: str, error: Exception) -> CallFailure:
        # one is in the name of the source
        where = f"{url}: " if len(self._source.url) > 1 else ""
        if isinstance(error, TimeoutError):
            return CallFailure("timeout", f"{where}no reply within {self._source.timeout_seconds:g} s")
        if isinstance(error, BadReply):
            return CallFailure("reply", f"{where}{error}")
        if isinstance(error, httpx.HTTPStatusError):
            return CallFailure("status", f"{where}status {error.response.status_code}")
        through = Address.expanded(url, "url").unreachable()
        return CallFailure("connection", f"{where}{type(error).__name__} {error}".rstrip() + through)


async def _received(response: httpx.Response) -> bytes:
    """Return the content of a reply. Raises HTTPStatusError, or BadReply for one that is too long."""
    if not response.is_success:
        raise httpx.HTTPStatusError("", request=response.request, response=response)
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > MOST_BYTES:
            raise BadReply(f"returned more than {bytes_text(MOST_BYTES)}")
    return bytes(content)


def _scores(reply: bytes) -> Any:
    """Return the part of a reply that should be the scores. Raises BadReply."""
    try:
        # Python's own reader ends at its limit of recursion, in another kind of error
        content = from_json(reply)
    except ValueError:
        raise BadReply(f"returned {reply[:60].decode(errors='replace')!r}, which is not JSON") from None
    if not isinstance(content, dict):
        return content
    return content.get("rewards", content.get("scores", content))
