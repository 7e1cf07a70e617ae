"""Re-planning of a run whose responses grow: the quick start's policy, rewarded by the words of a response.

    flexrlhf run                          # once: trains the policy that it starts from
    python benchmarks/replanning.py       # in the same directory; about two minutes

Measures the machine, trains with and without ``--replan``, and prints the decisions and from which step on the two runs
differ. Then times the steps of long responses under both placements in turns, from the same policy. Run it on a machine
with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from flexrlhf.metrics import METRICS

REWARD = """
def length(prompts, responses, **_):
    return [min(len(text.split()), 90) / 30 for text in responses]
"""
CORPUS = "runs/quickstart-corpus"
FIRST = {"actor": {"ranks": [0]}, "critic": {"ranks": [1]}, "ref": {"ranks": [1]}}
"""As fast as any other placement for short responses: both ranks train at once."""
RUN: dict[str, Any] = {
    "algorithm": {"name": "ppo", "prompts_per_step": 16, "num_mini_batches": 2, "kl": {"coefficient": 0.0}},
    "models": {
        "actor": {"path": "runs/replanning-actor", "optimizer": {"learning_rate": 1e-3}},
        "critic": {"optimizer": {"learning_rate": 1e-3}},
    },
    "reward": {"function": "runs/replanning-reward.py:length"},
    "data": {"path": f"{CORPUS}/prompts.jsonl", "tokenizer": f"{CORPUS}/tokenizer"}
    | {"max_prompt_tokens": 16, "max_response_tokens": 120},
    "cluster": {"devices": 2, "device": "cpu"},
}


def write(name: str, placement: object, steps: int, policy: str | None = None) -> str:
    """Write a run's YAML; ``policy``: a directory of weights to start from, which are then trained no further."""
    raw: dict[str, Any] = json.loads(json.dumps({"name": name, **RUN, "placement": placement, "steps": steps}))
    if policy is not None:
        raw["models"]["actor"] |= {"path": policy, "optimizer": {"learning_rate": 1e-9}}
    path = Path(f"runs/{name}.yaml")
    path.write_text(yaml.safe_dump(raw))
    return str(path)


def command(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "flexrlhf", *words], check=True, stdout=subprocess.DEVNULL)


def rows(name: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"runs/{name}/{file}").read_text().splitlines()]


def differences() -> list[float]:
    """Return the largest relative difference of the metrics of both runs, by step."""
    found = []
    for one, other in zip(rows("plain"), rows("replanned"), strict=True):
        values = [
            (one[name], other[name]) for name in one if name not in METRICS.times and isinstance(one[name], float)
        ]
        found.append(max(abs(a - b) / max(abs(a), 1e-3) for a, b in values))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=8)
    options = parser.parse_args()
    Path("runs/replanning-reward.py").write_text(REWARD)
    actor = Path("runs/replanning-actor")
    shutil.copytree("runs/quickstart-sft/actor", actor, dirs_exist_ok=True)
    config = json.loads((actor / "config.json").read_text())
    (actor / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    plain, replanned = (write(name, FIRST, options.steps) for name in ("plain", "replanned"))
    command("profile", plain)
    command("run", replanned, "--replan", f"every={options.every}")
    command("run", plain)
    for each in rows("replanned", "replans.jsonl"):
        print(
            f"step {each['step']}: {each['response_length']:.0f} tokens, {each['seconds']:.2f} s measured, "
            f"{each['predicted']:.2f} s predicted, {each['predicted_after']:.2f} s with {each['after']}; "
            f"restart {each['restart_seconds']:.1f} s: {'switch' if each['switches'] else 'go on'}"
        )
    found = differences()
    print("largest relative difference of a metric, by step:", " ".join(f"{each:.0e}" for each in found))
    placements = {"before": FIRST, "after": [1, 1, 1]}
    seconds: dict[str, list[float]] = {name: [] for name in placements}
    for _ in range(2):
        for name, placement in placements.items():
            command("run", write(f"timed-{name}", placement, 8, "runs/plain/actor"))
            seconds[name].append(median(row["seconds"] for row in rows(f"timed-{name}")[1:]))
    for name, times in seconds.items():
        print(f"{name}: {', '.join(f'{value:.2f}' for value in times)} s a step of long responses")


if __name__ == "__main__":
    main()
