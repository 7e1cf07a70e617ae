"""Server of the directories of runs for machines that do not mount them: HTTP with some of WebDAV's methods.

Rank 0 serves. A request carries the token of the job, the number of a directory and a path in it. Whoever has the token
may read those directories, and write the names that a run writes. Symbolic links are not followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from typing import IO
from urllib.parse import unquote

from flexrlhf.runs.checkpoint_directory import FOLDER
from flexrlhf.runs.durable_files import WRITING, replace_directory
from flexrlhf.runs.episode_log import DIRECTORY as REPLIES
from flexrlhf.runs.episode_log import FILE as REPLIES_FILE
from flexrlhf.runs.flight_log import TIMELINE
from flexrlhf.runs.recorded_columns import DIRECTORY
from flexrlhf.serving.token_server import Refused, TokenHandler, TokenServer

BLOCK_BYTES = 1 << 20
PARTIAL = ".partial"
"""Ends the name of a file that has not arrived whole."""
MOST_PATH, MOST_NAME = 4096, 255
"""Longest path of a request and longest name in it, in bytes."""
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
            "lines": rf"{TIMELINE}/rank-\d{{5,}}\.jsonl|{REPLIES}/{REPLIES_FILE}",
            "directory": rf"(?:{models}){_MODEL}",
        }
        return root in self.written and re.fullmatch(patterns[kind], inside) is not None


class _Server(TokenServer):
    """Server of ``runs``."""

    def __init__(self, host: str, runs: ServedRuns, token: str, seconds: float, most_of_one: int) -> None:
        super().__init__(host, _Handler, token, seconds, most_of_one, "file server")
        self.runs = runs


@contextmanager
def serve_files(runs: ServedRuns, token: str, host: str, seconds: float = 60.0, most_of_one: int = 64) -> Iterator[int]:
    """Serve the files of ``runs`` to whoever has the token, and yield the port. The directories need not exist yet.

    host:         address of this machine to listen on.
    seconds:      longest silence of a connection with the token.
    most_of_one:  connections of one address at once.
    """
    server = _Server(host, runs, token, seconds, most_of_one)
    with server.serving():
        yield server.port


class _Handler(TokenHandler):
    """One request. A file is written under another name and renamed when it is whole and on disk."""

    server: _Server

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
                    raise Refused(HTTPStatus.NOT_FOUND, "there is no such file")
            if file is not None:
                self._begin_response(HTTPStatus.OK, os.fstat(file.fileno()).st_size)
                shutil.copyfileobj(file, self.wfile, BLOCK_BYTES)

    def do_PUT(self) -> None:  # noqa: N802
        """Write a file. Returns its sha256 digest."""
        with self._responding():
            path = self._written_place("file")
            partial = path.with_name(path.name + PARTIAL)
            length = self._length()
            path.parent.mkdir(parents=True, exist_ok=True)
            if length > (free := shutil.disk_usage(path.parent).free):
                raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{length} bytes to write, {free} free")
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
                raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {MOST_LINES_BYTES} bytes of lines")
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

    def _place(self) -> tuple[Path, Path, str]:
        """Verify the token; return the path of ``/<number of a root>/<path in it>``, its root and the path in it."""
        self._verify_token()
        address = unquote(self.path)
        if len(address.encode(errors="replace")) > MOST_PATH:
            raise Refused(HTTPStatus.REQUEST_URI_TOO_LONG, f"the path has more than {MOST_PATH} bytes")
        number, _, inside = address.removeprefix("/").partition("/")
        roots = self.server.runs.roots
        is_number = number.isascii() and number.isdecimal() and len(number) < len(str(MOST_PATH))
        root = roots[int(number)] if is_number and int(number) < len(roots) else None
        parts = [part for part in inside.split("/") if part != "."]
        is_name = all(part != ".." and part and len(part.encode(errors="replace")) <= MOST_NAME for part in parts)
        if root is None or not address.isprintable() or not (is_name or inside in ("", ".")):
            raise Refused(HTTPStatus.FORBIDDEN, "the path is in no directory of this job")
        path = root
        for part in filter(None, parts):
            path /= part
            if path.is_symlink():
                raise Refused(HTTPStatus.FORBIDDEN, "a symbolic link is in the path")
        return path, root, "/".join(parts)

    def _written_place(self, kind: str) -> Path:
        """Return the path of a request that writes."""
        path, root, inside = self._place()
        if not self.server.runs.accepts(root, kind, inside):
            raise Refused(HTTPStatus.FORBIDDEN, "a run writes nothing of this name")
        return path

    def _copy_body(self, file: IO[bytes], length: int) -> str:
        """Write the body of the request into ``file``. Returns its sha256 digest."""
        digest, left = hashlib.sha256(), length
        while left:
            block = self.rfile.read(min(left, BLOCK_BYTES))
            if not block:
                raise Refused(HTTPStatus.BAD_REQUEST, "the connection closed before the end of the file")
            digest.update(block)
            file.write(block)
            left -= len(block)
        return digest.hexdigest()


def _open_plain(path: str, flags: int) -> int:
    """Open a file that is no symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _files_in(directory: Path) -> Iterator[tuple[str, int]]:
    """Yield path and size of each file in a directory, but of no symbolic link."""
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield str(path.relative_to(directory)), path.stat().st_size
