"""A run that fails ends everywhere, soon, with a sentence that names the rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cases import Case, make_assets
from commands import children, is_alive, read_until, start

from flexrlhf.spec_file import dump_spec

LAST_RANK = 1


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A config whose run does not end by itself: ref on rank 0, reward on rank 1."""
    assets = make_assets(tmp_path_factory.mktemp("failures"))
    raw = yaml.safe_load(dump_spec(assets.spec(Case("two", "halves", 2))))
    raw |= {"name": "endless", "steps": 100_000, "timeout_seconds": 5, "runs": "runs"}
    path = tmp_path_factory.mktemp("config") / "endless.yaml"
    path.write_text(yaml.safe_dump(raw))
    yield path


@pytest.mark.parametrize("way", ["killed", "stuck", "interrupted"])
def test_a_run_ends_everywhere_and_names_the_rank(way: str, endless: Path, tmp_path: Path) -> None:
    process = start(["run", str(endless)], tmp_path)
    read_until(process, "step 2/")
    ranks = children(process)
    assert len(ranks) == 2
    began = time.monotonic()
    if way == "interrupted":
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(ranks[LAST_RANK], signal.SIGKILL if way == "killed" else signal.SIGSTOP)
    out, _ = process.communicate(timeout=60)
    seconds = time.monotonic() - began
    last = out.strip().splitlines()[-1]
    assert not any(is_alive(pid) for pid in ranks), last
    if way == "interrupted":
        assert process.returncode == 130 and seconds < 10 and "all ranks have ended" in last
    elif way == "killed":
        assert process.returncode == 1 and seconds < 30
        assert last.startswith("flexrlhf: rank 1 (") and "killed by SIGKILL" in last
    else:
        # the deadline is 5 s; a stopped process does not even take SIGTERM, so the agent kills it half a minute later
        assert process.returncode == 1 and seconds < 60
        assert "the deadline passed, waiting for rank 1 (at: step" in last


def test_a_rank_that_raises_ends_the_run_with_its_message(endless: Path, tmp_path: Path) -> None:
    """The model's weights vanish between planning and loading: only the ranks notice."""
    raw = yaml.safe_load(endless.read_text())
    raw["models"]["reward"]["path"] = str(tmp_path / "reward")
    (tmp_path / "reward").mkdir()
    source = Path(yaml.safe_load(endless.read_text())["models"]["reward"]["path"])
    for file in source.iterdir():
        (tmp_path / "reward" / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "reward" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    config = tmp_path / "broken.yaml"
    config.write_text(yaml.safe_dump(raw))
    process = start(["run", str(config)], tmp_path)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    last = out.strip().splitlines()[-1]
    assert last.startswith("flexrlhf: rank ") and "ended the run, exit code 1" in last
