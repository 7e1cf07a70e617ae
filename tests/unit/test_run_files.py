"""Files of runs that go from a machine to rank 0's over HTTP: whole or not at all, and for this job alone."""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from flexrlhf.errors import RunStopped
from flexrlhf.runs import file_server
from flexrlhf.runs.file_server import ServedRuns, serve_files
from flexrlhf.runs.remote_files import RemoteFiles
from flexrlhf.runs.run_files import RunFiles


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    directory = tmp_path / "here"
    directory.mkdir()
    return directory


@pytest.fixture
def remote(there: Path, here: Path) -> Iterator[RemoteFiles]:
    """Files of ``there``; the two machines have their directories under different paths."""
    with serve_files(ServedRuns({there: ["actor"]}, [there / "checkpoints"]), "secret", "127.0.0.1") as port:
        yield RemoteFiles((here,), "127.0.0.1", port, "secret", 10.0)


def test_a_file_goes_there_and_is_removed_here(remote: RemoteFiles, here: Path, there: Path) -> None:
    path = here / "columns" / "a b%.safetensors"
    path.parent.mkdir()
    path.write_bytes(os.urandom(3_000_000))
    contents = path.read_bytes()
    RunFiles(True, True, remote).send(path)
    assert (there / "columns" / "a b%.safetensors").read_bytes() == contents and not path.exists()
    assert [each.name for each in (there / "columns").iterdir()] == ["a b%.safetensors"]


def test_a_directory_takes_the_place_of_the_one_there(remote: RemoteFiles, here: Path, there: Path) -> None:
    (there / "actor").mkdir(parents=True)
    (there / "actor" / "old.json").write_text("old")
    # of an attempt that was cut off
    (there / "actor.writing").mkdir()
    (there / "actor.writing" / "part").write_text("part")
    (here / "actor").mkdir(parents=True)
    (here / "actor" / "config.json").write_text("{}")
    (here / "actor" / "model.safetensors").write_bytes(b"weights")
    RunFiles(False, True, remote).send_directory(here / "actor")
    assert sorted(each.name for each in there.iterdir()) == ["actor"] and not (here / "actor").exists()
    assert sorted(each.name for each in (there / "actor").iterdir()) == ["config.json", "model.safetensors"]
    remote.get_directory(here / "actor", here / "copy")
    assert (here / "copy" / "model.safetensors").read_bytes() == b"weights"


def test_lines_are_appended_there(remote: RemoteFiles, here: Path, there: Path) -> None:
    for files in (RunFiles(False, True, remote), RunFiles(True)):
        for line in ("first\n", "second\n"):
            files.append(here / "timeline" / "rank-00001.jsonl", line)
    for directory in (here, there):
        assert (directory / "timeline" / "rank-00001.jsonl").read_text() == "first\nsecond\n"


def test_another_job_is_refused(remote: RemoteFiles, here: Path, there: Path) -> None:
    (here / "columns").mkdir()
    (here / "columns" / "file.json").write_text("x")
    with pytest.raises(RunStopped, match="of another job"):
        replace(remote, token="guess").put(here / "columns" / "file.json")
    assert not there.exists()


def request(remote: RemoteFiles, line: str, *headers: str, body: bytes = b"", token: str | None = "secret") -> bytes:
    """Return the first bytes of the response to a request; empty if the connection was closed without one."""
    lines = [f"{line} HTTP/1.0", *([] if token is None else [f"Authorization: Bearer {token}"]), *headers]
    with socket.create_connection((remote.host, remote.port), timeout=5) as connection, suppress(OSError):
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1000), b""))
    return b""


