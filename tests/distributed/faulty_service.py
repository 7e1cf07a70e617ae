"""A reward service for test_reward_runs.py with a fault for each request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Fault = Callable[[int], str]
"""Index of a request, from 0 → its fault."""
SECONDS_OF_SLOW, SECONDS_OF_TOO_SLOW = 0.3, 3.0


class FaultyService:
    """A service whose scores are 1. ``texts``: the texts of all requests, in the order of arrival."""

    def __init__(self, fault: Fault = lambda _: "none") -> None:
        self.texts: list[list[str]] = []
        self._fault = fault
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/score"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reply(self, texts: list[str]) -> tuple[int, bytes]:
        """Status and body."""
        with self._lock:
            fault = self._fault(len(self.texts))
            self.texts.append(texts)
        scores: list[Any] = [1.0] * len(texts)
        match fault:
            case "slow":
                time.sleep(SECONDS_OF_SLOW)
            case "too slow":
                time.sleep(SECONDS_OF_TOO_SLOW)
            case "nan":
                scores[0] = float("nan")
            case "infinite":
                scores[0] = float("inf")
            case "count":
                scores.append(1.0)
        return 500 if fault == "500" else 200, json.dumps({"rewards": scores}).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, body = service.reply(request["query"])
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except (BrokenPipeError, ConnectionResetError):
                    # the client has stopped waiting
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                """Not in the tests' output."""

        return Handler
