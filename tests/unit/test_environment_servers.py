"""Servers that run episodes: they share them, and one that is lost costs its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.environments.base import EpisodeCall, EpisodeReply
from flexrlhf.environments.episodes import Episodes
from flexrlhf.environments.servers import Servers
from flexrlhf.environments.sources import check_variables
from flexrlhf.errors import UserError

FOLDER = Path(__file__).parent
ROWS = range(6)


@dataclass
class Server:
    """A server in a process of its own. ``sessions``: file with a line for each."""

    url: str
    process: subprocess.Popen[bytes]
    sessions: Path

    @property
    def num_sessions(self) -> int:
        return len(self.sessions.read_text().splitlines()) if self.sessions.exists() else 0

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def serving(program: str, folder: Path) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sessions = folder / f"sessions-{port}"
    process = subprocess.Popen([sys.executable, str(FOLDER / program), str(port), str(sessions)])
    server = Server(f"http://127.0.0.1:{port}", process, sessions)
    try:
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None
            time.sleep(0.05)
        yield server
    finally:
        server.end()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    with ExitStack() as stack:
        first, second = (stack.enter_context(serving("session_server.py", tmp_path)) for _ in range(2))
        yield first, second


def episodes_of(*servers: Server, seconds: float = 30.0, connect: float = 5.0) -> closing[Episodes]:
    path = f"openenv:{','.join(server.url for server in servers)}"
    options = {"message": "text", "greeting": "hello", "connect_seconds": connect}
    return closing(Episodes(EnvironmentSpec(path=path, options=options, timeout_seconds=seconds), 1))


def reply_to(
    episodes: Episodes, step: int, turns: Sequence[str], rows: Sequence[int] = ROWS, replied: Sequence[int] = ()
) -> list[EpisodeReply]:
    calls = [EpisodeCall((step, row), {}, row, tuple(turns), replied=tuple(replied)) for row in rows]
    return episodes.replies(calls, 60.0)


def texts(replies: Sequence[EpisodeReply]) -> list[str]:
    assert [reply.failure for reply in replies] == [None] * len(replies)
    return [text for reply in replies for _, text in reply.messages]


def expected(*turns: str, rows: Sequence[int] = ROWS) -> list[str]:
    return [" ".join([f"seed {row} hello", *turns]) for row in rows]


@pytest.mark.parametrize("program", ["session_server.py", "openenv_server.py"])
def test_openenv(program: str, tmp_path: Path) -> None:
    """Sessions of one process are open at the same time."""
    if program == "openenv_server.py":
        pytest.importorskip("openenv")
    with serving(program, tmp_path) as server, episodes_of(server) as episodes:
        for count in range(3):
            replies = reply_to(episodes, 0, ("a", "b")[:count])
            assert texts(replies) == expected(*("a", "b")[:count])
        assert [(reply.reward, reply.is_done) for reply in replies] == [(1.5, True)] * len(ROWS)


def test_a_server_that_is_killed_costs_its_episodes(servers: tuple[Server, Server]) -> None:
    """Others go on with the same replies; later episodes begin with the server that is left."""
    first, second = servers
    with episodes_of(*servers) as episodes:
        assert texts(reply_to(episodes, 0, [])) == expected()
        assert (first.num_sessions, second.num_sessions) == (3, 3)
        assert texts(reply_to(episodes, 0, ["a"])) == expected("a")
        second.end()
        replies = reply_to(episodes, 0, ["a", "b"])
        assert texts(replies[::2]) == expected("a", "b", rows=ROWS[::2])
        for row in ROWS[1::2]:
            failure = replies[row].failure
            assert failure is not None and failure.kind == f"server {second.url}"
            assert f"step 0, row {row}, turn 2: {second.url}: has gone: " in failure.text
        for turns in ([], ["a"]):
            assert texts(reply_to(episodes, 1, turns)) == expected(*turns)
        assert first.num_sessions == 9
        first.end()
        began = time.monotonic()
        failures = [reply.failure for reply in reply_to(episodes, 2, [])]
        assert time.monotonic() - began < 3
        for failure in failures:
            assert failure is not None and failure.kind == "server"
            assert all(f"{server.url}: not reached: " in failure.text for server in servers)


def test_a_replay_finds_the_same_server(servers: tuple[Server, Server]) -> None:
    """Also another process, which has none of its episodes."""
    counts = []
    for _ in range(2):
        with episodes_of(*servers) as episodes:
            assert texts(reply_to(episodes, 3, ["a"], rows=[0, 2, 3, 4])) == expected("a", rows=[0, 2, 3, 4])
            counts.append([server.num_sessions for server in servers])
    assert counts == [[1, 3], [2, 6]]


def test_a_server_that_hangs_is_named_and_not_waited_for(servers: tuple[Server, Server]) -> None:
    first, second = servers
    with episodes_of(*servers, seconds=1.5, connect=0.5) as episodes:
        assert texts(reply_to(episodes, 0, [])) == expected()
        replies = reply_to(episodes, 0, ["wait"], rows=[0])
        assert replies[0].failure is not None and replies[0].failure.kind == "timeout"
        assert f"row 0, turn 1: {first.url}: took longer than 1.5 s" in replies[0].failure.text
        os.kill(second.process.pid, signal.SIGSTOP)
        for step in (1, 2):
            assert texts(reply_to(episodes, step, [])) == expected()
        assert first.num_sessions == 3 + 12


def test_servers_share_the_episodes_of_one_that_is_gone() -> None:
    """The order in which an episode tries them is a function of its step and row."""
    found, rows = Servers(addresses := ["a", "b", "c"]), range(60)
    orders = [found.in_order((5, row)) for row in rows]
    assert [order[0] for order in orders] == [addresses[(5 + row) % 3] for row in rows]
    assert all(sorted(order) == addresses for order in orders)
    found.leave("b", "not reached")
    later = [found.in_order((5, row)) for row in rows]
    assert [order[0] for order in later].count("a") == 30 and all(order[-1] == "b" for order in later)
    assert all(one[0] == other[0] for one, other in zip(orders, later, strict=True) if one[0] != "b")


def test_each_address_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    check_variables(EnvironmentSpec(path="openenv:http://a:1, https://b/envs"))
    for path in ("openenv:http://a:1,b:2", "openenv:http://a:1,", "openenv:http://a:0"):
        with pytest.raises(UserError, match=r"or several with commas between, found 'openenv:http://a"):
            check_variables(EnvironmentSpec(path=path))
    monkeypatch.setenv("SOMEBODY", "s3cr")
    found = Servers(["http://u:${SOMEBODY}@a:1"])
    assert found.in_order((0, 0)) == ["http://u:s3cr@a:1"]
    assert found.shown("http://u:s3cr@a:1: has gone") == "http://u:${SOMEBODY}@a:1: has gone"
    monkeypatch.delenv("NOBODY", raising=False)
    with pytest.raises(UserError, match="the environment has no NOBODY"):
        check_variables(EnvironmentSpec(path="openenv:http://a:1,http://u:${NOBODY}@b:2"))
