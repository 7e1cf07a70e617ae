"""Files of runs as one rank has them: in a directory that all machines mount, or in one of its machine's own.

Where machines have directories of their own, rank 0's is that of the run. What another machine writes for it is copied
there, and what it reads of an earlier step or run is copied from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from os.path import realpath
from pathlib import Path
from secrets import token_hex
from typing import IO
from urllib.parse import quote

from flexrlhf.comm.world import World
from flexrlhf.config.spec import Spec
from flexrlhf.errors import RunStopped
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.file_server import BLOCK_BYTES, serve_files
from flexrlhf.runs.fingerprints import written_inputs
from flexrlhf.runs.manifest import FOLDER
from flexrlhf.runs.run_directory import replace_directory
from flexrlhf.runs.run_order import RunOrder

WRITING = ".writing"
"""Ends the name of a directory that is not whole yet."""
RECEIVED = "received"
"""Folder of a run, on a machine with a directory of its own, for the checkpoint that it goes on from."""
_SERVER = "files/server"


@dataclass(frozen=True)
class RemoteFiles:
    """Files of rank 0's machine below the directories ``roots``, which have the same names there.

    host, port:  of the server.
    token:       of the job.
    seconds:     longest silence of the server.

    All methods raise RunStopped where a file cannot be copied.
    """

    roots: tuple[Path, ...]
    host: str
    port: int
    token: str
    seconds: float

    def put(self, path: Path) -> None:
        """Copy a file of this machine to the path of the same name there, and compare the digests."""
        self._put(path, path)

    def append(self, path: Path, text: str) -> None:
        """Append ``text`` to a file there."""
        self._request("POST", path, text.encode())

    def put_directory(self, directory: Path) -> None:
        """Copy a directory of this machine there, in the place of one of the same name. It is there whole or not."""
        fresh = directory.with_name(directory.name + WRITING)
        self._request("DELETE", fresh)
        for path in sorted(each for each in directory.rglob("*") if each.is_file()):
            self._put(path, fresh / path.relative_to(directory))
        self._request("MOVE", fresh, headers={"Destination": self._address(directory)})

    def get_directory(self, directory: Path, target: Path) -> None:
        """Copy a directory there to ``target`` on this machine, in the place of what has that name."""
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

    def _put(self, path: Path, target: Path) -> None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            found = self._request("PUT", target, file, {"Content-Length": str(path.stat().st_size)})
        if found != digest.encode():
            raise self._error(path, "its checksum there is another one")

    def _fetch(self, source: Path, path: Path, size: int) -> None:
        with self._response("GET", source) as response, path.open("wb") as file:
            shutil.copyfileobj(response, file, BLOCK_BYTES)
        if path.stat().st_size != size:
            raise self._error(source, f"{path.stat().st_size} of {size} bytes have arrived")

    def _request(
        self, method: str, path: Path, body: IO[bytes] | bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Return the text of the response."""
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


@dataclass(frozen=True)
class RunFiles:
    """Files of runs, for one rank.

    keeps:       whether this rank keeps the directories of its machine: makes, trims and clears them.
    are_copied:  whether a machine of the job has directories of its own.
    remote:      those of rank 0's machine, where this one has its own.
    """

    keeps: bool
    are_copied: bool = False
    remote: RemoteFiles | None = None

    def send(self, path: Path) -> None:
        """Copy a file that this rank has written to rank 0's machine, and remove it here."""
        if self.remote is not None:
            self.remote.put(path)
            path.unlink()

    def send_directory(self, directory: Path) -> None:
        """Copy a directory that this rank has written to rank 0's machine, and remove it here."""
        if self.remote is not None:
            self.remote.put_directory(directory)
            shutil.rmtree(directory)

    def append(self, path: Path, text: str) -> None:
        """Append ``text`` to a file of rank 0's machine."""
        if self.remote is not None:
            self.remote.append(path, text)
            return
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(text)

    def received_checkpoint(self, checkpoint: Path, plan: Plan, world: World) -> Path:
        """Return where this machine has a checkpoint, once it has it. All ranks call this."""
        target = checkpoint if self.remote is None else plan.spec.directory / RECEIVED / checkpoint.name
        if self.remote is not None and self.keeps:
            self.remote.get_directory(checkpoint, target)
        self._meet(world, f"the copies of {checkpoint}", plan.spec)
        return target

    def remove_checkpoint(self, plan: Plan, world: World) -> None:
        """Remove the copies of checkpoints once all ranks have read them. All ranks call this."""
        self._meet(world, "the end of reading the checkpoint", plan.spec)
        if self.remote is not None and self.keeps:
            shutil.rmtree(plan.spec.directory / RECEIVED, ignore_errors=True)

    def clear(self, directory: Path) -> None:
        """Remove the folder through which the checkpoints of a run have gone, once it has ended on all ranks."""
        if self.remote is not None and self.keeps:
            shutil.rmtree(directory / FOLDER, ignore_errors=True)

    def receive_inputs(self, spec: Spec, earlier: Sequence[Path], world: World) -> None:
        """Copy the models that a run reads from ``earlier``, directories of runs before it. All ranks call this."""
        if self.remote is not None and self.keeps:
            for path in written_inputs(spec, earlier):
                self.remote.get_directory(path, path)
        self._meet(world, "the models of earlier runs", spec)

    def _meet(self, world: World, what: str, spec: Spec) -> None:
        if self.are_copied:
            world.meet(f"{spec.name}: {what}", spec.timeout_seconds)


@contextmanager
def open_run_files(world: World, orders: Sequence[RunOrder], shares: bool, seconds: float) -> Iterator[RunFiles]:
    """Yield the files of the runs of a job; all ranks call this. ``shares``: whether this machine mounts rank 0's."""
    world.store.set(f"files/shares/{world.rank}", str(int(shares)))
    roots = tuple(dict.fromkeys(path for order in orders for path in (order.spec.directory, *order.candidates)))
    if world.rank != 0:
        world.wait_for(world.store, {_SERVER: "rank 0"}, "the files of the runs", seconds)
        server = json.loads(world.store.get(_SERVER))
        remote = None if shares else RemoteFiles(roots, os.environ["MASTER_ADDR"], seconds=seconds, **server)
        yield RunFiles(world.rank == world.first_here and not shares, bool(server), remote)
        return
    keys = {f"files/shares/{rank}": f"rank {rank}" for rank in range(world.size)}
    world.wait_for(world.store, keys, "the files of the runs", seconds)
    are_copied, token = not all(int(world.store.get(key)) for key in keys), token_hex()
    with serve_files(roots, token) if are_copied else nullcontext(0) as port:
        world.store.set(_SERVER, json.dumps({"port": port, "token": token} if are_copied else {}))
        yield RunFiles(True, are_copied)
