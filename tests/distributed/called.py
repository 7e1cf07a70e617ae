"""Program of a session: the operators of the graph in its order, as a user would call them.

    python called.py CONFIG [WAY [RESUME [ENDPOINT]]]

WAY: ``joined``: trainings by forward_backward and optim_step; ``fails``: calls on one mini-batch after the other in the
first step, and an error in the second; ``stops``: SIGKILL between the trainings of the third;
``primitives``: as configs/primitives.py has it; ``chooses``: trains on steps whose mean score is not above that of the
step before, on the run's prompts as the program's own, with the rows of the reference split by their lengths,
and makes calls that are refused; ``skips``: trains at once under a lag, and leaves steps, mini-batches and operators
out; ``forgets``: does not compare the rows of a step, with rows of the reference on other ranks;
``scheduled``: in the order of the schedule, with several open batches under a lag; ``stops-late``: the same, and
SIGKILL before a training, with batches in flight. ENDPOINT: where a second machine joins.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest
import torch
from odd_calls import call_from_everywhere, try_odd_calls

from flexrlhf import Session
from flexrlhf.config.code_loading import load_function
from flexrlhf.data.files import Row, read_rows
from flexrlhf.data.order import step_indices
from flexrlhf.errors import UserError
from flexrlhf.launch.session import CalledBatch
from flexrlhf.operators.graph import Operator
from flexrlhf.placement.protocols import SplitPrompts
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.strategies.instructions import Run

PRIMITIVES = Path(__file__).parents[2] / "configs" / "primitives.py"


def main(config: str, way: str = "", resume: str | None = None, endpoint: str = "", fails_at: int = 5) -> None:
    """``fails_at``: operators that the second step of ``fails`` calls; all: it fails at its end."""
    with Session(config, resume=resume or None, nnodes=2 if endpoint else 1, rdzv_endpoint=endpoint) as run:
        if way in ("scheduled", "stops-late"):
            call_as_scheduled(run, stops=way == "stops-late")
            return
        if way in ("skips", "forgets"):
            (skip if way == "skips" else forget)(run)
            return
        before, points = None, count()
        for batch in run.prompts(rows_of(run) if way == "chooses" else None):
            if way == "primitives":
                load_function(f"{PRIMITIVES}:train")(run, batch)
                run.save()
                continue
            due = [each for each in run.plan.graph.operators if batch.step % each.every == 0]
            is_split_up = way == "fails" and batch.step == 0
            parts = batch.mini_batches(run.plan.batch.num_mini_batches) if is_split_up else [batch]
            for operator in due:
                is_split = way == "chooses" and operator.name == "ref_logprobs"
                # log-probs of tokens that are decoded together may differ in their last digits
                is_whole = operator.barrier or operator.kind == "generate"
                if operator.kind != "train":
                    fail(way, batch, points, fails_at)
                    for part in [batch] if is_whole else parts:
                        run.call(operator.name, part, protocol=by_length(run, batch) if is_split else None)
                if way == "chooses" and batch.step == 0 and operator.kind == "generate":
                    print(try_odd_calls(run, batch, Session(config)), "calls are refused")
                    call_from_everywhere(run, batch)
            mean = float(batch["scores"].mean()) if way == "chooses" else 0.0
            if before is None or mean <= before:
                for operator in due:
                    if operator.kind == "train":
                        fail(way, batch, points, fails_at)
                        train(run, operator.name, batch, way)
                        if way == "stops" and batch.step == 2:
                            # read once the training is done
                            assert len(batch["tokens"])
                            os.kill(os.getpid(), signal.SIGKILL)
            fail(way, batch, points, fails_at)
            before = mean
            if way != "fails":
                run.save()


def call_as_scheduled(run: Session, stops: bool) -> None:
    plan, batches = run.plan, list[CalledBatch]()
    late = {each.operator.name for each in plan.schedule.instructions if isinstance(each, Run) and each.lag}

    def call(batch: CalledBatch, is_late: bool) -> None:
        for operator in plan.graph.operators:
            if not operator.is_due(batch.step) or (operator.name in late) != is_late:
                continue
            if stops and operator.kind == "train" and batch.step == plan.spec.steps - 1 - plan.schedule.lag:
                # once the calls before are done, and the checkpoint is written, which ranks do in the background
                assert len(batch["advantages"])
                written = RunDirectory(plan.spec.directory).checkpoint(batch.step).path
                while written not in [each.path for each in RunDirectory(plan.spec.directory).checkpoints]:
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
            run.call(operator.name, batch)

    for batch in run.prompts(rows_of(run) if plan.batch.segments > 1 else None):
        if plan.kept_slots:
            with pytest.raises(UserError, match="a protocol of generate would take rows away from the keys and values"):
                run.generate(batch, protocol=last_apart)
        call(batch, is_late=False)
        batches.append(batch)
        if batch.step == 1 and len(batches) == 2 and not stops:
            with pytest.raises(UserError, match="train_actor on the batch of step 1, before all trainings of step 0; "):
                run.train_actor(batch)
        if len(batches) > plan.schedule.lag:
            call(batches.pop(0), is_late=True)
        if plan.spec.checkpoint.every is None:
            run.save()
    for batch in batches:
        call(batch, is_late=True)


def skip(run: Session) -> None:
    """Do not train in step 1, call nothing in step 3, and in step 7 nothing but the two responses; in step 4 all calls
    but the first are on one mini-batch, without training. Step 9 is generated on its second mini-batch, and trained on,
    once the next one is generated on its first: it still has the rows that the step before has left."""
    shape, open_rows = run.plan.batch, list[torch.Tensor]()
    refused = {
        (2, "train_actor"): "before all trainings of step 1; ",
        (4, "generate"): "goes on with rows of the step before, for which generate has not been called on mini-batch 0",
        (5, "generate"): "for which whole has not been called on mini-batch 1",
        (8, "generate"): "for which whole has not been called on mini-batch 0",
    }
    late: CalledBatch | None = None
    responses, further = run.plan.graph.operators[:3], run.plan.graph.operators[3:]
    for batch in run.prompts():
        first, *others = batch.mini_batches(shape.num_mini_batches)
        if batch.step >= 9:
            call_all(run, responses, first)
            if late is None:
                late = batch
                continue
            call_all(run, responses, *late.mini_batches(shape.num_mini_batches)[1:])
            mask, tokens = open_rows
            width = mask.shape[1]
            assert mask[len(first) :].any() and (late["tokens"][:, -width:] == tokens[:, -width:])[mask].all()
            call_all(run, responses, *others)
            call_all(run, further, late, batch)
            continue
        for operator in run.plan.graph.operators[: {3: 0, 7: 2}.get(batch.step)]:
            part = first if batch.step == 4 and operator.name != "generate" else batch
            if (sentence := refused.get((batch.step, operator.name))) is not None:
                with pytest.raises(UserError, match=sentence):
                    run.call(operator.name, part)
                run.end_step()
            if operator.kind != "train" or batch.step not in (1, 4):
                run.call(operator.name, part)
        if batch.step == 8:
            # sampled tokens of rows that go on in step 9
            steps, _ = shape.as_taken(torch.arange(shape.num_rows), 9)
            going = (batch["present"] == 0) & (steps < 9)
            open_rows = [batch["response_mask"].bool() & going[:, None], batch["tokens"]]


def call_all(run: Session, operators: Sequence[Operator], *parts: CalledBatch) -> None:
    for part in parts:
        for operator in operators:
            run.call(operator.name, part)


def forget(run: Session) -> None:
    """Call no advantages in step 2: step 3 has the scores that step 1 has left of prompts that are still there."""
    shape, found = run.plan.batch, dict[int, list[torch.Tensor]]()
    for batch in run.prompts():
        for operator in run.plan.graph.operators:
            if batch.step != 2 or operator.name not in ("advantages", "train_actor"):
                split = last_apart if operator.name == "ref_logprobs" else None
                run.call(operator.name, batch, protocol=split)
        if batch.step in (1, 3):
            found[batch.step] = [batch[name] for name in ("group_scores", "group_steps")]
        if batch.step == 1:
            runs = (each for each in run.trace().schedule.instructions if isinstance(each, Run))
            layout = next(each.layout for each in runs if each.operator.name == "ref_logprobs")
            # all places of the last number of each mini-batch
            last = [place for number in shape.mini_batches for place in shape.prompts(number)[-shape.num_places :]]
            assert [*shape.prompts_on(layout, layout.replica_sets[1][0], shape.mini_batches)] == last
        if batch.step == 3:
            stayed = shape.as_taken(torch.arange(shape.num_rows), batch.step)[0] <= 1
            for before, after in zip(found[1], found[3], strict=True):
                is_known = ~before[stayed].isnan()
                assert is_known.any() and torch.equal(before[stayed][is_known], after[stayed][is_known])
            return


def last_apart(replicas: Sequence[Sequence[int]], prompts: range) -> list[Sequence[int]]:
    """Return all prompts but the last for the first of two replicas."""
    assert len(replicas) == 2
    return [prompts[:-1], prompts[-1:]]


class BugError(Exception):
    """Error of a program."""


def fail(way: str, batch: CalledBatch, points: Iterator[int], fails_at: int) -> None:
    """Raise an error at one of the points of the second step."""
    if way == "fails" and batch.step == 1 and next(points) == fails_at:
        raise BugError


def rows_of(run: Session) -> Iterator[list[Row]]:
    """Yield the rows of the data set that each further step takes."""
    spec = run.plan.spec
    rows = read_rows(str(spec.data.path))
    for step in range(len(run.metrics), spec.steps):
        yield [rows[index] for index in step_indices(spec.seed, step, run.plan.batch.num_new, len(rows))]


def by_length(run: Session, batch: CalledBatch) -> SplitPrompts:
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
        if way == "joined":
            # known before the optimizer step
            losses = dict(run.forward_backward(operator, part))
            metrics = {**losses, **run.optim_step(operator)}
        else:
            metrics = run.call(operator, part)
        if part.parts.stop == run.plan.batch.num_mini_batches:
            print(batch.step, operator, metrics)


if __name__ == "__main__":
    main(*sys.argv[1:])
