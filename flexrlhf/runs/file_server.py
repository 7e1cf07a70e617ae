"""Server of the directories of runs for machines that do not mount them: HTTP with some of WebDAV's methods.

Rank 0 serves. A request carries the token of the job, the number of a directory and a path in it. Whoever has the token
may read those directories, and write the names that a run writes. Nobody gets anything without it: idle connections are
closed, their number is bounded, symbolic links are not followed, and no request prints a traceback.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import shutil
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import IO, Any
from urllib.parse import unquote

from flexrlhf.runs.flight_log import TIMELINE
from flexrlhf.runs.manifest import FOLDER
from flexrlhf.runs.recorded_columns import DIRECTORY
from flexrlhf.runs.run_directory import replace_directory

BLOCK_BYTES = 1 << 20
PARTIAL = ".partial"
"""Ends the name of a file that has not arrived whole."""
WRITING = ".writing"
"""Ends the name of a directory that is not whole yet."""
IDLE_SECONDS = 10.0
"""Longest silence of a connection before its token has been verified."""
POLL_SECONDS = 0.1
MOST_CONNECTIONS = 1024
"""Most connections at once."""
MOST_PATH, MOST_NAME = 4096, 255
"""Longest path of a request and longest name in it, in bytes."""
MOST_LENGTH_DIGITS = 15
MOST_LINES_BYTES = 1 << 30
"""Most bytes that are appended at once."""
_FILE = r"[^/]+\.(?:safetensors|json|jinja|txt|model)"
_MODEL = rf"(?:-best|-step-\d{{6,}})?{re.escape(WRITING)}"


@dataclass(frozen=True)
class ServedRuns:
    """Directories that a server serves; their numbers in requests are their places in ``roots``.

    written:  directory of a run → the models that it saves.
    read:     further directories, of checkpoints, in which nothing is written.
    """

    written: Mapping[Path, Sequence[str]]
    read: Sequence[Path] = ()

    @property
    def roots(self) -> tuple[Path, ...]:
        """All directories."""
        return (*self.written, *self.read)

    def accepts(self, root: Path, kind: str, inside: str) -> bool:
        """Return whether a run may write ``inside``, a path of a ``kind`` below ``root``: file, lines or directory."""
        models = "|".join(map(re.escape, self.written.get(root, ())))
        patterns = {
            "file": rf"(?:{FOLDER}/step-\d{{6,}}{re.escape(WRITING)}|{DIRECTORY}|(?:{models}){_MODEL})/{_FILE}",
            "lines": rf"{TIMELINE}/rank-\d{{5,}}\.jsonl",
            "directory": rf"(?:{models}){_MODEL}",
        }
        return root in self.written and re.fullmatch(patterns[kind], inside) is not None


class _Refused(Exception):
    """Request that is not carried out."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Server(ThreadingMixIn, TCPServer):
    """Server with one thread for each connection.

    most_of_one:  connections of one address at once.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, runs: ServedRuns, token: str, seconds: float, most_of_one: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Handler)
        self.runs, self.token, self.seconds = runs, token.encode(), seconds
        self._most_of_one, self._open, self._lock = most_of_one, Counter[str](), threading.Lock()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Count a connection; return False, so that it is closed, if there are too many."""
        with self._lock:
            if self._open[client_address[0]] >= self._most_of_one or self._open.total() >= MOST_CONNECTIONS:
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
                f"flexrlhf: file server: a request of {client_address[0]} failed ({error!r})",
                file=sys.stderr,
                flush=True,
            )


