"""Whole calls at tp 1 and 2 and pp 1 and 2 on two CPU ranks, measured and priced by a profile of layers.

    PYTHONPATH=.:tests/megatron_on_cpu python -m benchmarks.layer_prices [--model 7M]

Profiles torch (PPO) and Megatron-Core (DPO), which alone has stages, with models of four or eight layers; before and
afterwards runs whole calls of the same models on all layouts, in one micro-batch and in several. For an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.layer_prices.rank import MeasuredCall
from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.guideline.costs.cost_model import Call, Links, MeanPass, Mesh
from flexrlhf.guideline.costs.measured import MeasuredCosts, load_costs
from flexrlhf.launch import start as launch
from flexrlhf.measure.profiled_models import LengthSample, length_sample, profiling_spec
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan

RANKS, ROWS = 2, 32
SIZES = {
    "small": "hidden_size: 128, intermediate_size: 384, num_hidden_layers: 4, num_attention_heads: 4",
    "7M": "hidden_size: 256, intermediate_size: 768, num_hidden_layers: 8, num_attention_heads: 4",
}
CONFIG = """
name: layers-{engine}
algorithm: {{name: {algorithm}, prompts_per_step: {rows}, num_mini_batches: 1}}
models:
  all: {{engine: {engine}}}
  actor: {{init: &sizes {{model_type: llama, vocab_size: 512, {sizes}}}}}
{reward}
data: {{path: none.jsonl, max_prompt_tokens: 16, max_response_tokens: 32}}
cluster: {{devices: {ranks}, device: cpu}}
"""
LAYOUTS = {"torch": ((1, 1), (2, 1)), "megatron": ((1, 1), (2, 1), (1, 2))}
"""Engine → (tp, pp) of its layouts."""
DEVICE, LINKS = DeviceClass("any", 1, 1, 1, 1, 1, 1), Links(1, 1)


def config_of(engine: str, model: str) -> str:
    algorithm, reward = ("ppo", "  reward: {init: *sizes}") if engine == "torch" else ("dpo", "")
    return CONFIG.format(engine=engine, algorithm=algorithm, rows=ROWS, sizes=SIZES[model], reward=reward, ranks=RANKS)


@dataclass(frozen=True)
class Layout:
    """A layout whose calls are measured in ``parts`` micro-batches."""

    engine: str
    tp: int
    pp: int
    parts: int

    @property
    def mesh(self) -> Mesh:
        return Mesh(DEVICE, LINKS, RANKS // (self.tp * self.pp), ParallelDims(self.tp, self.pp), per_node=RANKS)

    def spec(self, plan: Plan, lengths: LengthSample) -> Spec:
        """Return the run on this layout, with random weights."""
        spec = profiling_spec(plan, (), RANKS, "cpu")
        rows = lengths.rows(ROWS, plan.batch.samples_per_prompt)
        tokens = 2 * sum(map(sum, rows)) // self.parts
        models = {
            role: plan_model.model_copy(update={"tp": self.tp, "pp": self.pp, "micro_batch_tokens": tokens})
            for role in plan.graph.roles
            for plan_model in [getattr(spec.models, role)]
        }
        return spec.model_copy(update={"models": spec.models.model_copy(update=models)})


def price(costs: MeasuredCosts, call: MeasuredCall, layout: Layout, lengths: LengthSample) -> float:
    """Return the predicted time of a call without the trainer's own."""
    times = next(each for each in costs.measured.models if each.model.head == "causal")
    width, prompt = times.row or times.width, times.prompt
    tokens = call.tokens / call.passes
    passes = MeanPass(call.passes, tokens / width, width, tokens, call.tokens)
    longest = float(max(lengths.responses))
    of_kind: Any = call.kind
    predicted = costs.call(
        Call(
            of_kind,
            times.model,
            layout.engine,
            call.rows,
            prompt,
            (longest,),
            width,
            item=4,
            passes=None if call.kind == "generate" else passes,
        ),
        layout.mesh,
    )
    return predicted.seconds - predicted.parts["bookkeeping"]


def measured_calls(layouts: list[Layout], directory: Path, plans: dict[str, Plan]) -> list[list[MeasuredCall]]:
    """Run the whole calls of all layouts."""
    request, output = directory / "request.json", directory / "calls.json"
    runs = []
    for layout in layouts:
        lengths = length_sample(plans[layout.engine])
        spec = layout.spec(plans[layout.engine], lengths)
        runs.append({"spec": spec.dump(), **asdict(lengths), "rows": ROWS})
    request.write_text(json.dumps({"runs": runs}))
    first = make_plan(layouts[0].spec(plans[layouts[0].engine], length_sample(plans[layouts[0].engine])))
    launch.start_ranks(["benchmarks.layer_prices.rank", str(request), str(output)], first, Hosts())
    return [[MeasuredCall(**call) for call in each] for each in json.loads(output.read_text())]


def lines(
    layouts: list[Layout], turns: list[list[list[MeasuredCall]]], costs: dict[str, MeasuredCosts], lengths: LengthSample
) -> Iterator[str]:
    """Yield a row for each call: the mean of its times before and after the profiles, and its price."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for layout, *both in zip(layouts, *turns, strict=True):
        for before, after in zip(*both, strict=True):
            predicted, measured = (
                price(costs[layout.engine], before, layout, lengths),
                (before.seconds + after.seconds) / 2,
            )
            error = predicted / measured - 1
            errors[layout.tp * layout.pp == 1].append(abs(error))
            of = f"| {layout.engine} | {layout.tp} | {layout.pp} | {before.kind} | {before.passes} "
            times = f"| {1e3 * before.seconds:.1f}, {1e3 * after.seconds:.1f} ms | {1e3 * predicted:.1f} ms "
            yield f"{of}{times}| {100 * error:+.0f} % |"
    for same, each in errors.items():
        yield f"{'same layout' if same else 'other layouts'}: median {median(each):.0%}, at most {max(each):.0%}"


def profiled(path: Path, seconds: float) -> MeasuredCosts:
    """Profile the run of a file; return its costs."""
    output = path.with_suffix(".json")
    words = ["profile", str(path), "-o", str(output), "--seconds", str(seconds)]
    subprocess.run([sys.executable, "-m", "flexrlhf", *words], check=True, stdout=subprocess.DEVNULL, env=os.environ)
    return load_costs(output, RANKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each profile")
    parser.add_argument("--engine", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        directory = Path(temporary)
        paths = {engine: directory / f"{engine}.yaml" for engine in options.engine}
        for engine, path in paths.items():
            path.write_text(config_of(engine, options.model))
        plans = {engine: make_plan(load_spec(path)) for engine, path in paths.items()}
        layouts = [
            Layout(engine, tp, pp, parts) for engine in options.engine for tp, pp in LAYOUTS[engine] for parts in (1, 4)
        ]
        before = measured_calls(layouts, directory, plans)
        costs = {engine: profiled(path, options.seconds) for engine, path in paths.items()}
        after = measured_calls(layouts, directory, plans)
        print("\n".join(lines(layouts, [before, after], costs, length_sample(plans[options.engine[0]]))))


if __name__ == "__main__":
    main()
