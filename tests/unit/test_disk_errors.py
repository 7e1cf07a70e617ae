"""A file system that fails in the midst of a run is one sentence with the path and the reason."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
import torch

from flexrlhf.errors import RunStopped
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.runs.tensor_files import save_tensors


def test_a_file_of_the_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunStopped) as raised, RunDirectory(tmp_path).writing():
        (tmp_path / "removed" / "metrics.jsonl").open("a")
    assert str(raised.value) == f"{tmp_path}/removed/metrics.jsonl: cannot be written (No such file or directory)"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_write_to_an_open_file_names_the_directory(number: int, tmp_path: Path) -> None:
    with pytest.raises(RunStopped) as raised, RunDirectory(tmp_path).writing():
        raise OSError(number, os.strerror(number))
    assert str(raised.value) == f"{tmp_path}: cannot be written ({os.strerror(number)})"


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), RunDirectory(tmp_path / "run").writing():
        (tmp_path / "data.jsonl").open()
    with pytest.raises(ConnectionResetError), RunDirectory(tmp_path).writing():
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


def test_safetensors_fails_with_the_error_of_the_system(tmp_path: Path) -> None:
    """A limit of the size of files stands for a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError) as raised:
            save_tensors({"x": torch.zeros(10_000)}, tmp_path / "x.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG and raised.value.filename == str(tmp_path / "x.safetensors")
