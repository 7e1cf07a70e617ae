"""Predictions that start from a run's own times and lengths, and the decision whether to go on under another
placement."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import TINY, plan_of, spec_of
from torch.distributed.elastic.multiprocessing.api import SignalException
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.replan import format_replan, places_text, reopened, replan, returns
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.costs.cost_model import Call, Cost, Mesh
from flexrlhf.guideline.costs.profiles import FROM_MEASUREMENTS
from flexrlhf.guideline.simulation.inputs import TextLengths, truncated_exponential
from flexrlhf.guideline.simulation.measured_run import RunRecord, measured_run
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.launch.start import saving_on_signals
from flexrlhf.plan.plan import Plan
from flexrlhf.report.metric_table import MetricTable
from flexrlhf.report.sections import replan_text
from flexrlhf.trainer.stop_requests import StopRequests

GPUS = "cluster={nodes: [{devices: 4, class: A100-80G}]}"
LONG = ("data.max_response_tokens=2048", "data.max_prompt_tokens=64", "algorithm.prompts_per_step=64")
MODEL = {**TINY, "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 22}
MODELS = tuple(f"models.{role}.init={MODEL | {'num_attention_heads': 16}}" for role in ("actor", "reward"))
SPLIT = [0.5, 0.5, 0.5, 0.5]


class Machine(AnalyticCosts):
    """A machine whose calls take longer than the figures of its devices say, by kind."""

    def __init__(self, longer: Mapping[str, float]) -> None:
        super().__init__()
        self._longer = longer

    def call(self, call: Call, mesh: Mesh) -> Cost:
        return Cost({name: self._longer[call.kind] * each for name, each in super().call(call, mesh).parts.items()})


def plan(placement: object = None, *overrides: str) -> Plan:
    return plan_of(placement, 4, GPUS, *LONG, *MODELS, "steps=100", *overrides)


def record_of(of: Plan, mean: float, machine: AnalyticCosts, steps: int = 6) -> RunRecord:
    """The files that a run of ``of`` on ``machine`` writes, with responses of ``mean`` tokens."""
    lengths = TextLengths(of.lengths.prompt, truncated_exponential(mean, of.lengths.response))
    simulation = simulate(of, machine, lengths)
    rows = [{"step": step, "seconds": simulation.seconds, "response_length": mean} for step in range(steps)]
    rows[0]["seconds"] += 7.0
    return RunRecord(Path("runs/test"), of, rows, (), [*simulation.spans(steps)])


@pytest.mark.parametrize("placement", [None, SPLIT, [1, 1, 0.5, 0.5]], ids=str)
def test_a_step_takes_as_long_as_measured_under_its_placement_and_under_others(placement: object) -> None:
    """Calls of one kind that take twice as long do so under every placement, whatever was measured on which ranks."""
    machine = Machine({"generate": 2.0, "forward": 1.3, "train": 3.0})
    run = measured_run(record_of(plan(placement), 300, machine))
    assert run.simulation.seconds == pytest.approx(run.seconds, rel=0.03) and run.warm_up == pytest.approx(7.0)
    assert run.source.accuracy.high == FROM_MEASUREMENTS.high, "all steps took as long"
    for other in (None, SPLIT):
        expected = simulate(plan(other), machine, run.lengths).seconds
        assert simulate(plan(other), run.source.costs, run.lengths).seconds == pytest.approx(expected, rel=0.05)


def test_the_range_is_as_wide_as_the_steps_vary() -> None:
    record = record_of(plan(), 300, Machine(dict.fromkeys(("generate", "forward", "train"), 1.0)), 8)
    rows = [row | {"seconds": (1.0, 2.0)[row["step"] % 2] * row["seconds"]} for row in record.rows]
    varied = measured_run(replace(record, rows=rows)).source.accuracy
    assert varied.high > 1.3 > FROM_MEASUREMENTS.high and varied.tie == FROM_MEASUREMENTS.tie


def test_measurements_are_of_the_last_steps_under_the_present_placement() -> None:
    machine = Machine(dict.fromkeys(("generate", "forward", "train"), 1.0))
    before, now = record_of(plan(SPLIT), 100, machine, 5), record_of(plan(), 800, machine, 9)
    rows = [*before.rows, *now.rows[5:]]
    spans = [*before.spans, *(span for span in now.spans if span.step >= 5)]
    run = measured_run(replace(now, rows=rows, spans=spans))
    assert run.steps == (6, 7, 8) and run.lengths.mean_response == pytest.approx(800, rel=0.01)
    samples = [{"rows": "training", "step": 6, "length": 100 + 200 * number} for number in range(8)]
    sampled = measured_run(replace(now, rows=rows, spans=spans, samples=samples)).lengths.responses
    assert sum(sampled) / 8 == pytest.approx(800, rel=0.01) and len(set(sampled)) == 8
    with pytest.raises(UserError, match="1 settled steps of its placement"):
        measured_run(replace(now, rows=rows[:7], spans=spans))


def test_a_run_changes_its_placement_once_its_responses_are_long_and_enough_steps_are_left() -> None:
    """All devices generate faster than half of them, which the steps of short responses do not pay back."""
    machine = Machine(dict.fromkeys(("generate", "forward", "train"), 1.5))
    short, long = (measured_run(record_of(plan(SPLIT), mean, machine)) for mean in (8, 1500))
    brief = replan(short, restart_seconds=60)
    assert brief.is_clear and not brief.switches, format_replan(brief)
    found = replan(long, restart_seconds=60)
    assert found.switches and found.remaining == 94, format_replan(found)
    assert found.gain == pytest.approx(94 * found.saved - 60) and found.saved > 0.1 * found.best.seconds
    assert not long.record.plan.spec.differences(found.best.plan.spec)
    assert "restart takes 60 s: switch" in format_replan(found)
    # a restart that takes longer than what is saved, few steps that are left, and no clear difference
    dear = replace(found, restart_seconds=95 * found.saved)
    assert not dear.switches and ": go on as it is" in format_replan(dear)
    ending = replace(long, record=replace(long.record, rows=[{**long.record.rows[-1], "step": 98}]))
    assert not replace(found, run=ending).switches
    assert not replace(found, advice=replace(found.advice, margin=10.0)).switches
    # it does not go back to a placement that it has left, unless its responses have another length now
    left = {"switches": True, "before": places_text(found.best.plan), "response_length": 1400.0}
    kept = {"switches": False, "before": "", "response_length": 9.0}
    assert returns(found, [left, kept]) and not returns(found, [kept])
    assert not returns(found, [{**left, "response_length": 900.0}])
    assert not returns(found, [left, {**left, "before": "another"}])
    # under the placement that it chose the run goes on
    again = replan(measured_run(record_of(found.best.plan, 1500, machine)), restart_seconds=0)
    assert not again.switches and "no difference beyond the accuracy" in format_replan(again)


def test_what_numbers_depend_on_and_what_is_written_stays() -> None:
    written = spec_of(None, 4, GPUS, "models.actor.zero=2", "schedule.num_chunks=2", "algorithm.num_mini_batches=4")
    resolved = plan_of(None, 4, GPUS, "models.actor.zero=2", "schedule.num_chunks=2", "algorithm.num_mini_batches=4")
    opened = reopened(resolved.spec, written)
    assert opened.placement is None and not resolved.spec.differences(opened)
    assert opened.schedule.num_blocks == resolved.spec.schedule.num_blocks
    for spec, is_open in ((opened, False), (reopened(resolved.spec), True)):
        assert ("zero" not in spec.models.actor.model_fields_set) == is_open  # type: ignore[union-attr]
        assert ("num_chunks" not in spec.schedule.model_fields_set) == is_open
        assert "lag" in spec.schedule.model_fields_set and "zero" not in spec.models.ref.model_fields_set  # type: ignore[union-attr]
    # of devices without figures only placement and chunks are compared
    cpu = reopened(plan_of(None, 2).spec)
    assert "zero" in cpu.models.actor.model_fields_set  # type: ignore[union-attr]


def test_a_signal_takes_the_place_of_a_decision(tmp_path: Path) -> None:
    """A job that saves and ends to go on under another placement then ends; a second SIGTERM ends it at once."""
    stop = tmp_path / "stop"
    stop.write_text(StopRequests.REPLAN)
    with saving_on_signals(stop, True):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.read_text() == ""
        with pytest.raises(SignalException):
            os.kill(os.getpid(), signal.SIGTERM)
    assert stop.read_text() == StopRequests.END_NOW


def test_the_report_says_how_long_steps_took_before_and_after() -> None:
    decision: dict[str, Any] = {"step": 3, "before": "all on rank 0", "after": "all on ranks 0-1"}
    decision |= {"seconds": 2.0, "predicted_after": 1.1, "response_length": 50.0}
    rows = [{"step": step, "seconds": seconds} for step, seconds in enumerate((9.0, 2.0, 2.0, 2.0, 5.0, 1.2, 1.2))]
    places = "after step 3: all on rank 0 → all on ranks 0-1; "
    before = f"{places}2 s a step before with responses of 50 tokens, 1.1 s predicted"
    assert replan_text(decision, MetricTable(rows)) == f"{before}, measured 1.2 s after"
    assert replan_text(decision, MetricTable(rows[:4])) == f"{before} after"
    longer = [row | {"response_length": 60.0} for row in rows]
    assert replan_text(decision, MetricTable(longer)) == f"{before}, measured 1.2 s with 60 tokens after"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "--replan", "20"], "--replan 20: expected every=N, at least 3 steps"),
        (["run", "--replan", "every=2"], "--replan every=2: expected every=N, at least 3 steps"),
        (["run", "--replan", "every=9,restart=-1"], "expected every=N"),
        (["run", "--replan", "every=9,other=1"], "expected every=N"),
        (["run", "--replan", "every=9", "--set", "checkpoint.on_signal=false"], "checkpoint.on_signal: false"),
        (["run", "--replan", "every=9", "--launcher", "ray"], "goes with the ranks of one machine"),
        (["simulate", "--from", "nowhere"], "run nowhere: no such directory"),
        (["advise", "--from", "nowhere"], "run nowhere: no such directory"),
    ],
    ids=" ".join,
)
def test_an_option_that_is_wrong_is_one_sentence(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and expected in result.stderr and "Traceback" not in result.stderr, result.stderr
