"""Evaluation responses scored by a model on other ranks: the same results on any rank, and the best model kept."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import Assets, make_assets
from forked import RANK_ENVIRONMENT, warm_factory
from safetensors.torch import load_file
from torch import Tensor

from flexrlhf.config.spec import Spec
from flexrlhf.launch.start import launch
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.runs.resume import RunOrder
from flexrlhf.runs.run_directory import RunDirectory

Raw = dict[str, Any]
STEPS, BEST_STEP = 3, 1
SAMPLES, PASS_AT, PASS_SCORE = 4, 2, 0.5
NUM_EVALUATION_ROWS = 11
"""Evaluation rows; a batch has 8, so the second one is not full."""
RUNS: Mapping[str, Raw] = {
    "co-located": {},
    "interleaving": {"placement": [1, 1, 0.5, 0.5]},
    "six-models": {"placement": [0.5] * 6},
    "gathered": {"models": {"reward": {"tp": 2}}},
    # ends with the best model of the others
    "shorter": {"steps": BEST_STEP + 1},
}
STILL = {role: {"optimizer": {"learning_rate": 0.0}} for role in ("actor", "critic")}
BEFORE: Raw = {"steps": 2, "eval": {"every": 2, "before": True}, "save": {}}
FROM_THE_START: Mapping[str, Raw] = {
    "still": {"steps": 1, "models": STILL},
    "before": BEFORE,
    "before-lag": {**BEFORE, "placement": [0.5] * 6, "schedule": {"lag": 1}, "sync": {"every": 2}},
    "before-hybrid": {**BEFORE, "rollout": {"engine": "torch"}},
}
"""The first has the weights of the start in its only evaluation."""


class Run:
    """Results of one of ``RUNS``."""

    def __init__(self, spec: Spec) -> None:
        self.directory = spec.directory

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        rows = RunDirectory(self.directory).metrics.read()
        return [{name: value for name, value in row.items() if name.startswith("eval_")} for row in rows]

    def column(self, step: int, operator: str, column: str) -> Tensor:
        """A column of all evaluation rows, put together from the files of the ranks."""
        rows: dict[int, Tensor] = {}
        for file in (self.directory / "columns").glob(f"held-out-step{step}-{operator}-*.safetensors"):
            part = load_file(file)
            rows |= dict(zip(part["rows"].tolist(), part[column], strict=True))
        assert sorted(rows) == list(range(NUM_EVALUATION_ROWS * SAMPLES))
        return torch.stack([rows[row] for row in sorted(rows)])

    def weights(self, name: str) -> dict[str, Tensor]:
        return load_file(self.directory / name / "model.safetensors")


def spec_of(assets: Assets, name: str, changes: Raw) -> Spec:
    optimizer = {"learning_rate": 3e-3}
    models: Raw = {role: {"path": assets.model(role)} for role in ("actor", "critic", "ref", "reward")}
    for role in ("actor", "critic"):
        models[role]["optimizer"] = optimizer
    for role, settings in changes.get("models", {}).items():
        models[role] |= settings
    raw: Raw = {
        "name": name,
        "algorithm": {"name": "ppo", "prompts_per_step": 8, "num_mini_batches": 2},
        "models": models,
        # a model's scores, and a source that is called on the ranks that have the responses
        "reward": [{"model": "reward"}, {"rule": "length", "target_tokens": 4, "weight": 0.5}],
        "data": {
            "path": str(assets.directory / "ppo.jsonl"),
            "tokenizer": str(assets.directory / "tokenizer"),
            "max_prompt_tokens": 8,
            "max_response_tokens": 8,
        },
        "eval": {
            "path": str(assets.directory / "ppo-evaluation.jsonl"),
            "every": 1,
            "samples_per_prompt": SAMPLES,
            "pass_at": PASS_AT,
            "pass_score": PASS_SCORE,
        },
        "save": {"best": "eval_reward_mean"},
        "steps": STEPS,
        "seed": 5,
        "cluster": {"devices": 2, "device": "cpu"},
        "debug": {"record_columns": True},
        "runs": str(assets.directory / "evaluated"),
        "timeout_seconds": 60,
    }
    further = {key: value for key, value in changes.items() if key != "models"}
    return Spec.parse({**raw, **further, "eval": raw["eval"] | changes.get("eval", {})})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All of them, in one launch of two ranks."""
    assets = make_assets(tmp_path_factory.mktemp("evaluation"))
    specs = {name: spec_of(assets, name, changes) for name, changes in (RUNS | FROM_THE_START).items()}
    plans = [make_plan(spec) for spec in specs.values()]
    for plan in plans:
        RunDirectory(plan.spec.directory).prepare(plan.spec, "", continues=False).close()
    with patch.dict(os.environ, RANK_ENVIRONMENT):
        launch([RunOrder(spec) for spec in specs.values()], plans[0], Hosts(), factory=warm_factory())
    return {name: Run(spec) for name, spec in specs.items()}


