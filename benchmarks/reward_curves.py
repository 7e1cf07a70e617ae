"""Draw the mean reward of runs over their steps: a chart for each run, of training and evaluation.

python -m benchmarks.reward_curves runs/word-game runs/agent --svg docs/environments.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.asynchrony.curves_svg import Curve, Panel, picture

CURVES = {"reward_mean": "training", "eval_reward_mean": "evaluation"}


def panel(run: Path) -> Panel:
    """Return the chart of a run, from its metrics. An evaluation after a step is drawn at the number of its steps."""
    steps: Sequence[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curves = []
    for metric, name in CURVES.items():
        points = [(step["step"] + (metric != "reward_mean"), step[metric]) for step in steps if metric in step]
        if points:
            xs, ys = zip(*points, strict=True)
            curves.append(Curve(name, xs, ys))
    return Panel(run.name, "steps", curves, (0.0, 1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--svg", type=Path, required=True)
    options = parser.parse_args()
    options.svg.write_text(picture([[panel(run) for run in options.runs]]))


if __name__ == "__main__":
    main()
