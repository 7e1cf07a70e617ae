"""Predicted and measured step time with slow environments, in rounds and with rows that go on by themselves.

    flexrlhf run                                # once: trains the quick start's model
    python benchmarks/environment_latency.py    # in the same directory; about ten minutes

One rank generates and one trains, on the batch before. Measures the machine and each environment, as ``flexrlhf
profile`` does, simulates all runs and has ``advise`` compare orders; only then runs each of them once, in turns.
Compare on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

# each of the environments' processes runs this module again, so slow imports are in the functions that use them
from flexrlhf.text import table

if TYPE_CHECKING:
    from flexrlhf.config.spec import Spec
    from flexrlhf.guideline.costs.measured import MeasuredCosts
    from flexrlhf.guideline.costs.measurements import Measurements
    from flexrlhf.guideline.simulation.inputs import TextLengths
    from flexrlhf.guideline.simulation.simulate import Simulation
    from flexrlhf.plan.plan import Plan

TURNS, TOKENS = 12, 2
CONFIG = f"""
name: waiting
algorithm: {{name: grpo, prompts_per_step: 128, samples_per_prompt: 4, num_mini_batches: 4, kl: null}}
models:
  actor: {{path: runs/quickstart-sft/actor, optimizer: {{learning_rate: 1.0e-6}}}}
environment:
  path: {Path(__file__).with_name("slow_environment.py")}:CLASS
  max_turns: {TURNS}
  turn_tokens: {TOKENS}
  processes: PROCESSES
data:
  path: runs/quickstart-corpus/prompts.jsonl
  tokenizer: runs/quickstart-corpus/tokenizer
  max_prompt_tokens: 24
  max_response_tokens: 40
cluster: {{devices: 2, device: cpu}}
placement: [0.5, 0.5]
schedule: {{lag: 1}}
"""
MARGIN = 0.1
"""Difference of predictions below which the order stays."""


def changes(seconds: float, order: str, steps: int) -> tuple[str, ...]:
    name = f"waiting-{seconds:g}-{order}"
    options = f"environment.options={{seconds: {seconds}}}"
    return (f"name={name}", options, f"rollout.order={order}", f"steps={steps}")


def command(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "flexrlhf", *words], check=True, stdout=subprocess.DEVNULL)


def settings(*changed: str) -> list[str]:
    return [word for change in changed for word in ("--set", change)]


def lengths_of(plan: Plan) -> TextLengths:
    """Return lengths of episodes that have all turns, of the most tokens, with replies of one token between them."""
    from flexrlhf.guideline.simulation.inputs import lengths_in_data

    replies = float(TURNS - 1)
    responses = (TURNS * TOKENS + replies,)
    return replace(lengths_in_data(plan), responses=responses, is_assumed=False, turns=float(TURNS), replies=replies)


def costs_of(measured: Measurements, plan: Plan) -> MeasuredCosts:
    """Return costs with the times of the plan's environment."""
    from flexrlhf.guideline.costs.measured import MeasuredCosts, slowdown
    from flexrlhf.measure.environment_calls import measure_environments

    environments = measure_environments([plan], seconds=5.0)
    return MeasuredCosts(measured.model_copy(update={"environments": environments}), slowdown(measured, 2))


def advised(spec: Spec, costs: MeasuredCosts, lengths: TextLengths) -> str:
    """Return the faster order of rows, and by how much, as ``advise`` prints it."""
    from flexrlhf.guideline.advice.advise import advise
    from flexrlhf.guideline.advice.waiting import least_waiting

    found = advise(spec, costs, lengths, seconds_limit=2.0, margin=MARGIN).waiting
    own = [each for each in found if each.processes == found[0].processes]
    best = least_waiting(own, MARGIN)
    return f"{best.order}, {own[0].seconds / best.seconds:.2f} x"


def measured_seconds(name: str) -> float:
    """Return the median time of a step, but for the first, in which processes start, and the last, which waits to show
    its samples."""
    rows: list[dict[str, float]] = [
        json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()
    ]
    return median(row["seconds"] for row in rows[1:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, nargs="*", default=[0.0, 0.01, 0.03], help="of a reply")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--service", action="store_true", help="each process awaits all of its replies at once, as of a server"
    )
    options = parser.parse_args()

    from flexrlhf.guideline.costs.measurements import read_measurements

    config, profile = Path("runs/waiting.yaml"), Path("runs/waiting-profile.json")
    name, processes = ("SlowService", 4) if options.service else ("Slow", 32)
    config.write_text(CONFIG.replace("CLASS", name).replace("PROCESSES", str(processes)))
    command("profile", str(config), *settings("environment.options={seconds: 0}"), "-o", str(profile))
    report(config, read_measurements(profile), options.seconds, options.steps)


def report(config: Path, measured: Measurements, latencies: Sequence[float], steps: int) -> None:
    """Print a table of the seconds of a step by the time of a reply and by the order of rows."""
    from flexrlhf.config.spec_file import load_spec
    from flexrlhf.guideline.advice.waiting import ORDERS
    from flexrlhf.guideline.simulation.simulate import simulate
    from flexrlhf.plan.pipeline import make_plan

    columns = (f"{order}: {name}" for order in ORDERS for name in ("predicted", "measured"))
    rows = [("a reply", "waits", *columns, "faster", "advise: order")]
    predicted: dict[float, tuple[list[Simulation], str]] = {}
    for seconds in latencies:
        specs = [load_spec(config, changes(seconds, order, steps)) for order in ORDERS]
        plans = [make_plan(spec) for spec in specs]
        costs, lengths = costs_of(measured, plans[0]), lengths_of(plans[0])
        simulations = [simulate(plan, costs, lengths) for plan in plans]
        predicted[seconds] = simulations, advised(specs[0], costs, lengths)
    for seconds, (simulations, advice) in predicted.items():
        found = []
        for order in ORDERS:
            changed = changes(seconds, order, steps)
            command("run", str(config), *settings(*changed))
            found.append(measured_seconds(changed[0].partition("=")[2]))
        pairs = zip((each.seconds for each in simulations), found, strict=True)
        cells = (f"{value:.2f}" for pair in pairs for value in pair)
        waits = simulations[0].reply_seconds / simulations[0].seconds
        rows.append((f"{seconds:g} s", f"{waits:.0%}", *cells, f"{found[0] / min(found):.2f} x", advice))
        print("\n".join(table(rows, ">" * len(rows[0]))), flush=True)


if __name__ == "__main__":
    main()
