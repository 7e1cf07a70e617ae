"""NaN and infinity on real ranks: the run ends with a sentence that names them, or skips the affected optimizer steps,
on all ranks alike; and a run whose responses never have a score ends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import start
from poisoned import BAD_MINI_BATCH, BAD_ROW, BAD_STEP, ppo, recurrent, supervised, unscored, write_assets
from safetensors.torch import load_file
from torch import Tensor

from flexrlhf.metrics import METRICS

Raw = dict[str, Any]
COMPUTES: dict[str, Raw] = {
    "replicas": {},
    "fsdp": {"zero": 3},
    "deepspeed-2": {"engine": "deepspeed", "zero": 2},
}
"""Settings of the actor: ways in which two ranks agree about a gradient."""
FURTHER: dict[str, Raw] = {
    "tp": {"tp": 2},
    "fsdp-2": {"zero": 2},
    "bfloat16": {"dtype": "bfloat16"},
    "deepspeed-0": {"engine": "deepspeed"},
    "deepspeed-1": {"engine": "deepspeed", "zero": 1},
    "deepspeed-3": {"engine": "deepspeed", "zero": 3},
    "deepspeed-bfloat16": {"engine": "deepspeed", "zero": 2, "dtype": "bfloat16"},
    "deepspeed-offloaded": {"engine": "deepspeed", "zero": 2, "offload_optimizer": True},
}
FIRST = (
    f"step {BAD_STEP}, train_actor on actor, mini-batch {BAD_MINI_BATCH}: the loss or its gradient is not finite, "
    f"first in the computed log-probs of row {BAD_ROW} at response token 0 (micro-batch"
)


@dataclass(frozen=True)
class Printed:
    """Results of a command: its runs' directory, its output, its exit code."""

    runs: Path
    out: str
    status: int

    def metrics(self, name: str) -> list[Raw]:
        return [json.loads(line) for line in (self.runs / name / "metrics.jsonl").read_text().splitlines()]

    def weights(self, name: str) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = load_file(self.runs / name / "actor" / "model.safetensors")
        return weights


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("poisoned")
    write_assets(directory)
    return directory


def command(assets: Path, raws: list[Raw]) -> Printed:
    """Execute ``raws`` in one command."""
    paths = [assets / f"{raw['name']}-{raw['cluster']['devices']}.yaml" for raw in raws]
    for path, raw in zip(paths, raws, strict=True):
        path.write_text(yaml.safe_dump(raw))
    process = start(["run", *map(str, paths)], assets)
    out, _ = process.communicate(timeout=200)
    return Printed(Path(raws[0]["runs"]), out, process.returncode)


def pairs(assets: Path, computes: dict[str, Raw]) -> list[Raw]:
    """Each of ``computes`` with the poisoned step, and without this step."""
    return [
        supervised(assets, f"{name}-{data}", data, 2, "skip", **actor)
        for name, actor in computes.items()
        for data in ("poisoned", "clean")
    ]


@pytest.fixture(scope="module")
def two_ranks(assets: Path) -> Printed:
    """The last run ends the command."""
    last = supervised(assets, "stopped", "poisoned", 2, "stop")
    # the trained copy computes the log-probs, the other one samples
    apart = {"algorithm": {"importance": {}}, "placement": {"actor.shadow": 0.5, "actor": 0.5}}
    copies = recurrent(assets, "copies", 2, "warn", **apart)
    return command(assets, [*pairs(assets, COMPUTES), ppo(assets, "ppo", 2, "skip"), copies, last])


@pytest.fixture(scope="module")
def one_rank(assets: Path) -> Printed:
    skipping = supervised(assets, "replicas-poisoned", "poisoned", 1, "skip")
    return command(assets, [skipping, recurrent(assets, "recurrent", 1, "warn"), ppo(assets, "values", 1, "stop")])


@pytest.fixture(scope="module")
def further(assets: Path) -> Printed:
    return command(assets, pairs(assets, FURTHER))


@pytest.mark.parametrize("compute", COMPUTES)
def test_a_skipped_step_never_was(two_ranks: Printed, compute: str) -> None:
    check_skipped(two_ranks, compute)


@pytest.mark.full
@pytest.mark.parametrize("compute", FURTHER)
def test_a_skipped_step_never_was_with_other_engines(further: Printed, compute: str) -> None:
    assert further.status == 0, further.out
    check_skipped(further, compute)


