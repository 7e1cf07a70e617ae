"""`make gpu`: its table for commands that end, fail or take too long, and the reference of MFU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from benchmarks.gpu.clock import Failed, OutOfTime, TimeBudget
from benchmarks.gpu.gpu_tests import _of_report
from benchmarks.gpu.machine import ON_CPU, ON_GPU
from benchmarks.gpu.results import LeftOut, Results, Row
from benchmarks.gpu.speed import FREE, StepRows, _flops, _phase_row, _shape, _trl
from benchmarks.gpu.workload import run_config, write_data
from flexrlhf.config.spec_file import load_spec
from flexrlhf.guideline.costs.cost_model import Transformer
from flexrlhf.plan.pipeline import make_plan


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_command_ends_fails_or_runs_out_of_time() -> None:
    budget = TimeBudget(30)
    assert budget.run(python("print('done')")) == "done\n"
    with pytest.raises(Failed, match="^broken \\(exit status 3\\)$"):
        budget.run(python("print('a'); print('broken'); raise SystemExit(3)"))
    with pytest.raises(OutOfTime, match="^not done after 1 s$") as caught:
        budget.run(python("import time; print('begun', flush=True); time.sleep(60)"), most=1)
    assert caught.value.printed == "begun\n"
    assert 0 < budget.left < 30


def test_everything_is_in_the_table_and_in_json(tmp_path: Path) -> None:
    results = Results({"device": "CPU", "torch": "2.13.0"})
    results.add(Row("speed", "step", "2 s", {"seconds": 2.0}), LeftOut("speed", "GRPO by TRL", "not installed"))
    results.write(tmp_path)
    assert (tmp_path / "gpu.md").read_text().splitlines() == [
        "device CPU, torch 2.13.0",
        "",
        "| stage | measurement | result |",
        "|---|---|---|",
        "| speed | step | 2 s |",
        "| speed | GRPO by TRL | skipped: not installed |",
    ]
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"][0]["figures"] == {"seconds": 2.0}


def test_tests_are_counted_and_skipped_ones_named() -> None:
    cases = "<testcase name='a'/><testcase name='b'><skipped message='no CUDA device'/></testcase>"
    failed = "<testcase name='c'><failure message='1 | 2&#10;more'/></testcase>"
    found = list(_of_report("ranks", ElementTree.fromstring(f"<testsuite>{cases}{failed}</testsuite>")))
    assert found == [
        LeftOut("ranks", "b", "no CUDA device"),
        Row("ranks", "c", "failure: 1 / 2"),
        Row("ranks", "tests marked gpu", "1 passed, 1 failed, 1 skipped", {"passed": 1, "failed": 1}),
    ]


def test_training_is_three_passes_and_a_pass_two_operations_a_weight() -> None:
    model = Transformer(layers=2, hidden=8, ffn=16, heads=2, kv_heads=1, head_dim=4, vocabulary=32)
    texts = StepRows(rows=3, prompt=6, response=4.0)
    weights = 2 * (8 * 4 * 6 + 8 * 16 * 3)
    expected = 3 * (2 * weights * 10 + 2 * 2 * 8 * 10 * 10 + 2 * 8 * 32 * 4)
    assert _flops("forward", model, texts) == expected
    assert _flops("train", model, texts) == 3 * expected
    assert _flops("forward", model.as_scorer(), texts) == expected - 3 * (2 * 8 * 32 * 4) + 3 * (2 * 8 * 10)


@pytest.mark.parametrize(("algorithm", "passes"), [("grpo", 1), ("ppo", 3)])
def test_passes_of_the_first_step_alone_do_not_count(algorithm: str, passes: int, tmp_path: Path) -> None:
    """The actor's forward, which only compares its log-probs with those of generation: its seconds are not counted."""
    write_data(tmp_path, ON_CPU)
    plan = make_plan(load_spec(run_config(f"{algorithm}-speed", tmp_path, ON_CPU, ON_CPU.large[0], "cpu"), ()))
    assert sum(operator.kind == "forward" for operator in plan.graph.operators) == passes + 1
    models = {model.role: _shape(plan, model) for model in plan.placement.models}
    row = _phase_row("", "forward", plan, models, StepRows(rows=32, prompt=32, response=24.0), seconds=1.0, peak=1.0)
    assert row.figures["tokens_s"] == passes * 32 * 56


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_trl_is_named_where_it_cannot_run(algorithm: str, tmp_path: Path) -> None:
    """Without it, and with a command in its place that fails on the request."""
    name = f"{algorithm.upper()} by TRL"
    found = [_trl(algorithm, tmp_path, ON_CPU, {}, "cpu", TimeBudget(30), trl) for trl in (None, "false")]
    missing = "trl is not installed; --trl PYTHON names an environment that has it"
    assert found == [LeftOut("speed", name, missing), LeftOut("speed", name, "no output (exit status 1)")]
    request = json.loads((tmp_path / f"trl-{algorithm}.json").read_text())
    assert (request["algorithm"], request["prompts"]) == (algorithm, ON_CPU.prompts)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_its_runs_can_be_planned(algorithm: str, tmp_path: Path) -> None:
    """Those on a GPU too, of 1.5 B parameters, whose prompts all have the same length, in passes of a quarter."""
    for scale in (replace(each, micro=each.micro // 4) for each in (ON_CPU, ON_GPU)):
        write_data(tmp_path, scale)
        for model in (*scale.large, scale.small):
            path = run_config(f"{algorithm}-speed", tmp_path, scale, model, "cpu")
            plan = make_plan(load_spec(path, ()))
            assert plan.batch.num_rows == scale.prompts * scale.samples
            assert max(memory.peak_bytes for memory in plan.memories) < FREE * 78e9
    assert yaml.safe_load(path.read_text())["data"]["max_prompt_tokens"] == ON_GPU.prompt
