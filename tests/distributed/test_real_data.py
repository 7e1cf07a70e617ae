"""SFT on instructions, then PPO on dialogues under each strategy, on four ranks: real data where it lies beside the
repository, the project's own fixtures of the same forms everywhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import start
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from flexrlhf.data import read_rows

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
REAL = ROOT.parent / "shared" / "data"
STRATEGIES = {
    "co-located": [1, 1, 1, 1],
    "interleaving": [1, 1, 0.5, 0.5],
    "disaggregated": [0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
}
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
    """A byte-level BPE of the data: no character is unknown."""
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
    """A finite number, or the name of what generated."""
    return value == "TorchEngine" if isinstance(value, str) else math.isfinite(value)


@pytest.mark.parametrize("data", [FIXTURES, REAL], ids=["fixtures", "real"])
def test_sft_and_ppo_run_under_every_strategy(data: Path, tmp_path: Path) -> None:
    if not data.is_dir():
        pytest.skip("the data folder is not beside the repository")
    process = start(["run", *make_configs(data, tmp_path)], tmp_path)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out[-2000:]
    runs = {name: (tmp_path / "runs" / name / "metrics.jsonl").read_text() for name in ("sft", *STRATEGIES)}
    rows = {name: [json.loads(line) for line in text.splitlines()] for name, text in runs.items()}
    assert all(len(steps) == 2 and all(map(is_sound, step.values())) for steps in rows.values() for step in steps)
    for name in ("interleaving", "disaggregated"):
        for step, same in zip(rows[name], rows["co-located"], strict=True):
            assert step["reward_mean"] == pytest.approx(same["reward_mean"], rel=1e-5, abs=1e-6), name