@contextmanager
def serve_files(runs: ServedRuns, token: str, host: str, seconds: float = 60.0, most_of_one: int = 64) -> Iterator[int]:
    """Serve the files of ``runs`` to whoever has the token, and yield the port. The directories need not exist yet.

    host:         address of this machine to listen on.
    seconds:      longest silence of a connection with the token.
    most_of_one:  connections of one address at once.
    """
    with _Server(host, runs, token, seconds, most_of_one) as server:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,), name="files of runs", daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    """One request. A file is written under another name and renamed when it is whole and on disk."""

    server: _Server
    timeout = IDLE_SECONDS
    default_request_version = "HTTP/1.0"
    """Version of a request without a valid one, so that its refusal has a status."""

    def do_GET(self) -> None:  # noqa: N802 (http.server's names)
        """Return a file, or the paths and sizes of all files in a directory."""
        with ExitStack() as stack:
            file = None
            with self._responding():
                path, _, _ = self._place()
                if path.is_dir():
                    self._respond(HTTPStatus.OK, json.dumps(dict(_files_in(path))))
                elif path.is_file():
                    file = stack.enter_context(open(path, "rb", opener=_open_plain))
                else:
                    raise _Refused(HTTPStatus.NOT_FOUND, "there is no such file")
            if file is not None:
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
                self.end_headers()
                shutil.copyfileobj(file, self.wfile, BLOCK_BYTES)

    def do_PUT(self) -> None:  # noqa: N802
        """Write a file. Returns its sha256 digest."""
        with self._responding():
            path = self._written_place("file")
            partial = path.with_name(path.name + PARTIAL)
            length = self._length()
            path.parent.mkdir(parents=True, exist_ok=True)
            if length > (free := shutil.disk_usage(path.parent).free):
                raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{length} bytes to write, {free} free")
            try:
                with open(partial, "wb", opener=_open_plain) as file:
                    digest = self._copy_body(file, length)
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
            self._respond(HTTPStatus.CREATED, digest)

    def do_POST(self) -> None:  # noqa: N802
        """Append to a file, once the body is whole."""
        with self._responding():
            path, lines = self._written_place("lines"), BytesIO()
            if (length := self._length()) > MOST_LINES_BYTES:
                raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {MOST_LINES_BYTES} bytes of lines")
            self._copy_body(lines, length)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab", opener=_open_plain) as file:
                file.write(lines.getbuffer())
            self._respond(HTTPStatus.OK, "")

    def do_MOVE(self) -> None:  # noqa: N802
        """Give a directory that is whole its name, in the place of the one that has it."""
        with self._responding():
            path = self._written_place("directory")
            replace_directory(path, path.with_name(path.name.removesuffix(WRITING)))
            self._respond(HTTPStatus.CREATED, "")

    def do_DELETE(self) -> None:  # noqa: N802
        """Remove a directory that is not whole, if there is one."""
        with self._responding():
            shutil.rmtree(self._written_place("directory"), ignore_errors=True)
            self._respond(HTTPStatus.OK, "")

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
        except _Refused as refusal:
            self._respond(refusal.status, str(refusal))
        except (ConnectionError, TimeoutError):
            # nobody reads a response
            raise
        except OSError as error:
            self._respond(HTTPStatus.INSUFFICIENT_STORAGE, error.strerror or str(error))

    def _place(self) -> tuple[Path, Path, str]:
        """Verify the token; return the path of ``/<number of a root>/<path in it>``, its root and the path in it."""
        given = self.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, b"Bearer " + self.server.token):
            raise _Refused(HTTPStatus.FORBIDDEN, "the request is of another job")
        self.connection.settimeout(self.server.seconds)
        address = unquote(self.path)
        if len(address.encode(errors="replace")) > MOST_PATH:
            raise _Refused(HTTPStatus.REQUEST_URI_TOO_LONG, f"the path has more than {MOST_PATH} bytes")
        number, _, inside = address.removeprefix("/").partition("/")
        roots = self.server.runs.roots
        is_number = number.isascii() and number.isdecimal() and len(number) < len(str(MOST_PATH))
        root = roots[int(number)] if is_number and int(number) < len(roots) else None
        parts = [part for part in inside.split("/") if part != "."]
        is_name = all(part != ".." and part and len(part.encode(errors="replace")) <= MOST_NAME for part in parts)
        if root is None or not address.isprintable() or not (is_name or inside in ("", ".")):
            raise _Refused(HTTPStatus.FORBIDDEN, "the path is in no directory of this job")
        path = root
        for part in filter(None, parts):
            path /= part
            if path.is_symlink():
                raise _Refused(HTTPStatus.FORBIDDEN, "a symbolic link is in the path")
        return path, root, "/".join(parts)

    def _written_place(self, kind: str) -> Path:
        """Return the path of a request that writes."""
        path, root, inside = self._place()
        if not self.server.runs.accepts(root, kind, inside):
            raise _Refused(HTTPStatus.FORBIDDEN, "a run writes nothing of this name")
        return path

    def _length(self) -> int:
        """Return the number of bytes of the body."""
        text = self.headers.get("Content-Length", "")
        if not (text.isascii() and text.isdecimal() and len(text) <= MOST_LENGTH_DIGITS):
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "Content-Length is no number of bytes")
        return int(text)

    def _copy_body(self, file: IO[bytes], length: int) -> str:
        """Write the body of the request into ``file``. Returns its sha256 digest."""
        digest, left = hashlib.sha256(), length
        while left:
            block = self.rfile.read(min(left, BLOCK_BYTES))
            if not block:
                raise _Refused(HTTPStatus.BAD_REQUEST, "the connection closed before the end of the file")
            digest.update(block)
            file.write(block)
            left -= len(block)
        return digest.hexdigest()

    def _respond(self, status: HTTPStatus, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _open_plain(path: str, flags: int) -> int:
    """Open a file that is no symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _files_in(directory: Path) -> Iterator[tuple[str, int]]:
    """Yield path and size of each file in a directory, but of no symbolic link."""
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield str(path.relative_to(directory)), path.stat().st_size
