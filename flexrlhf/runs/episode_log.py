"""Replies of environments in the steps since the last checkpoint, so that a run that goes on receives the same ones.

``episodes/step<s>-rank<r>.jsonl`` has a line for each reply, with a digest of the turns before it: an environment need
not reply alike twice, and where the policy's turns are others, it is called again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from threading import Lock

from flexrlhf.environments.base import EpisodeCall, EpisodeReply
from flexrlhf.runs.checkpoint_directory import CheckpointDirectory

DIRECTORY = "episodes"
FILE = r"step(\d+)-rank\d+\.jsonl"
"""Name of a file of one rank and step, whose replies it has."""


class EpisodeLog:
    """Replies to the episodes of one rank, kept until no checkpoint is left from which their step would run."""

    def __init__(
        self, run: Path, received: Path, rank: int, append: Callable[[Path, str], None], first_step: int
    ) -> None:
        """Read the replies of all ranks: an episode may have moved.

        run:       directory of the run.
        received:  directory of the replies, as this machine has it.
        append:    adds text to a file of the run, which another machine may have.
        first_step: of this start; replies of earlier steps stay for an older checkpoint.
        """
        self._directory, self._rank, self._append, self._lock = run / DIRECTORY, rank, append, Lock()
        self._found: dict[str, EpisodeReply] = {}
        for path in sorted(received.glob("*.jsonl")):
            named = re.fullmatch(FILE, path.name)
            if named is None or int(named[1]) < first_step:
                continue
            for line in path.read_text(encoding="utf-8").splitlines():
                self._read(line)

    @property
    def num_found(self) -> int:
        """Number of replies of an earlier start of the run."""
        return len(self._found)

    def find(self, call: EpisodeCall) -> EpisodeReply | None:
        """Return the reply that an earlier start of the run has received to the same turns."""
        return self._found.get(_digest(call)) if self._found else None

    def add(self, step: int, replies: Sequence[tuple[EpisodeCall, EpisodeReply]]) -> None:
        """Write the replies that ``step`` has received, except to episodes that failed or are of an evaluation."""
        entries = [
            {**asdict(reply), "digest": _digest(call)}
            for call, reply in replies
            if reply.failure is None and call.key[0] >= 0
        ]
        if entries:
            text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
            with self._lock:
                self._append(self._directory / f"step{step}-rank{self._rank}.jsonl", text)

    def _read(self, line: str) -> None:
        """Take a line; the last one may be cut off where the run was killed."""
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            return
        digest, messages = entry.pop("digest"), tuple((role, text) for role, text in entry.pop("messages"))
        self._found[digest] = EpisodeReply(messages, **entry)


def drop_replies(run: Path, oldest: CheckpointDirectory) -> None:
    """Remove the replies of steps before the ``oldest`` checkpoint that the run may go on from."""
    for path in (run / DIRECTORY).glob("*.jsonl"):
        named = re.fullmatch(FILE, path.name)
        if named is not None and CheckpointDirectory.before(run, int(named[1])).path < oldest.path:
            path.unlink(missing_ok=True)


def _digest(call: EpisodeCall) -> str:
    return blake2b(repr((call.key, call.seed, call.turns, call.is_ended)).encode(), digest_size=16).hexdigest()