@pytest.mark.parametrize("name", ["interleaving", "six-models", "gathered"])
def test_metrics_equal_co_located_models(runs: dict[str, Run], name: str) -> None:
    expected, found = runs["co-located"].metrics, runs[name].metrics
    assert len(found) == len(expected) == STEPS
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys() and "eval_reward_mean" in ours
        assert ours == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("name", ["co-located", "interleaving", "six-models", "gathered"])
def test_metrics_follow_from_the_recorded_scores(runs: dict[str, Run], name: str) -> None:
    """pass@k by all ways to choose k of a prompt's responses."""
    for step, metrics in enumerate(runs[name].metrics):
        scores = runs[name].column(step, "scores", "scores").double()
        right = (scores >= PASS_SCORE).view(NUM_EVALUATION_ROWS, SAMPLES)
        choices = [right[:, list(choice)].any(1) for choice in combinations(range(SAMPLES), PASS_AT)]
        assert 0 < float(right.double().mean()) < 1
        finished = runs[name].column(step, "generate", "finished").double()
        length = runs[name].column(step, "generate", "response_mask").double().sum(1)
        direct = {
            "eval_reward_mean": scores.mean(),
            "eval_reward_std": scores.std(correction=0),
            "eval_pass_at_1": right.double().mean(),
            "eval_pass_at_k": torch.stack(choices).double().mean(),
            "eval_truncated": 1 - finished.mean(),
            "eval_response_length": length.mean(),
            "eval_score_invalid": torch.tensor(0.0),
        }
        assert {key: metrics[key] for key in direct} == pytest.approx(
            {key: float(value) for key, value in direct.items()}, abs=1e-9
        )


@pytest.mark.parametrize("name", ["co-located", "interleaving", "six-models", "gathered"])
def test_the_best_model_is_that_of_the_best_evaluation(runs: dict[str, Run], name: str) -> None:
    values = [row["eval_reward_mean"] for row in runs[name].metrics]
    best = max(range(STEPS), key=lambda step: values[step])
    assert best == BEST_STEP, f"{values}: choose settings under which it is neither the first nor the last"
    for role in ("actor", "critic"):
        best_file = json.loads((runs[name].directory / f"{role}-best" / "best.json").read_text())
        assert best_file == {"step": best, "metric": "eval_reward_mean", "value": values[best]}
        found, last = runs[name].weights(f"{role}-best"), runs[name].weights(role)
        assert not all(torch.equal(found[key], last[key]) for key in last)
    if name == "co-located":
        expected = runs["shorter"].weights("actor")
        assert all(torch.equal(runs[name].weights("actor-best")[key], expected[key]) for key in expected)


def test_samples_show_their_scores(runs: dict[str, Run]) -> None:
    """Four of all rows of the evaluation set, evenly spaced, the same ones under every placement."""
    shown = (0, NUM_EVALUATION_ROWS, 2 * NUM_EVALUATION_ROWS, 3 * NUM_EVALUATION_ROWS)
    for name, run in ((name, runs[name]) for name in RUNS):
        samples = [each for each in RunDirectory(run.directory).samples.read() if each["rows"] == "evaluation"]
        for step in range(len(run.metrics)):
            scores = run.column(step, "scores", "scores")
            found = {sample["row"]: sample["score"] for sample in samples if sample["step"] == step}
            assert found == {row: pytest.approx(float(scores[row]), rel=1e-5) for row in shown}, (name, step)
    texts = [
        [(each["step"], each["row"], each["prompt"], each["response"]) for each in directory.samples.read()]
        for directory in (RunDirectory(runs[name].directory) for name in RUNS if name != "shorter")
    ]
    assert all(each == texts[0] for each in texts[1:])


@pytest.mark.parametrize("name", [name for name in FROM_THE_START if name != "still"])
def test_an_evaluation_before_training_is_of_the_first_weights(runs: dict[str, Run], name: str) -> None:
    """Under a lag and with copies that are filled for it, too; the next one is after the last step."""
    first, last = runs[name].metrics
    assert first == pytest.approx(runs["still"].metrics[0], abs=1e-6)
    assert last.keys() == first.keys() and last["eval_reward_mean"] != pytest.approx(first["eval_reward_mean"])
    samples = [
        [each for each in RunDirectory(run.directory).samples.read() if each["rows"] == "evaluation"]
        for run in (runs[name], runs["still"])
    ]
    assert {each["step"] for each in samples[0]} == {0, 1}
    assert [each["response"] for each in samples[0] if each["step"] == 0] == [each["response"] for each in samples[1]]


def test_only_the_whole_models_are_left(runs: dict[str, Run]) -> None:
    names = sorted(path.name for path in Path(runs["co-located"].directory).iterdir() if path.is_dir())
    assert names == ["actor", "actor-best", "columns", "critic", "critic-best"]
