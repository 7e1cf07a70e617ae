"""A Ray cluster of two nodes on this machine, in a separate process, and its ranks.

As a script: starts the cluster, prints a line of JSON, removes the second node on the input line ``remove``,
and ends with its input.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from commands import children_of, comm_of, name_of, ranks_of

ROOT = Path(__file__).parents[2]
STORE_BYTES = 80 * 2**20
SECONDS = 90


@dataclass(frozen=True)
class RayCluster:
    """``dashboard``: address of the web interface, to which jobs are submitted; empty without."""

    process: subprocess.Popen[str]
    address: str
    dashboard: str

    def remove_node(self) -> None:
        """Kill the second node; the first is not notified."""
        assert self.process.stdin is not None
        self.process.stdin.write("remove\n")
        self.process.stdin.flush()

    def ranks(self) -> dict[int, tuple[int, int]]:
        """Processes of each rank and its node's actor, only those started by this cluster."""
        launchers = [pid for pid in descendants(self.process.pid) if "-m flexrlhf.launch.ray.node" in name_of(pid)]
        return {
            int(comm_of(rank).removeprefix("rank ")): (rank, parent_of(launcher))
            for launcher in launchers
            for rank in (ranks_of(launcher) if comm_of(launcher) != "rank-factory" else [])
        }


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, directly or not."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [each for child in children_of(pid) for each in (child, *descendants(child))]
    return []


@contextmanager
def ray_cluster(dashboard: bool = False) -> Iterator[RayCluster]:
    """Two nodes with a CPU each. Their files are in a directory with a short name, as their sockets require."""
    directory = mkdtemp(prefix="ray-", dir="/tmp")
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "RAY_TMPDIR": directory, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, *["dashboard"] * dashboard],
        env={name: value for name, value in environment.items() if name != "RAY_ADDRESS"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    started: list[int] = []
    try:
        assert process.stdout is not None and process.stdin is not None
        line = next((line for line in process.stdout if line.startswith("{")), "")
        assert line, "the Ray cluster did not start"
        yield RayCluster(process, **json.loads(line))
        started = descendants(process.pid)
        process.stdin.close()
        process.wait(SECONDS)
    finally:
        started = started or descendants(process.pid)
        process.kill()
        process.wait()
        for pid in started:
            # a number may be another process's by now
            if directory in name_of(pid) or name_of(pid).startswith("ray::"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "dashboard_agent_listen_port": 0}
    head = {**node, "include_dashboard": "dashboard" in sys.argv, "dashboard_port": 0}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(**node)
    cluster.wait_for_nodes()
    print(json.dumps({"address": cluster.address, "dashboard": cluster.head_node.webui_url or ""}), flush=True)
    for line in sys.stdin:
        if line.strip() == "remove":
            cluster.remove_node(second, allow_graceful=False)
    cluster.shutdown()


if __name__ == "__main__":
    main()
