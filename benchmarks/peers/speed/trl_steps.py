"""Steps of TRL's trainers: an environment of their own, and a run in it by torchrun, one thread a rank."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from dataclasses import asdict
from pathlib import Path

from benchmarks.peers.speed.child import run_quietly
from benchmarks.peers.speed.workloads import RANKS, PeerJob

PACKAGES = ("trl==1.9.0", "datasets>=5,<6")
ROOT = Path(__file__).parents[3]


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def make_environment(environment: Path) -> None:
    """Create ``environment`` with TRL over the packages of this one, so that torch and transformers are the same."""
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    site = subprocess.run(
        [python_of(environment), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    Path(site.stdout.strip(), "zz_this.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([python_of(environment), "-m", "pip", "install", *PACKAGES], check=True)


def seconds(job: PeerJob, environment: Path) -> list[float]:
    """Return the time of each step after the first."""
    path = job.directory / "trl.json"
    fields = {"workload": asdict(job.workload), "directory": str(job.directory), "steps": job.steps}
    path.write_text(json.dumps(fields))
    module = ["-m", "benchmarks.peers.speed.trl_rank", str(path)]
    command = [str(python_of(environment)), "-m", "torch.distributed.run", "--standalone"]
    environment_of_ranks = {"PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"}
    run_quietly([*command, f"--nproc-per-node={RANKS}", *module], environment_of_ranks, job.directory / "trl.log")
    result: list[float] = json.loads(path.with_suffix(".seconds").read_text())
    return result
