"""Step time of a program that calls models (docs/sessions.md), and of the planned run: the quick start's PPO, on this
machine.

    flexrlhf run                                 # once: trains the models that PPO starts from
    python benchmarks/session_overhead.py        # in the same directory; about three minutes

Both are run several times, in turns: the plan, 7 calls a step whose results nothing reads, and the same calls with the
metrics of trainings read. ``waited`` is the time of a rank without work, of a step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from flexrlhf import ExecutionEngine, Session
from flexrlhf.data.quickstart import config_paths
from flexrlhf.runs.run_directory import RunDirectory

VECTOR = (1, 1, 0.5, 0.5)
WAYS = ("planned", "called", "called, read")


def run(way: str, steps: int) -> Path:
    """Run once; return its directory."""
    path, name = config_paths()[-1], f"overhead-{WAYS.index(way)}"
    changes = (f"name={name}", f"steps={steps}", "eval=null")
    if way == "planned":
        ExecutionEngine(path, placement_ratio=VECTOR, overrides=changes)()
        return Path("runs") / name
    with Session(path, VECTOR, overrides=changes) as session:
        for batch in session.prompts():
            due = (each for each in session.plan.graph.operators if batch.step % each.every == 0)
            results = [session.call(each.name, batch) for each in due]
            if way == "called, read":
                for metrics in results[-2:]:
                    repr(metrics)
    return Path("runs") / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way in WAYS:
            # the first steps warm up
            rows[way] += RunDirectory(run(way, arguments.steps)).metrics.read()[2:]
    planned = median(row["seconds"] for row in rows["planned"])
    for way, of_way in rows.items():
        seconds = median(row["seconds"] for row in of_way)
        waited = median(row["seconds"] * row["time_wait"] for row in of_way)
        print(f"{way}: {seconds:.3f} s a step, {seconds / planned - 1:+.1%}; waited {waited:.3f} s")


if __name__ == "__main__":
    main()
