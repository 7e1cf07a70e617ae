"""Server of the directories of runs, for machines that do not mount them: HTTP with some of WebDAV's methods.

Rank 0 serves. A request names the number of a directory and a path in it; everything else is refused, as is a request
without the token of the job.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from flexrlhf.runs.run_directory import replace_directory

BLOCK_BYTES = 1 << 20
PARTIAL = ".partial"
"""Ends the name of a file that has not arrived whole."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, roots: Sequence[Path], token: str) -> None:
        super().__init__(("", 0), _Handler)
        self.roots, self.token = tuple(roots), token


@contextmanager
def serve_files(roots: Sequence[Path], token: str) -> Iterator[int]:
    """Serve the files below ``roots`` to whoever has the token, and yield the port. They need not exist yet."""
    with _Server(roots, token) as server:
        thread = threading.Thread(target=server.serve_forever, name="files of runs", daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    """One request. A file is written under another name and renamed when it is whole and on disk."""

    server: _Server

    def do_GET(self) -> None:  # noqa: N802 (http.server's names)
        """Return a file, or the paths and sizes of all files in a directory."""
        path = self._path()
        if path is None:
            return
        if path.is_dir():
            files = {str(each.relative_to(path)): each.stat().st_size for each in path.rglob("*") if each.is_file()}
            self._respond(HTTPStatus.OK, json.dumps(files))
        elif path.is_file():
            with path.open("rb") as file:
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
                self.end_headers()
                shutil.copyfileobj(file, self.wfile, BLOCK_BYTES)
        else:
            self._respond(HTTPStatus.NOT_FOUND, "there is no such file")

    def do_PUT(self) -> None:  # noqa: N802
        """Write a file. Returns its sha256 digest."""
        with self._writing() as path:
            if path is None:
                return
            partial = path.with_name(path.name + PARTIAL)
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                digest = self._copy_body(file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            self._respond(HTTPStatus.CREATED, digest)

    def do_POST(self) -> None:  # noqa: N802
        """Append to a file."""
        with self._writing() as path:
            if path is None:
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                digest = self._copy_body(file)
            self._respond(HTTPStatus.OK, digest)

    def do_MOVE(self) -> None:  # noqa: N802
        """Give a directory another name, in the place of what has it."""
        with self._writing() as path:
            target = self._resolved(self.headers.get("Destination", ""))
            if path is None or target is None:
                return
            replace_directory(path, target)
            self._respond(HTTPStatus.CREATED, "")

    def do_DELETE(self) -> None:  # noqa: N802
        """Remove a directory, if there is one."""
        with self._writing() as path:
            if path is None:
                return
            shutil.rmtree(path, ignore_errors=True)
            self._respond(HTTPStatus.OK, "")

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: errors are reported by the rank that made the request."""

    @contextmanager
    def _writing(self) -> Iterator[Path | None]:
        """Yield the path of a request, or None after a refusal; what cannot be written is refused, too."""
        try:
            yield self._path()
        except OSError as error:
            self._respond(HTTPStatus.INSUFFICIENT_STORAGE, error.strerror or str(error))

    def _path(self) -> Path | None:
        """Return the path of this request; None after a refusal."""
        if not hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {self.server.token}"):
            self._respond(HTTPStatus.FORBIDDEN, "the request is of another job")
            return None
        return self._resolved(self.path)

    def _resolved(self, address: str) -> Path | None:
        """Return the path of ``/<number of a root>/<path in it>``; None after a refusal."""
        number, _, inside = unquote(address).removeprefix("/").partition("/")
        if number.isdecimal() and int(number) < len(self.server.roots) and ".." not in Path(inside).parts:
            root = self.server.roots[int(number)]
            path = root / inside
            if path.is_relative_to(root):
                return path
        self._respond(HTTPStatus.FORBIDDEN, "the path is in no directory of this job")
        return None

    def _copy_body(self, file: BinaryIO) -> str:
        """Write the body of the request into ``file``. Returns its sha256 digest; raises OSError where it is cut."""
        digest, left = hashlib.sha256(), int(self.headers.get("Content-Length", "0"))
        while left:
            block = self.rfile.read(min(left, BLOCK_BYTES))
            if not block:
                raise ConnectionError("the connection closed before the end of the file")
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
