"""Replies of environments in the steps since the last checkpoint, so that a run that goes on receives the same ones.

``episodes/step<s>-rank<r>.jsonl`` has a line for each reply that the step received, with a digest of the turns before
it: an environment need not reply alike twice, and where the policy's turns are others, it is called again. Where late
rows are carried (``rollout.late_replies``), the clock decides which replies a step receives. A further line says it for
the rows of a generate, once it has ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

from flexrlhf.environments.base import EpisodeCall, EpisodeReply
from flexrlhf.environments.episode_process import Key
from flexrlhf.runs.checkpoint_directory import CheckpointDirectory

DIRECTORY = "episodes"
FILE = r"step(\d+)-rank\d+\.jsonl"
"""Name of a file of one rank and step, whose replies it has."""
CUT = "cut"


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
        self._found: dict[str, tuple[int, EpisodeReply]] = {}
        self._cuts: dict[int, dict[Key, int | None]] = {}
        for step, entry in _entries(received, first_step):
            if CUT in entry:
                self._cuts.setdefault(step, {}).update({(taken, row): number for taken, row, number in entry[CUT]})
                continue
            digest, messages = entry.pop("digest"), tuple((role, text) for role, text in entry.pop("messages"))
            self._found[digest] = step, EpisodeReply(messages, **entry)

    @property
    def num_found(self) -> int:
        """Number of replies of an earlier start of the run."""
        return len(self._found)

    def find(self, call: EpisodeCall) -> EpisodeReply | None:
        """Return the reply that an earlier start of the run has received to the same turns."""
        found = self._found.get(_digest(call)) if self._found else None
        return None if found is None else found[1]

    def cut(self, step: int) -> Mapping[Key, int | None]:
        """Return the episodes at the cuts that ended the generates of ``step``, as far as records have them: how many
        replies, that to its reset included, one had whose next reply was late; None: none was late."""
        return self._cuts.get(step, {})

    def add(self, step: int, replies: Sequence[tuple[EpisodeCall, EpisodeReply]]) -> None:
        """Write the replies that ``step`` has received, except to episodes that failed or are of an evaluation."""
        entries = [
            {**asdict(reply), "digest": _digest(call)}
            for call, reply in replies
            if reply.failure is None and call.key[0] >= 0
        ]
        self._write(step, [each for each in entries if self._found.get(each["digest"], (None,))[0] != step])

    def add_cut(self, step: int, episodes: Mapping[Key, int | None]) -> None:
        """Write the ``episodes`` of a generate of ``step`` at its end, as ``cut`` returns them."""
        if episodes:
            self._write(step, [{CUT: [[*key, number] for key, number in episodes.items()]}])

    def _write(self, step: int, entries: Sequence[Mapping[str, Any]]) -> None:
        if entries:
            # a line begins with its newline: the one before may be cut off where an earlier start was killed
            text = "".join("\n" + json.dumps(entry) for entry in entries)
            with self._lock:
                self._append(self._directory / f"step{step}-rank{self._rank}.jsonl", text)


def _entries(directory: Path, first_step: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines of all ranks in steps from ``first_step`` on, without the ones that a kill has cut off."""
    for path in sorted(directory.glob("*.jsonl")):
        named = re.fullmatch(FILE, path.name)
        if named is None or int(named[1]) < first_step:
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield int(named[1]), json.loads(line)
            except json.JSONDecodeError:
                continue


def drop_replies(run: Path, oldest: CheckpointDirectory) -> None:
    """Remove the replies of steps before the ``oldest`` checkpoint that the run may go on from."""
    for path in (run / DIRECTORY).glob("*.jsonl"):
        named = re.fullmatch(FILE, path.name)
        if named is not None and CheckpointDirectory.before(run, int(named[1])).path < oldest.path:
            path.unlink(missing_ok=True)


def _digest(call: EpisodeCall) -> str:
    return blake2b(repr((call.key, call.seed, call.turns, call.is_ended)).encode(), digest_size=16).hexdigest()
