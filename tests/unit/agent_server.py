"""A server of the programs of example_programs.py, for test_program_servers.py. Argument: its port.

Its path names the program; behind ``/behaves`` it does what the row has in place of one.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))

import example_programs


class Episode(BaseHTTPRequestHandler):
    """One episode."""

    def do_POST(self) -> None:  # noqa: N802 (http.server's name)
        task = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name, status = self.path.strip("/"), 200
        kind = task["row"]["prompt"] if name == "behaves" else ""
        if kind == "user":
            task["row"]["prompt"] = self.headers["Authorization"]
        if kind == "sleeps":
            time.sleep(1000)
        try:
            if kind == "full":
                status, reply = 503, "come later"
            elif kind == "text":
                reply = "fine"
            else:
                program = getattr(example_programs, "misbehaves" if kind else name)
                reply = json.dumps({"reward": program(task["row"], SimpleNamespace(**task), **task["options"])})
        except ValueError as error:
            status, reply = 500, f"raised {error}"
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Episode).serve_forever()
