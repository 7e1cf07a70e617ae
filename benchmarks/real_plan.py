"""ReaL's searched plan of 7B models with transformers and with vLLM generating, on four CPU ranks: time by instruction.

    python -m benchmarks.real_plan [--rows ROWS] [--response TOKENS] [--long] [--tp DEGREE] [--json FILE]

The plan is ``configs/real-7b-searched.yaml`` with a rank for two of its devices: reference and reward, and then both
trainings, are on two ranks each, where they run at the same time, and generation and values are on all four. Degrees
inside these meshes are not ReaL's but chosen, as in the file: ``--tp`` is generation's. Both runs have the same random
weights, prompts and sampling noise, and log-probs of generation (``rollout.logprobs: reuse``), so that their metrics
agree but for rounding. A response ends with one of three of some 150 tokens, so that lengths differ much, or with
``--long`` with one. The runs take turns, one thread a rank, as in ``benchmarks.hybrid_engine``, whose table this is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.workload import WORDS
from benchmarks.hybrid_engine import RANKS, Result, run, table, together
from flexrlhf.data.quickstart.corpus import build_tokenizer

Raw = dict[str, Any]
CONFIG = Path(__file__).parents[1] / "configs" / "real-7b-searched.yaml"
MODEL: Raw = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""28 million parameters, as in ``benchmarks/rollout_speed.py``."""
PROMPT = 32
ENDS = [20, 21, 22]
"""Tokens of words that end a response, which has 50 tokens in the mean."""
ENGINES = ("transformers", "vllm")


@dataclass(frozen=True)
class Workload:
    """Rows of a step, tokens of the longest response, whether the tokenizer's end token alone ends one, and
    tensor-parallel ranks of a replica that generates."""

    rows: int
    response: int
    is_long: bool
    tp: int


def halved(operators: Mapping[str, Raw]) -> dict[str, Raw]:
    """Return a placement of operators on half as many ranks, each with half as many replicas."""
    return {name: {**entry, "ranks": _half(entry["ranks"])} for name, entry in operators.items()}


def _half(ranks: str) -> str:
    first, last = map(int, ranks.split("-"))
    return f"{first // 2}-{last // 2}"


def write_inputs(directory: Path, steps: int, load: Workload) -> dict[str, Path]:
    """Write a tokenizer, prompts and the YAML of a run by each engine; return the YAMLs."""
    build_tokenizer([" ".join(WORDS)], directory / "tokenizer")
    # one more token than words: bos
    prompts = [" ".join(WORDS[(row + place) % len(WORDS)] for place in range(PROMPT - 1)) for row in range(load.rows)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    actor: Raw = {"init": dict(MODEL)} if load.is_long else {"path": _saved_actor(directory)}
    operators = halved(yaml.safe_load(CONFIG.read_text())["placement"]["operators"])
    operators["generate"]["tp"] = load.tp
    paths = {}
    for engine in ENGINES:
        raw = {
            "name": engine,
            "algorithm": {"name": "ppo", "prompts_per_step": load.rows, "num_mini_batches": 2},
            "models": {
                "actor": dict(actor),
                **{role: {"init": dict(MODEL)} for role in ("critic", "ref", "reward")},
            },
            "data": {
                "path": str(directory / "prompts.jsonl"),
                "tokenizer": str(directory / "tokenizer"),
                "max_prompt_tokens": PROMPT,
                "max_response_tokens": load.response,
            },
            "steps": steps,
            "cluster": {"devices": RANKS, "device": "cpu"},
            "placement": {"operators": operators},
            "rollout": {"engine": engine, "logprobs": "reuse", **({"parity": None} if engine == "vllm" else {})},
            "checkpoint": {"on_signal": False},
            "runs": str(directory),
        }
        paths[engine] = directory / f"{engine}.yaml"
        paths[engine].write_text(yaml.safe_dump(raw))
    return paths


def _saved_actor(directory: Path) -> str:
    """Save a random actor with ``ENDS`` in ``directory``; return where it is."""
    torch.manual_seed(0)
    actor = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
    actor.generation_config.eos_token_id = ENDS
    actor.save_pretrained(directory / "actor")
    return str(directory / "actor")


def measure(rounds: int, steps: int, load: Workload) -> dict[str, Result]:
    """Run with each engine ``rounds`` times in turns."""
    found: dict[str, list[Result]] = {engine: [] for engine in ENGINES}
    for number in range(rounds):
        with TemporaryDirectory() as directory:
            for engine, config in write_inputs(Path(directory), 1 + steps, load).items():
                found[engine].append(run(config))
                print(f"round {number + 1}: {engine} ended", file=sys.stderr, flush=True)
    return {engine: together(results) for engine, results in found.items()}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real_plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs with each engine")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of a run")
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    parser.add_argument("--response", type=int, default=128, help="tokens of the longest response")
    parser.add_argument("--long", action="store_true", help="the tokenizer's end token alone ends a response")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks of a replica that generates")
    parser.add_argument("--json", type=Path, help="write the table's cells to this file")
    options = parser.parse_args()
    load = Workload(options.rows, options.response, options.long, options.tp)
    results = measure(options.rounds, options.steps, load)
    print("\n".join(table(results)))
    if options.json is not None:
        options.json.write_text(json.dumps({name: result.lines for name, result in results.items()}, indent=1))


if __name__ == "__main__":
    main()
