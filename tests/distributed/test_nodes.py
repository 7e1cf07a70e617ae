"""Several nodes, and torchrun: however the ranks are started, the results equal one command's on one node."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
import yaml
from cases import Assets, Case, make_assets
from commands import PROGRAM, free_port, read_until, start
from comparison import deviations
from forked import RANK_ENVIRONMENT, Forked
from launcher import Outcome

from flexrlhf.plan.pipeline import make_plan

CASE = Case("two", "halves", 2)
PLAYED = Case("episodes-random", "co-located", 2)
"""An environment that never replies alike: a run that goes on has its former replies from a log alone."""
SECONDS = 90


def torchrun(num_ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", f"--master-port={free_port()}", *PROGRAM]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return make_assets(tmp_path_factory.mktemp("machines"))


def write_config(assets: Assets, directory: Path, **changes: Any) -> str:
    return write_case(CASE, assets, directory / "config.yaml", **changes)


def write_case(case: Case, assets: Assets, path: Path, **changes: Any) -> str:
    path.write_text(yaml.safe_dump(yaml.safe_load(assets.spec(case).dump()) | {"runs": "runs"} | changes))
    return str(path)


def assert_equals_the_reference(assets: Assets, directory: Path) -> None:
    """Columns, metrics and weights, as of a plain run in test_equality."""
    spec = assets.spec(CASE).model_copy(update={"runs": str(directory / "runs")})
    far = [str(d) for d in deviations(Outcome(CASE, make_plan(spec))) if not d.size <= d.limit]
    assert not far, far[0]


def test_two_nodes_give_the_results_of_one(assets: Assets, tmp_path: Path) -> None:
    """Two launchers with a rank and half of the cores each, on a shared file system; the second has no config."""
    endpoint = ["--rdzv-endpoint", f"localhost:{free_port()}"]
    job = ["run", write_config(assets, tmp_path), "--nnodes", "2", *endpoint]
    nodes = [start(arguments, tmp_path) for arguments in (job, ["join", *endpoint])]
    cores = sorted(os.sched_getaffinity(0))
    for number, node in enumerate(nodes):
        os.sched_setaffinity(node.pid, cores[number::2] or cores)
    first, second = (node.communicate(timeout=SECONDS)[0] for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0], first[-2000:] + second[-2000:]
    assert_equals_the_reference(assets, tmp_path)
    assert f"joins {CASE.name} as node 1 of 2: rank 1\n" in second, second
    for sign in (*(f"{CASE.name}  step {step}/3  " for step in (1, 2, 3)), "results in runs/"):
        assert (first.count(sign), second.count(sign)) == (1, 0), sign


def test_a_request_to_one_node_is_the_end_of_all(assets: Assets, tmp_path: Path) -> None:
    """Before its last step a job has not ended well, whichever machine a scheduler has signalled."""
    write_config(assets, tmp_path, steps=100_000)
    endpoint = ["--rdzv-endpoint", f"localhost:{free_port()}"]
    commands = ["run", "config.yaml", "--nnodes", "2", *endpoint], ["join", *endpoint]
    nodes = [start(command, tmp_path) for command in commands]
    read_until(nodes[0], "step 2/")
    os.kill(nodes[0].pid, signal.SIGTERM)
    outputs = [node.communicate(timeout=SECONDS)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [143, 143], outputs
    assert all("; the same command with --resume goes on" in text for text in outputs), outputs


@pytest.mark.parametrize("way", ["own launchers", pytest.param("torchrun", marks=pytest.mark.full)])
def test_two_nodes_without_a_shared_directory(
    way: str, assets: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later run reads a model of the first one, and the first one resumes from a checkpoint of node 0.

    In a third one each node runs the episodes of its rank. Their replies since the checkpoint from which it resumes are
    on node 0.
    """
    monkeypatch.setenv("FLEXRLHF_TOKEN", token_hex())
    places = [tmp_path / "first", tmp_path / "second"]
    cluster = {"cluster": {"nodes": [{"count": 2, "devices": 1}], "device": "cpu"}}
    for place in places:
        place.mkdir()
        write_config(assets, place, **{"checkpoint": {"every": 1}, **cluster})
        later = yaml.safe_load((place / "config.yaml").read_text())
        later["models"]["actor"]["path"] = f"runs/{CASE.name}/actor"
        (place / "later.yaml").write_text(yaml.safe_dump(later | {"name": "later", "steps": 1}))
        played = {"name": "played", "checkpoint": {"every": 1, "keep_last": 2}, **cluster}
        write_case(PLAYED, assets, place / "played.yaml", **played)

    def run(*arguments: str, joins: bool = False) -> str:
        port, command = free_port(), ["run", "config.yaml", "later.yaml", "played.yaml", *arguments]
        endpoint = ["--rdzv-endpoint", f"{'[::1]' if Path('/proc/net/if_inet6').exists() else 'localhost'}:{port}"]
        nodes = []
        for number, place in enumerate(places):
            if way == "torchrun":
                program = [*("-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}")]
                program += ["--nproc-per-node=1", f"--master-port={port}", *PROGRAM]
                nodes.append(start(command, place, program))
            elif number and joins:
                nodes.append(start(["join", *endpoint], place))
            else:
                nodes.append(start([*command, "--nnodes", "2", "--node-rank", str(number), *endpoint], place))
        return finish(*nodes)

    first, second = places
    run("--set", f"{CASE.name}:steps=2", "--set", "later:steps=1", "--set", "played:steps=2", joins=True)
    assert not list((second / "runs").rglob("step-*")), "checkpoints are on node 0 alone"
    assert replies_of(second) == set() and replies_of(first) == {"step1-rank0.jsonl", "step1-rank1.jsonl"}
    before = [row["reward_mean"] for row in metrics_of(first)]
    shutil.rmtree(first / "runs/played/checkpoints/step-000002")
    # a run that is finished on node 0 alone is one that torchrun's ranks do not find
    arguments = ["--resume", "auto", *(["--set", "later:steps=2"] if way == "torchrun" else [])]
    out = run(*arguments)
    assert f"{CASE.name}  step 2/3" not in out and f"{CASE.name}  step 3/3" in out, out
    assert ("later: finished, skipped" in out) == (way != "torchrun"), out
    assert_equals_the_reference(assets, first)
    assert [row["reward_mean"] for row in metrics_of(first)][:2] == before and "replies of environments since" in out
    assert all(row["episode_failed"] == 0 for row in metrics_of(first))
    assert replies_of(second) == set() and replies_of(first) == {"step2-rank0.jsonl", "step2-rank1.jsonl"}
    assert not list((second / "runs").rglob("received"))
    trace = json.loads((first / f"runs/{CASE.name}/timeline.json").read_text())
    assert {event["tid"] for event in trace["traceEvents"]} == {0, 1}


