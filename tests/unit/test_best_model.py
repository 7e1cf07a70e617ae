"""Which evaluation was the best: ranks agree through the key-value store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_runs import plan_of

from flexrlhf.comm.deadlines import DeadlineError
from flexrlhf.comm.world import World
from flexrlhf.display.events import EventSender
from flexrlhf.metrics import Triple
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.runs.run_loggers import RunLoggers
from flexrlhf.strategies.instructions import Eval, Run, Save
from flexrlhf.timeline import Timeline
from flexrlhf.trainer.recorder import Recorder, make_report
from flexrlhf.trainer.results_writer import ResultsWriter
from flexrlhf.trainer.work_time import WorkTime

Publish = Callable[[int, float], None]


def plan() -> Plan:
    """Both ranks of the reward model's side and of the actor's; actor and critic are saved by rank 0."""
    best = ("eval={path: held_out.jsonl, every: 1}", "save.best=eval_reward_mean", "timeout_seconds=1", "steps=5")
    return plan_of([1, 1, 0.5, 0.5], 2, *best)


@pytest.fixture
def recorder() -> Recorder:
    world = World(0, 2, dist.HashStore(), torch.device("cpu"), "gloo")
    return Recorder(plan(), world)


def saves() -> list[Save]:
    return [x for x in plan().schedule.instructions if isinstance(x, Save) and x.best is not None]


def evaluate(recorder: Recorder, step: int, reward: float | None) -> None:
    """As the trainer reports an evaluation: one key for each of its operators."""
    instructions = plan().schedule.instructions
    position = next(index for index, x in enumerate(instructions) if isinstance(x, Eval))
    evaluation = instructions[position]
    assert isinstance(evaluation, Eval)
    for inner, each in enumerate(evaluation.instructions):
        if isinstance(each, Run):
            is_scored = each.operator.name == "held_out_scores" and reward is not None
            statistics: dict[str, Triple] = {"eval_reward": (2.0, 2 * (reward or 0.0), 0.0)} if is_scored else {}
            recorder.publish(step, step * len(instructions) + position, make_report(statistics), inner)


def test_a_model_is_better_than_all_before_or_it_is_not_kept(recorder: Recorder) -> None:
    found = []
    for step, reward in enumerate((0.5, 0.25, None, 0.5, 0.75)):
        evaluate(recorder, step, reward)
        found.append([recorder.improved(save, step) for save in saves()])
    assert found == [[0.5, 0.5], [None, None], [None, None], [None, None], [0.75, 0.75]]


def test_what_is_read_by_all_is_removed_and_not_before(recorder: Recorder, tmp_path: Path) -> None:
    evaluate(recorder, 0, 0.5)
    work = WorkTime("run", recorder.world, Timeline(0, 1))
    ResultsWriter(
        recorder, RunDirectory(tmp_path), work, RunLoggers(tmp_path), EventSender(), lambda step, positions: []
    ).collect()
    actor, critic = saves()
    before = recorder.mailbox.store.num_keys()
    assert recorder.improved(actor, 0) == recorder.improved(critic, 0) == 0.5
    # one of each of four operators, and the count of readers is gone again
    assert recorder.mailbox.store.num_keys() == before - 4


def test_a_rank_that_never_evaluates_is_named(recorder: Recorder) -> None:
    late = r"rank 0 at the evaluation of step 0: the deadline of 1 s passed, .*rank 1 \(scores on reward\)"
    with pytest.raises(DeadlineError, match=late):
        recorder.improved(saves()[0], 0)
