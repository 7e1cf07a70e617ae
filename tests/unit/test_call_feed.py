"""Calls of a program on their way to the ranks, through a store without authentication."""

from __future__ import annotations

import json
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flexrlhf.comm.mailbox import PART_BYTES, Mailbox
from flexrlhf.comm.store import Endpoint
from flexrlhf.comm.world import World
from flexrlhf.errors import UserError
from flexrlhf.runs.fingerprints import FunctionFiles
from flexrlhf.trainer.call_feed import CallFeed

CALL = {"do": "call", "operator": "train_actor", "loss": "stranger.py:loss"}


def first_feed(store: dist.Store, directory: Path) -> tuple[CallFeed, Connection]:
    """Return the feed of rank 0, and the program that it is connected to."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "program"))
        listener.listen(1)
        feed = CallFeed(rank_of(0, store), "run", str(directory / "program"), 10)
        return feed, Connection(listener.accept()[0].detach())


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """Store of a job, whose secret is set."""
    monkeypatch.setenv("FLEXRLHF_TOKEN", "5" * 64)
    return Endpoint("test", "127.0.0.1", 0).serve(False, 10)


def rank_of(rank: int, store: dist.Store) -> World:
    return World(rank, 2, store, torch.device("cpu"), "gloo")


def test_all_ranks_receive_the_calls_of_the_program_in_order(store: dist.TCPStore, tmp_path: Path) -> None:
    """Of any length; no entry of them is left in the store."""
    first, program = first_feed(store, tmp_path)
    feeds = [first, CallFeed(rank_of(1, store), "run", "", 10)]
    calls = [CALL, {"do": "begin", "step": 1, "examples": ["a" * PART_BYTES, "b" * PART_BYTES]}]
    for call in calls:
        program.send_bytes(json.dumps(call).encode())
    assert [[feed.next() for _ in calls] for feed in feeds] == [calls, calls]
    program.close()
    assert [feed.next() for feed in feeds] == [{"do": "close"}] * 2
    first.close()
    assert not [key for key in store.list_keys() if "calls/" in key]


def test_a_program_that_waits_reads_the_end_of_ranks_that_stop(store: dist.TCPStore, tmp_path: Path) -> None:
    """By a request to their launcher: the program is in the middle of its calls."""
    feed, program = first_feed(store, tmp_path)
    program.send_bytes(json.dumps(CALL).encode())
    assert feed.next() == CALL
    feed.close()
    with pytest.raises(EOFError):
        program.recv_bytes()


@pytest.mark.parametrize("tag", ["", "0" * 64], ids=["none", "a guess"])
def test_a_call_of_a_stranger_is_not_made(store: dist.TCPStore, tag: str) -> None:
    feed = CallFeed(rank_of(1, store), "run", "", 10)
    Mailbox(rank_of(0, store), "calls/run", 10).put("0", f"{tag}\n{json.dumps(CALL)}".encode())
    with pytest.raises(UserError, match="^session: call 0 in the job's store is of a process without the secret of"):
        feed.next()


def test_a_call_is_made_once(store: dist.TCPStore) -> None:
    """Its tag belongs to its number."""
    feed, mailbox = CallFeed(rank_of(1, store), "run", "", 10), Mailbox(rank_of(0, store), "calls/run", 10)
    for number in (0, 1):
        mailbox.put(str(number), feed._secret.signed("calls/run/0", json.dumps(CALL)).encode())
    assert feed.next() == CALL
    with pytest.raises(UserError, match="^session: call 1 "):
        feed.next()


def test_a_loss_of_other_code_than_the_program_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a file that it imports differs; each machine has its own directory."""
    for place, scale in (("first", 1), ("second", 2)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "losses.py").write_text("from scales import SCALE\n\ndef loss(algorithm): ...\n")
        (tmp_path / place / "scales.py").write_text(f"SCALE = {scale}\n")
    monkeypatch.chdir(tmp_path / "first")
    files = FunctionFiles("losses.py:loss", "session")
    expected = files.digests()
    files.check(expected, "rank 0 (host a)")
    monkeypatch.chdir(tmp_path / "second")
    with pytest.raises(
        UserError, match=r"^session: scales.py of rank 1 \(host b\) is not the one of the program; copy"
    ):
        files.check(expected, "rank 1 (host b)")
    (tmp_path / "second" / "losses.py").unlink()
    with pytest.raises(UserError, match="^session: no file losses.py"):
        files.check(expected, "rank 1 (host b)")
