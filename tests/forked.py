"""Processes of tests, forked by one factory of each test process: none loads torch and transformers by itself."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexrlhf.launch.rank_factory import LOADED, RankFactory

PATH = [str(Path(__file__).parent / folder) for folder in ("megatron_on_cpu", "distributed", "engines", "")]
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "_MLFLOW_TELEMETRY_SESSION_ID": "tests",
    "PYTHONPATH": os.pathsep.join(filter(None, [*PATH, os.environ.get("PYTHONPATH")])),
}
"""Environment: one thread a rank, none of the functions that vLLM compiles on CPUs, no thread of Arrow, without which
the factory can fork, Megatron-Core's stand-in for CUDA there, and ranks of tests. Two have their values before
DeepSpeed and MLflow set them in a test process, after which the factory would load all libraries anew."""
LIBRARIES = {"peft": ("peft",), "megatron": ("flexrlhf.engines.megatron.engine",)}
"""Modules that many launches load, by the package that they are of."""
if "FLEXRLHF_TEST_DEVICE" not in os.environ:
    # DeepSpeed chooses its device when it is loaded
    RANK_ENVIRONMENT["DS_ACCELERATOR"] = "cpu"
    LIBRARIES["deepspeed"] = ("deepspeed", "flexrlhf.engines.deepspeed.engine")


@cache
def warm_factory() -> RankFactory:
    """Return the factory of this test process, which has loaded the modules of launchers and engines, too."""
    installed = [module for package, modules in LIBRARIES.items() if find_spec(package) for module in modules]
    factory = RankFactory(modules=[*LOADED, "flexrlhf.cli.app", "torch.testing", *installed])
    atexit.register(factory.close)
    return factory


class Forked(subprocess.Popen[str]):
    """``python -m`` in a fork of the factory, with its stdout and stderr in one pipe."""

    def __init__(self, command: Sequence[str], directory: Path, environment: Mapping[str, str], **further: Any) -> None:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | further
        super().__init__(list(command), cwd=directory, env=dict(environment), **streams)

    def _execute_child(self, args: Any, *values: Any) -> None:
        """Fork where Popen would execute a program; ``values``: of its private method."""
        directory, environment = values[4], values[5]
        pipes = values[9:15]
        _, _, _, stdout, _, stderr = pipes
        streams = (0, stdout if stdout != -1 else 1, stderr if stderr != -1 else 2)
        self.pid = warm_factory().fork(args, environment, Path(args[0]).stem, Path(directory), streams).pid
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run_ranks(module: str, *arguments: object, number: int, seconds: float = 200) -> None:
    """Run ``number`` processes of a module of tests, as ranks of a job whose store rank 0 serves, to a good end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [module, *map(str, arguments)]
    ranks = []
    for rank in range(number):
        environment = {**os.environ, **RANK_ENVIRONMENT, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(warm_factory().fork(command, environment, f"rank {rank}"))
    try:
        assert [rank.wait(seconds) for rank in ranks] == [0] * number
    finally:
        for rank in ranks:
            rank.kill()
