"""SFT on instructions, then PPO on dialogues under each strategy, on four ranks; GRPO on school problems on two: real
data if it is next to the repository, the project's own fixtures of the same forms everywhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import start
from tokenizers import ByteLevelBPETokenizer
from toys import SCORES
from transformers import PreTrainedTokenizerFast

from flexrlhf.data.files import read_rows
from flexrlhf.metrics import METRICS

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
REAL = ROOT.parent / "shared" / "data"
STRATEGIES = {
    "co-located": [1, 1, 1, 1],
    "interleaving": [1, 1, 0.5, 0.5],
    "disaggregated": [0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
}
PROBLEMS = next(file for file in (REAL / "gsm8k.jsonl", FIXTURES / "question_answer.jsonl") if file.is_file())
REWARDS = {"rule": {"rule": "gsm8k"}, "function": {"function": f"{SCORES}:borrowed"}}
"""A random model solves nothing, but some responses share more characters with the solution than others."""
GRPO_RUNS: list[tuple[str, str, object]] = [
    ("rule", "co-located", [1, 1]),
    ("rule", "interleaving", [0.5, 0.5]),
    ("function", "co-located", [1, 1]),
    ("function", "disaggregated", {"actor.shadow": 0.5, "ref": 0.5, "actor": 0.5}),
]
"""Reward, strategy, placement of actor and ref."""
SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 2000,
    "max_position_embeddings": 512,
}


def make_tokenizer(files: list[Path], directory: Path) -> str:
    """A byte-level BPE trained on the data: no character is unknown."""
    texts = [str(value) for file in files for row in read_rows(file) for value in row.values()]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=2000, special_tokens=["<pad>", "<eos>", "<bos>"])
    bpe.save(str(directory / "bpe.json"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "bpe.json"), pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
    tokenizer.save_pretrained(directory / "tokenizer")
    return str(directory / "tokenizer")


def make_configs(data: Path, directory: Path) -> list[str]:
    """One SFT, and one PPO for each strategy that starts from it."""
    files = [data / "alpaca.json", data / "hh_pairs.jsonl.gz"]
    shared = {"tokenizer": make_tokenizer(files, directory), "long_prompts": "drop"}
    widths = {"max_prompt_tokens": 192, "max_response_tokens": 16}
    common: dict[str, Any] = {"cluster": {"devices": 4}, "runs": str(directory / "runs"), "steps": 2}
    sft = {
        "name": "sft",
        "algorithm": {"name": "sft", "prompts_per_step": 8, "num_mini_batches": 2},
        "models": {"actor": {"init": SHAPE, "optimizer": {"learning_rate": 1e-3}}},
        "data": {"path": str(files[0]), **shared, **widths},
        **common,
    }
    ppos = [
        {
            "name": strategy,
            "algorithm": {"name": "ppo", "prompts_per_step": 8, "num_mini_batches": 2},
            "models": {
                "actor": {"path": str(directory / "runs" / "sft" / "actor"), "optimizer": {"learning_rate": 1e-3}},
                "reward": {"init": SHAPE},
            },
            "data": {"path": str(files[1]), **shared, **widths},
            "placement": placement,
            **common,
        }
        for strategy, placement in STRATEGIES.items()
    ]
    paths = [directory / f"{raw['name']}.yaml" for raw in (sft, *ppos)]
    for path, raw in zip(paths, (sft, *ppos), strict=True):
        path.write_text(yaml.safe_dump(raw))
    return [str(path) for path in paths]


def is_sound(value: float | str) -> bool:
    """A finite number, or the name of the rollout engine."""
    return value == "torch" if isinstance(value, str) else math.isfinite(value)


def results(step: dict[str, Any]) -> dict[str, float]:
    """Metrics that no placement may change."""
    return {name: value for name, value in step.items() if name not in METRICS.times and not isinstance(value, str)}


@pytest.mark.parametrize(
    "data", [pytest.param(FIXTURES, id="fixtures"), pytest.param(REAL, id="real", marks=pytest.mark.full)]
)
def test_sft_and_ppo_run_under_every_strategy(data: Path, tmp_path: Path) -> None:
    if not data.is_dir():
        pytest.skip("the data folder is not next to the repository")
    process = start(["run", *make_configs(data, tmp_path)], tmp_path)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out[-2000:]
    # the run itself prints dropped and cut rows, also if its tokenizer comes from an earlier run
    for name, file in (("sft", "alpaca.json"), ("co-located", "hh_pairs.jsonl.gz")):
        (line,) = [line for line in out.splitlines() if line.startswith(f"{name}: data: {data / file}: form ")]
        assert " prompts left out" in line and ("responses cut" in line) == (name == "sft"), line
    runs = {name: (tmp_path / "runs" / name / "metrics.jsonl").read_text() for name in ("sft", *STRATEGIES)}
    rows = {name: [json.loads(line) for line in text.splitlines()] for name, text in runs.items()}
    assert all(len(steps) == 2 and all(map(is_sound, step.values())) for steps in rows.values() for step in steps)
    for name in ("interleaving", "disaggregated"):
        for step, same in zip(rows[name], rows["co-located"], strict=True):
            assert step["reward_mean"] == pytest.approx(same["reward_mean"], rel=1e-5, abs=1e-6), name


def make_grpo_configs(directory: Path) -> dict[tuple[str, str], Path]:
    """Configs by reward and placement, without a reward model."""
    tokenizer = make_tokenizer([PROBLEMS], directory)
    raws = {
        (reward, strategy): {
            "name": f"{reward}-{strategy}",
            "algorithm": {"name": "grpo", "prompts_per_step": 8, "samples_per_prompt": 4, "num_mini_batches": 2},
            # if all advantages are 0 the gradient is rounding, from which Adam's default eps would make whole steps
            "models": {"actor": {"init": SHAPE, "optimizer": {"learning_rate": 1e-3, "eps": 1e-5}}},
            "reward": REWARDS[reward],
            "data": {
                **{"path": str(PROBLEMS), "tokenizer": tokenizer, "long_prompts": "drop"},
                **{"max_prompt_tokens": 192, "max_response_tokens": 16},
            },
            "placement": placement,
            "cluster": {"devices": 2},
            "steps": 2,
            "runs": str(directory / "runs"),
        }
        for reward, strategy, placement in GRPO_RUNS
    }
    paths = {key: directory / f"{raw['name']}.yaml" for key, raw in raws.items()}
    for key, path in paths.items():
        path.write_text(yaml.safe_dump(raws[key]))
    return paths


def test_grpo_on_school_problems_is_the_same_under_every_placement(tmp_path: Path) -> None:
    configs = make_grpo_configs(tmp_path)
    process = start(["run", *map(str, configs.values())], tmp_path)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out[-2000:]
    rows = {
        key: [json.loads(line) for line in (tmp_path / "runs" / path.stem / "metrics.jsonl").read_text().splitlines()]
        for key, path in configs.items()
    }
    for (reward, strategy), steps in rows.items():
        assert len(steps) == 2 and all(map(is_sound, [value for step in steps for value in step.values()]))
        assert all(step["score_failed"] == step["score_invalid"] == 0 for step in steps), (reward, strategy)
        for step, same in zip(steps, rows[reward, "co-located"], strict=True):
            assert results(step) == pytest.approx(results(same), rel=1e-5, abs=1e-6), (reward, strategy)
    for step in rows["function", "co-located"]:
        assert step["advantage_std"] > 0.5 and step["group_alike"] < 0.5 and step["actor_grad_norm"] > 0
