"""A step of PPO with ZeRO-3 training and four ways to generate, on four CPU ranks: time, bytes, memory.

    python -m benchmarks.hybrid_engine [--json FILE]

DeepSpeed's ZeRO-3 trains actor and critic in all of them, with the same random weights, prompts and settings, and every
operator runs, so that losses are the same:

* ZeRO-3: all models on all ranks; every decoding step gathers all weights.
* hybrid: the same, but a tensor-parallel copy on the same ranks generates (``rollout: {engine: torch, tp: 2}``).
* interleaving: as hybrid, with reference and reward model on two ranks each, next to each other.
* disaggregation: two ranks train, the other two have tensor-parallel shadows, reference and reward model.

Runs in turns, one thread a rank; the first step of each is a warm-up. Seconds are medians over steps of means over
ranks, by instruction. A rank waits for rows before it computes (``wait``), and for weights inside a sync.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks.gpu.workload import WORDS
from flexrlhf.config.spec_file import load_spec
from flexrlhf.data.quickstart.corpus import build_tokenizer
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Move, Run, Sync
from flexrlhf.timeline import Span, Trace

Raw = dict[str, Any]
RANKS = 4
MODEL: Raw = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""8 million parameters."""
PROMPT, RESPONSE, ROWS = 32, 32, 32
ZERO: Raw = {"engine": "deepspeed", "zero": 3}
TENSOR: Raw = {"shadow": {"engine": "torch", "zero": 0, "tp": 2}}
HYBRID: Raw = {"rollout": {"engine": "torch", "tp": 2, "parity": None}}
WAYS: dict[str, Raw] = {
    "ZeRO-3": {"placement": [1, 1, 1, 1]},
    "hybrid": {"placement": [1, 1, 1, 1], **HYBRID},
    "interleaving": {"placement": [1, 1, 0.5, 0.5], **HYBRID},
    "disaggregation": {"placement": [0.5] * 6, "shadows": TENSOR},
}
KINDS = ("generate", "forward", "train", "other runs", "move", "sync", "free, reload", "wait", "rest")
KB, MB = 1e3, 1e6


@dataclass(frozen=True)
class Step:
    """Means over ranks of one step.

    seconds:  time by kind of instruction; ``rest`` is time without an instruction.
    moved:    bytes of rows that all ranks send.
    synced:   bytes of weights that all ranks send.
    """

    seconds: Mapping[str, float]
    moved: float
    synced: float


@dataclass(frozen=True)
class Result:
    """Measurements of one way, and its plan.

    steps:    measured steps.
    peaks:    bytes of each rank's process in addition to those before its models were loaded.
    loss:     of the policy in the last step.
    plan:     of the run.
    """

    steps: Sequence[Step]
    peaks: Sequence[int]
    loss: float
    plan: Plan

    def seconds(self, kind: str) -> float:
        return median(step.seconds[kind] for step in self.steps)

    @property
    def lines(self) -> dict[str, str]:
        """Cells of its column, by name of the row."""
        total = median(sum(step.seconds.values()) for step in self.steps)
        cells = {f"{kind}, s": f"{self.seconds(kind):.2f}" for kind in KINDS} | {"step, s": f"{total:.2f}"}
        cells["moved, kB (planned)"] = _with_planned(median(s.moved for s in self.steps), _planned(self.plan, Move), KB)
        cells["synced, MB (planned)"] = _with_planned(median(s.synced for s in self.steps), _planned(self.plan, Sync))
        cells["gathered to generate, MB (computed)"] = f"({_gathered(self.plan) / MB:.0f})"
        for kind in ("generate", "train"):
            cells[f"memory to {kind}, MB (planned)"] = f"({_phase_bytes(self.plan, kind) / MB:.0f})"
        planned = max(memory.process_bytes for memory in self.plan.memories)
        cells["peak of a rank, MB (planned)"] = _with_planned(max(self.peaks), planned)
        return cells | {"policy loss, last step": f"{self.loss:.6f}"}


def _with_planned(measured: float, planned: float, unit: float = MB) -> str:
    return f"{measured / unit:.1f} ({planned / unit:.1f})"


def _planned(plan: Plan, kind: type[Move] | type[Sync]) -> float:
    """Bytes that the plan has for the moves or syncs of a step."""
    found = [each for each in plan.schedule.instructions if isinstance(each, kind)]
    sizes = [
        plan.traffic.move_bytes(each) if isinstance(each, Move) else plan.traffic.sync_bytes(each) for each in found
    ]
    return sum(size or 0 for size in sizes)


def _gathered(plan: Plan) -> float:
    """Bytes that all ranks receive if generation gathers ZeRO-3's shards: all weights for every token of a row."""
    run = next(each for each in _runs(plan) if each.operator.kind == "generate")
    model = plan.placement[run.model]
    size = 4 * plan.shapes[model.role].num_parameters
    return RESPONSE * size * (model.layout.dp - 1) if model.split != "whole" else 0.0


def _phase_bytes(plan: Plan, kind: str) -> int:
    """Planned bytes of the fullest rank while the actor generates, or trains."""
    phases = [phase for memory in plan.memories for phase in memory.phases if phase.kind == kind]
    return max(phase.total + phase.host for phase in phases if phase.model.startswith("actor"))


