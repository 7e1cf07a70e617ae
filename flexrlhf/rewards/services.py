"""An HTTP service as a source of scores, in the form of OpenRLHF's remote reward models.

Request: POST of JSON ``{"query": [prompt + response, ...], "prompts": [...], "labels": [...]}``; with level token also
``"num_tokens": [...]``. Reply: ``{"rewards": [...]}``, ``{"scores": [...]}`` or the list alone.

| the service                                   | what is done                                                    |
|-----------------------------------------------|-----------------------------------------------------------------|
| is slow: no whole reply in timeout_seconds    | asked again                                                     |
| refuses the connection, or drops it           | asked again                                                     |
| replies with another status than 2xx          | asked again                                                     |
| replies with what is not JSON, no list,       | asked again                                                     |
| another number of scores, or no numbers       |                                                                 |
| says NaN or an infinity for an answer         | the answer has that score; not asked again                      |
| says null for an answer, or, at level token,  | nothing for that answer; not asked again                        |
| a list of another length                      |                                                                 |
| failed 1 + retries times                      | nothing for the batch                                           |
| has not replied well in deadline_seconds      | nothing for the batch                                           |
| timed out for three batches running           | nothing for the step's batches that are not yet under way       |
| is not done by the step's deadline            | nothing for the batches that are left                           |

Asking again: after a random pause of up to FIRST_PAUSE_SECONDS, twice as long each time, and at the next of several
URLs. Batches go to the URLs in turn. At most ``concurrency`` batches are under way; the deadline of a batch runs from
when it is. A service that stays dead costs its scores; whether the run then stops is not decided here.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from flexrlhf.config.reward_sources import ServiceSource
from flexrlhf.rewards.base import Answer, Batch, Entry, Problem, Reply, batches_of, nothing
from flexrlhf.rewards.limits import Deadline, Patience
from flexrlhf.rewards.replies import BadReply, read_reply
from flexrlhf.rewards.warn_once import Told

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0


class RequestFailed(Exception):
    """One request without a reply of use."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


@dataclass(frozen=True)
class _Step:
    """What the batches of one step share. ``free``: a place among the batches that are under way."""

    client: httpx.AsyncClient
    free: asyncio.Semaphore
    deadline: Deadline
    patience: Patience


class Service:
    """``first_pause``: the longest pause before the first of the retries, in seconds."""

    def __init__(self, source: ServiceSource, told: Told, first_pause: float = FIRST_PAUSE_SECONDS) -> None:
        self._source, self._told, self._first_pause = source, told, first_pause
        # goes on from step to step, so that steps of one batch use all URLs, too
        self._turns = itertools.count()

    def ask(self, answers: Sequence[Answer], deadline: Deadline) -> list[Entry]:
        """Bounded by the deadline, and what a name server may take to fail.

        Not from a thread with an event loop.
        """
        replies = asyncio.run(self._ask(batches_of(answers, self._source.batch_size), deadline))
        for reply in replies:
            self._told(reply.problem)
        return [entry for reply in replies for entry in reply.entries]

    def close(self) -> None:
        """Connections live as long as one ``ask``."""

    async def _ask(self, batches: Sequence[Batch], deadline: Deadline) -> list[Reply]:
        free = asyncio.Semaphore(self._source.concurrency)
        limits = httpx.Limits(max_connections=self._source.concurrency)
        async with httpx.AsyncClient(headers=self._source.headers, timeout=None, limits=limits) as client:
            step = _Step(client, free, deadline, Patience(deadline))
            return await asyncio.gather(*(self._reply(step, batch, next(self._turns)) for batch in batches))

    async def _reply(self, step: _Step, batch: Batch, turn: int) -> Reply:
        """The reply to one batch, once there is a place for it."""
        async with step.free:
            problem = step.patience.ended()
            reply = nothing(batch, problem) if problem else await self._asked(step, batch, turn)
            step.patience.heard(reply)
            return reply

    async def _asked(self, step: _Step, batch: Batch, turn: int) -> Reply:
        """The reply to one batch, after as many requests as it takes."""
        failures: list[Problem] = []
        content = self._content(batch)
        limit = min(self._source.deadline_seconds, step.deadline.left())
        try:
            async with asyncio.timeout(limit):
                return await self._retrying()(self._request, step.client, batch, content, turn, failures)
        except RequestFailed as failure:
            return nothing(batch, failure.problem)
        except TimeoutError:
            is_last = limit < self._source.deadline_seconds
            return nothing(batch, step.deadline.problem() if is_last else self._late(failures))

    async def _request(
        self, client: httpx.AsyncClient, batch: Batch, content: bytes, turn: int, failures: list[Problem]
    ) -> Reply:
        """One request, to the next URL with every failure of the batch so far. Raises RequestFailed."""
        url = self._source.url[(turn + len(failures)) % len(self._source.url)]
        try:
            async with asyncio.timeout(self._source.timeout_seconds):
                response = await client.post(url, content=content, headers={"Content-Type": "application/json"})
            return read_reply(_scores(response), batch.num_tokens, self._source.level)
        except (httpx.HTTPError, OSError, BadReply) as error:
            failures.append(self._problem(url, error))
            raise RequestFailed(failures[-1]) from None

    def _content(self, batch: Batch) -> bytes:
        """Escaped to ASCII: a text of half a surrogate pair cannot be sent otherwise."""
        labels = batch.columns.get(self._source.label, [None] * len(batch))
        queries = [prompt + response for prompt, response in zip(batch.prompts, batch.responses, strict=True)]
        asked = {"query": queries, "prompts": batch.prompts, "labels": labels}
        lengths = {"num_tokens": batch.num_tokens} if self._source.level == "token" else {}
        return json.dumps(asked | lengths).encode()

    def _retrying(self) -> AsyncRetrying:
        return AsyncRetrying(
            stop=stop_after_attempt(1 + self._source.retries),
            wait=wait_random_exponential(multiplier=self._first_pause, max=LONGEST_PAUSE_SECONDS),
            retry=retry_if_exception_type(RequestFailed),
            reraise=True,
        )

    def _problem(self, url: str, error: Exception) -> Problem:
        if isinstance(error, TimeoutError):
            return Problem("timeout", f"{url}: no reply within {self._source.timeout_seconds:g} s")
        if isinstance(error, BadReply):
            return Problem("reply", f"{url} {error}")
        if isinstance(error, httpx.HTTPStatusError):
            return Problem("status", f"{url}: status {error.response.status_code}")
        return Problem("connection", f"{url}: {type(error).__name__} {error}".rstrip())

    def _late(self, failures: Sequence[Problem]) -> Problem:
        last = f"; last {failures[-1].text}" if failures else ""
        return Problem("deadline", f"no scores within {self._source.deadline_seconds:g} s{last}")


def _scores(response: httpx.Response) -> Any:
    """What stands for the scores in a reply. Raises HTTPStatusError or BadReply."""
    if not response.is_success:
        raise httpx.HTTPStatusError("", request=response.request, response=response)
    try:
        said = json.loads(response.content)
    except ValueError:
        raise BadReply(f"gave {response.text!r:.60}, which is not JSON") from None
    if not isinstance(said, dict):
        return said
    return said.get("rewards", said.get("scores", said))
