"""A run that a signal or a failure ends, and the same command with --resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, make_assets
from commands import children, is_alive, read_until, start
from logged_runs import READERS
from safetensors.torch import load_file

from flexrlhf.config.output_settings import LoggerSpec, MlflowSpec, TensorBoardSpec, WandbSpec
from flexrlhf.metrics import METRICS

STEPS = 6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a config, whose run has ended without an interruption."""
    path = tmp_path_factory.mktemp("signals")
    spec = make_assets(tmp_path_factory.mktemp("models")).spec(Case("two", "co-located", 2))
    changes = {"steps": STEPS, "runs": "runs", "debug": spec.debug.model_copy(update={"record_columns": False})}
    (path / "ppo.yaml").write_text(spec.model_copy(update={**changes, "loggers": installed_loggers()}).dump())
    assert finished(launch(path, "whole", "--set", "loggers=[]"))[0] == 0
    return path


def installed_loggers() -> tuple[LoggerSpec, ...]:
    each = (TensorBoardSpec(name="tensorboard"), WandbSpec(name="wandb", mode="offline"), MlflowSpec(name="mlflow"))
    return tuple(logger for logger in each if find_spec(logger.name) is not None)


def launch(directory: Path, name: str, *arguments: str, is_forked: bool = True) -> subprocess.Popen[str]:
    return start(["run", "ppo.yaml", "--set", f"name={name}", *arguments], directory, is_forked=is_forked)


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


@contextmanager
def stopped(processes: list[int]) -> Iterator[None]:
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    yield
    for process in processes:
        os.kill(process, signal.SIGCONT)


def rows(directory: Path, name: str) -> list[dict[str, Any]]:
    lines = (directory / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in METRICS.times} for line in lines]


def assert_logged(directory: Path, name: str) -> None:
    """Every logger has each step of the run once, also if it was interrupted."""
    expected = [(row["step"], row["reward_mean"]) for row in rows(directory, name)]
    loggers = installed_loggers()
    assert len(loggers) > 0
    for logger in loggers:
        found = READERS[logger.name](directory / "runs" / name)
        assert found == [(step, pytest.approx(value)) for step, value in expected], logger.name


def assert_goes_on(directory: Path, name: str, *arguments: str) -> None:
    """The same command with --resume ends with the results of the whole run, to the last bit."""
    code, out = finished(launch(directory, name, "--resume", "auto", *arguments))
    assert code == 0 and f"{name}  step 1/" not in out, out[-3000:]
    assert rows(directory, name) == rows(directory, "whole")
    for role in ("actor", "critic"):
        expected, found = (load_file(directory / "runs" / n / role / "model.safetensors") for n in ("whole", name))
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    spans = json.loads((directory / "runs" / name / "timeline.json").read_text())["traceEvents"]
    trained = [(s["tid"], s["args"]["step"]) for s in spans if s["ph"] == "X" and s["name"] == "train_actor on actor"]
    assert sorted(trained) == [(rank, step) for rank in range(2) for step in range(STEPS)]


def test_sigterm_to_every_process_saves_and_ends(directory: Path) -> None:
    """The signal as schedulers send it. A second command of the same name is refused meanwhile."""
    slow = ("--set", "debug.run_delay_seconds=0.3")
    process = launch(directory, "terminated", *slow, is_forked=False)
    read_until(process, "terminated  step 2/")
    ranks = children(process)
    # a slow machine may need longer for the second command than the run has steps
    with stopped(ranks):
        code, out = finished(launch(directory, "terminated"))
    assert code == 2 and f"process {process.pid} on " in out and "is using it" in out
    os.killpg(process.pid, signal.SIGTERM)
    code, out = finished(process)
    assert code == 143, out[-3000:]
    assert f"of {STEPS} steps; the same command with --resume goes on" in out
    assert not any(map(is_alive, ranks))
    assert_goes_on(directory, "terminated")
    assert_logged(directory, "terminated")


@pytest.mark.full
def test_sigusr1_to_the_launcher_saves_and_ends(directory: Path) -> None:
    process = launch(directory, "warned", "--set", "debug.run_delay_seconds=0.1", is_forked=False)
    read_until(process, "warned  step 1/")
    process.send_signal(signal.SIGUSR1)
    assert finished(process)[0] == 143
    assert_goes_on(directory, "warned")


@pytest.mark.full
def test_a_killed_run_goes_on_from_its_newest_undamaged_checkpoint(directory: Path) -> None:
    every = ("--set", "checkpoint.every=1", "--set", "checkpoint.keep_last=3")
    process = launch(directory, "killed", *every, "--set", "debug.run_delay_seconds=0.1", is_forked=False)
    read_until(process, "killed  step 4/")
    os.kill(children(process)[1], signal.SIGKILL)
    code, out = finished(process)
    assert code == 1 and "killed by SIGKILL" in out, out[-3000:]
    newest = max((directory / "runs/killed/checkpoints").glob("step-??????"))
    shard = newest / "actor-00001.safetensors"
    contents = bytearray(shard.read_bytes())
    contents[len(contents) // 2] ^= 4
    shard.write_bytes(bytes(contents))
    assert_goes_on(directory, "killed", *every)
    assert not list(newest.parent.glob("*.abandoned")), "the run has written it as new"
