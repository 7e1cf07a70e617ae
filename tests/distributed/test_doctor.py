"""``flexrlhf doctor`` with real ranks: machines in order, and the names of the others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from cases import Case, make_assets
from commands import children, free_port, is_alive, start

import flexrlhf
from benchmarks.two_hosts import can_link, linked_hosts

CASE = Case("two", "halves", 2)
SECONDS = 90
PACKAGE = Path(flexrlhf.__file__).parent
Table = dict[str, tuple[str, str]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = make_assets(tmp_path_factory.mktemp("doctor")).spec(CASE)
    raw = yaml.safe_load(spec.dump()) | {"runs": "runs", "checkpoint": {"every": 1}}
    path = tmp_path_factory.mktemp("config") / "two.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def outcome(arguments: list[str], directory: Path) -> tuple[int, str]:
    """Exit code and output of the command."""
    process = start(arguments, directory)
    output, _ = process.communicate(timeout=SECONDS)
    return process.returncode, output


def table(output: str) -> Table:
    """Result and text of each check, by its name."""
    found = {}
    for line in output.splitlines():
        for result in ("ok", "warning", "FAILS", "skipped"):
            name, sign, rest = line.partition(f"  {result}")
            if sign and not name.startswith("flexrlhf"):
                found.setdefault(name.strip(), (result, rest.strip()))
    return found


def two_nodes(config: Path, port: int) -> list[str]:
    return [str(config), "--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}", "--timeout", "60", "--node-rank"]


def test_machines_in_order(config: Path, tmp_path: Path) -> None:
    """Two ranks exchange messages in the groups of the plan; every figure is measured, and no file is left."""
    code, output = outcome(["doctor", str(config)], tmp_path)
    found = table(output)
    assert code == 0, output
    assert len(found) == 16 and {result for result, _ in found.values()} <= {"ok", "warning"}, output
    assert found["ranks"][1].startswith("gloo: 1 pair of 2 ranks exchanged messages; ")
    assert " groups of the plans made and summed over in " in found["ranks"][1]
    assert found["run directory"] == ("ok", f"{tmp_path}/runs is read and written by all 2 ranks")
    assert f"{CASE.name} needs " in found["disk space"][1] and "3 checkpoints of " in found["disk space"][1]
    speed = float(found["links"][1].removeprefix("within node 0 ").partition(" GB/s")[0])
    assert speed > 0.001
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_differs_is_named(config: Path, tmp_path: Path) -> None:
    """The second node has another source file, another seed, and its own directory; ranks meet nevertheless."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    shutil.copytree(PACKAGE, second / "flexrlhf", ignore=shutil.ignore_patterns("__pycache__"))
    with (second / "flexrlhf" / "text.py").open("a") as file:
        file.write("# patched\n")
    port = free_port()
    command = [sys.executable, "-m", "flexrlhf", "doctor", *two_nodes(config, port), "1", "--set", "seed=3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(second)}
    other = subprocess.Popen(
        command, cwd=second, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    code, output = outcome(["doctor", *two_nodes(config, port), "0"], first)
    others_output, _ = other.communicate(timeout=SECONDS)
    assert (code, other.returncode) == (1, 1), output + others_output
    found = table(output)
    names = {name for name, (result, _) in found.items() if result == "FAILS"}
    assert names == {"same versions", "same settings", "run directory"}, output
    assert "flexrlhf/text.py differs on node 0 " in found["same versions"][1]
    assert found["same settings"][1].startswith("seed is 7 on node 0 (host ")
    seen = f"{first}/runs on node 0; rank 1 on machines with others, whose files are copied there with a secret"
    assert found["run directory"][1].startswith(seen) and "export FLEXRLHF_TOKEN=" in output
    assert found["ranks"][0] == found["clocks"][0] == "ok" and "no groups of the plans made" in found["ranks"][1]
    assert "node 0 to node 1 by 1 rank " in found["links"][1]
    assert "preflight: 3 of 16 checks failed: same versions, same settings, run directory" in output
    # the other node shows its failures
    assert set(table(others_output)) == names
    assert list(first.iterdir()) == [] and not (second / "runs").exists()


def test_a_node_that_never_comes_and_a_file_in_place_of_the_directory(config: Path, tmp_path: Path) -> None:
    """This machine's own measurements are shown next to the missing ones, and a run does not begin."""
    (tmp_path / "runs").write_text("a file where a directory should be")
    arguments = [str(config), "--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port()}"]
    began = time.monotonic()
    code, output = outcome(["doctor", *arguments, "--timeout", "2"], tmp_path)
    # the deadline, and the time to read the inputs
    assert time.monotonic() - began < SECONDS
    found = table(output)
    assert code == 1 and {name for name, (result, _) in found.items() if result == "FAILS"} == {
        "ranks",
        "run directory",
    }
    assert "missing node 1; arrived: node 0; gave up after 2 s" in found["ranks"][1]
    assert found["run directory"][1].startswith(f"{tmp_path}/runs cannot be written (")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.full
def test_a_rank_that_stops_is_named_and_none_is_left(config: Path, tmp_path: Path) -> None:
    process = start(["doctor", str(config), "--timeout", "5"], tmp_path)
    ranks = _ranks(process)
    os.kill(ranks[1], signal.SIGSTOP)
    output, _ = process.communicate(timeout=SECONDS)
    result, text = table(output)["ranks"]
    assert process.returncode == 1 and result == "FAILS" and "rank 1" in text and "rank 0" in text, output
    assert not any(map(is_alive, ranks)) and list(tmp_path.iterdir()) == []


def _ranks(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of both ranks, as soon as they run."""
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        found = children(process)
        if len(found) == CASE.ranks:
            return found
        time.sleep(0.05)
    raise AssertionError("no ranks were started")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_run_begins_after_its_checks_and_not_without(config: Path, tmp_path: Path) -> None:
    """The run's launchers meet a second time, at the same address."""
    port = free_port()
    command = ["run", "--preflight", *[each for each in two_nodes(config, port) if each not in ("--timeout", "60")]]
    nodes = [start([*command, str(number)], tmp_path) for number in (0, 1)]
    first, second = (node.communicate(timeout=SECONDS)[0] for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0], first + second
    assert first.index("checks passed") < first.index("step 1/3") and "step 3/3" in first
    assert "step" not in second
    (tmp_path / "file").write_text("")
    refused = start(["run", "--preflight", str(config), "--set", "runs=file"], tmp_path)
    output, _ = refused.communicate(timeout=SECONDS)
    assert refused.returncode == 1 and "preflight: 1 of 16 checks failed: run directory" in output
    assert "step 1/3" not in output


def test_a_run_on_a_disk_that_is_too_small_is_refused(config: Path, tmp_path: Path) -> None:
    """`run` itself refuses it before a rank starts."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        code, output = outcome(["run", str(config), "--set", f"runs={tmp_path}/runs"], tmp_path)
        assert code == 2 and not (tmp_path / "runs").exists()
        need = f"{CASE.name} needs 1.49 MB (3 checkpoints of 447 kB, models of 149 kB)"
        assert f"flexrlhf: runs: {need}; {tmp_path} has " in output
        assert output.strip().count("\n") == 0, output
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.full
@pytest.mark.skipif(not can_link(), reason="needs the right to make network namespaces")
def test_a_host_that_others_do_not_reach_is_named(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 reaches the store, but its ranks listen on a private interface, such as a container's bridge."""
    with linked_hosts() as link:
        own = ["ip", "-n", link.hosts[1]]
        subprocess.run([*own, "link", "add", "bridge0", "type", "veth", "peer", "name", "bridge1"], check=True)
        subprocess.run([*own, "addr", "add", "10.99.0.1/24", "dev", "bridge0"], check=True)
        for interface in ("bridge0", "bridge1"):
            subprocess.run([*own, "link", "set", interface, "up"], check=True)
        command = ["doctor", str(config), "--nnodes", "2", "--rdzv-endpoint", f"{link.addresses[0]}:29500"]
        first = link.start(0, [*command, "--node-rank", "0"], tmp_path)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "bridge0")
        second = link.start(1, [*command, "--node-rank", "1"], tmp_path)
        outputs = [node.communicate(timeout=SECONDS)[0] for node in (first, second)]
    assert [first.returncode, second.returncode] == [1, 1]
    for output in outputs:
        result, text = table(output)["ranks"]
        assert result == "FAILS", output
        assert f"node 0 (host {link.hosts[0]}) does not reach 10.99.0.1:" in text, output
        assert f" of node 1 (host {link.hosts[1]}) (" in text and "set GLOO_SOCKET_IFNAME" in text, output
    assert table(outputs[0])["same versions"][0] == "ok" and list(tmp_path.iterdir()) == []
