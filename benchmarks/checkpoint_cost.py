"""Step time with a checkpoint after every step, and without: the quick start's PPO, on this machine.

    flexrlhf run                                # once: trains the models that PPO starts from
    python benchmarks/checkpoint_cost.py        # in the same directory; about three minutes

Both are run several times, in turns. ``blocked`` is the time that a rank spends copying its pieces, by the timeline.
The rest of the cost is writing, which shares the cores with the next step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from flexrlhf.data.quickstart import config_paths
from flexrlhf.runs.run_directory import RunDirectory

NAMES = {"without": (), "with": ("checkpoint.every=1",)}


def run(name: str, steps: int) -> Path:
    """Run once; return its directory."""
    changes = (f"name=checkpoint-cost-{name}", f"steps={steps}", "eval=null", *NAMES[name])
    words = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "flexrlhf", "run", str(config_paths()[-1]), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Path("runs") / f"checkpoint-cost-{name}"


def step_seconds(directory: Path) -> list[float]:
    """Return the times of all steps but the first, in which libraries warm up."""
    return [row["seconds"] for row in RunDirectory(directory).metrics.read()[1:]]


def blocked_seconds(directory: Path) -> list[float]:
    """Return the times of all Checkpoints but the first, on the slowest rank."""
    events = json.loads((directory / "timeline.json").read_text())["traceEvents"]
    longest: dict[int, float] = {}
    for event in events:
        if event.get("cat") == "checkpoint" and event["args"]["step"] > 0:
            step = event["args"]["step"]
            longest[step] = max(longest.get(step, 0.0), event["dur"] / 1e6)
    return list(longest.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    blocked: list[float] = []
    for _ in range(arguments.rounds):
        for name in NAMES:
            directory = run(name, arguments.steps)
            seconds[name] += step_seconds(directory)
            if name == "with":
                blocked += blocked_seconds(directory)
    plain, saving = median(seconds["without"]), median(seconds["with"])
    print(f"step without checkpoints {plain:.3f} s, with one a step {saving:.3f} s: {saving / plain - 1:+.1%}")
    print(f"blocked {median(blocked):.4f} s, {median(blocked) / plain:.2%} of a step")


if __name__ == "__main__":
    main()
