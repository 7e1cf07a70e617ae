"""From the ranks' statistics to metrics.jsonl, timeline.json and the progress lines.

Statistics and spans travel through the job's key-value store, so that reporting needs no collective: the first rank of
a placed model publishes, rank 0 collects what has arrived and never waits for another rank while it trains.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from flexrlhf.metrics import Triple, add, evaluate, progress_line
from flexrlhf.plan import Plan
from flexrlhf.strategies.instructions import Eval, Instruction, Run
from flexrlhf.timeline import Span, Timeline, load_spans, write_trace


class Recorder:
    """Publishes for this rank; on rank 0 also collects and writes."""

    def __init__(self, plan: Plan, rank: int, store: dist.Store, directory: Path) -> None:
        self._plan = plan
        self._rank = rank
        self._store = dist.PrefixStore(f"record/{plan.spec.name}", store)
        self._directory = directory
        self._next_step = 0
        self._last_time = time.time()
        self._deadline = timedelta(seconds=plan.spec.timeout_seconds)
        if rank == 0:
            (directory / "metrics.jsonl").write_text("")

    def publish(self, step: int, instruction: Instruction, statistics: dict[str, Triple]) -> None:
        self._store.set(self._key(step, instruction), json.dumps(statistics))

    def _key(self, step: int, instruction: Instruction) -> str:
        return f"{step}/{self._plan.schedule.instructions.index(instruction)}"

    def _keys(self, step: int) -> list[str]:
        """The reports that make up a step."""
        reporting = [i for i in self._plan.schedule.instructions if isinstance(i, Run | Eval)]
        return [self._key(step, i) for i in reporting if i.due(step, self._plan.spec.steps)]

    def collect(self) -> None:
        """Write the metrics of all steps that have arrived in full; do not wait."""
        while self._next_step < self._plan.spec.steps and self._store.check(self._keys(self._next_step)):
            self._write_step()

    def finish(self, timeline: Timeline, weights_held: dict[str, int]) -> None:
        """Hand in this rank's spans; rank 0 waits for all and writes the rest."""
        self._store.set(f"timeline/{self._rank}", timeline.dump())
        self._store.set(f"weights/{self._rank}", json.dumps(weights_held))
        if self._rank != 0:
            return
        while self._next_step < self._plan.spec.steps:
            self._store.wait(self._keys(self._next_step), self._deadline)
            self._write_step()
        self._write_timeline()

    def _write_step(self) -> None:
        total: dict[str, Triple] = {}
        for key in self._keys(self._next_step):
            add(total, json.loads(self._store.get(key)))
            self._store.delete_key(key)
        now = time.time()
        row = {"step": self._next_step, "seconds": now - self._last_time, **evaluate(total)}
        with (self._directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            progress_line(self._plan.spec.name, self._next_step, self._plan.spec.steps, row, row["seconds"]), flush=True
        )
        self._next_step, self._last_time = self._next_step + 1, now

    def _write_timeline(self) -> None:
        spans: list[Span] = []
        held = {}
        for rank in range(self._plan.placement.num_ranks):
            self._store.wait([f"timeline/{rank}", f"weights/{rank}"], self._deadline)
            spans += load_spans(self._store.get(f"timeline/{rank}").decode())
            held[rank] = json.loads(self._store.get(f"weights/{rank}"))
        classes = {device.rank: device.device_class for device in self._plan.cluster.devices}
        write_trace(self._directory / "timeline.json", spans, {"weights_held_bytes": held, "device_class": classes})