def replies_of(place: Path) -> set[str]:
    return {path.name for path in (place / "runs/played/episodes").glob("*")}


def metrics_of(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "runs/played/metrics.jsonl").read_text().splitlines()]


QUICK = ["--set", "steps=2", "--set", "quickstart-ppo:eval=null"]


@pytest.mark.full
@pytest.mark.parametrize("is_shared", [True, False], ids=["one directory", "own directories"])
def test_node_0_decides_which_runs_of_the_quick_start_are_kept(
    is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine has only copies of an earlier run's models."""
    monkeypatch.setenv("FLEXRLHF_TOKEN", "" if is_shared else token_hex())
    places = [tmp_path / "first", tmp_path / ("first" if is_shared else "second")]

    def run(*arguments: str) -> str:
        endpoint = ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port()}"]
        nodes = []
        for number, place in enumerate(places):
            place.mkdir(exist_ok=True)
            nodes.append(start(["run", *QUICK, *arguments, *endpoint, "--node-rank", str(number)], place))
        return finish(*nodes)

    assert "finished, kept" not in run()
    out = run("--placement-ratio", "[1,1,0.5,0.5]")
    for name in ("sft", "reward"):
        assert f"quickstart-{name}: finished, kept; its config is unchanged" in out
        assert not (places[0] / f"runs/quickstart-{name}.1").exists()
    assert "quickstart-ppo: ppo, interleaving on 2 devices" in out and "quickstart-ppo  step 2/2" in out
    assert (places[0] / "runs/quickstart-ppo.1").exists()


def finish(*nodes: subprocess.Popen[str]) -> str:
    """Output of the first node, once all have ended well."""
    outputs = [node.communicate(timeout=SECONDS)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0] * len(nodes), "\n\n".join(each[-2500:] for each in outputs)
    return outputs[0]


