"""Data files, model directories and checkpoints of random damage: each is used or refused in one clear sentence."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from mutated_files import damage_directory, damage_rows, damage_run
from outcomes import Case, run_cases

from flexrlhf.runs.run_directory import RunDirectory

SAMPLED, ALL = 30, 800
FULL = [pytest.mark.full, pytest.mark.timeout(1800)]
SIZES = pytest.mark.parametrize("count", [SAMPLED, pytest.param(ALL, marks=FULL)])
DATA = {
    "ppo.yaml": ("prompts.jsonl",),
    "sft.yaml": ("responses.json",),
    "dpo.yaml": ("pairs.jsonl.gz",),
    "rule.yaml": ("questions.jsonl", "prompts.jsonl.gz"),
    "ptx.yaml": ("prompts.jsonl", "texts.jsonl"),
    "tables.yaml": ("prompts.parquet", "prompts.csv", "inputs.json"),
}
"""Config → data files that it reads."""
ROLES = (
    ("--set", "models.actor.path={}"),
    ("--set", "models.actor.path={}", "--set", "data.tokenizer=tokenizer"),
    ("--set", "models.reward={{path: {}, new_head: true}}"),
    ("--set", "models.critic={{path: {}, zero: 3}}"),
    ("--set", "data.tokenizer={}"),
)


@SIZES
def test_a_damaged_data_file_is_read_or_refused_in_one_sentence(count: int, inputs: Path) -> None:
    def case(rng: Random) -> Case:
        config = rng.choice(list(DATA))
        damage = damage_rows(rng, Path(rng.choice(DATA[config])))
        return Case((rng.choice(("run", "run", "simulate")), config), damage).dry()

    run_cases(inputs, count, 5, case).check(least_refused=0.5)


@SIZES
def test_a_damaged_model_directory_is_used_or_refused_in_one_sentence(count: int, inputs: Path) -> None:
    def case(rng: Random) -> Case:
        model = rng.choice(("llama", "llama", "gpt2", "several", "tokenizer"))
        role = ROLES[-1] if model == "tokenizer" else rng.choice(ROLES)
        damage = damage_directory(rng, Path(model))
        return Case(("run", "ppo.yaml", *(word.format(model) for word in role)), damage).dry()

    run_cases(inputs, count, 6, case).check(least_refused=0.4)


@SIZES
def test_a_damaged_checkpoint_is_refused_in_one_sentence(count: int, inputs: Path) -> None:
    def case(rng: Random) -> Case:
        if rng.random() < 0.3:
            RunDirectory(Path("runs/small")).write_status("finished", 3, 3)
        damage = damage_directory(rng, Path("runs/small"))
        resume = Case(("run", "ppo.yaml", "--resume", rng.choice(("auto", "runs/small"))), damage).dry()
        export = Case(("export", "runs/small", "-o", "exported"), damage)
        return rng.choice((resume, export))

    run_cases(inputs, count, 7, case).check(least_refused=0.2)


REPLAN = {"switches": True, "before": "a", "after": "b", "seconds": 2.0, "predicted_after": 1.0, "response_length": 5.0}
CALL = {"operator": "generate", "mini_batches": [0, 2], "loss": "", "part": "", "parts": []}
SAMPLE = {"rows": "training", "row": 0, "prompt": "a", "response": "b", "length": 1, "finished": True, "score": 0.5}
RUN_ROWS = {
    "metrics": {"seconds": 1.0, "reward_mean": 0.5, "rows_trained": 8.0, "staleness_0": 1.0, "rollout_restarts": 1.0},
    "samples": SAMPLE | {"turns": [{"role": "policy", "text": "b", "reward": 1.0}]},
    "replans": REPLAN,
    "calls": {"calls": [CALL]},
}


@pytest.mark.parametrize("count", [6, pytest.param(100, marks=FULL)])
def test_a_damaged_run_is_reported_as_far_as_it_can_be_read(count: int, inputs: Path) -> None:
    def case(rng: Random) -> Case:
        directory = Path("runs/small")
        for name, row in RUN_ROWS.items():
            lines = [json.dumps({"step": step, **row}) + "\n" for step in range(3)]
            (directory / f"{name}.jsonl").write_text("".join(lines))
        damage = damage_run(rng, directory)
        return Case(rng.choice((("report", "runs/small"), ("compare", "runs/small", "runs/small"))), damage)

    run_cases(inputs, count, 8, case).check(least_refused=0.0)
