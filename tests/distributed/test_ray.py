"""Ranks in a real Ray cluster of two nodes on this machine: the results of the local launcher, and named failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from cases import Assets, Case, make_assets
from commands import is_alive, read_until, start
from ray_cluster import RayCluster, ray_cluster

from flexrlhf.metrics import METRICS

pytest.importorskip("ray")
TWO, SIX = Case("two", "halves", 2), Case("one", "six", 2)
NODES = {"nodes": [{"count": 2, "devices": 1}], "device": "cpu"}
MANY = ["--set", "steps=100000"]
SECONDS = 180
NO_AGENT, AGENT_SECONDS = "No available agent", 90
"""Error of Ray while the process of a node that starts jobs is not there yet."""
NAMED_SECONDS = 60
"""Deadline of the tests; the figure that is documented is printed."""


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return make_assets(tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as made:
        yield made


def write_config(assets: Assets, directory: Path, case: Case) -> str:
    raw = yaml.safe_load(assets.spec(case).dump()) | {"runs": "runs", "cluster": NODES}
    path = directory / f"{case.name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return str(path)


def start_under_ray(
    cluster: RayCluster, arguments: list[str], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> subprocess.Popen[str]:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    return start(["run", *arguments, "--launcher", "ray"], directory)


def results(directory: Path, case: Case) -> list[dict[str, Any]]:
    """Metrics without times, and samples."""
    run = directory / "runs" / case.name
    lines = (run / "metrics.jsonl").read_text().splitlines() + (run / "samples.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in METRICS.times} for line in lines]


def test_the_results_are_the_local_launchers(
    cluster: RayCluster, assets: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of one command, on a Ray node for each rank: whole models, and six."""
    here, there = tmp_path / "local", tmp_path / "ray"
    here.mkdir()
    there.mkdir()
    configs = [write_config(assets, tmp_path, case) for case in (TWO, SIX)]
    jobs = [start(["run", *configs], here), start_under_ray(cluster, configs, there, monkeypatch)]
    outputs = [job.communicate(timeout=SECONDS)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs[0][-2000:] + outputs[1][-2000:]
    for case in (TWO, SIX):
        assert results(there, case) == results(here, case), case.name
        assert len(results(there, case)) >= 3
    nodes = {line.partition("Ray node ")[2] for line in outputs[1].splitlines() if line.startswith("node ")}
    assert len(nodes) == 2, outputs[1]
    assert f"[node 0, host {os.uname().nodename}] {TWO.name}  step 3/3  " in outputs[1]


def end_of(process: subprocess.Popen[str], pids: list[int]) -> tuple[str, float]:
    """Closing sentence of a run, and seconds until it and all its ranks have ended."""
    began = time.monotonic()
    output = process.communicate(timeout=NAMED_SECONDS)[0]
    while any(map(is_alive, pids)):
        assert time.monotonic() - began < NAMED_SECONDS, "a rank is left"
        time.sleep(0.1)
    assert process.returncode == 1, output[-2000:]
    # lines of Ray's log may come behind it
    sentence = next(line for line in reversed(output.splitlines()) if line.startswith("flexrlhf: "))
    return sentence, time.monotonic() - began


@pytest.mark.full
def test_an_actor_that_is_killed_is_named(
    cluster: RayCluster, assets: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_under_ray(cluster, [write_config(assets, tmp_path, TWO), *MANY], tmp_path, monkeypatch)
    read_until(job, "step 3/")
    ranks = cluster.ranks()
    os.kill(ranks[1][1], signal.SIGKILL)
    sentence, seconds = end_of(job, [rank for rank, _ in ranks.values()])
    print(f"a killed actor is named, and all ranks have ended, after {seconds:.1f} s")
    assert sentence.startswith(
        f"flexrlhf: node 1 (host {os.uname().nodename}; rank 1) ended the run, its Ray actor was "
    )
    assert "killed; rank 1 was at step " in sentence and "record: runs/" in sentence


@pytest.mark.full
def test_a_cluster_that_is_too_small_is_refused(
    cluster: RayCluster, assets: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_node = ["--set", "cluster={nodes: [{count: 1, devices: 2}], device: cpu}"]
    job = start_under_ray(cluster, [write_config(assets, tmp_path, TWO), *one_node], tmp_path, monkeypatch)
    output = job.communicate(timeout=SECONDS)[0]
    assert job.returncode == 2
    sentence = output.rstrip().splitlines()[-1]
    assert sentence == (
        "flexrlhf: --launcher ray: node 0 of the plan needs 2 CPU on one Ray node; Ray has 2 nodes: 2 with 1 CPU"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
def test_a_signal_saves_and_a_failure_restarts(
    cluster: RayCluster, assets: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [write_config(assets, tmp_path, TWO), *MANY, "--set", "checkpoint.every=1", "--max-restarts", "1"]
    job = start_under_ray(cluster, settings, tmp_path, monkeypatch)
    read_until(job, "step 3/")
    os.kill(cluster.ranks()[1][0], signal.SIGKILL)
    read_until(job, "killed by SIGKILL; record: runs/two_halves_2/failure; restart 1 of 1")
    read_until(job, f"{TWO.name}  step ")
    job.send_signal(signal.SIGTERM)
    output = job.communicate(timeout=SECONDS)[0]
    assert job.returncode == 143 and "the same command with --resume goes on" in output, output[-2000:]


@pytest.mark.full
def test_ctrl_c_ends_all_ranks(
    cluster: RayCluster, assets: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_under_ray(cluster, [write_config(assets, tmp_path, TWO), *MANY], tmp_path, monkeypatch)
    read_until(job, "step 3/")
    ranks = [rank for rank, _ in cluster.ranks().values()]
    job.send_signal(signal.SIGINT)
    output = job.communicate(timeout=NAMED_SECONDS)[0]
    assert job.returncode == 130 and output.endswith("flexrlhf: stopped; all ranks have ended\n"), output[-2000:]
    assert len(ranks) == 2 and not any(map(is_alive, ranks))


@pytest.mark.full
def test_a_node_that_is_removed_is_named(assets: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ray_cluster() as cluster:
        job = start_under_ray(cluster, [write_config(assets, tmp_path, TWO), *MANY], tmp_path, monkeypatch)
        read_until(job, "step 3/")
        pids = [rank for rank, _ in cluster.ranks().values()]
        cluster.remove_node()
        sentence, seconds = end_of(job, pids)
    print(f"a removed node is named, and all ranks have ended, after {seconds:.1f} s")
    assert sentence.startswith("flexrlhf: node ") and f"(host {os.uname().nodename}; rank " in sentence
    assert ") ended the run, its Ray node was removed" in sentence


@pytest.mark.full
def test_a_job_is_submitted(assets: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver connects to the cluster that started it."""
    config = write_config(assets, tmp_path, TWO)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with ray_cluster(dashboard=True) as cluster:
        program = [sys.executable, "-m", "flexrlhf", "run", config, "--set", f"runs={tmp_path / 'runs'}"]
        submit = ["job", "submit", "--address", f"http://{cluster.dashboard}", "--"]
        output = NO_AGENT
        began = time.monotonic()
        while NO_AGENT in output and time.monotonic() - began < AGENT_SECONDS:
            job = start([*submit, *program, "--launcher", "ray"], tmp_path, ["-m", "ray.scripts.scripts"])
            output = job.communicate(timeout=SECONDS)[0]
    assert job.returncode == 0 and "results in" in output, output[-2000:]
    assert len(results(tmp_path, TWO)) >= 3


STRANGER = "import sys, ray; ray.init(address=sys.argv[1], logging_level='critical')"
OWN_CLUSTER = """
import os, subprocess, sys
from flexrlhf.launch.ray.cluster import connected
with connected():
    import ray
    address = ray.get_runtime_context().gcs_address
    for token in (None, "0" * 64, os.environ["RAY_AUTH_TOKEN"]):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        environment |= {} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        print("exit", subprocess.run([sys.executable, "-c", sys.argv[1], address], env=environment).returncode)
"""


@pytest.mark.full
def test_a_cluster_of_a_run_has_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray, which listens on all interfaces, would run code of whoever connects."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # paths of sockets are short
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:
        monkeypatch.setenv("RAY_TMPDIR", directory)
        command = [sys.executable, "-c", OWN_CLUSTER, STRANGER]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert [line for line in done.stdout.splitlines() if line.startswith("exit")] == ["exit 1", "exit 1", "exit 0"], (
        done
    )
