"""A run that fails ends everywhere, soon, with a sentence that names the rank."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

import as_nccl
import pytest
import torch
import yaml
from cases import Assets, Case, make_assets
from commands import children, children_of, is_alive, name_of, read_until, start
from forked import RANK_ENVIRONMENT, Forked
from killed_decoders import decoders_of
from processes import descendants, listening_addresses
from safetensors.torch import load_file

from flexrlhf.metrics import METRICS
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.timeline import Trace

LAST_RANK = 1


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return make_assets(tmp_path_factory.mktemp("failures"))


@pytest.fixture(scope="module")
def endless(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A config whose run does not end by itself: ref on rank 0, reward on rank 1."""
    raw = yaml.safe_load(assets.spec(Case("two", "halves", 2)).dump())
    raw |= {"name": "endless", "steps": 100_000, "timeout_seconds": 5, "runs": "runs"}
    path = tmp_path_factory.mktemp("config") / "endless.yaml"
    path.write_text(yaml.safe_dump(raw))
    yield path


@pytest.mark.parametrize("way", ["killed", "stuck", pytest.param("interrupted", marks=pytest.mark.full)])
def test_a_run_ends_everywhere_and_names_the_rank(way: str, endless: Path, tmp_path: Path) -> None:
    process = start(["run", str(endless)], tmp_path, is_forked=way == "stuck")
    read_until(process, "step 2/")
    ranks = children(process)
    assert len(ranks) == 2
    # whoever reaches such a socket could end the run, or worse
    assert listening_addresses(descendants(process.pid)) == {"127.0.0.1"}
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
        return
    assert process.returncode == 1 and seconds < 30
    assert last.endswith("; record: runs/endless/failure")
    if way == "killed":
        assert last.startswith("flexrlhf: rank 1 (") and re.search(r" at step \d+, .*, killed by SIGKILL", last)
    else:
        assert last.startswith("flexrlhf: rank 0 (") and " at step " in last
        assert "the deadline of 5 s passed, waiting for rank 1 (" in last and "does not respond)" in last
    assert_recorded(tmp_path / "runs" / "endless", way)


