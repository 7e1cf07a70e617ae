"""Files of runs as one rank has them: in a directory that all machines mount, or in one of its machine's own.

If machines have directories of their own, rank 0's is the one of the run. Files that another machine writes for it are
copied there, and files that it reads of an earlier step or run are copied from there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from torch import Tensor

from flexrlhf.comm.world import World
from flexrlhf.config.job_secret import JobSecret
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.checkpoint_directory import FOLDER
from flexrlhf.runs.durable_files import FileEntry, write_durably
from flexrlhf.runs.episode_log import DIRECTORY as REPLIES
from flexrlhf.runs.file_server import ServedRuns, serve_files
from flexrlhf.runs.fingerprints import written_inputs
from flexrlhf.runs.remote_files import RemoteFiles
from flexrlhf.runs.resume import RunOrder
from flexrlhf.runs.tensor_files import Piece, piece_file, write_pieces, write_tensors

RECEIVED = "received"
"""Folder of a run, on a machine with a directory of its own, for the checkpoint that it goes on from, with
replies."""
SPARE_CONNECTIONS = 16
"""Connections that one address may have in addition to one for each rank."""
_SERVER = "files/server"


@dataclass(frozen=True)
class RunFiles:
    """Files of runs, for one rank.

    keeps:       whether this rank keeps the directories of its machine: makes, trims and clears them.
    are_copied:  whether a machine of the job has directories of its own.
    remote:      files of rank 0's machine, if this one has its own.
    """

    keeps: bool
    are_copied: bool = False
    remote: RemoteFiles | None = None

    @classmethod
    @contextmanager
    def open(cls, world: World, orders: Sequence[RunOrder], shares: bool, seconds: float) -> Iterator[RunFiles]:
        """Yield the files of the runs of a job; all ranks call this. ``shares``: whether this machine mounts rank 0's.

        Raises UserError if files must be copied and the machines have no common secret.
        """
        world.store.set(f"files/shares/{world.rank}", str(int(shares)))
        runs = _served_runs(orders)
        if world.rank != 0:
            world.wait_for(world.store, {_SERVER: "rank 0"}, "the files of the runs", seconds)
            secret = JobSecret.here()
            server = json.loads(secret.verified(_SERVER, world.store.get(_SERVER).decode()))
            remote = None
            if not shares:
                token = secret.derived_token(server["nonce"])
                remote = RemoteFiles(runs.roots, server["host"], server["port"], token, seconds)
            yield cls(world.rank == world.first_here and not shares, bool(server), remote)
            return
        keys = {f"files/shares/{rank}": f"rank {rank}" for rank in range(world.size)}
        world.wait_for(world.store, keys, "the files of the runs", seconds)
        secret = JobSecret.here()
        if all(int(world.store.get(key)) for key in keys):
            world.store.set(_SERVER, secret.signed(_SERVER, "{}"))
            yield cls(True)
            return
        if not secret.value:
            raise UserError(
                f"{secret.VARIABLE}: missing; machines that do not mount the runs of rank 0 send it files; "
                f"{secret.MAKE}"
            )
        host, nonce = world.address, token_hex()
        with serve_files(runs, secret.derived_token(nonce), host, seconds, world.size + SPARE_CONNECTIONS) as port:
            world.store.set(_SERVER, secret.signed(_SERVER, json.dumps({"host": host, "port": port, "nonce": nonce})))
            yield cls(True, are_copied=True)

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
        with path.open("a", encoding="utf-8") as file:
            file.write(text)

    def write_checkpoint(
        self,
        directory: Path,
        rank: int,
        pieces: Mapping[str, Mapping[str, Piece]],
        rows: Mapping[str, Tensor],
        texts: Mapping[str, str],
    ) -> dict[str, FileEntry]:
        """Write the files of one ``rank`` of a checkpoint, on disk here when this returns, and copy them to rank 0's
        machine; return their sizes and checksums.

        pieces:  of its tensors, by placed model.
        rows:    columns of the steps in flight.
        texts:   further files, by name.
        """
        directory.mkdir(parents=True, exist_ok=True)
        files = {piece_file(model, rank): contents for model, contents in pieces.items()}
        written = {name: write_pieces(directory / name, contents) for name, contents in files.items()}
        if rows:
            name = f"rows-{rank:05d}.safetensors"
            written[name] = write_tensors(directory / name, rows)
        for name, text in texts.items():
            written[name] = write_durably(directory / name, text.encode())
        for name in written:
            self.send(directory / name)
        return written

    def received_checkpoint(self, checkpoint: Path, plan: Plan, world: World) -> Path:
        """Return where this machine has a checkpoint, once it has it. All ranks call this."""
        return self._received(checkpoint, plan, world)

    def received_replies(self, plan: Plan, world: World) -> Path:
        """Return where this machine has the replies of environments, once it has them. All ranks call this."""
        directory = plan.spec.directory / REPLIES
        if world.rank == 0:
            directory.mkdir(exist_ok=True)
        self._meet(world, "the directory of replies", plan.spec)
        return self._received(directory, plan, world)

    def remove_received(self, plan: Plan, world: World) -> None:
        """Remove the copies of checkpoints and replies once all ranks have read them. All ranks call this."""
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

    def _received(self, directory: Path, plan: Plan, world: World) -> Path:
        target = directory if self.remote is None else plan.spec.directory / RECEIVED / directory.name
        if self.remote is not None and self.keeps:
            self.remote.get_directory(directory, target)
        self._meet(world, f"the copies of {directory}", plan.spec)
        return target

    def _meet(self, world: World, what: str, spec: Spec) -> None:
        if self.are_copied:
            world.meet(f"{spec.name}: {what}", spec.timeout_seconds)


def _served_runs(orders: Sequence[RunOrder]) -> ServedRuns:
    """Return the directories of all runs of a job, in the same order on all ranks."""
    written = {order.spec.directory: [name for name, _ in order.spec.models] for order in orders}
    read = dict.fromkeys(path for order in orders for path in order.candidates if path not in written)
    return ServedRuns(written, tuple(read))
