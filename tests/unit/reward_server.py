"""A little HTTP service for test_reward_service.py: it behaves as the test sets it, request by request."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Request:
    """``number``: how many came before it."""

    number: int
    body: Any
    headers: dict[str, str]


@dataclass(frozen=True)
class Reply:
    """``pause``: seconds before it. ``drip``: seconds between its bytes. ``drops``: the connection ends halfway."""

    body: str | bytes = ""
    status: int = 200
    header: tuple[str, str] = ("Server", "test")
    pause: float = 0.0
    drip: float = 0.0
    drops: bool = False


def rewards(values: Any, **settings: Any) -> Reply:
    return Reply(json.dumps({"rewards": values}), **settings)


def lengths(request: Request) -> Reply:
    """As many scores as there are texts: their lengths."""
    return rewards([len(text) for text in request.body["query"]])


class RewardServer:
    """Server whose ``behaviour`` replies to a request; ``requests`` and ``most_at_once`` record the arrivals."""

    def __init__(self, behaviour: Callable[[Request], Reply] = lengths) -> None:
        self.requests: list[Request] = []
        self.most_at_once = 0
        self._at_once = 0
        self._behaviour = behaviour
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/score"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.die()

    def die(self) -> None:
        """From here on connections are refused."""
        self._server.shutdown()
        self._server.socket.close()

    def reply(self, body: Any, headers: dict[str, str]) -> Reply:
        with self._lock:
            request = Request(len(self.requests), body, headers)
            self.requests.append(request)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        reply = self._behaviour(request)
        time.sleep(reply.pause)
        with self._lock:
            self._at_once -= 1
        return reply

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                reply = server.reply(body, dict(self.headers.items()))
                content = reply.body.encode() if isinstance(reply.body, str) else reply.body
                try:
                    self._send(reply, content)
                except (BrokenPipeError, ConnectionResetError):
                    # the client has stopped waiting
                    self.close_connection = True

            def _send(self, reply: Reply, content: bytes) -> None:
                self.send_response(reply.status)
                self.send_header("Content-Length", str(len(content)))
                self.send_header(*reply.header)
                self.end_headers()
                if reply.drops:
                    self.wfile.write(content[: len(content) // 2])
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                for start in range(len(content)) if reply.drip else ():
                    self.wfile.write(content[start : start + 1])
                    time.sleep(reply.drip)
                if not reply.drip:
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """Not in the tests' output."""

        return Handler
