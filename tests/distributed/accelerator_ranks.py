"""One process: a rank of runs on the accelerator made of host memory, which counts reads and waits by the host, and
batches of messages."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_accelerator
import torch.distributed as dist

from flexrlhf.comm.progress import RankProgress
from flexrlhf.comm.world import InOrder, Waitable
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.launch import worker
from flexrlhf.runs import manifest
from flexrlhf.runs.resume import RunOrder
from flexrlhf.trainer import rank_runs
from flexrlhf.trainer.execution import Execution
from flexrlhf.trainer.trainer import Trainer

WAITS = Counter[str]()
"""Waits for communication so far, in the order of the device's work and of the host, as they are with NCCL; and batches
of messages that were begun."""


def counted(wait: Callable[..., None]) -> Callable[..., None]:
    """Count the calls of ``RankProgress.wait``."""

    def counting(self: RankProgress, work: Waitable, ranks: tuple[int, ...]) -> None:
        WAITS["in order" if isinstance(work, InOrder) else "host"] += 1
        wait(self, work, ranks)

    return counting


def counted_batch(begin: Callable[..., list[dist.Work]]) -> Callable[..., list[dist.Work]]:
    """Count the calls of ``batch_isend_irecv``."""

    def counting(messages: list[dist.P2POp]) -> list[dist.Work]:
        WAITS["batches"] += 1
        return begin(messages)

    return counting


class CountingTrainer(Trainer):
    """Writes the host's reads and waits of the last step, by instruction, to ``counts-RANK.json`` of the run."""

    def _execute(self, execution: Execution) -> None:
        before = self._counts()
        super()._execute(execution)
        path = self.plan.spec.directory / f"counts-{self._rank.rank}.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        if execution.step == self.plan.spec.steps - 1:
            label = execution.instruction.label
            found[label] = Counter(found.get(label, {})) + (self._counts() - before)
        path.write_text(json.dumps(found))

    @staticmethod
    def _counts() -> Counter[str]:
        return WAITS + Counter(reads=host_accelerator.host_reads())


def on_accelerator(order: RunOrder) -> RunOrder:
    cluster = order.spec.cluster.model_copy(update={"device": host_accelerator.NAME})
    return replace(order, spec=order.spec.model_copy(update={"cluster": cluster}))


def settings_of_checkpoint(text: str) -> dict[str, Any]:
    """Return the settings that a rank has written; ``cluster.device`` has no name for this accelerator."""
    raw: dict[str, Any] = read_yaml(text)
    assert raw["cluster"]["device"] == host_accelerator.NAME
    return raw | {"cluster": raw["cluster"] | {"device": "cpu"}}


if __name__ == "__main__":
    manifest.read_yaml = settings_of_checkpoint
    host_accelerator.register(Path(sys.argv[1]))
    dist.Backend.backend_capability[dist.Backend.GLOO].append(host_accelerator.NAME)
    rank_runs.Trainer = CountingTrainer  # type: ignore[misc]
    dist.batch_isend_irecv = counted_batch(dist.batch_isend_irecv)
    RankProgress.wait = counted(RankProgress.wait)  # type: ignore[method-assign]
    worker.work([on_accelerator(order) for order in RunOrder.from_json(Path(sys.argv[2]).read_text())])
