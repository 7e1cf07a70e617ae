"""Files of runs that go from a machine to rank 0's over HTTP: whole or not at all, and for this job alone."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flexrlhf.errors import RunStopped
from flexrlhf.runs.remote_files import RemoteFiles, serve_files
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
    with serve_files([there], "secret") as port:
        yield RemoteFiles((here,), "127.0.0.1", port, "secret", 10.0)


def test_a_file_goes_there_and_is_removed_here(remote: RemoteFiles, here: Path, there: Path) -> None:
    path = here / "checkpoints" / "a b%.safetensors"
    path.parent.mkdir()
    path.write_bytes(os.urandom(3_000_000))
    contents = path.read_bytes()
    RunFiles(True, True, remote).send(path)
    assert (there / "checkpoints" / "a b%.safetensors").read_bytes() == contents and not path.exists()
    assert [each.name for each in (there / "checkpoints").iterdir()] == ["a b%.safetensors"]


def test_a_directory_takes_the_place_of_the_one_there(remote: RemoteFiles, here: Path, there: Path) -> None:
    (there / "actor").mkdir(parents=True)
    (there / "actor" / "old.json").write_text("old")
    # of an attempt that was cut off
    (there / "actor.writing").mkdir()
    (there / "actor.writing" / "part").write_text("part")
    (here / "actor" / "shards").mkdir(parents=True)
    (here / "actor" / "config.json").write_text("{}")
    (here / "actor" / "shards" / "0").write_bytes(b"weights")
    RunFiles(False, True, remote).send_directory(here / "actor")
    assert sorted(each.name for each in there.iterdir()) == ["actor"] and not (here / "actor").exists()
    assert sorted(each.name for each in (there / "actor").iterdir()) == ["config.json", "shards"]
    remote.get_directory(here / "actor", here / "copy")
    assert (here / "copy" / "shards" / "0").read_bytes() == b"weights"


def test_lines_are_appended_there(remote: RemoteFiles, here: Path, there: Path) -> None:
    for files in (RunFiles(False, True, remote), RunFiles(True)):
        for line in ("first\n", "second\n"):
            files.append(here / "timeline" / "rank-00001.jsonl", line)
    for directory in (here, there):
        assert (directory / "timeline" / "rank-00001.jsonl").read_text() == "first\nsecond\n"


def test_other_jobs_and_paths_are_refused(remote: RemoteFiles, here: Path, there: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("not for others")
    (here / "file").write_text("x")
    with pytest.raises(RunStopped, match="of another job"):
        replace(remote, token="guess").put(here / "file")
    for address in ("/0/../key", f"/0/{tmp_path}/key", "/1/key", "/key"):
        with socket.create_connection((remote.host, remote.port)) as connection:
            connection.sendall(f"GET {address} HTTP/1.0\r\nAuthorization: Bearer secret\r\n\r\n".encode())
            assert b" 403 " in connection.recv(100), address
    assert not there.exists()


def test_a_file_that_is_cut_off_is_not_there(remote: RemoteFiles, there: Path) -> None:
    with socket.create_connection((remote.host, remote.port)) as connection:
        connection.sendall(b"PUT /0/part HTTP/1.0\r\nAuthorization: Bearer secret\r\nContent-Length: 100\r\n\r\nhalf")
        connection.shutdown(socket.SHUT_WR)
        assert b" 507 " in connection.recv(100)
    assert not (there / "part").exists()


def test_problems_are_one_sentence(remote: RemoteFiles, here: Path, there: Path) -> None:
    (here / "file").write_text("x")
    there.write_text("a file where the directory should be")
    with pytest.raises(RunStopped, match=r"here/file: not copied between .* 127.0.0.1 \((File exists|Not a directory)"):
        remote.put(here / "file")
    with pytest.raises(RunStopped, match="no such file"):
        remote.get_directory(here / "missing", here / "copy")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(RunStopped, match="Connection refused"):
            replace(remote, port=closed.getsockname()[1]).append(here / "file", "x")
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(RunStopped, match="timed out"):
        replace(remote, port=silent.getsockname()[1], seconds=0.2).append(here / "file", "x")


def test_a_shared_directory_needs_no_copies(here: Path) -> None:
    (here / "file").write_text("x")
    files = RunFiles(True)
    files.send(here / "file")
    files.send_directory(here)
    files.clear(here)
    assert stat.S_ISREG((here / "file").stat().st_mode)
