"""Directories of runs for machines that do not mount them, server and client: HTTP with some of WebDAV's methods.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from os.path import realpath
from pathlib import Path
from typing import IO, BinaryIO
from urllib.parse import quote, unquote

from flexrlhf.errors import RunStopped
from flexrlhf.runs.run_directory import replace_directory

BLOCK_BYTES = 1 << 20
PARTIAL = ".partial"
"""Ends the name of a file that has not arrived whole."""
WRITING = ".writing"
"""Ends the name of a directory that is not whole yet."""


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
        """Give a directory another name, in the place of the one that has it."""
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
        """Yield the path of a request, or None after a refusal; a request that cannot be written is refused, too."""
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
        """Write the body of the request into ``file``. Returns its sha256 digest; raises OSError if it is cut."""
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


@dataclass(frozen=True)
class RemoteFiles:
    """Files of rank 0's machine below the directories ``roots``, which have the same names there.

    host, port:  of the server.
    token:       of the job.
    seconds:     longest silence of the server.

    All methods raise RunStopped if a file cannot be copied.
    """

    roots: tuple[Path, ...]
    host: str
    port: int
    token: str
    seconds: float

    def put(self, path: Path, target: Path | None = None) -> None:
        """Copy a file of this machine to ``target`` there, or to the same path, and compare the digests."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            found = self._request("PUT", target or path, file, {"Content-Length": str(path.stat().st_size)})
        if found != digest.encode():
            raise self._error(path, "its checksum there is another one")

    def append(self, path: Path, text: str) -> None:
        """Append ``text`` to a file there."""
        self._request("POST", path, text.encode())

    def put_directory(self, directory: Path) -> None:
        """Copy a directory of this machine there, in the place of one of the same name. It is there whole or not."""
        fresh = directory.with_name(directory.name + WRITING)
        self._request("DELETE", fresh)
        for path in sorted(each for each in directory.rglob("*") if each.is_file()):
            self.put(path, fresh / path.relative_to(directory))
        self._request("MOVE", fresh, headers={"Destination": self._address(directory)})

    def get_directory(self, directory: Path, target: Path) -> None:
        """Copy a directory there to ``target`` on this machine, in the place of the one that has that name."""
        fresh = target.with_name(target.name + WRITING)
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            for name, size in json.loads(self._request("GET", directory)).items():
                path = fresh / name
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fetch(directory / name, path, size)
            replace_directory(fresh, target)
        except OSError as error:
            raise RunStopped(f"{target}: cannot be written ({error.strerror or error})") from None

    def _fetch(self, source: Path, path: Path, size: int) -> None:
        with self._response("GET", source) as response, path.open("wb") as file:
            shutil.copyfileobj(response, file, BLOCK_BYTES)
        if path.stat().st_size != size:
            raise self._error(source, f"{path.stat().st_size} of {size} bytes have arrived")

    def _request(
        self, method: str, path: Path, body: IO[bytes] | bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        with self._response(method, path, body, headers) as response:
            return response.read()

    @contextmanager
    def _response(
        self, method: str, path: Path, body: IO[bytes] | bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[HTTPResponse]:
        connection = HTTPConnection(self.host, self.port, timeout=self.seconds, blocksize=BLOCK_BYTES)
        try:
            own = {"Authorization": f"Bearer {self.token}", **(headers or {})}
            connection.request(method, self._address(path), body, own)
            response = connection.getresponse()
            if response.status >= 400:
                raise self._error(path, response.read().decode())
            yield response
        except (ConnectionError, TimeoutError, HTTPException) as error:
            raise self._error(path, str(error) or type(error).__name__) from None
        finally:
            connection.close()

    def _address(self, path: Path) -> str:
        place = Path(realpath(path))
        roots = [Path(realpath(root)) for root in self.roots]
        number = next(number for number, root in enumerate(roots) if place.is_relative_to(root))
        return quote(f"/{number}/{place.relative_to(roots[number])}")

    def _error(self, path: Path, reason: str) -> RunStopped:
        return RunStopped(f"{path}: not copied between this machine and rank 0's at {self.host} ({reason})")
