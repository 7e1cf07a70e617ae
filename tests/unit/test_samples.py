"""Samples: which rows of a step are kept, and how the parts that operators report become lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import plan_of
from torch import device
from torch import distributed as dist

from flexrlhf.comm.world import World
from flexrlhf.display.events import EventSender
from flexrlhf.placement.layout import BatchShape
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.runs.run_loggers import RunLoggers
from flexrlhf.strategies.instructions import Run
from flexrlhf.timeline import Timeline
from flexrlhf.trainer.recorder import Recorder, make_report
from flexrlhf.trainer.results_writer import ResultsWriter
from flexrlhf.trainer.samples import merged_samples, sample_rows
from flexrlhf.trainer.work_time import WorkTime

TEXT = {"prompt": "a", "response": "b", "length": 2, "finished": True, "weights_version": 3}


@pytest.mark.parametrize(
    ("prompts", "samples", "count", "rows"),
    [(8, 1, 4, (0, 2, 4, 6)), (4, 8, 4, (0, 8, 16, 24)), (2, 3, 4, (0, 1, 3, 4)), (3, 1, 9, (0, 1, 2)), (3, 1, 0, ())],
)
def test_rows_are_evenly_spaced(prompts: int, samples: int, count: int, rows: tuple[int, ...]) -> None:
    assert sample_rows(BatchShape(prompts, samples), count) == rows


def test_a_sampled_prompt_of_segments_has_a_place_in_each_step_that_may_train_on_it() -> None:
    """Rows 0 and 4 of the 8 that a step takes: first prompts of 4, in 3 places each, of 2 responses."""
    assert sample_rows(BatchShape(12, 2, segments=3), 2) == (0, 2, 4, 12, 14, 16)


def test_parts_of_a_row_are_one_line_in_the_order_of_rows() -> None:
    parts = [
        {"rows": "evaluation", "row": 1, **TEXT},
        {"rows": "training", "row": 4, "score": 0.5},
        {"rows": "training", "row": 4, **TEXT},
        {"rows": "training", "row": 1, "cost": 1.0, **TEXT},
        {"rows": "training", "row": 2, "score": 0.5},
    ]
    found = merged_samples(7, parts)
    assert [(each["rows"], each["row"]) for each in found] == [("training", 1), ("training", 4), ("evaluation", 1)]
    assert list(found[1]) == [
        *("rows", "step", "row", "weights_version", "prompt", "response", "length", "finished", "score")
    ]
    assert found[1] == {"rows": "training", "step": 7, "row": 4, "score": 0.5, **TEXT}


def test_samples_are_written_with_the_metrics_of_their_step(tmp_path: Path) -> None:
    """Rank 0 waits for the parts of all operators, and writes none of them twice."""
    plan = plan_of(None, 1, "steps=2")
    world = World(0, 1, dist.HashStore(), device("cpu"), "gloo")
    recorder, work = Recorder(plan, world), WorkTime("run", world, Timeline(0, 1))
    run, loggers = RunDirectory(tmp_path), RunLoggers(tmp_path)
    results = ResultsWriter(recorder, run, work, loggers, EventSender(), lambda step, positions: [])
    runs = [index for index, each in enumerate(plan.schedule.instructions) if isinstance(each, Run)]
    for step in (0, 1):
        for index in runs:
            name = plan.schedule.instructions[index].operator.name  # type: ignore[union-attr]
            text = [{"rows": "training", "row": 0, **TEXT}] if name == "generate" else []
            score = [{"rows": "training", "row": 0, "score": float(step)}] if name == "scores" else []
            assert run.samples.read() == expected(step)
            recorder.publish(step, step * len(plan.schedule.instructions) + index, make_report(samples=[*text, *score]))
        results.collect()
    assert run.samples.read() == expected(2)


def expected(steps: int) -> list[dict[str, object]]:
    return [{"rows": "training", "step": step, "row": 0, **TEXT, "score": float(step)} for step in range(steps)]
