"""One process: a rank of runs on the accelerator made of host memory, which counts reads by the host."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_accelerator
import torch.distributed as dist

from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import parse_spec
from flexrlhf.launch import worker
from flexrlhf.runs.resume import ORDERS, RunOrder
from flexrlhf.trainer import restoration
from flexrlhf.trainer.execution import Execution
from flexrlhf.trainer.trainer import Trainer


class CountingTrainer(Trainer):
    """Writes the host reads of the last step, by instruction, to ``reads-RANK.json`` of the run."""

    def _execute(self, execution: Execution) -> None:
        before = host_accelerator.host_reads()
        super()._execute(execution)
        path = self.plan.spec.directory / f"reads-{self._rank.rank}.json"
        found = Counter(json.loads(path.read_text()) if path.exists() else {})
        if execution.step == self.plan.spec.steps - 1:
            found[execution.instruction.label] += host_accelerator.host_reads() - before
        path.write_text(json.dumps(found))


def on_accelerator(order: RunOrder) -> RunOrder:
    cluster = order.spec.cluster.model_copy(update={"device": host_accelerator.NAME})
    return replace(order, spec=order.spec.model_copy(update={"cluster": cluster}))


def spec_of_checkpoint(raw: dict[str, Any]) -> Spec:
    """Return a spec that a rank has written; ``cluster.device`` has no name for this accelerator."""
    assert raw["cluster"]["device"] == host_accelerator.NAME
    return parse_spec(raw | {"cluster": raw["cluster"] | {"device": "cpu"}})


if __name__ == "__main__":
    restoration.parse_spec = spec_of_checkpoint
    host_accelerator.register(Path(sys.argv[1]))
    dist.Backend.backend_capability[dist.Backend.GLOO].append(host_accelerator.NAME)
    worker.Trainer = CountingTrainer  # type: ignore[misc]
    worker.work([on_accelerator(order) for order in ORDERS.validate_json(Path(sys.argv[2]).read_bytes())])