def check_skipped(left: Printed, compute: str) -> None:
    """Weights, optimizer and schedule continue as if the step had not existed, bitwise as in a run without it."""
    rows, clean = left.metrics(f"{compute}-poisoned"), left.metrics(f"{compute}-clean")
    assert [row["actor_skipped"] for row in rows] == [0, 1, 0]
    assert [row.get("rows_skipped", 0) for row in rows] == [0, rows[0]["rows_trained"], 0]
    assert "nll" not in rows[BAD_STEP] and "actor_grad_norm" not in rows[BAD_STEP]
    compared = ("nll", "actor_grad_norm", "actor_learning_rate")
    assert [[row[name] for name in compared] for row in (rows[0], rows[2])] == [
        [row[name] for name in compared] for row in clean
    ]
    weights, expected = left.weights(f"{compute}-poisoned"), left.weights(f"{compute}-clean")
    assert all(bits(weights[name]).equal(bits(expected[name])) for name in expected), compute


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def test_a_run_that_stops_names_step_mini_batch_and_row(two_ranks: Printed) -> None:
    """The row is on the second rank; all ranks report the same."""
    last = two_ranks.out.strip().splitlines()[-1]
    assert two_ranks.status == 1 and " (actor; host " in last and FIRST in last, last
    left = "the weights were left as they were; guards.non_finite: skip would go on without this optimizer step"
    assert left in last, last
    assert "Traceback" not in two_ranks.out
    assert len(two_ranks.metrics("stopped")) == BAD_STEP


def test_two_ranks_skip_the_same_steps_as_one(two_ranks: Printed, one_rank: Printed) -> None:
    """And name the same row."""
    name = "replicas-poisoned"
    assert all(f"flexrlhf: {FIRST}" in left.out for left in (two_ranks, one_rank)), one_rank.out
    for row, other in zip(two_ranks.metrics(name), one_rank.metrics(name), strict=True):
        assert {k: v for k, v in row.items() if k not in METRICS.times} == pytest.approx(
            {k: v for k, v in other.items() if k not in METRICS.times}, rel=1e-5
        )


def test_a_non_finite_output_is_named_in_its_forward_pass(two_ranks: Printed) -> None:
    """The critic's values of one row spoil the advantages of all, so no model is trained in that step; the next one
    without poison is."""
    found = [
        line for line in two_ranks.out.splitlines() if "values on critic: NaN or infinity in values of row" in line
    ]
    assert found and all("no update will follow from it" in line for line in found), two_ranks.out
    rows = two_ranks.metrics("ppo")
    assert [row["actor_skipped"] for row in rows] == [row["critic_skipped"] for row in rows] == [1, 1, 0]
    assert "policy_loss" in rows[2] and "value_loss" in rows[2]


def test_values_that_are_not_finite_end_a_run(one_rank: Printed) -> None:
    last = one_rank.out.strip().splitlines()[-1]
    assert one_rank.status == 1 and "step 0, values on critic: NaN or infinity in values of row " in last, one_rank.out
    assert "guards.non_finite: skip would go on without the optimizer steps that it spoils" in last, last


def test_an_architecture_that_is_decoded_wrongly_is_named(one_rank: Printed, two_ranks: Printed) -> None:
    """And no other: the PPO and the supervised runs of these commands have no such line. Each run prints it once, for
    the copy that sampled."""
    for left, name, copy in ((one_rank, "recurrent", "actor"), (two_ranks, "copies", "actor.shadow")):
        (line,) = [line for line in left.out.splitlines() if "computes other log-probs of whole texts" in line]
        assert line.startswith(f"flexrlhf: step 0: {copy} (mamba)"), left.out
        assert "limit 0.001" in line and "worst tokens: '" in line
        assert len(left.metrics(name)) == 2


@pytest.mark.full
def test_a_run_whose_responses_never_have_a_score_ends(assets: Path) -> None:
    """Each rank has its own worker whose function raises; the run would have 1,000 steps."""
    raw = unscored(assets, "unscored", 2)
    left = command(assets, [raw])
    last = left.out.strip().splitlines()[-1]
    assert left.status == 1 and "no response of 3 steps in a row had a score" in last, left.out
    assert "guards.max_failed_steps 3" in last and "Traceback" not in left.out
    shown = [line for line in left.out.splitlines() if "unscored  step" in line]
    assert shown and all("score_failed 1" in line for line in shown)
