"""Loggers: what their own libraries read back, runs that go on, and libraries that fail."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from logged_runs import READERS, scalars
from small_runs import PPO

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.loggers import tensorboard as tensorboard_logger
from flexrlhf.runs import run_loggers as packages
from flexrlhf.runs.run_loggers import RunLoggers, read_states

EACH = ["tensorboard", "wandb", "mlflow"]
Raw = dict[str, Any]


def settings(name: str) -> Raw:
    return {"name": name, "mode": "offline"} if name == "wandb" else {"name": name}


def spec_with(tmp_path: Path, *names: str) -> Spec:
    raw = {**deepcopy(PPO), "runs": str(tmp_path), "loggers": [settings(name) for name in names]}
    return Spec.parse(raw)


def row_of(step: int) -> Raw:
    return {"step": step, "seconds": 1.5, "reward_mean": float(step), "kl": float("nan"), "rollout_engine": "torch"}


def sample_of(step: int) -> Raw:
    return {"rows": "training", "step": step, "row": 0, "prompt": "a|b\nc", "response": "d", "score": None}


def run_steps(spec: Spec, steps: Sequence[int], ends: bool = True) -> None:
    """As a recorder does it: a row is written before it is logged."""
    directory = spec.directory
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(spec.dump())
    loggers = RunLoggers.open(spec, directory)
    for step in steps:
        for name, line in (("metrics.jsonl", row_of(step)), ("samples.jsonl", sample_of(step))):
            with (directory / name).open("a") as file:
                file.write(json.dumps(line) + "\n")
        loggers.log(row_of(step), [sample_of(step)])
    loggers.finish(is_whole=ends)


@pytest.mark.parametrize("name", EACH)
def test_a_library_reads_back_what_was_logged_and_a_resumed_run_goes_on(name: str, tmp_path: Path) -> None:
    """A run that is stopped after three steps goes on from a checkpoint after two."""
    pytest.importorskip(name)
    spec = spec_with(tmp_path, name)
    run_steps(spec, [0, 1, 2], ends=False)
    assert read_states(spec.directory)[name].next_step == 3
    for file in ("metrics.jsonl", "samples.jsonl"):
        lines = (spec.directory / file).read_text().splitlines(keepends=True)
        (spec.directory / file).write_text("".join(lines[:2]))
    # W&B names its directories by the second
    time.sleep(1.0)
    run_steps(spec, [2, 3])
    assert READERS[name](spec.directory) == [(step, float(step)) for step in range(4)]


def test_a_logger_that_is_added_later_receives_the_steps_before(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run_steps(spec_with(tmp_path), [0, 1])
    spec = spec_with(tmp_path, "tensorboard")
    run_steps(spec, [2])
    assert scalars(spec.directory) == [(0, 0.0), (1, 1.0), (2, 2.0)]


class Failing(tensorboard_logger.TensorBoardLogger):
    """Fails at the second step, as a full disk makes it."""

    def log_row(self, row: Raw) -> None:
        if row["step"] == 1:
            raise OSError("No space left on device")
        super().log_row(row)


def test_a_logger_that_fails_is_named_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    spec = spec_with(tmp_path, "tensorboard")
    monkeypatch.setattr("flexrlhf.runs.run_loggers.load_plugin", lambda *_: Failing)
    run_steps(spec, [0, 1, 2, 3])
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("flexrlhf:")]
    assert "logger tensorboard: No space left on device; its rows from step 1 on" in line
    assert read_states(spec.directory)["tensorboard"].next_step == 1
    # a resumed run logs them
    monkeypatch.undo()
    run_steps(spec, [4])
    assert [step for step, _ in scalars(spec.directory)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", EACH)
def test_a_missing_library_is_named_with_its_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda module: None)
    with pytest.raises(UserError, match=rf"loggers: {name} needs the package {name}.*pip install 'flexrlhf\[{name}\]'"):
        RunLoggers.check(spec_with(tmp_path, name))


def test_a_server_that_is_not_there_is_named_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    raw = deepcopy(PPO)
    logger = {"name": "mlflow", "tracking_uri": "http://127.0.0.1:9"}
    spec = Spec.parse({**raw, "runs": str(tmp_path), "loggers": [logger]})
    with pytest.raises(UserError, match="loggers: mlflow cannot begin .*correct tracking_uri, or start its server"):
        RunLoggers.open(spec, tmp_path)


def test_what_a_logger_lacks_is_found_before_the_models_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    raw = {**deepcopy(PPO), "runs": str(tmp_path)}
    online = Spec.parse({**raw, "loggers": [{"name": "wandb"}]})
    for key, reason in (("", "there is no key of an account at http"), ("short", "API key must have 40. characters")):
        monkeypatch.setenv("WANDB_API_KEY", key)
        with pytest.raises(UserError, match=f"wandb cannot begin .*{reason}.*; set WANDB_API_KEY, or mode: offline"):
            RunLoggers.check(online)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    RunLoggers.check(online)
    for address in ("http://127.0.0.1:9", "http://:80"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        with pytest.raises(UserError, match=f"mlflow cannot begin .{address}: .*; correct tracking_uri"):
            RunLoggers.check(spec_with(tmp_path, "mlflow"))
