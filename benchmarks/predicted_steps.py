"""Predicted and measured step time: the quick start's PPO under three placements, on this machine.

    flexrlhf run                                # once: trains the models that PPO starts from
    python benchmarks/predicted_steps.py        # in the same directory; about five minutes
    python benchmarks/predicted_steps.py --model 20M --steps 4 --runs 3

Measures the machine (``flexrlhf profile``), simulates all placements, and only then runs each of them several times, in
turns, so that a machine that slows down does so for all; then counts the runs whose steps are inside the printed range.
Compare on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from statistics import median

from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.data.quickstart import config_paths
from flexrlhf.guideline.costs.profiles import Accuracy
from flexrlhf.guideline.simulation.compare import Comparison, compare, read_run
from flexrlhf.guideline.simulation.inputs import costs_for
from flexrlhf.guideline.simulation.lengths import read_lengths
from flexrlhf.guideline.simulation.simulate import Simulation, simulate
from flexrlhf.plan.pipeline import make_plan

PLACEMENTS = {
    "co-located": "[1,1,1,1]",
    "interleaving": "[1,1,0.5,0.5]",
    "six models": "[0.5,0.5,0.5,0.5,0.5,0.5]",
}
SIZES = (
    "{model_type: llama, vocab_size: 512, hidden_size: 384, intermediate_size: 1024, num_hidden_layers: 11, "
    "num_attention_heads: 6}"
)
"""About 20 M parameters."""
MODELS = {
    "quick start": (),
    "20M": tuple(f"models.{role}.{key}" for role in ("actor", "reward") for key in ("path=null", f"init={SIZES}")),
}
"""Settings of the models, in addition to the quick start's."""
CLEARLY = 0.1
"""Difference of two plans above which their order must be right."""


def changes_of(name: str, vector: str, steps: int, model: str) -> tuple[str, ...]:
    """Return the changes of the quick start's PPO; without evaluation, which is no part of a step."""
    return (f"name={name}", f"placement={vector}", f"steps={steps}", "eval=null", *MODELS[model])


def spec_of(name: str, vector: str, steps: int, model: str) -> Spec:
    return load_spec(config_paths()[-1], changes_of(name, vector, steps, model))


def command(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "flexrlhf", *words], check=True, stdout=subprocess.DEVNULL)


def settings(changes: Iterable[str]) -> tuple[str, ...]:
    """Return ``changes`` as words of a command."""
    return tuple(word for change in changes for word in ("--set", change))


def measure(name: str, vector: str, steps: int, model: str) -> Path:
    """Run once; return the timeline's path."""
    command("run", str(config_paths()[-1]), *settings(changes_of(name, vector, steps, model)))
    return Path("runs") / name / "timeline.json"


def predict(steps: int, model: str, profile: Path) -> tuple[dict[str, Simulation], Accuracy]:
    source, simulations = costs_for(spec_of("predicted", "[1,1,1,1]", steps, model), profile), {}
    for name, vector in PLACEMENTS.items():
        plan = make_plan(spec_of("predicted", vector, steps, model))
        simulations[name] = simulate(plan, source.costs, read_lengths(None, plan))
    return simulations, source.accuracy


def report(simulations: dict[str, Simulation], accuracy: Accuracy, runs: dict[str, list[Comparison]]) -> None:
    print(f"{'placement':<14} {'predicted':>10} {'measured':>10} {'error':>8}   runs (ms)                 spans")
    steps = {name: median(run.step.measured for run in each) for name, each in runs.items()}
    for name, each in runs.items():
        error = simulations[name].seconds / steps[name] - 1
        shown = " ".join(f"{1e3 * run.step.measured:.0f}" for run in each)
        same = "equal" if not any(run.missing or run.extra for run in each) else "differ"
        print(
            f"{name:<14} {1e3 * simulations[name].seconds:>7.0f} ms {1e3 * steps[name]:>7.0f} ms {error:>+8.1%}   "
            f"{shown:<25} {same}"
        )
    seconds = [(simulations[name].seconds, run.step.measured) for name, each in runs.items() for run in each]
    inside = sum(accuracy.has(measured, predicted) for predicted, measured in seconds)
    ratios = ", ".join(f"{measured / predicted:.2f}" for predicted, measured in seconds)
    span = f"{accuracy.low:.2f} to {accuracy.high:.2f}"
    print(f"{inside} of {len(seconds)} runs inside the range of {span}: {ratios}")
    for first, second in combinations(runs, 2):
        if abs(steps[first] / steps[second] - 1) > CLEARLY:
            right = (steps[first] < steps[second]) == (simulations[first].seconds < simulations[second].seconds)
            print(f"order of {first} and {second}: {'right' if right else 'wrong'}")
    for name, each in runs.items():
        print(f"\n{name}, medians over the runs")
        for label in [line.label for line in each[0].lines]:
            pairs = [line.seconds for run in each for line in run.lines if line.label == label]
            measured, predicted = 1e3 * median(pair.measured for pair in pairs), 1e3 * pairs[0].predicted
            if measured > 1:
                print(f"  {label:<34} {predicted:>7.1f} {measured:>7.1f} ms {predicted / measured - 1:>+7.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--model", choices=MODELS, default="quick start")
    parser.add_argument("--keep-profile", action="store_true", help="do not measure the machine again")
    options = parser.parse_args()
    profile = Path(f"runs/profile-{options.model.replace(' ', '-')}.json")
    if not options.keep_profile or not profile.is_file():
        command("profile", str(config_paths()[-1]), *settings(MODELS[options.model]), "-o", str(profile))
    simulations, accuracy = predict(options.steps, options.model, profile)
    runs: dict[str, list[Comparison]] = {name: [] for name in PLACEMENTS}
    for turn in range(options.runs):
        for name, vector in PLACEMENTS.items():
            timeline = measure(f"{name.replace(' ', '-')}-{turn}", vector, options.steps, options.model)
            runs[name].append(compare(simulations[name], read_run(timeline)))
    report(simulations, accuracy, runs)


if __name__ == "__main__":
    main()