def assert_recorded(directory: Path, way: str) -> None:
    """Each rank has a record of its last instructions, and the timeline has those that ran."""
    records = [json.loads((directory / "failure" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for rank, record in enumerate(records):
        assert (record["rank"], record["run"], record["host"]) == (rank, "endless", socket.gethostname())
        assert record["instructions"] and record["at"].startswith("step ")
        # a rank may be killed between two instructions; the others wait inside one
        is_inside = record["instructions"][-1]["end"] == 0.0
        assert is_inside or (way, rank) == ("killed", 1), "the instruction that it ended in"
    assert any("in _execute" in line for line in records[0]["stack"]), "the stack of the rank"
    if way == "killed":
        assert records[1]["reason"].endswith("killed by SIGKILL") and not records[1]["stack"]
    else:
        # it may be woken before it is ended, and then explains itself
        assert any(each in records[1]["reason"] for each in ("ended by", "the deadline of", "has not responded"))
    spans = Trace.read(directory / "timeline.json").spans
    assert {span.rank for span in spans} == {0, 1} and {span.step for span in spans} >= {0, 1}


def test_ranks_are_restarted_and_end_with_their_launcher(endless: Path, tmp_path: Path) -> None:
    """Killed once: all ranks resume from the checkpoint. Then the launcher is killed, which can end nothing any
    more."""
    process = start(["run", str(endless), "--max-restarts", "1", "--set", "checkpoint={every: 1}"], tmp_path)
    read_until(process, "step 4/")
    first = children(process)
    os.kill(first[0], signal.SIGKILL)
    sentence = read_until(process, "restart 1 of 1").splitlines()[-1]
    assert sentence.startswith("flexrlhf: rank 0 (") and "killed by SIGKILL" in sentence
    next_step = int(read_until(process, "  step ").splitlines()[-1].partition("  step ")[2].partition("/")[0])
    assert next_step > 1, "it began anew"
    read_until(process, f"step {next_step + 1}/")
    second = children(process)
    assert len(second) == 2 and not set(first) & set(second)
    process.kill()
    wait_for_the_end_of(second)
    process.communicate(timeout=60)


@pytest.fixture(scope="module")
def child_config(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without an end whose responses a process of rank 1 decodes."""
    pytest.importorskip("vllm")
    raw = yaml.safe_load(assets.spec(Case("four", "six-chunks", 2, rollout="vllm-child")).dump())
    raw |= {"name": "decoding", "steps": 100_000, "timeout_seconds": 90, "runs": "runs"}
    path = tmp_path_factory.mktemp("config") / "decoding.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "victim", [pytest.param(each, marks=pytest.mark.full) for each in ("rollout process", "its rank")]
)
def test_nothing_is_left_of_a_rollout_process(victim: str, child_config: Path, tmp_path: Path) -> None:
    """Killed in the midst of a step, alone or with the rank that it serves."""
    shared = set(Path("/dev/shm").iterdir())
    process = start(["run", str(child_config), "--set", "rollout.max_restarts=0"], tmp_path, is_forked=False)
    read_until(process, "step 2/")
    first, last = children(process)
    (decoder,) = decoders_of(last)
    everyone = [first, last, *children_of(first), *children_of(last)]
    assert listening_addresses(descendants(process.pid)) == {"127.0.0.1"}
    began = time.monotonic()
    os.kill(decoder if victim == "rollout process" else last, signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and time.monotonic() - began < 60, out
    sentence = out.strip().splitlines()[-1]
    if victim == "rollout process":
        assert sentence.startswith("flexrlhf: rank 1 (actor.rollout, "), out
        assert f"actor.rollout: the vLLM process {decoder} ended (killed by SIGKILL); record: " in sentence, out
    else:
        assert sentence.startswith("flexrlhf: rank 1 (actor.rollout, ") and "killed by SIGKILL" in sentence, out
    wait_for_the_end_of(everyone)
    assert set(Path("/dev/shm").iterdir()) <= shared


# by default a run whose process is killed is compared with the reference (killed_decoders.py)
@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_killed_rollout_process_changes_no_bit(child_config: Path, tmp_path: Path) -> None:
    """Killed from step 3 on, where it has decoded one of two chunks or less. A second run has vLLM in the rank itself.

    Operators are delayed, so that no step ends before it is killed.
    """
    raw = yaml.safe_load(child_config.read_text())
    raw["debug"] |= {"run_delay_seconds": 0.1, "record_columns": True}
    raw["schedule"]["lag"] = 1
    for name, process in (("killed", "child"), ("kept", "inline")):
        changed = {"name": name, "steps": 8, "eval": None, "rollout": {**raw["rollout"], "process": process}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**raw, **changed}))
    command = start(["run", "killed.yaml", "kept.yaml"], tmp_path)
    read_until(command, "step 3/")
    (decoder,) = decoders_of(command.pid)
    os.kill(decoder, signal.SIGKILL)
    out, _ = command.communicate(timeout=300)
    assert command.returncode == 0, out
    sentence = f"rank 1: actor.rollout: the vLLM process {decoder} ended (killed by SIGKILL)"
    assert f"flexrlhf: {sentence}; restart 1 of 2 with the weights of the last sync" in out
    killed, kept = (tmp_path / "runs" / name for name in ("killed", "kept"))
    metrics = [RunDirectory(run).metrics.read() for run in (killed, kept)]
    (step,) = [row["step"] for row in metrics[0] if row["rollout_restarts"]]
    assert step >= 3 and f"  1 restart of rollout processes, in step {step}\n" in out
    of_killed, of_kept = (
        [{k: v for k, v in row.items() if k not in METRICS.times} for row in rows] for rows in metrics
    )
    assert of_killed == of_kept and len(of_kept) == 8
    files = [path.relative_to(kept) for path in kept.rglob("*.safetensors")]
    assert {path.parts[0] for path in files} == {"actor", "critic", "columns"}
    for path in files:
        one, other = load_file(killed / path), load_file(kept / path)
        assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys()), path


def wait_for_the_end_of(processes: list[int]) -> None:
    deadline = time.monotonic() + 10
    while alive := [pid for pid in processes if is_alive(pid)]:
        assert time.monotonic() < deadline, f"left behind: {[name_of(pid) for pid in alive]}"
        time.sleep(0.1)


@pytest.mark.full
def test_user_errors_end_the_ranks_without_a_restart(endless: Path, tmp_path: Path) -> None:
    """The model's weights vanish between planning and loading: only the ranks notice."""
    raw = yaml.safe_load(endless.read_text())
    model = tmp_path / "reward"
    shutil.copytree(raw["models"]["reward"]["path"], model)
    raw["models"]["reward"]["path"] = str(model)
    config = tmp_path / "broken.yaml"
    config.write_text(yaml.safe_dump(raw))
    process = start(["run", str(config), "--max-restarts", "3"], tmp_path)
    # the ranks load torch for seconds before they read the model
    read_until(process, "whole plan")
    (model / "model.safetensors").write_bytes(b"")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    last = out.strip().splitlines()[-1]
    sentence = r"flexrlhf: rank [01] \(actor, critic, .*; host .*\) ended the run, exit code 1: models\.reward\.path .*"
    assert re.fullmatch(sentence + "model.safetensors is empty; copy it again", last), out
    assert "restart" not in out and "Traceback" not in out


SENTENCES = {
    "exception": r"rank 1 \(.*\) ended the run.*, exit code 1: RuntimeError: planted",
    "memory": r"rank 1 \(.*\) ended the run.*: memory is exhausted \(CUDA out of memory\. Tried to allocate 20",
    "deadline": r"rank 0 \(.*\) at step 1, .*: the deadline of 5 s passed, waiting for rank 1 \(",
    "stopped": r"rank 0 \(.*\) at step 1, .*: the deadline of 5 s passed, waiting for rank 1 \(.*does not respond\)",
    "killed": r"rank 1 \(.*\) ended the run at step .*, killed by SIGKILL",
    "nan": r"rank [01] \(.*\) ended the run at step 1, .*not finite",
}
"""Beginning of the last line of a run, by the fault of rank 1 in step 1."""


def unmapped(files: set[Path]) -> set[Path]:
    """Return the files that no process maps; other tests, which run meanwhile, map theirs."""
    maps = []
    for file in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            maps.append(file.read_text())
    return {file for file in files if not any(str(file) in each for each in maps)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "rollout"),
    [
        ("memory", ""),
        *(pytest.param(each, "", marks=pytest.mark.full) for each in SENTENCES if each != "memory"),
        pytest.param("exception", "vllm-child", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_fails_is_named_though_groups_are_destroyed_together(
    fault: str, rollout: str, assets: Assets, tmp_path: Path
) -> None:
    """As with NCCL, whose destroy a rank that fails would never leave; nothing of the job is left."""
    if rollout:
        pytest.importorskip("vllm")
    config = write_failing(assets, tmp_path, rollout)
    shared = set(Path("/dev/shm").iterdir())
    process = start_as_nccl(["flexrlhf", "run", str(config)], tmp_path, fault)
    read_until(process, "step 1/")
    began = time.monotonic()
    everyone = descendants(process.pid)
    out, _ = process.communicate(timeout=150)
    temporary = Path((tmp_path / "temporary").readlink())
    assert process.returncode == 1 and time.monotonic() - began < as_nccl.ABORT_SECONDS
    last = out.strip().splitlines()[-1]
    assert re.match("flexrlhf: " + SENTENCES[fault], last), out
    wait_for_the_end_of(everyone)
    assert not list(temporary.glob("flexrlhf*")) and not unmapped(set(Path("/dev/shm").iterdir()) - shared)
    run = tmp_path / "runs" / "failing"
    assert [row["step"] for row in RunDirectory(run).metrics.read()] == [0]
    assert {row["step"] for row in RunDirectory(run).samples.read()} == {0}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("apart", r" ended \(RuntimeError: planted\)"),
        pytest.param("stopped apart", " has given no sign of life for 10 s", marks=pytest.mark.full),
    ],
)
def test_a_rank_without_a_launcher_ends_once_another_has_failed(
    fault: str, reason: str, assets: Assets, tmp_path: Path
) -> None:
    """Ranks of another system, of which one computes while the other fails or is stopped."""
    config = write_failing(assets, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    job |= {"TORCHELASTIC_RUN_ID": "job", "LOCAL_WORLD_SIZE": "2"}
    command, began = ["flexrlhf", "run", str(config)], time.monotonic()
    ranks = [start_as_nccl(command, tmp_path, fault, job | {"RANK": each, "LOCAL_RANK": each}) for each in "01"]
    first, _ = ranks[0].communicate(timeout=150)
    assert ranks[0].returncode == 1 and time.monotonic() - began < as_nccl.ABORT_SECONDS
    name = r"rank {} \(actor, ref; host .*\)"
    assert re.search(f"flexrlhf: {name.format(0)} at step 1, .*: {name.format(1)}{reason}", first), first
    if fault == "apart":
        second, _ = ranks[1].communicate(timeout=30)
        assert ranks[1].returncode == 1 and "RuntimeError: planted" in second
    ranks[1].kill()


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("command", ["doctor", "profile", "verify", "session"])
def test_ranks_of_other_commands_are_named_too(command: str, assets: Assets, tmp_path: Path) -> None:
    config = write_failing(assets, tmp_path, has_loop=command != "session")
    options = {"profile": ["--seconds", "5"], "verify": ["--against", "[0.5,0.5]"]}.get(command, [])
    module = ["called", str(config)] if command == "session" else ["flexrlhf", command, str(config), *options]
    process = start_as_nccl(module, tmp_path, "exception" if command == "verify" else "collective")
    out, _ = process.communicate(timeout=200)
    assert process.returncode != 0 and re.search(r"rank 1 \(.*\) ended the run.*: RuntimeError: planted", out), out


def write_failing(assets: Assets, directory: Path, rollout: str = "", has_loop: bool = True) -> Path:
    """Write a config whose loop fails; a session's has none."""
    case = Case("grpo-counted", "six", 2, rollout=rollout) if rollout else Case("grpo-counted", "co-located", 2)
    raw = yaml.safe_load(assets.spec(case).dump())
    raw |= {"name": "failing", "steps": 3, "timeout_seconds": 240 if rollout else 5, "runs": "runs"}
    if has_loop:
        raw["algorithm"]["loop"] = f"{as_nccl.__file__}:failing"
    config = directory / "failing.yaml"
    config.write_text(yaml.safe_dump(raw))
    return config


def start_as_nccl(command: list[str], directory: Path, fault: str, job: Mapping[str, str] = {}) -> Forked:
    """Start a module whose ranks destroy groups as NCCL does. ``job``: variables of a rank of another system."""
    (directory / "destroyed").mkdir(exist_ok=True)
    if not (directory / "temporary").exists():
        # vLLM's sockets are in it, whose paths are short
        (directory / "temporary").symlink_to(mkdtemp())
    variables = {as_nccl.VARIABLE: str(directory / "destroyed"), as_nccl.FAULT: fault}
    variables["TMPDIR"] = str((directory / "temporary").readlink())
    environment = {**os.environ, **RANK_ENVIRONMENT, **variables, **job}
    return Forked(["as_nccl", *command], directory, environment)
