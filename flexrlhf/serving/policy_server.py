"""HTTP server of a policy in OpenAI's protocol, for clients of any framework.

| path                                     | reply                                                            |
|------------------------------------------|------------------------------------------------------------------|
| GET ``/v1/models``                       | the one model                                                    |
| POST ``/v1/chat/completions``            | a message: text, reasoning, calls of functions                   |
| POST ``/v1/completions``                 | a text                                                           |

Paths work without ``/v1``, too. Every other reply is an error in OpenAI's form, with a sentence:

| status | because                                                                                            |
|--------|----------------------------------------------------------------------------------------------------|
| 400    | the request is not of this form, or would change what is sampled (``openai_requests.TAKEN``)       |
| 401    | its key is not known                                                                               |
| 404    | of another path, or of another model                                                               |
| 405    | of a method that the path does not have                                                            |
| 408    | it did not arrive in time                                                                          |
| 411    | it does not say how long it is                                                                     |
| 413    | it is too long                                                                                     |
| 415    | it is not JSON by its Content-Type                                                                 |
| others | the policy refuses the call                                                                        |

Clients are told not to send a refused request again. A connection is kept for further requests (HTTP/1.1); it is closed
after a refusal whose body has not been read, and after a silence. Its key is verified before its body is read.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from urllib.parse import unquote, urlsplit

from flexrlhf.serving.model_calls import CallRefused, Policy
from flexrlhf.serving.openai_replies import error_body, models_body, reply_body, reply_events
from flexrlhf.serving.openai_requests import RequestReader, not_served
from flexrlhf.serving.token_server import HEAD_SECONDS, Refused, TokenHandler, TokenServer

MOST_BYTES = 2**25
"""Longest request."""
BODY_SECONDS = 60.0
"""Time for the body of a request; also for its reply to be received."""
IDLE_SECONDS = 120.0
"""Longest silence between two requests of a connection, longer than clients keep one."""
MOST_CONNECTIONS = 2048
LATE = "the request did not arrive in time"
METHODS = {("models",): "GET", ("chat", "completions"): "POST", ("completions",): "POST"}
"""Path behind ``/v1`` → method."""
_CHAT = "/v1/chat/completions is served"
NOT_SERVED: Mapping[str, str] = {
    "responses": f"{_CHAT}: with pydantic-ai use OpenAIChatModel in place of OpenAIResponsesModel, with openai-agents "
    'set_default_openai_api("chat_completions"), with langchain ChatOpenAI(use_responses_api=False), with openai '
    "client.chat.completions.create",
    "messages": f"{_CHAT}: with litellm give the model as 'openai/NAME'",
    "embeddings": "a policy has no embeddings; use another model, with a client of its own",
}
"""First part of a path behind ``/v1`` → the settings of frameworks that lead to one that is served."""
_OTHERS = "/v1/models, /v1/chat/completions and /v1/completions are served"


class PolicyServer(TokenServer):
    """Server of the replies of ``policy``."""

    def __init__(
        self,
        policy: Policy,
        model: str,
        sampling: Mapping[str, float] | None,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        most_connections: int = MOST_CONNECTIONS,
        most_bytes: int = MOST_BYTES,
        head_seconds: float = HEAD_SECONDS,
        body_seconds: float = BODY_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """
        model:             its name in requests.
        sampling:          ``temperature``, ``top_p`` and ``top_k`` of the run; None: a request has its own.
        host, port:        to listen on; 0: any free one.
        most_connections:  at once, also of one address.
        most_bytes:        of a request.
        head_seconds:      time for the head of a request, and for the first one to begin.
        body_seconds:      time for its body, and one more for each LEAST_RATE bytes of it; also for sending a reply.
        idle_seconds:      longest silence between two requests of a connection.
        """
        super().__init__(host, _PolicyHandler, "", body_seconds, most_connections, "policy server", port)
        self.policy, self.model, self.reader = policy, model, RequestReader(model, sampling)
        self.most_bytes = most_bytes
        self.head_seconds, self.body_seconds, self.idle_seconds = head_seconds, body_seconds, idle_seconds
        self._connections: set[socket.socket] = set()
        self._guard = threading.Lock()

    @contextmanager
    def connected(self, connection: socket.socket) -> Iterator[None]:
        """Close ``connection`` with the server, if that is closed while the body runs."""
        with self._guard:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._guard:
                self._connections.discard(connection)

    def server_close(self) -> None:
        """End all connections, also such as wait for a further request."""
        super().server_close()
        with self._guard:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _PolicyHandler(TokenHandler):
    """Requests of one connection."""

    server: PolicyServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        """Receive the first request with a deadline."""
        super().setup()
        self._silence = self.server.head_seconds
        self._key: str | None = None

    def handle(self) -> None:
        """Respond to requests until the connection ends."""
        with self.server.connected(self.connection), suppress(OSError):
            super().handle()

    def handle_one_request(self) -> None:
        """Respond to one request, once its first byte is there."""
        self.close_connection = True
        self._key, self._is_whole, self._has_responded = None, False, False
        # until they have arrived
        self.command = self.requestline = ""
        self.request_version = self.default_request_version
        self.arriving.within(self._silence)
        if not self.received.peek(1):
            return
        self.arriving.within(self.server.head_seconds)
        super().handle_one_request()
        if self.arriving.is_late and not self._has_responded:
            self._refuse(Refused(HTTPStatus.REQUEST_TIMEOUT, LATE))

    def do_GET(self) -> None:  # noqa: N802 (http.server's names)
        """Return the model, or the list of it."""
        with self._responding():
            self._verify_key()
            if "Content-Length" in self.headers and self._length():
                raise Refused(HTTPStatus.BAD_REQUEST, "a GET has no body")
            self._is_whole = True
            name = "/".join(self._route("GET")[1:]) or None
            if name not in (None, self.server.model):
                raise not_served(name, self.server.model)
            self._respond(HTTPStatus.OK, models_body(self.server.model, name))

    def do_POST(self) -> None:  # noqa: N802
        """Return the reply to a call."""
        with self._responding():
            key = self._verify_key()
            body = self._body()
            request = self.server.reader.read(body, self._route("POST")[0] == "chat")
            # refusals of the policy are its own
            self._key = None
            reply = partial(self.server.policy.reply, key)
            if len(request.calls) == 1:
                replies = [reply(request.calls[0])]
            else:
                # at once, so that the policy can compute them together
                with ThreadPoolExecutor(len(request.calls)) as pool:
                    replies = list(pool.map(reply, request.calls))
            if request.is_stream:
                events = reply_events(self.server.model, request.calls, replies, request.has_usage)
                self._send(HTTPStatus.OK, events, "text/event-stream")
            else:
                self._respond(HTTPStatus.OK, reply_body(self.server.model, request.calls, replies))

    def _route(self, method: str) -> tuple[str, ...]:
        """Return the parts of the path behind ``/v1``. Raises CallRefused for one that is not served."""
        path = urlsplit(self.path).path
        parts = tuple(unquote(part) for part in path.split("/") if part)
        parts = parts[1:] if parts[:1] == ("v1",) else parts
        served = METHODS.get(parts[:1] if parts[:1] == ("models",) else parts)
        if served is None:
            reason = NOT_SERVED.get(parts[0] if parts else "", _OTHERS)
            raise CallRefused(HTTPStatus.NOT_FOUND, f"{path:.80} is not served here; {reason}", code="unknown_url")
        if served != method:
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{method} {path:.80}: send a {served}")
        return parts

    def _verify_key(self) -> str:
        """Return the key of the request. Raises CallRefused for one that is not known."""
        # a policy may know those without a key
        scheme, _, key = self.headers.get("Authorization", "Bearer").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key.isascii() or not self.server.policy.knows(key):
            sentence = "the key of the request is not known here; give the one of this address as the client's api_key"
            raise CallRefused(HTTPStatus.UNAUTHORIZED, sentence, code="invalid_api_key")
        self._key, self._silence = key, self.server.idle_seconds
        return key

    def _body(self) -> bytes:
        """Return the body of the request. Raises Refused."""
        if "Transfer-Encoding" in self.headers:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "Transfer-Encoding cannot be read; send Content-Length")
        if (length := self._length()) > self.server.most_bytes:
            sentence = f"the request has {length} bytes, of at most {self.server.most_bytes}"
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, sentence)
        self.arriving.within(self.server.body_seconds)
        try:
            body = self.rfile.read(length)
        except TimeoutError:
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, LATE) from None
        if len(body) < length:
            raise Refused(HTTPStatus.BAD_REQUEST, f"the body has {len(body)} bytes, and Content-Length is {length}")
        self._is_whole = True
        kind = self.headers.get("Content-Type", "application/json").partition(";")[0].strip()
        if kind.lower() != "application/json":
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type: expected application/json, found {kind!r}")
        return body

    def _refuse(self, refusal: Refused) -> None:
        """Count a refusal of a known key, and respond."""
        if self._key is not None:
            self.server.policy.refused(self._key, str(refusal))
        super()._refuse(refusal)

    def _reason(self, refusal: Refused) -> str:
        """Return a refusal in OpenAI's form."""
        return error_body(refusal)

    def _respond(self, status: HTTPStatus, text: str) -> None:
        self._send(status, text, "application/json")

    def _send(self, status: HTTPStatus, text: str, kind: str) -> None:
        """Send a response of a kind of content."""
        body, self._has_responded = text.encode(), True
        headers = {"Content_Type": kind}
        if not self._is_whole:
            headers["Connection"] = "close"
        if status >= HTTPStatus.BAD_REQUEST:
            # another try would have the same response
            headers["x_should_retry"] = "false"
        self._begin_response(status, len(body), **headers)
        self.wfile.write(body)
