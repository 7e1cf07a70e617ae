"""Longest texts that fit a budget of memory, by settings: planned, and metered in a training step at that length.

    python -m benchmarks.longest_texts [--memory-gb 0.045] [--directory DIRECTORY]

A model of 1.7 million parameters in float32 is trained on two texts a step (sft), each in a pass of its own. Each row
is planned with that budget for its longest text, and then run at that length. Printed are the tokens, the planned peak
of a rank while it trains, and the metered one. On one rank that is of torch's allocator on the CPU in a second step,
when the host memory of offloaded activations exists already. Several ranks run on the accelerator made of host memory
of this repository's tests, which needs g++.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flexrlhf.config.spec import Spec
from flexrlhf.engines.base import Batch
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.runs.resume import RunOrder
from flexrlhf.runs.run_directory import RunDirectory

TESTS = Path(__file__).parents[1] / "tests"
INIT: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 2000,
    "hidden_size": 64,
    "intermediate_size": 384,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
RECOMPUTED = {"activation_checkpointing": True}
ROWS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "`activation_checkpointing`": RECOMPUTED,
    "and `offload_activations`": RECOMPUTED | {"offload_activations": True},
    "and `tiled_mlp`": RECOMPUTED | {"tiled_mlp": True},
    "and both": RECOMPUTED | {"offload_activations": True, "tiled_mlp": True},
    "`cp: 4` alone": {"cp": 4},
    "`cp: 4` and `activation_checkpointing`": {"cp": 4, **RECOMPUTED},
    "and `context_parallel: ring`": {"cp": 4, "context_parallel": "ring", **RECOMPUTED},
}
PROMPT, TEXTS = 16, 2


def plan_of(directory: Path, number: int, settings: Mapping[str, Any], memory_gb: float, response: int) -> Plan:
    """Return the plan of a run with texts of ``response`` tokens behind the prompt."""
    model = {"init": INIT, "micro_batch_tokens": 1, "logits_mb": 1, **settings}
    data = {"path": str(directory / f"{number}.jsonl"), "tokenizer": str(directory / "tokenizer")}
    return make_plan(
        Spec.parse(
            {
                "name": f"longest-{number}",
                "algorithm": {"name": "sft", "prompts_per_step": TEXTS, "num_mini_batches": 1},
                "models": {"actor": model},
                "data": {**data, "max_prompt_tokens": PROMPT, "max_response_tokens": response},
                "steps": 2,
                "cluster": {"devices": settings.get("cp", 1), "memory_gb": memory_gb},
                "runs": str(directory / "runs"),
                "timeout_seconds": 900,
            }
        )
    )


def peak_on_cpu(plan: Plan) -> int:
    """Train an engine twice; return the most bytes of its tensors in the second step."""
    from small_models import engine_for, likelihood, peak_bytes

    lengths = plan.lengths
    tokens = torch.randint(3, INIT["vocab_size"], (TEXTS, lengths.total), dtype=torch.int32)
    mask = torch.ones(TEXTS, lengths.total, dtype=torch.uint8)
    columns = {"tokens": tokens, "attention_mask": mask, "response_mask": mask[:, lengths.prompt :]}
    parts = [(Batch(columns, torch.arange(TEXTS), 1), likelihood())]
    engine = engine_for(plan.placement["actor"], lengths=lengths)
    engine.train(parts)
    usage = engine.memory_usage()
    return usage.weights + usage.optimizer + peak_bytes(lambda: engine.train(parts))


def peak_on_accelerator(directory: Path, number: int, plan: Plan) -> int:
    """Run the plan; return the most bytes of a rank while it trains in the second step."""
    import host_accelerator
    from assets import WORDS, build_tokenizer
    from forked import run_ranks

    build_tokenizer([" ".join(WORDS)], directory / "tokenizer")
    count = plan.lengths.response - 1
    texts = {"prompt": " ".join(WORDS[: PROMPT - 1]), "response": " ".join(WORDS[n % len(WORDS)] for n in range(count))}
    (directory / f"{number}.jsonl").write_text("\n".join([json.dumps(texts)] * 2 * TEXTS))
    RunDirectory(plan.spec.directory).prepare(plan.spec, format_plan(plan), continues=False).close()
    (directory / "orders").write_text(RunOrder.to_json([RunOrder(plan.spec)]))
    library = host_accelerator.built(directory)
    run_ranks("accelerator_ranks", library, directory / "orders", number=plan.placement.num_ranks, seconds=1800)
    events = json.loads((plan.spec.directory / "timeline.json").read_text())["traceEvents"]
    trained = (each["args"] for each in events if each["ph"] == "X" and each["name"].startswith("train"))
    return max(args["peak_bytes"] for args in trained if args["step"] == 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--memory-gb", type=float, default=0.045)
    parser.add_argument("--directory", type=Path, default=Path("runs") / "longest-texts")
    options = parser.parse_args()
    sys.path[:0] = [str(TESTS), str(TESTS / "distributed"), str(TESTS / "engines")]
    torch.set_num_threads(1)
    directory: Path = options.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    print("| settings | longest text, tokens | planned MB | metered MB | planned / metered |\n|---|---|---|---|---|")
    for number, (name, settings) in enumerate(ROWS.items()):
        found = plan_of(directory, number, settings, options.memory_gb, 1).limits.longest_text()
        assert found is not None, "the budget is known"
        plan = plan_of(directory, number, settings, options.memory_gb, found.response)
        planned = max(phase.total for memory in plan.memories for phase in memory.phases if phase.trains)
        is_alone = plan.placement.num_ranks == 1
        metered = peak_on_cpu(plan) if is_alone else peak_on_accelerator(directory, number, plan)
        sizes = f"{planned / 1e6:.1f} | {metered / 1e6:.1f} | {planned / metered:.3f}"
        print(f"| {name} | {PROMPT + found.response:,} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
