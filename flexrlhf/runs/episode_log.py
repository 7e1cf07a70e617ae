"""Replies of environments in the steps since the last checkpoint, so that a run that goes on receives the same ones.

``episodes/step<s>-rank<r>.jsonl`` has a line for each reply, with a digest of the turns before it: an environment need
not reply alike twice, and where the policy's turns are others, it is called again.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

from flexrlhf.environments.base import EpisodeCall, EpisodeReply
from flexrlhf.runs.manifest import checkpoint_directory

DIRECTORY = "episodes"
_FILE = re.compile(r"step(\d+)-rank\d+\.jsonl")


class EpisodeLog:
    """Replies to the episodes of one rank, kept until no checkpoint is left from which their step would be played."""

    def __init__(self, run: Path, rank: int) -> None:
        """Read the replies that are in ``run``, of all ranks: an episode may have moved."""
        self._directory, self._rank = run / DIRECTORY, rank
        self._found: dict[str, EpisodeReply] = {}
        for path in sorted(self._directory.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                self._read(line)

    def find(self, call: EpisodeCall) -> EpisodeReply | None:
        """Return the reply that an earlier start of the run has received to the same turns."""
        return self._found.get(_digest(call)) if self._found else None

    def add(self, call: EpisodeCall, reply: EpisodeReply) -> None:
        """Write a reply, unless the episode failed or is of an evaluation."""
        step = call.key[0]
        if reply.failure is not None or step < 0:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        entry = {**asdict(reply), "digest": _digest(call)}
        with (self._directory / f"step{step}-rank{self._rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def _read(self, line: str) -> None:
        """Take a line; the last one may be cut off where the run was killed."""
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            return
        digest, messages = entry.pop("digest"), tuple((role, text) for role, text in entry.pop("messages"))
        self._found[digest] = EpisodeReply(messages, **entry)


def drop_replies(run: Path, oldest: Path) -> None:
    """Remove the replies of steps before the ``oldest`` checkpoint that the run may go on from."""
    for path in (run / DIRECTORY).glob("*.jsonl"):
        named = _FILE.fullmatch(path.name)
        if named is not None and checkpoint_directory(run, int(named[1])) < oldest:
            path.unlink(missing_ok=True)


def _digest(call: EpisodeCall) -> str:
    return blake2b(repr((call.key, call.seed, call.turns, call.is_ended)).encode(), digest_size=16).hexdigest()
