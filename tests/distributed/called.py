"""Program of a session: the operators of the graph in its order, as a user would call them.

    python called.py CONFIG [WAY]

WAY: ``joined``: trainings by forward_backward and optim_step; ``stops``: ends itself by SIGKILL in the third step;
``chooses``: trains on steps whose mean score is not above that of the step before.
"""

from __future__ import annotations

import os
import signal
import sys

from flexrlhf import Session
from flexrlhf.launch.session import CalledBatch


def main(config: str, way: str = "", resume: str | None = None) -> None:
    with Session(config, resume=resume) as run:
        before = None
        for batch in run.prompts():
            if way == "stops" and batch.step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            due = [each for each in run.plan.graph.operators if batch.step % each.every == 0]
            for operator in due:
                if operator.kind != "train":
                    run.call(operator.name, batch)
            mean = float(batch["scores"].mean()) if way == "chooses" else 0.0
            if before is None or mean <= before:
                for operator in due:
                    if operator.kind == "train":
                        train(run, operator.name, batch, way)
            before = mean
            run.save()


def train(run: Session, operator: str, batch: CalledBatch, way: str) -> None:
    for part in batch.mini_batches(run.plan.batch.num_mini_batches):
        if way == "joined":
            run.forward_backward(operator, part)
            metrics = run.optim_step(operator)
        else:
            metrics = run.call(operator, part)
        if part.parts.stop == run.plan.batch.num_mini_batches:
            print(batch.step, operator, metrics)


if __name__ == "__main__":
    main(*sys.argv[1:])
