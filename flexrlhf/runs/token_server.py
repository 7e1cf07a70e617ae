"""HTTP server for the other machines of a job: a request carries the job's token.

Nobody gets anything without it: idle connections are closed, their number is bounded, and no request prints a
traceback.
"""

from __future__ import annotations

import hmac
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

IDLE_SECONDS = 10.0
"""Longest silence of a connection before its token has been verified."""
POLL_SECONDS = 0.1
MOST_CONNECTIONS = 1024
"""Most connections at once, unless one address may have more."""
MOST_LENGTH_DIGITS = 15


class Refused(Exception):
    """Request that is not carried out."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class TokenServer(ThreadingMixIn, TCPServer):
    """Server with one thread for each connection."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(
        self,
        host: str,
        handler: type[TokenHandler],
        token: str,
        seconds: float,
        most_of_one: int,
        what: str,
        port: int = 0,
    ) -> None:
        """
        host:         address of this machine to listen on.
        seconds:      longest silence of a connection with the token.
        most_of_one:  connections of one address at once.
        what:         name of the server.
        port:         0: any free one.
        """
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)
        self.token, self.seconds, self.what = token.encode(), seconds, what
        self._most = max(MOST_CONNECTIONS, most_of_one)
        self._most_of_one, self._open, self._lock = most_of_one, Counter[str](), threading.Lock()

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return int(self.server_address[1])

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve while the body runs."""
        with self:
            thread = threading.Thread(target=self.serve_forever, args=(POLL_SECONDS,), name=self.what, daemon=True)
            thread.start()
            try:
                yield
            finally:
                self.shutdown()
                thread.join()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Count a connection; return False, so that it is closed, if there are too many."""
        with self._lock:
            if self._open[client_address[0]] >= self._most_of_one or self._open.total() >= self._most:
                return False
            self._open[client_address[0]] += 1
        return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Respond to a request, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open[client_address[0]] -= 1
                self._open += Counter()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print one line; nothing about a connection that broke, which the rank at its other end reports."""
        error = sys.exception()
        if not isinstance(error, OSError):
            print(
                f"flexrlhf: {self.what}: a request of {client_address[0]} failed ({error!r})",
                file=sys.stderr,
                flush=True,
            )


class TokenHandler(BaseHTTPRequestHandler):
    """One request."""

    server: TokenServer
    timeout = IDLE_SECONDS
    default_request_version = "HTTP/1.0"
    """Version of a request without a valid one, so that its refusal has a status."""

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: errors are reported by the rank that made the request."""

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "flexrlhf"

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that is no valid one; all such refusals are the client's errors."""
        self._respond(HTTPStatus(code if code < 500 else HTTPStatus.BAD_REQUEST), message or explain or "")

    @contextmanager
    def _responding(self) -> Iterator[None]:
        """Respond with the reason if the request is refused or cannot be carried out."""
        try:
            yield
        except Refused as refusal:
            self._respond(refusal.status, str(refusal))
        except (ConnectionError, TimeoutError):
            # nobody reads a response
            raise
        except OSError as error:
            self._respond(HTTPStatus.INSUFFICIENT_STORAGE, error.strerror or str(error))

    def _verify_token(self) -> None:
        """Raise Refused unless the request has the token of the job."""
        given = self.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, b"Bearer " + self.server.token):
            raise Refused(HTTPStatus.FORBIDDEN, "the request is of another job")
        self.connection.settimeout(self.server.seconds)

    def _length(self) -> int:
        """Return the number of bytes of the body."""
        text = self.headers.get("Content-Length", "")
        if not (text.isascii() and text.isdecimal() and len(text) <= MOST_LENGTH_DIGITS):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "Content-Length is no number of bytes")
        return int(text)

    def _respond(self, status: HTTPStatus, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
