"""HTTP server for the other machines of a job: a request carries the job's token.

Nobody gets anything without it: connections whose request does not arrive in time are closed, their number is bounded,
also that of one address, and no request prints a traceback.
"""

from __future__ import annotations

import hmac
import io
import resource
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from ipaddress import IPv6Address, ip_address
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

HEAD_SECONDS = 10.0
"""Time in which the whole head of a request has to arrive, before its token is verified."""
LEAST_RATE = 100_000
"""Bytes a second of a request without a token, after its first time."""
POLL_SECONDS = 0.1
OTHER_FILES = 256
"""Open files that are no connections."""
STRANGER_BITS = 64
"""Bits of an address of IPv6 that one machine or site has in common."""
MOST_LENGTH_DIGITS = 15
LINGER_SECONDS = 2.0
"""Time in which the client of a refused request, which it may still be sending, can read the refusal."""
BLOCK_BYTES = 1 << 16


class Refused(Exception):
    """Request that is not carried out."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Arriving(io.RawIOBase):
    """Bytes of a connection, of which single ones in time do not keep it open: all of a part have to arrive in time."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self.is_late = False
        """Whether a part has not arrived in time."""
        self.within(seconds)

    def within(self, seconds: float) -> None:
        """Begin a part that has to arrive in ``seconds``, and one more for each LEAST_RATE bytes of it."""
        self._end, self._silence = time.monotonic() + seconds, 0.0

    def unless_silent(self, seconds: float) -> None:
        """Begin a part that may take any time without so long a silence."""
        self._end, self._silence = 0.0, seconds

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Receive some bytes. Raises TimeoutError."""
        left = self._silence or self._end - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            number = self._connection.recv_into(buffer)
        except TimeoutError:
            self.is_late = True
            raise
        self._end += number / LEAST_RATE
        return number


class TokenServer(ThreadingMixIn, TCPServer):
    """Server with one thread for each connection."""

    daemon_threads = True
    request_queue_size = 1024
    MOST_CONNECTIONS = 1024
    """Most connections at once, unless one address may have more."""

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
        self._most = self.connection_room(max(self.MOST_CONNECTIONS, most_of_one))
        self._most_of_one, self._open, self._lock = most_of_one, Counter[str](), threading.Lock()

    @staticmethod
    def connection_room(most: int) -> int:
        """Return the number of connections, at most ``most``, for which this process may have files open.

        Its limit is raised where it may be.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if resource.RLIM_INFINITY not in (soft, hard) and soft < most + OTHER_FILES:
            soft = min(hard, most + OTHER_FILES)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return most if soft == resource.RLIM_INFINITY else max(2, min(most, soft - OTHER_FILES))

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
        site = _site(client_address[0])
        with self._lock:
            if self._open[site] >= self._most_of_one or self._open.total() >= self._most:
                return False
            self._open[site] += 1
        return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Respond to a request, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open[_site(client_address[0])] -= 1
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
    timeout = HEAD_SECONDS
    # head and body of a response are two parts, and a client would acknowledge the first one late
    disable_nagle_algorithm = True
    default_request_version = "HTTP/1.0"
    """Version of a request without a valid one, so that its refusal has a status."""
    _is_whole = False
    """Whether all of the request has been read."""

    def setup(self) -> None:
        """Receive the request with a deadline."""
        super().setup()
        self.rfile.close()
        self.arriving = Arriving(self.connection, self.timeout)
        self.rfile = self.received = io.BufferedReader(self.arriving)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: errors are reported by the rank that made the request."""

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "flexrlhf"

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that is no valid one; all such refusals are the client's errors."""
        status = HTTPStatus(code if code < 500 else HTTPStatus.BAD_REQUEST)
        self._refuse(Refused(status, message or explain or status.phrase))

    @contextmanager
    def _responding(self) -> Iterator[None]:
        """Respond with the reason if the request is refused or cannot be carried out."""
        try:
            yield
        except Refused as refusal:
            self._refuse(refusal)
        except (ConnectionError, TimeoutError):
            # nobody reads a response
            raise
        except OSError as error:
            self._respond(HTTPStatus.INSUFFICIENT_STORAGE, error.strerror or str(error))

    def _refuse(self, refusal: Refused) -> None:
        """Respond with the reason. Unless all of the request was read, then end the connection.

        One that is closed with bytes unread is reset, and its client reads nothing; so it has time for the reason.
        """
        self._respond(refusal.status, self._reason(refusal))
        if self._is_whole:
            return
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_WR)
        end = time.monotonic() + LINGER_SECONDS
        while (left := end - time.monotonic()) > 0:
            self.connection.settimeout(left)
            if not self.connection.recv(BLOCK_BYTES):
                return

    def _reason(self, refusal: Refused) -> str:
        """Return the body of a refusal."""
        return str(refusal)

    def _verify_token(self) -> None:
        """Raise Refused unless the request has the token of the job."""
        given = self.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, b"Bearer " + self.server.token):
            raise Refused(HTTPStatus.FORBIDDEN, "the request is of another job")
        self.arriving.unless_silent(self.server.seconds)

    def _length(self) -> int:
        """Return the number of bytes of the body."""
        text = self.headers.get("Content-Length", "")
        if not (text.isascii() and text.isdecimal() and len(text) <= MOST_LENGTH_DIGITS):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "Content-Length is no number of bytes")
        return int(text)

    def _respond(self, status: HTTPStatus, text: str) -> None:
        body = text.encode()
        self._begin_response(status, len(body))
        self.wfile.write(body)

    def _begin_response(self, status: HTTPStatus, length: int, **headers: str) -> None:
        """Send the head of a response. ``headers``: more of them, with ``_`` in place of ``-``."""
        self.connection.settimeout(self.server.seconds)
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()


def _site(address: str) -> str:
    """Return what connections of one machine have in common: the address, or of IPv6 its network."""
    found = ip_address(address.partition("%")[0])
    if not isinstance(found, IPv6Address) or found.ipv4_mapped:
        return address
    return str(int(found) >> STRANGER_BITS)
