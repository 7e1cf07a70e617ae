"""Log of the replies of environments: which step received which, and what a run that goes on repeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexrlhf.environments.base import EpisodeCall, EpisodeReply
from flexrlhf.runs.episode_log import EpisodeLog
from flexrlhf.user_code.call_failures import CallFailure


def append(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def opened(run: Path, first_step: int = 0, rank: int = 0) -> EpisodeLog:
    return EpisodeLog(run, run / "episodes", rank, append, first_step)


def call_of(row: int, *turns: str) -> EpisodeCall:
    return EpisodeCall((0, row), {}, 7, turns)


REPLY = EpisodeReply((("user", "yes"),), 0.5)


def test_a_reply_is_of_the_step_that_received_it(tmp_path: Path) -> None:
    """Rows 0 and 2 are late in step 0; the reply to row 0 is there in step 2. A reply that no step has received yet is
    called for again, and a failed one leaves none."""
    log = opened(tmp_path)
    log.add(0, [(call_of(0), REPLY), (call_of(1), EpisodeReply(failure=CallFailure("raise", "no game")))])
    log.add_cut(0, {(0, 0): 1, (0, 1): None, (0, 2): 0})
    log.add(2, [(call_of(0, "a"), REPLY)])
    for rank in range(2):
        again = opened(tmp_path, rank=rank)
        assert again.num_found == 2 and again.find(call_of(0)) == again.find(call_of(0, "a")) == REPLY
        assert again.find(call_of(1)) is again.find(call_of(1, "a")) is again.find(call_of(0, "b")) is None
        assert again.cut(0) == {(0, 0): 1, (0, 1): None, (0, 2): 0}
        assert again.cut(2) == {}, "step 2 was not over"
    # a checkpoint after step 0 has what the row had received then
    later = opened(tmp_path, first_step=1)
    assert later.num_found == 1 and later.cut(0) == {}


def test_a_repeated_step_writes_no_reply_twice(tmp_path: Path) -> None:
    """But a later step does that receives a reply which an earlier start has received before, so that a checkpoint
    between them can go on; a line that the kill cut off is none."""
    opened(tmp_path).add(1, [(call_of(0, "a"), REPLY)])
    (file,) = (tmp_path / "episodes").iterdir()
    text = file.read_text()
    append(file, text[: len(text) // 2])
    again = opened(tmp_path)
    again.add(1, [(call_of(0, "a"), REPLY)])
    assert file.read_text().count("digest") <= 2
    again.add(2, [(call_of(0, "a"), REPLY)])
    assert opened(tmp_path, first_step=2).find(call_of(0, "a")) == REPLY


@pytest.mark.parametrize("part", [0.5, 1.0])
def test_a_kill_loses_no_later_line(tmp_path: Path, part: float) -> None:
    """Of a run that is killed while it writes a reply, resumed, killed again and resumed; with any letters."""
    for start, text in enumerate(("\u2028é", "\x85日本")):
        log = opened(tmp_path)
        reply = EpisodeReply((("user", text),), 0.5)
        log.add(1, [(call_of(0, f"{start}"), reply)])
        log.add_cut(1, {(0, start): start})
        log.add(1, [(call_of(1, f"{start}"), reply)])
        again = opened(tmp_path)
        assert again.find(call_of(0, f"{start}")) == again.find(call_of(1, f"{start}")) == reply
        assert again.cut(1)[0, start] == start
        (file,) = (tmp_path / "episodes").iterdir()
        lines = file.read_bytes().rstrip(b"\n").split(b"\n")
        file.write_bytes(b"\n".join([*lines[:-1], lines[-1][: int(part * len(lines[-1]))]]))
    last = opened(tmp_path)
    assert all(last.find(call_of(0, f"{start}")) for start in range(2)) and last.cut(1) == {(0, 0): 0, (0, 1): 1}
    assert [last.find(call_of(1, f"{start}")) is not None for start in range(2)] == [part == 1.0] * 2
