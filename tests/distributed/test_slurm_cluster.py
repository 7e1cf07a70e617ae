"""A SLURM of two nodes on this machine: a job saves on its signal, is requeued and resumes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from cases import Case, make_assets
from commands import free_port

from flexrlhf.runs.run_directory import RunDirectory

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munge", "unmunge")
SECONDS = 120
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)), reason="needs root and SLURM (apt install slurm-wlm)"
    ),
]
# the first node has the name of this machine, which the other one reaches
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/controller.pid
SlurmdPidFile={directory}/node-%n.pid
SlurmctldLogFile={directory}/controller.log
SlurmdLogFile={directory}/node-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=60
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=zz NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=ALL Default=YES State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A running SLURM.

    environment:  variables of the commands.
    """

    environment: dict[str, str]

    def call(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=SECONDS, check=False
        )


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if subprocess.run("munge -n | unmunge", shell=True, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs a running munged")
    directory, host = tmp_path_factory.mktemp("slurm"), socket.gethostname()
    config = directory / "slurm.conf"
    config.write_text(CONFIG.format(host=host, directory=directory, ports=[free_port() for _ in range(3)]))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    made = Slurm({**os.environ, "SLURM_CONF": str(config), "OMP_NUM_THREADS": "1", "PATH": path})
    try:
        for command in (("slurmctld", "-c"), ("slurmd", "-N", host), ("slurmd", "-N", "zz")):
            assert made.call(*command).returncode == 0
        wait_until(lambda: made.call("sinfo", "-h", "-o", "%t").stdout.split() == ["idle"])
        yield made
    finally:
        made.call("scontrol", "shutdown")


def wait_until(holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "did not come in time"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two nodes of a rank each."""
    spec = make_assets(tmp_path_factory.mktemp("assets")).spec(Case("two", "halves", 2))
    raw = yaml.safe_load(spec.dump()) | {"name": "job", "runs": "runs", "steps": 200}
    raw["cluster"] = {"nodes": [{"count": 2, "devices": 1}], "device": "cpu"}
    path = tmp_path_factory.mktemp("config") / "job.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def test_a_job_that_is_signalled_goes_on_in_the_next_one(slurm: Slurm, config: Path, tmp_path: Path) -> None:
    written = slurm.call("flexrlhf", "slurm", str(config), "-o", "job.sbatch", cwd=tmp_path)
    assert written.stdout == "wrote job.sbatch; start it with: sbatch job.sbatch\n", written.stderr
    job = slurm.call("sbatch", "--parsable", "-o", "job.out", "job.sbatch", cwd=tmp_path).stdout.strip()
    out, run = tmp_path / "job.out", tmp_path / "runs" / "job"
    wait_until(lambda: out.exists() and "step 20/" in out.read_text())
    slurm.call("scancel", "--signal=USR1", job)
    wait_until(lambda: "job has stopped after" in out.read_text())
    stopped = RunDirectory(run).status
    assert stopped is not None and stopped.state == "stopped" and 20 <= stopped.next_step < 200
    wait_until(lambda: "BeginTime" in slurm.call("squeue", "-h", "-j", job, "-o", "%r").stdout)
    # instead of two minutes later
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_until(lambda: "results in runs/job" in out.read_text())
    assert [row["step"] for row in RunDirectory(run).metrics.read()] == list(range(200))


@pytest.mark.parametrize("seconds", [0.0, 0.5, 3.0])
def test_a_job_that_is_signalled_before_its_first_step_is_requeued(
    seconds: float, slurm: Slurm, config: Path, tmp_path: Path
) -> None:
    """As soon as its tasks are there, whether their interpreters have started or they load libraries."""
    slurm.call("flexrlhf", "slurm", str(config), "-o", "job.sbatch", cwd=tmp_path)
    job = slurm.call("sbatch", "--parsable", "-o", "job.out", "job.sbatch", cwd=tmp_path).stdout.strip()
    wait_until(lambda: f"{job}.0" in slurm.call("squeue", "-h", "-s", "-j", job, "-o", "%i").stdout)
    time.sleep(seconds)
    slurm.call("scancel", "--signal=USR1", job)
    wait_until(lambda: "BeginTime" in slurm.call("squeue", "-h", "-j", job, "-o", "%r").stdout)
    slurm.call("scancel", job)
    said = (tmp_path / "job.out").read_text()
    assert "step 1/" not in said and "Traceback" not in said, said
    # a signal before the interpreter runs has no word of ours
    assert seconds < 3 or "flexrlhf: stopped by SIGUSR1 before the first step; nothing is to be saved" in said, said


def test_tasks_on_one_node_and_nodes_without_srun_are_refused(slurm: Slurm, config: Path, tmp_path: Path) -> None:
    many = slurm.call("srun", "-N1", "-n2", "flexrlhf", "run", str(config), cwd=tmp_path)
    assert (many.stderr + many.stdout).count("flexrlhf: srun: 2 tasks on 1 nodes; a task starts all ranks") == 2
    script = f"#!/bin/bash\nflexrlhf run {config}\n"
    (tmp_path / "plain.sbatch").write_text(script)
    slurm.call("sbatch", "-N2", "--wait", "-o", "plain.out", "plain.sbatch", cwd=tmp_path)
    said = (tmp_path / "plain.out").read_text()
    assert "flexrlhf: SLURM: the job has 2 nodes and cluster.nodes 2, but this process would start" in said, said


def test_srun_with_a_task_per_device_is_refused(slurm: Slurm, config: Path, tmp_path: Path) -> None:
    many = slurm.call("srun", "-N2", "-n4", "flexrlhf", "run", str(config), cwd=tmp_path)
    assert "flexrlhf: srun: 4 tasks on 2 nodes; a task starts all ranks of its node" in many.stderr + many.stdout
    assert not list(tmp_path.iterdir())
