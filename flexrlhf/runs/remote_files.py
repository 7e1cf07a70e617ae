"""Directories of runs on rank 0's machine, for machines that do not mount them: the client of ``file_server``."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from os.path import realpath
from pathlib import Path
from typing import IO
from urllib.parse import quote

from flexrlhf.errors import RunStopped
from flexrlhf.runs.durable_files import WRITING, replace_directory
from flexrlhf.runs.file_server import BLOCK_BYTES


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
        self._request("MOVE", fresh)

    def get_directory(self, directory: Path, target: Path) -> None:
        """Copy a directory there to ``target`` on this machine, in the place of the one that has that name."""
        fresh = target.with_name(target.name + WRITING)
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            for name, size in json.loads(self._request("GET", directory)).items():
                path = fresh / name
                if ".." in path.parts or not path.is_relative_to(fresh):
                    raise self._error(directory, f"{name} is in no directory of this job")
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
            # a server that refuses a file responds before it has read it
            with suppress(BrokenPipeError, ConnectionResetError):
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