def write_inputs(directory: Path, steps: int) -> dict[str, Path]:
    """Write a tokenizer, prompts and the YAML of every way; return the YAMLs."""
    build_tokenizer([" ".join(WORDS)], directory / "tokenizer")
    # one more token than words: bos
    prompts = [" ".join(WORDS[(row + place) % len(WORDS)] for place in range(PROMPT - 1)) for row in range(ROWS)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    paths = {}
    for name, way in WAYS.items():
        paths[name] = directory / f"{name}.yaml"
        paths[name].write_text(yaml.safe_dump(_run(name, way, directory, steps)))
    return paths


def _run(name: str, way: Raw, directory: Path, steps: int) -> Raw:
    trained = {"init": dict(MODEL), **ZERO, **way.get("shadows", {})}
    frozen = {"init": dict(MODEL), **ZERO}
    return {
        "name": name,
        "algorithm": {"name": "ppo", "prompts_per_step": ROWS, "num_mini_batches": 2},
        "models": {"actor": trained, "critic": dict(trained), "ref": dict(frozen), "reward": dict(frozen)},
        "data": {
            "path": str(directory / "prompts.jsonl"),
            "tokenizer": str(directory / "tokenizer"),
            "max_prompt_tokens": PROMPT,
            "max_response_tokens": RESPONSE,
        },
        "steps": steps,
        "cluster": {"devices": RANKS, "device": "cpu"},
        "placement": way["placement"],
        "rollout": {**way.get("rollout", {}), "logprobs": "recompute"},
        # larger ones than a step needs would be most of the memory of models as small as these
        "sync": {"bucket_mb": 8},
        "checkpoint": {"on_signal": False},
        "runs": str(directory),
    }


def run(config: Path) -> Result:
    """Train by a YAML and return its measurements. Raises CalledProcessError with its output."""
    command = [sys.executable, "-m", "flexrlhf", "run", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    plan = make_plan(load_spec(config))
    directory = plan.spec.directory
    spans = Trace.read(directory / "timeline.json").spans
    facts = json.loads((directory / "timeline.json").read_text())["otherData"]
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [_step(plan, [span for span in spans if span.step == number]) for number in range(1, plan.spec.steps)]
    return Result(steps, list(facts["peak_bytes"].values()), metrics[-1]["policy_loss"], plan)


def _step(plan: Plan, spans: Sequence[Span]) -> Step:
    """Return the sums of a step's spans. Saves, which end a run, do not count."""
    kinds = {f"{each.operator.name} on {each.model}": each.operator.kind for each in _runs(plan)}
    spans = [span for span in spans if span.kind in ("run", "move", "sync", "offload", "reload", "release")]
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        seconds[_kind(span, kinds)] += (span.end - span.start) / RANKS
        seconds["wait"] += span.waited / RANKS
    began, ended = min(span.start - span.waited for span in spans), max(span.end for span in spans)
    seconds["rest"] = ended - began - sum(seconds.values())
    sent = {kind: sum(span.bytes_sent or 0 for span in spans if span.kind == kind) for kind in ("move", "sync")}
    return Step({kind: seconds[kind] for kind in KINDS}, sent["move"], sent["sync"])


def _runs(plan: Plan) -> Iterable[Run]:
    return (each for each in plan.schedule.instructions if isinstance(each, Run))


def _kind(span: Span, kinds: Mapping[str, str]) -> str:
    """Return the row of the table that the time of ``span`` belongs to."""
    if span.kind in ("offload", "reload", "release"):
        return "free, reload"
    kind = kinds[span.label] if span.kind == "run" else span.kind
    return kind if kind in KINDS else "other runs"


def table(results: Mapping[str, Result]) -> list[str]:
    """Return the lines of the table: a column for each way."""
    columns = [result.lines for result in results.values()]
    lines = [f"| | {' | '.join(results)} |", "|---" * (1 + len(results)) + "|"]
    return lines + [f"| {row} | {' | '.join(column[row] for column in columns)} |" for row in columns[0]]


def measure(rounds: int, steps: int) -> dict[str, Result]:
    """Run every way ``rounds`` times in turns; peaks are the highest of all rounds."""
    found: dict[str, list[Result]] = {name: [] for name in WAYS}
    for number in range(rounds):
        with TemporaryDirectory() as directory:
            for name, config in write_inputs(Path(directory), 1 + steps).items():
                found[name].append(run(config))
                print(f"round {number + 1}: {name} ended", file=sys.stderr, flush=True)
    return {name: together(results) for name, results in found.items()}


def together(results: Sequence[Result]) -> Result:
    steps = [step for result in results for step in result.steps]
    peaks = [max(each) for each in zip(*(result.peaks for result in results), strict=True)]
    return Result(steps, peaks, fmean(result.loss for result in results), results[0].plan)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hybrid_engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run")
    parser.add_argument("--json", type=Path, help="write the table's cells to this file")
    options = parser.parse_args()
    results = measure(options.rounds, options.steps)
    print("\n".join(table(results)))
    if options.json is not None:
        options.json.write_text(json.dumps({name: result.lines for name, result in results.items()}, indent=1))


if __name__ == "__main__":
    main()
