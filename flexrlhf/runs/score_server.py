"""HTTP server of scores, which ``flexrlhf.rewards.services`` and OpenRLHF's remote reward models call.

Request: POST of JSON ``{"query": [prompt + response, ...]}``, usually with ``prompts`` and ``labels``, of level token
with ``num_tokens``, of level step with ``steps``. Reply: ``{"rewards": [...]}``. Every other reply is a sentence:

| status | because                                                       |
|--------|---------------------------------------------------------------|
| 400    | the request is not of this form, or of a level without scores |
| 401    | it lacks the server's secret                                  |
| 411    | it does not say how long it is                                |
| 413    | it has more than MOST_BYTES                                   |
| 500    | the source of scores failed for all of its responses          |

A connection is closed without a reply if its request does not arrive in time: the head in HEAD_SECONDS, then with the
secret after a silence of RECEIVE_SECONDS, without one once the body takes longer than that and LEAST_RATE. One address
may have half of the connections, so that others are served whatever it does.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic_core import from_json

from flexrlhf.config.reward_sources import Level
from flexrlhf.errors import UserError, one_line
from flexrlhf.rewards.base import ScoreBatch
from flexrlhf.runs.served_scores import ServedScores
from flexrlhf.serving.token_server import Refused, TokenHandler, TokenServer
from flexrlhf.text import counted

MOST_BYTES = 2**28
"""Longest request."""
RECEIVE_SECONDS = 60.0
"""Time for the body of a request and for its reply."""
OF_A_RESPONSE = ("none", "tokens", "steps", "ends")
"""Failures that cost the score of one response, not those of a request."""


@dataclass(frozen=True)
class ScoreRequest:
    """Responses to score. ``level``: follows from the columns of the request."""

    batch: ScoreBatch
    level: Level


def read_request(body: bytes, label: str) -> ScoreRequest:
    """Return the responses of a request. Raises Refused. ``label``: name of the column with its labels."""
    try:
        content = from_json(body)
    except ValueError:
        raise _malformed(f"{body[:60].decode(errors='replace')!r} is not JSON") from None
    if not isinstance(content, dict):
        raise _malformed(f"expected an object with the key 'query', found {content!r:.60}")
    queries = _texts(content, "query")
    number = len(queries)
    prompts = _texts(content, "prompts", number) if content.get("prompts") is not None else [""] * number
    labels = content.get("labels")
    if labels is not None and not (isinstance(labels, list) and len(labels) == number):
        raise _malformed(f"labels: expected a list of {number}, as of query, found {labels!r:.60}")
    lengths, steps = content.get("num_tokens"), content.get("steps")
    if lengths is not None and not _is_list(lengths, int, number):
        raise _malformed(f"num_tokens: expected a list of {number} whole numbers, found {lengths!r:.60}")
    if steps is not None and not (_is_list(steps, list, number) and all(_is_list(each, str) for each in steps)):
        raise _malformed(f"steps: expected a list of {number} lists of texts, found {steps!r:.60}")
    responses = [_response(*each) for each in zip(queries, prompts, strict=True)]
    columns = {} if labels is None else {label: labels}
    batch = ScoreBatch(prompts, responses, lengths or [], columns, steps, [[]] * number, [[]] * number)
    return ScoreRequest(batch, "step" if steps is not None else "token" if lengths is not None else "answer")


def _malformed(sentence: str) -> Refused:
    return Refused(HTTPStatus.BAD_REQUEST, sentence)


def _is_list(value: Any, kind: type, number: int | None = None) -> bool:
    """Whether ``value`` is a list of ``number`` values of ``kind``, which no truth value is."""
    return (
        isinstance(value, list)
        and number in (None, len(value))
        and all(isinstance(each, kind) and not isinstance(each, bool) for each in value)
    )


def _texts(content: dict[str, Any], key: str, number: int | None = None) -> list[str]:
    texts = content.get(key)
    if not _is_list(texts, str, number):
        many = "texts" if number is None else f"{number} texts, as of query"
        raise _malformed(f"{key}: expected a list of {many}, found {texts!r:.60}")
    assert isinstance(texts, list), "it is a list of texts"
    return texts


def _response(query: str, prompt: str) -> str:
    """Return the text behind the prompt. Special tokens may be in front of it, as OpenRLHF sends them."""
    before, found, response = query.partition(prompt) if prompt else ("", "found", query)
    if not found:
        raise _malformed(f"query: {query!r:.60} does not contain its prompt {prompt!r:.60}")
    return response


class ScoreServer(TokenServer):
    """Server of the scores of ``source``.

    token:  secret that requests have as ``Authorization: Bearer``; None: nobody needs one.
    label:  name of the column with the labels of a request.
    """

    def __init__(self, source: ServedScores, host: str, port: int, token: str | None, label: str) -> None:
        """Listen. Raises UserError for an address that is in use, or is not of this machine."""
        self.source, self.label, self.has_token = source, label, token is not None
        self.requests = 0
        try:
            half = self.connection_room(self.MOST_CONNECTIONS) // 2
            super().__init__(host, _ScoreHandler, token or "", RECEIVE_SECONDS, half, "serve-reward", port)
        except OSError as error:
            raise UserError(f"--host {host} --port {port}: {error.strerror}; give others") from None


class _ScoreHandler(TokenHandler):
    """One request."""

    server: ScoreServer

    def do_POST(self) -> None:  # noqa: N802 (http.server's name)
        """Return the scores of the responses."""
        start, self._note = time.monotonic(), ""
        with self._responding():
            self._verify_token()
            if (length := self._length()) > MOST_BYTES:
                raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the request has more than {MOST_BYTES} bytes")
            request = read_request(self.rfile.read(length), self.server.label)
            values = self._scores(request)
            means = [value for value in values if isinstance(value, float) and math.isfinite(value)]
            mean = f", mean {sum(means) / len(means):.4g}" if means else ""
            self._note = f"{counted(len(values), 'response')} in {time.monotonic() - start:.2f} s{mean}"
            self._respond(HTTPStatus.OK, json.dumps({"rewards": values}))

    def _verify_token(self) -> None:
        """Raise Refused if the server has a secret that the request lacks."""
        if not self.server.has_token:
            self.arriving.within(self.server.seconds)
            return
        try:
            super()._verify_token()
        except Refused:
            raise Refused(
                HTTPStatus.UNAUTHORIZED, "expected the header Authorization: Bearer with the secret"
            ) from None

    def _scores(self, request: ScoreRequest) -> list[Any]:
        """Return the scores as JSON has them. Raises Refused where there are none."""
        try:
            reply = self.server.source.score(request.batch, request.level)
        except UserError as error:
            raise _malformed(str(error)) from None
        if (
            reply.failure is not None
            and reply.failure.kind not in OF_A_RESPONSE
            and not any(score is not None for score in reply.scores)
        ):
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, reply.failure.text)
        return reply.as_json

    def _respond(self, status: HTTPStatus, text: str) -> None:
        """Respond, and print a line about the request."""
        self.server.requests += 1
        note = self._note if status == HTTPStatus.OK else f"{status.value}: {text}"
        print(one_line(f"{time.strftime('%H:%M:%S')} {self.client_address[0]}: {note}"), flush=True)
        super()._respond(status, text)
