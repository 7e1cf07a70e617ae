"""`make gpu`: its table for commands that end, fail or take too long, its stages for one GPU and several, and the
reference of MFU."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from benchmarks.gpu.__main__ import _run
from benchmarks.gpu.against import plan_side
from benchmarks.gpu.bases import BASES, settings_of, write_base
from benchmarks.gpu.clock import Failed, OutOfTime, TimeBudget
from benchmarks.gpu.gpu_tests import _of_report
from benchmarks.gpu.incidents import FAULTS, is_named
from benchmarks.gpu.job import MODELS, Job
from benchmarks.gpu.machine import ON_CPU, ON_GPU
from benchmarks.gpu.mechanisms import MECHANISMS
from benchmarks.gpu.results import LeftOut, Results, Row
from benchmarks.gpu.speed import FREE, StepRows, _flops, _phase_row, _shape, _trl
from benchmarks.gpu.stages import STAGES, Stage
from benchmarks.gpu.workload import run_config, write_data
from flexrlhf.config.spec_file import load_spec
from flexrlhf.guideline.costs.cost_model import Transformer
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.verify.sides import check_comparable

ROOT = Path(__file__).parents[2]


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


# --- several GPUs


def test_all_mechanisms_can_be_compared_with_their_plain_runs(tmp_path: Path) -> None:
    job = Job(tmp_path, "cpu", ON_CPU, 8)
    for name, base in BASES.items():
        path, settings = write_base(name, job), settings_of(name, job)
        plain = plan_side(path, "plain", tmp_path, (*settings, "cluster.devices=1", *base.plain))
        assert plain.placement.num_ranks == (2 if base.plain else 1)
        for each in (each for stage in MECHANISMS.values() for each in stage if each.base == name):
            own = (*settings, f"cluster.devices={each.ranks}", *each.settings)
            plan = plan_side(path, "other", tmp_path, own)
            check_comparable(plain, plan, each.name)
            assert plan.placement.num_ranks == each.ranks, each.name
    for model in (model for sizes in MODELS.values() for model in sizes.values()):
        # tensor-parallel ranks, context-parallel ranks, pipeline stages and expert-parallel ranks at most
        assert model["num_key_value_heads"] % 4 == model["num_hidden_layers"] % 2 == 0
        assert model.get("num_experts", 8) % 8 == 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("exception", "at step 1, train_actor, exit code 1: RuntimeError: planted by make gpu"),
        ("out of memory", "at step 1: memory is exhausted (CUDA out of memory); use fewer tokens"),
        ("SIGKILL", "at step 1, train_actor on actor, killed by SIGKILL"),
        ("SIGSTOP", "does not respond; arrived: rank 0"),
        ("SIGSTOP", "has given no sign of life for 15 s"),
    ],
)
def test_a_fault_is_named_by_rank_and_reason(name: str, sentence: str) -> None:
    reason = FAULTS[name].reason
    assert is_named(f"rank 1 (actor; host a) {sentence}", reason)
    assert not is_named(f"rank 10 (actor; host a) {sentence}", reason)
    assert not is_named("rank 1 (actor; host a) ended the run at step 1, killed by SIGABRT", reason)


def test_stages_have_the_gpus_that_they_need_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage for one GPU does not see the others, and one for several says which number it lacks."""

    def see(_: Job, budget: TimeBudget) -> Iterator[Row]:
        visible = budget.run(python("import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"))
        yield Row("probe", "visible", visible.strip())

    job, results = Job(tmp_path, "cuda", ON_GPU, 2, ("4", "GPU-a")), Results({})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-a")
    for gpus in (1, 2, 4):
        monkeypatch.setitem(STAGES, "probe", Stage(see, 30, 30, gpus))
        _run("probe", job, None, results)
    assert [row.found for row in results.rows] == ["4", "4,GPU-a"]
    assert results.left_out == [LeftOut("probe", "all", "needs 4 GPUs, 2 used (--gpus)")]
    assert len(json.loads((tmp_path / "gpu.json").read_text())["rows"]) == 2


def test_the_document_lists_the_stages_and_their_limits() -> None:
    tables = (ROOT / "docs" / "gpu.md").read_text().partition("## What one GPU has shown")[0]
    limits = dict(re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \|", tables, re.MULTILINE))
    assert list(limits) == list(STAGES)
    for name, stage in STAGES.items():
        if stage.gpus == 1:
            assert limits[name] == f"{stage.on_gpu / 60:g} min"
        else:
            assert limits[name].startswith(str(stage.gpus)) and stage.on_gpu <= 180
