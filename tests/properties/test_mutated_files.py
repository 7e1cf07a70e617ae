"""Data files, model directories and checkpoints of random damage: each is used or refused in one clear sentence."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from mutated_files import damage_directory, damage_rows
from outcomes import Case, run_cases

from flexrlhf.runs.run_directory import RunStatus, write_status

SAMPLE, ALL = 30, 800
FULL = [pytest.mark.full, pytest.mark.timeout(1800)]
SIZES = pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=FULL)])
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
            write_status(Path("runs/small"), RunStatus("finished", 3, 3))
        damage = damage_directory(rng, Path("runs/small"))
        resume = Case(("run", "ppo.yaml", "--resume", rng.choice(("auto", "runs/small"))), damage).dry()
        export = Case(("export", "runs/small", "-o", "exported"), damage)
        return rng.choice((resume, export))

    run_cases(inputs, count, 7, case).check(least_refused=0.2)
