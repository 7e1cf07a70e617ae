"""Program of a session: the operators of the graph in its order, as a user would call them.

    python called.py CONFIG [WAY]

WAY: ``joined``: trainings by forward_backward and optim_step; ``stops``: calls on one mini-batch after the other in the
first step, ``joined`` in the second, and ends itself by SIGKILL in the third;
``primitives``: as configs/primitives.py has it; ``chooses``: trains on steps whose mean score is not above that of the
step before, on the run's prompts as the program's own, with the rows of the reference split by their lengths.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flexrlhf import Session
from flexrlhf.config.code_loading import load_function
from flexrlhf.data.files import Row, read_rows
from flexrlhf.data.order import step_indices
from flexrlhf.launch.session import CalledBatch
from flexrlhf.placement.protocols import Split

PRIMITIVES = Path(__file__).parents[2] / "configs" / "primitives.py"


def main(config: str, way: str = "", resume: str | None = None) -> None:
    with Session(config, resume=resume) as run:
        before = None
        for batch in run.prompts(rows_of(run) if way == "chooses" else None):
            if way == "stops" and batch.step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if way == "primitives":
                load_function(f"{PRIMITIVES}:train")(run, batch)
                run.save()
                continue
            due = [each for each in run.plan.graph.operators if batch.step % each.every == 0]
            is_split_up = way == "stops" and batch.step == 0
            parts = batch.mini_batches(run.plan.batch.num_mini_batches) if is_split_up else [batch]
            for operator in due:
                is_split = way == "chooses" and operator.name == "ref_logprobs"
                # log-probs of tokens that are decoded together may differ in their last digits
                is_whole = operator.barrier or operator.kind == "generate"
                if operator.kind != "train":
                    for part in [batch] if is_whole else parts:
                        run.call(operator.name, part, protocol=by_length(run, batch) if is_split else None)
            mean = float(batch["scores"].mean()) if way == "chooses" else 0.0
            if before is None or mean <= before:
                for operator in due:
                    if operator.kind == "train":
                        train(run, operator.name, batch, way)
            before = mean
            run.save()


def rows_of(run: Session) -> Iterator[list[Row]]:
    """Yield the rows of the data set that each step takes."""
    spec = run.plan.spec
    rows = read_rows(str(spec.data.path))
    for step in range(spec.steps):
        yield [rows[index] for index in step_indices(spec.seed, step, run.plan.batch.num_prompts, len(rows))]


def by_length(run: Session, batch: CalledBatch) -> Split:
    """Split prompts so that each replica has about as many tokens of responses."""
    lengths = batch["response_mask"].sum(1).view(-1, run.plan.batch.samples_per_prompt).sum(1).tolist()

    def split(replicas: Sequence[Sequence[int]], prompts: range) -> list[list[int]]:
        parts: list[list[int]] = [[] for _ in replicas]
        for prompt in sorted(prompts, key=lambda each: -lengths[each]):
            min(parts, key=lambda part: sum(lengths[each] for each in part)).append(prompt)
        return parts

    return split


def train(run: Session, operator: str, batch: CalledBatch, way: str) -> None:
    # further epochs begin once all mini-batches are trained on
    count = run.plan.batch.num_mini_batches if run.plan.spec.algorithm.epochs == 1 else 1
    for part in batch.mini_batches(count):
        if way == "chooses":
            run.compute_loss(operator, part)
        if way == "joined" or (way == "stops" and batch.step == 1):
            # known before the optimizer step
            losses = dict(run.forward_backward(operator, part))
            metrics = {**losses, **run.optim_step(operator)}
        else:
            metrics = run.call(operator, part)
        if part.parts.stop == run.plan.batch.num_mini_batches:
            print(batch.step, operator, metrics)


if __name__ == "__main__":
    main(*sys.argv[1:])