WRITABLE = "/0/columns/a.json"
HOSTILE = {
    "another directory": ("GET /0/../key",),
    "an absolute path": ("GET /0//etc/passwd",),
    "an escaped absolute path": ("GET /0/%2fetc/passwd",),
    "a number of no directory": ("GET /2/key",),
    "a digit of another script": ("GET /%D9%A0/key",),
    "a long number": ("GET /" + "9" * 5000 + "/x",),
    "no number": ("GET /key",),
    "a long path": ("GET /0/" + "a" * 5000,),
    "a long name": ("GET /0/" + "a" * 256,),
    "a path with a NUL": ("GET /0/a%00b",),
    "an odd byte in the token": ("GET /0/key", "Authorization: Bearer \xe9"),
    "no token": ("GET /0/key", "token: none"),
    "no length": (f"PUT {WRITABLE}",),
    "a length in words": (f"PUT {WRITABLE}", "Content-Length: x"),
    "a negative length": (f"PUT {WRITABLE}", "Content-Length: -1"),
    "a long length": (f"PUT {WRITABLE}", "Content-Length: " + "9" * 5000),
    "a length beyond the disk": (f"PUT {WRITABLE}", "Content-Length: 999999999999999"),
    "lines beyond the limit": ("POST /0/timeline/rank-00001.jsonl", "Content-Length: 99999999999"),
    "code": ("PUT /0/actor.writing/evil.py", "Content-Length: 0"),
    "a file of a model that is whole": ("PUT /0/actor/config.json", "Content-Length: 0"),
    "a file of no trained model": ("PUT /0/evil.writing/config.json", "Content-Length: 0"),
    "a file of a checkpoint that is only read": ("PUT /1/a.json", "Content-Length: 0"),
    "metrics": ("POST /0/metrics.jsonl", "Content-Length: 0"),
    "the directory of the run": ("DELETE /0/",),
    "the directory of the run, named otherwise": ("DELETE /0/./",),
    "a model that is whole": ("DELETE /0/actor",),
    "all checkpoints": ("MOVE /0/checkpoints.writing",),
    "another method": ("PATCH /0/key",),
    "a later version of HTTP": ("GET /0/key HTTP/7.0",),
    "a long header": ("GET /0/key", "X: " + "a" * 70000),
    "many headers": ("GET /0/key", *[f"X-{number}: a" for number in range(200)]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_request_is_refused(
    case: str, remote: RemoteFiles, there: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is read, written or printed, and the server goes on."""
    (tmp_path / "key").write_text("not for others")
    (there / "actor").mkdir(parents=True)
    (there / "key").write_text("for this job")
    line, *headers = HOSTILE[case]
    has_token = not any(header.lower().startswith(("authorization", "token")) for header in headers)
    response = request(remote, line, *headers, token="secret" if has_token else None)
    assert (response[9:10] == b"4" and b"for " not in response) or not response, response
    assert [str(each.relative_to(there)) for each in sorted(there.rglob("*"))] in (
        ["actor", "key"],
        ["actor", "columns", "key"],
    )
    assert b"for this job" in request(remote, "GET /0/key")
    assert capfd.readouterr() == ("", "")


def test_symbolic_links_are_not_followed(remote: RemoteFiles, there: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "key.json").write_text("not for others")
    (there / "actor").mkdir(parents=True)
    (there / "actor" / "link").symlink_to(outside / "key.json")
    for name in ("columns", "actor.writing"):
        (there / name).symlink_to(outside)
    for line in ("GET /0/actor/link", "GET /0/columns/key.json", "GET /0/columns", "DELETE /0/actor.writing"):
        assert b" 403 " in request(remote, line), line
    for line in ("PUT /0/columns/key.json", "PUT /0/actor.writing/key.json"):
        assert b" 403 " in request(remote, line, "Content-Length: 1", body=b"x"), line
    assert request(remote, "GET /0/actor").endswith(b"{}")
    assert (outside / "key.json").read_text() == "not for others"


@pytest.mark.parametrize("way", ["closed", "reset"])
def test_a_file_that_is_cut_off_is_not_there(
    way: str, remote: RemoteFiles, there: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A machine that is lost while it copies costs no line: the job reports it."""
    head = f"PUT {WRITABLE} HTTP/1.0\r\nAuthorization: Bearer secret\r\nContent-Length: 100\r\n\r\nhalf"
    with socket.create_connection((remote.host, remote.port)) as connection:
        connection.sendall(head.encode())
        await_files(there / "columns", 1)
        if way == "closed":
            connection.shutdown(socket.SHUT_WR)
            assert b" 400 " in connection.recv(100)
        else:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await_files(there / "columns", 0)
    assert request(remote, "GET /0/columns").endswith(b"{}")
    assert capfd.readouterr() == ("", "")


def await_files(directory: Path, number: int) -> None:
    limit = time.monotonic() + 5
    while len(list(directory.glob("*"))) != number:
        assert time.monotonic() < limit, f"{number} files in {directory} are awaited"
        time.sleep(0.01)


def test_idle_and_many_connections_are_closed(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_server._Handler, "timeout", 0.5)
    there.mkdir()
    before = threading.active_count()
    with serve_files(ServedRuns({there: []}), "secret", "127.0.0.1", most_of_one=8) as port:
        idle = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(40)]
        assert threading.active_count() - before <= 9
        # those above the limit at once, the others after a silence
        assert not any(connection.recv(1) for connection in idle)
        for connection in idle:
            connection.close()
        remote = RemoteFiles((there,), "127.0.0.1", port, "secret", 5.0)
        assert b" 200 " in request(remote, "GET /0/")


def test_the_server_listens_on_one_address(there: Path) -> None:
    with serve_files(ServedRuns({there: []}), "secret", "127.0.0.2") as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_problems_are_one_sentence(remote: RemoteFiles, here: Path, there: Path) -> None:
    file = here / "columns" / "a.json"
    file.parent.mkdir()
    file.write_text("x")
    there.write_text("a file where the directory should be")
    with pytest.raises(RunStopped, match=r"a.json: not copied between .* 127.0.0.1 \((File exists|Not a directory)"):
        remote.put(file)
    with pytest.raises(RunStopped, match="no such file"):
        remote.get_directory(here / "missing", here / "copy")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(RunStopped, match="Connection refused"):
            replace(remote, port=closed.getsockname()[1]).append(file, "x")
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(RunStopped, match="timed out"):
        replace(remote, port=silent.getsockname()[1], seconds=0.2).append(file, "x")


def test_a_shared_directory_needs_no_copies(here: Path) -> None:
    (here / "file").write_text("x")
    files = RunFiles(True)
    files.send(here / "file")
    files.send_directory(here)
    files.clear(here)
    assert stat.S_ISREG((here / "file").stat().st_mode)
