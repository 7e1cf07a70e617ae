"""Models with experts on 32 to 1,024 H100: the placement that ``flexrlhf advise`` recommends, its time by part and
memory, next to published steps.

    python -m benchmarks.mixtures [--only WORDS]

GRPO with a rule, without a KL penalty, in bfloat16. Published steps are from ``docs/about/performance-summary.md`` of
NeMo-RL 0.6, where Megatron trains and vLLM generates: OpenMathInstruct-2, whose prompts are counted with 100 tokens.
The other steps have a prompt of 1,024 tokens for each device, eight responses, 1,024 tokens in the mean of at most
2,048, and one optimizer step. vLLM generates here, too; with latent attention it is planned alone.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from time import process_time

from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.advise import advise
from flexrlhf.guideline.advice.candidates import FeasibleCandidate
from flexrlhf.guideline.advice.request import AdviceOptions
from flexrlhf.guideline.simulation.inputs import costs_for
from flexrlhf.guideline.simulation.lengths import expected_lengths
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.strategies.instructions import Run, Sync

MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")
DEVICES = (64, 256, 1024)
PROMPT = 100


@dataclass(frozen=True)
class Step:
    """A step to be placed.

    lag:        of its batches.
    batch:      prompts, responses to each, optimizer steps.
    texts:      tokens of the longest prompt and response, and of a response in the mean.
    published:  seconds; None: of the same model and devices nothing is published with this batch.
    """

    model: str
    devices: int
    lag: int
    batch: tuple[int, int, int]
    texts: tuple[int, int, float]
    published: float | None = None

    @property
    def name(self) -> str:
        prompts, samples, updates = self.batch
        lag = f", lag {self.lag}" if self.lag else ""
        return f"{self.model}, {self.devices}{lag} | {prompts} x {samples} / {updates}, {self.texts[2]:.0f}"


def steps() -> Iterator[Step]:
    """Yield all steps: published ones first."""
    for model, devices, lag, batch, longest, mean, seconds in (
        ("qwen3-30b-a3b", 32, 0, (64, 32, 4), 4096, 3203, 192.0),
        ("qwen3-30b-a3b", 32, 1, (64, 32, 4), 4096, 3201, 152.0),
        ("qwen3-235b-a22b", 128, 0, (16, 32, 1), 8192, 5698, 395.0),
        ("qwen3-235b-a22b", 256, 0, (16, 32, 1), 8192, 5713, 312.0),
        ("qwen3-235b-a22b", 256, 1, (16, 32, 1), 8192, 5721, 231.0),
        ("deepseek-v3", 256, 0, (32, 16, 1), 1536, 701, 134.0),
        ("deepseek-v3", 512, 0, (32, 16, 1), 1536, 697, 111.0),
        ("deepseek-v3", 512, 1, (32, 16, 1), 1536, 710, 64.1),
    ):
        yield Step(model, devices, lag, batch, (PROMPT, longest - PROMPT, mean - PROMPT), seconds)
    for model in MODELS:
        for devices in DEVICES:
            yield Step(model, devices, 0, (devices, 8, 1), (1024, 2048, 1024))


def row(step: Step) -> str:
    """Return the row of the table of a step."""
    began = process_time()
    prompts, samples, updates = step.batch
    prompt, response, mean = step.texts
    options = AdviceOptions(
        **{"algorithm": "grpo", "model": step.model, "gpus": step.devices, "gpu_type": "H100-80G", "rollout": "vllm"},
        **{"prompts": prompts, "samples": samples, "mini_batches": updates},
        **{"prompt_tokens": prompt, "response_tokens": response},
    )
    settings = ("reward={rule: gsm8k}", "algorithm.kl=null", *([f"schedule.lag={step.lag}"] if step.lag else []))
    spec = options.spec(None, settings)
    source = costs_for(spec, None)
    published = "-" if step.published is None else f"{step.published:.4g}"
    try:
        best = advise(spec, source.costs, expected_lengths(spec, None, mean), margin=source.accuracy.tie).best
        cells = [*_cells(best), published, f"{best.peak / 1e9:.3g}"]
    except UserError as error:
        cells = [f"refused: {error}", *["-"] * 4, published, "-"]
    return f"| {step.name} | {' | '.join(cells)} | {process_time() - began:.0f} |"


def _cells(best: FeasibleCandidate) -> list[str]:
    """Return the placement, the times of generation, training and all other instructions, and the time of a step."""
    parts: Counter[str] = Counter()
    for each in best.simulation.regular:
        instruction = each.instruction
        kind = instruction.operator.kind if isinstance(instruction, Run) else "other"
        kind = "sync" if isinstance(instruction, Sync) else kind
        parts[kind if kind in ("generate", "train") else "other"] += each.cost.seconds
    placed = "; ".join(map(_placed, best.plan.placement.models))
    times = [f"{parts[kind]:.3g}" for kind in ("generate", "train", "other")]
    return [placed, *times, f"{best.simulation.seconds:.4g}"]


def _placed(model: PlacedModel) -> str:
    layout, settings = model.layout, model.settings
    degrees = {"tp": layout.dims.tp, "cp": layout.dims.cp, "ep": layout.dims.ep, "ZeRO": settings.zero}
    shown = " ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > (name != "ZeRO"))
    return f"{'vLLM' if model.rollout is not None else 'actor'} on {len(model.ranks)}: {shown or 'replicas'}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="steps whose name has these words, such as 'deepseek-v3, 256'")
    options = parser.parse_args()
    print(
        "| model, H100 | prompts x responses / updates, tokens | placement | generation, s | training | other | step ",
        end="",
    )
    print("| published | GB on a device | CPU s |")
    print(f"|{'---|' * 10}")
    for step in steps():
        if options.only in step.name:
            print(row(step), flush=True)


if __name__ == "__main__":
    main()