@pytest.mark.parametrize("way", ["own launchers", pytest.param("torchrun", marks=pytest.mark.full)])
def test_machines_that_differ_end_before_anything_is_written(way: str, assets: Assets, tmp_path: Path) -> None:
    port = free_port()
    options = ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}"]
    jobs = []
    for number, seed in ((0, 0), (1, 3)):
        settings = ["run", write_config(assets, tmp_path), "--set", f"seed={seed}"]
        if way == "torchrun":
            settings += ["--set", "cluster={nodes: [{count: 2, devices: 1}]}"]
            program = [*("-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}", "--nproc-per-node=1")]
            jobs.append(start(settings, tmp_path, [*program, f"--master-port={port}", *PROGRAM]))
        else:
            jobs.append(start([*settings, *options, "--node-rank", str(number)], tmp_path))
    outputs = [job.communicate(timeout=SECONDS)[0] for job in jobs]
    noun = "rank" if way == "torchrun" else "node"
    for job, output in zip(jobs, outputs, strict=True):
        assert job.returncode != 0
        assert f"flexrlhf: seed is 0 on {noun} 0 (host " in output and f" and 3 on {noun} 1 (host " in output, output
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.full
def test_the_end_of_node_0_is_not_retried(assets: Assets, tmp_path: Path) -> None:
    """It serves the store in which the nodes would meet again."""
    config = write_config(assets, tmp_path, steps=100_000, timeout_seconds=20)
    options = ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port()}", "--max-restarts", "1", "--node-rank"]
    first, second = (start(["run", config, *options, str(node)], tmp_path) for node in (0, 1))
    read_until(first, "step 2/")
    first.kill()
    out, _ = second.communicate(timeout=SECONDS)
    first.communicate(timeout=SECONDS)
    assert second.returncode == 1, out[-2000:]
    assert out.splitlines()[-1].startswith("flexrlhf: the launcher of node 0 (host "), out[-2000:]


def test_under_torchrun_the_results_are_the_same(assets: Assets, tmp_path: Path) -> None:
    process = start(["run", write_config(assets, tmp_path)], tmp_path, torchrun(CASE.ranks))
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out[-2000:]
    assert_equals_the_reference(assets, tmp_path)
    assert out.count("results in runs/") == 1


def test_torchrun_with_another_number_of_ranks_is_refused(assets: Assets, tmp_path: Path) -> None:
    """By the variables that torchrun sets, whose own process and rank would load their libraries for it."""
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "one"}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **RANK_ENVIRONMENT, **job, **meeting}
    process = Forked(["flexrlhf", "run", write_config(assets, tmp_path)], tmp_path, environment)
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    sentence = next(line for line in out.splitlines() if line.startswith("flexrlhf: "))
    assert "2 devices" in sentence and "1 rank" in sentence
    assert not (tmp_path / "runs").exists()


FOUR_AND_TWO = {"nodes": [{"count": 1, "devices": 4}, {"count": 1, "devices": 2}], "device": "cpu"}
MEETING = ("--rdzv-endpoint", "localhost:1")


@pytest.mark.parametrize(
    ("arguments", "cluster", "named"),
    [
        (("--nnodes", "2"), {}, "--rdzv-endpoint"),
        (("--nnodes", "2", "--node-rank", "5", *MEETING), {}, "--node-rank 5"),
        (("--nnodes", "2", "--rdzv-endpoint", "nohost"), {}, "--rdzv-endpoint nohost"),
        (("--nnodes", "3", "--devices", "4", *MEETING), {}, "--nnodes 3"),
        (("--nnodes", "3", *MEETING), {"cluster": FOUR_AND_TWO}, "--nnodes 3"),
    ],
    ids=["no endpoint", "no such node", "no port", "unequal parts", "other nodes"],
)
def test_nodes_that_do_not_fit_are_refused(
    assets: Assets, tmp_path: Path, arguments: tuple[str, ...], cluster: dict[str, Any], named: str
) -> None:
    config = write_config(assets, tmp_path, **cluster)
    process = start(["run", config, *arguments], tmp_path)
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 2, out[-2000:]
    # stdout and stderr together
    assert out.startswith("flexrlhf: ") and named in out and out.count("\n") == 1, out
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
