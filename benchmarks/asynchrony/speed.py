"""Samples per second by lag and segments on 2 + 2 ranks, measured and predicted, with lengths of a heavy tail.

    python -m benchmarks.asynchrony.speed DIRECTORY --lengths FILE [--rounds 3] [--real]

GRPO of a small Llama whose responses have the lengths in FILE (``output_lens`` of vLLM's benchmark), scaled to at most
195 tokens. Each pass of its model sleeps as a stand-in for an accelerator (slow_model.py); with ``--real`` it does not,
and four ranks share the cores. Variants run in turns; predictions are by profiles of this machine before and after.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.gpu.workload import WORDS
from flexrlhf.config.spec_file import load_spec
from flexrlhf.data.quickstart.corpus import build_tokenizer
from flexrlhf.guideline.simulation.inputs import costs_for
from flexrlhf.guideline.simulation.lengths import expected_lengths
from flexrlhf.guideline.simulation.variants import Variant, Variants
from flexrlhf.timeline import Trace

Raw = dict[str, Any]
PROMPT, LONGEST = 16, 195
PROMPTS, SAMPLES = 16, 4
LAGS, SEGMENTS = (0, 1, 2, 4), (None, 64)
PASS_SECONDS, TOKEN_SECONDS = 10e-3, 0.2e-3
"""A pass of up to 50 tokens takes as long as reading the weights."""
SHAPE: Raw = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False}
REAL_SHAPE: Raw = SHAPE | {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}
REAL_SHAPE |= {"num_attention_heads": 4}


@dataclass(frozen=True)
class Way:
    """A lag, and tokens of a segment."""

    lag: int
    segment: int | None

    @property
    def name(self) -> str:
        return f"lag-{self.lag}" + (f"-segments-{self.segment}" if self.segment else "")

    @property
    def fill(self) -> int:
        """Steps until as many rows are in flight as later."""
        return 1 + self.lag + (0 if self.segment is None else -(-LONGEST // self.segment))


WAYS = [Way(lag, segment) for segment in SEGMENTS for lag in LAGS]
BASE = WAYS[0]


def write_inputs(directory: Path, lengths: Path) -> None:
    """Write a tokenizer, prompts of ``PROMPT`` tokens, the scaled lengths, and the code of the model."""
    directory.mkdir(parents=True, exist_ok=True)
    found = json.loads(lengths.read_text())["output_lens"]
    # some are empty, which a response with an end token is not
    scaled = [max(1, round(length * LONGEST / max(found))) for length in found]
    (directory / "lengths.json").write_text(json.dumps(scaled))
    build_tokenizer([" ".join(WORDS)], directory / "tokenizer")
    # one more token than words: bos
    prompts = [" ".join(WORDS[(row + place) % len(WORDS)] for place in range(PROMPT - 1)) for row in range(150)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    (directory / "model").mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("slow_model.py"), directory / "model")


def write_config(directory: Path, way: Way, steps: int, is_real: bool) -> Path:
    """Write the YAML of a run and return its path."""
    model = {
        **(REAL_SHAPE if is_real else SHAPE),
        "vocab_size": len(WORDS) + 4,
        **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
        "auto_map": {"AutoModelForCausalLM": f"{directory / 'model'}--slow_model.SlowLlama"},
        "lengths_file": str(directory / "lengths.json"),
        "prompt_tokens": PROMPT,
        "pass_seconds": 0.0 if is_real else PASS_SECONDS,
        "token_seconds": 0.0 if is_real else TOKEN_SECONDS,
    }
    raw = {
        "name": way.name,
        "algorithm": {"name": "grpo", "kl": None, "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES},
        # lengths are to stay as they are
        "models": {"actor": {"init": model, "trust_remote_code": True, "optimizer": {"learning_rate": 1e-12}}},
        "reward": {"rule": "length", "target_tokens": LONGEST // 4},
        "data": {
            "path": str(directory / "prompts.jsonl"),
            "tokenizer": str(directory / "tokenizer"),
            "max_prompt_tokens": PROMPT,
            "max_response_tokens": LONGEST,
        },
        "cluster": {"devices": 4, "device": "cpu"},
        "placement": {"actor.shadow": 0.5, "actor": 0.5},
        "schedule": {"lag": way.lag},
        "rollout": {"segment_tokens": way.segment},
        "steps": way.fill + steps + way.lag,
        "runs": str(directory / "runs"),
    }
    path = directory / f"{way.name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def command(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "flexrlhf", *words], check=True, stdout=subprocess.DEVNULL)


def predict(config: Path, profile: Path) -> Variant:
    spec = load_spec(config)
    lengths = expected_lengths(spec, str(config.parent / "lengths.json"))
    way = spec.rollout.segment_tokens
    plain = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"segment_tokens": None})})
    return Variants(plain, costs_for(spec, profile).costs, lengths, max(LAGS)).simulate(spec.schedule.lag, way)


def measure(config: Path, way: Way, steps: int) -> float:
    """Run; return samples per second, from the end of the training of step ``fill`` on."""
    command("run", str(config))
    directory = load_spec(config).directory
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    ends = {step: 0.0 for step in range(len(rows))}
    for span in Trace.read(directory / "timeline.json").spans:
        if span.kind == "run" and span.label.startswith("train_actor"):
            ends[span.step] = max(ends[span.step], span.end)
    first, last = way.fill - 1, way.fill - 1 + steps
    trained: float = sum(row["rows_trained"] for row in rows[first + 1 : last + 1])
    return trained / (ends[last] - ends[first])


def measure_profile(config: Path, path: Path) -> Path:
    """Measure this machine, unless ``path`` exists; return it."""
    if not path.is_file():
        # with fewer rows, of which the largest calls have four times as many
        fewer = f"algorithm.prompts_per_step={PROMPTS // 2}"
        command("profile", str(config), "--set", fewer, "--seconds", "1", "-o", str(path))
    return path


def table(predicted: Sequence[Mapping[Way, Variant]], measured: Mapping[Way, Sequence[float]]) -> list[str]:
    """Return the lines of the table. ``predicted``: by each profile."""
    lines = ["| lag | segments | samples/s, predicted | measured | ratio, predicted | measured | difference |"]
    lines.append("|---" * 7 + "|")
    for way, runs in measured.items():
        base = [one / other for one, other in zip(runs, measured[BASE], strict=True)]
        ratios = [each[way].samples / each[BASE].samples for each in predicted]
        samples = " · ".join(f"{each[way].samples:.1f}" for each in predicted)
        every = ", ".join(f"{each:.1f}" for each in runs)
        by_plan = " · ".join(f"{ratio:.2f}" for ratio in ratios)
        errors = " · ".join(f"{ratio / median(base) - 1:+.0%}" for ratio in ratios)
        lines.append(
            f"| {way.lag} | {way.segment or '-'} | {samples} | {median(runs):.1f} ({every}) | {by_plan} | "
            f"{median(base):.2f} | {errors} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--lengths", type=Path, required=True, help="JSON of vLLM's benchmark, with output_lens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a run")
    parser.add_argument("--real", action="store_true", help="without the stand-in: a larger model on the cores")
    options = parser.parse_args()
    directory = options.directory.resolve()
    write_inputs(directory, options.lengths)
    configs = {way: write_config(directory, way, options.steps, options.real) for way in WAYS}
    profiles = [measure_profile(configs[BASE], directory / "profile-before.json")]
    results = directory / "measured.json"
    rounds: list[list[float]] = json.loads(results.read_text()) if results.is_file() else []
    while len(rounds) < options.rounds:
        rounds.append([measure(config, way, options.steps) for way, config in configs.items()])
        results.write_text(json.dumps(rounds))
    profiles.append(measure_profile(configs[BASE], directory / "profile-after.json"))
    predicted = [{way: predict(config, profile) for way, config in configs.items()} for profile in profiles]
    print("\n".join(table(predicted, dict(zip(WAYS, zip(*rounds, strict=True), strict=True)))))


if __name__ == "__main__":
    main()
