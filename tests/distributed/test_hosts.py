"""Two hosts with a link that fails: both end, soon, with a sentence that names the other."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import yaml
from cases import Case, make_assets
from commands import children, is_alive, read_until

from benchmarks.two_hosts import Link, can_link, linked_hosts
from flexrlhf.timeline import Trace

PORT = 29500
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not can_link(), reason="needs the right to make network namespaces"),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four ranks that does not end by itself; a silent connection counts as lost after twenty seconds."""
    assets = make_assets(tmp_path_factory.mktemp("hosts"))
    raw = yaml.safe_load(assets.spec(Case("four", "halves", 4)).dump())
    raw |= {"name": "endless", "steps": 100_000, "timeout_seconds": 20, "runs": "runs"}
    path = tmp_path_factory.mktemp("config") / "endless.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture
def link() -> Iterator[Link]:
    with linked_hosts() as hosts:
        yield hosts


Job = tuple[subprocess.Popen[str], subprocess.Popen[str]]


def start_job(link: Link, config: Path, directory: Path) -> Job:
    """Launchers of both hosts, whose ranks have trained."""
    endpoint = f"{link.hosts[0]}:{PORT}"
    options = ["run", str(config), "--nnodes", "2", "--rdzv-endpoint", endpoint, "--node-rank"]
    first = link.start(0, [*options, "0"], directory)
    # it is late: node 0 names the node that it waits for
    read_until(first, f"node 0 (host {link.hosts[0]}) compares settings, versions and files: missing node 1")
    second = link.start(1, [*options, "1"], directory)
    interfaces = f"{link.hosts[1]} ({link.addresses[1]}) ranks 2-3; here over {link.hosts[0]}"
    assert interfaces in read_until(first, "step 3/")
    return first, second


def ends(job: Job) -> list[str]:
    """Last line of both launchers, once they and their ranks have ended."""
    outputs = ["", ""]

    def read(number: int) -> None:
        outputs[number], _ = job[number].communicate(timeout=90)

    threads = [Thread(target=read, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [output.strip().splitlines()[-1] if output.strip() else "" for output in outputs]


@pytest.mark.parametrize("way", ["packets lost", "link down"])
def test_a_link_that_is_gone_ends_both_hosts(way: str, link: Link, config: Path, tmp_path: Path) -> None:
    job = start_job(link, config, tmp_path)
    ranks = [pid for launcher in job for pid in children(launcher)]
    began = time.monotonic()
    link.lose_packets() if way == "packets lost" else link.set("down")
    first, second = ends(job)
    assert [launcher.returncode for launcher in job] == [1, 1]
    # ten times less than torch's quarter of an hour, with room for a busy machine
    assert time.monotonic() - began < 90
    assert f"node 1 (host {link.hosts[1]}; ranks 2, 3)" in first and "; rank 0 was at step " in first, first
    assert f"node 0 (host {link.hosts[0]}; ranks 0, 1)" in second and "; rank 2 was at step " in second, second
    assert len(ranks) == 4 and not any(map(is_alive, ranks))
    records = sorted(path.name for path in (tmp_path / "runs" / "endless" / "failure").iterdir())
    assert records == [f"rank-{rank}.json" for rank in range(4)]
    assert {span.rank for span in Trace.read(tmp_path / "runs" / "endless" / "timeline.json").spans} == set(range(4))


def test_a_link_that_is_down_for_a_while_costs_nothing(link: Link, config: Path, tmp_path: Path) -> None:
    """Then Ctrl-C on one host ends both."""
    job = start_job(link, config, tmp_path)
    link.set("down")
    time.sleep(4)
    link.set("up")
    seen = read_until(job[0], "step 1")
    number = int(seen.splitlines()[-1].split("step ")[1].partition("/")[0])
    read_until(job[0], f"step {number + 20}/")
    os.kill(job[0].pid, signal.SIGINT)
    first, second = ends(job)
    assert [launcher.returncode for launcher in job] == [130, 1]
    assert "stopped" in first and f"node 0 (host {link.hosts[0]}) was stopped" in second


@pytest.mark.parametrize("victim", ["rank", "stopped rank", "launcher of node 0", "launcher of node 1"])
def test_a_death_on_one_host_is_named_on_the_other(victim: str, link: Link, config: Path, tmp_path: Path) -> None:
    job = start_job(link, config, tmp_path)
    ranks = [pid for launcher in job for pid in children(launcher)]
    if victim == "rank":
        os.kill(ranks[3], signal.SIGKILL)
    elif victim == "stopped rank":
        os.kill(ranks[3], signal.SIGSTOP)
    else:
        job[int(victim[-1])].kill()
    first, second = ends(job)
    deadline = time.monotonic() + 10
    while any(map(is_alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, ranks)), "left behind"
    if victim == "rank":
        assert first == second and [launcher.returncode for launcher in job] == [1, 1]
        assert f"host {link.hosts[1]}) ended the run at step " in first and ", killed by SIGKILL" in first
    elif victim == "stopped rank":
        assert [launcher.returncode for launcher in job] == [1, 1]
        assert f"reward; host {link.hosts[1]}; at step " in first and "; does not respond)" in first, first
    elif victim == "launcher of node 0":
        assert job[1].returncode == 1 and f"the launcher of node 0 (host {link.hosts[0]}; ranks 0, 1)" in second
    else:
        assert job[0].returncode == 1 and f"the launcher of node 1 (host {link.hosts[1]}; ranks 2, 3)" in first
