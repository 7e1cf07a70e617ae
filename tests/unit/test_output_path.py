"""Files that a command writes: an existing one is replaced only where the same command has written it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from small_runs import PPO
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.config.output_path import OutputPath
from flexrlhf.errors import UserError
from flexrlhf.guideline.costs.measurements import are_measurements

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.chdir(tmp_path)
    cluster = {"nodes": [{"devices": 2, "class": "A100-80G"}]}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(PPO | {"cluster": cluster}))
    return lambda *words: CliRunner().invoke(app, list(map(str, words)))


SMALL = ("--model", "qwen2.5-0.5b", "--gpus", 2, "--prompts", 32, "--seconds", 1)


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    return result.output.strip().removeprefix("flexrlhf: ")


def test_advice_replaces_advice_and_nothing_else(invoke: Invoke, tmp_path: Path) -> None:
    for _ in range(2):
        assert invoke("advise", *SMALL, "-o", "b.yaml").exit_code == 0
    before = (tmp_path / "a.yaml").read_text()
    message = refused(invoke("advise", "a.yaml", "-o", "a.yaml"))
    assert message == "--output a.yaml: is read by this command, which would replace it; give another file"
    message = refused(invoke("advise", *SMALL, "-o", "a.yaml"))
    assert message == "--output a.yaml: exists and was not written by this command; give another file, or remove it"
    assert (tmp_path / "a.yaml").read_text() == before
    # under another name, too, and even where it is an advice itself
    os.link(tmp_path / "b.yaml", tmp_path / "c.yaml")
    assert "c.yaml: is read by this command" in refused(invoke("advise", "b.yaml", "-o", "c.yaml"))


def test_a_trace_replaces_a_simulated_one_alone(invoke: Invoke, tmp_path: Path) -> None:
    for _ in range(2):
        assert invoke("simulate", "a.yaml", "-o", "trace.json").exit_code == 0
    trace = json.loads((tmp_path / "trace.json").read_text())
    del trace["otherData"]["simulated"]
    for text in (json.dumps(trace), "[]", "{", "[" * 100_000):
        (tmp_path / "trace.json").write_text(text)
        assert "exists and was not written by this command" in refused(invoke("simulate", "a.yaml", "-o", "trace.json"))
        assert (tmp_path / "trace.json").read_text() == text
    assert "a.yaml: is read by this command" in refused(invoke("simulate", "a.yaml", "-o", "a.yaml"))


def test_a_profile_replaces_a_profile_alone(invoke: Invoke, tmp_path: Path) -> None:
    assert "-o a.yaml: is read by this command" in refused(invoke("profile", "a.yaml", "-o", "a.yaml"))
    (tmp_path / "metrics.json").write_text('{"version": 1}')
    assert "-o metrics.json: exists and was not written" in refused(invoke("profile", "a.yaml", "-o", "metrics.json"))
    assert are_measurements('{"version": 0, "machine": {}, "memory_bytes_s": 1}')
    assert not are_measurements("[1]")


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    OutputPath(Path("/dev/null"), "-o").check_file("x.json", lambda _: False)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    OutputPath(tmp_path / "link", "-o").check_file("x.json", lambda _: False)


@pytest.mark.skipif(shutil.which("chmod") is None or os.geteuid() == 0, reason="nothing is unreadable for root")
def test_a_file_that_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.json").touch(0o200)
    with pytest.raises(UserError, match="exists and cannot be read"):
        OutputPath(tmp_path / "x.json", "-o").check_file("x.json", lambda _: True)
