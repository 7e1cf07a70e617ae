"""Requests to ``flexrlhf advise``: its choice against the fastest placement that it has seen, the guideline's and usual
ones; refusals; and the time of each.

    python -m benchmarks.advice_requests [--only WORDS]

A choice with a lag needs ``--max-lag``, so placements with one are compared apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import mean
from time import process_time
from typing import Any

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.advise import advise
from flexrlhf.guideline.advice.choice import Advice
from flexrlhf.guideline.advice.request import AdviceOptions
from flexrlhf.guideline.simulation.inputs import costs_for
from flexrlhf.guideline.simulation.lengths import expected_lengths

LONG = "data.max_response_tokens=16384"
GRPO = ("algorithm.name=grpo", "reward={rule: gsm8k}")
PLAIN = [("llama-7b", n) for n in (4, 8, 16, 32, 64, 128)] + [("llama-13b", n) for n in (8, 16, 32, 64)]
PLAIN += [("llama-33b", n) for n in (8, 16, 32, 64, 128)] + [("llama-2-70b", n) for n in (16, 32, 64, 128)]
SMALL = [("qwen2.5-0.5b", 1), ("qwen2.5-1.5b", 1), ("qwen2.5-3b", 2), ("llama-7b", 1), ("llama-7b", 2)]
CLASSES = (("A100-80G", "V100-32G"), ("H100-80G", "A100-80G"), ("A100-80G", "A100-40G"))
MIXED = [(first, second, model) for first, second in CLASSES for model in ("llama-7b", "llama-13b", "llama-33b")]
REASONING = [("qwen2.5-7b", 8), ("qwen2.5-7b", 64), ("qwen2.5-32b", 64)]


@dataclass(frozen=True)
class Request:
    """A request. ``settings``: of ``--set``; ``mean``: mean length of responses."""

    name: str
    options: AdviceOptions
    settings: tuple[str, ...] = ()
    mean: float | None = None

    @property
    def spec(self) -> Spec:
        return self.options.spec(None, self.settings)


def requests() -> Iterator[Request]:
    """Yield all requests."""
    for model, gpus in PLAIN:
        for gpu_type, lora in product(("A100-80G", "H100-80G"), (None, 16)):
            yield _request(model, gpus, gpu_type, lora=lora)
    for (model, gpus), gpu_type in product(SMALL, ("A100-80G", "A100-40G", "RTX4090-24G")):
        yield _request(model, gpus, gpu_type)
        yield _request(model, gpus, gpu_type, lora=16)
    for first, second, model in MIXED:
        nodes = f"cluster={{nodes: [{{devices: 8, class: {first}}}, {{devices: 8, class: {second}}}]}}"
        half = ("models.all.fallback_dtype=float16",) if second.startswith("V100") else ()
        for lora in (None, 16):
            yield _request(model, 16, first, (nodes, *half), f"and 8 {second}", lora=lora)
    for (model, gpus), samples in product(REASONING, (8, 16)):
        yield _request(model, gpus, "H100-80G", GRPO, prompts=128, samples=samples)
        yield _request(model, gpus, "H100-80G", (*GRPO, LONG), "long", mean=6000, prompts=128, samples=samples)
    for engine, rollout in (("deepspeed", "transformers"), ("deepspeed", "vllm"), ("megatron", "vllm")):
        for model, gpus in (("llama-7b", 8), ("llama-33b", 32), ("llama-65b", 128)):
            yield _request(model, gpus, "A100-80G", engine=engine, rollout=rollout)


def _request(
    model: str,
    gpus: int,
    gpu_type: str,
    settings: tuple[str, ...] = (),
    note: str = "",
    *,
    mean: float | None = None,
    **options: Any,
) -> Request:
    words = [f"{key} {value}" for key, value in options.items() if value is not None]
    name = " ".join(filter(None, [model, f"@{gpus}", gpu_type, *words, note]))
    return Request(name, AdviceOptions(model=model, gpus=gpus, gpu_type=gpu_type, **options), settings, mean)


@dataclass(frozen=True)
class Outcome:
    """Result of a request: how much slower the choice is than others, as shares, and the time it took."""

    request: Request
    text: str
    slower: Mapping[str, float]
    seconds: float

    def row(self) -> str:
        cells = " ".join(f"{name} {share:+.0%}" for name, share in self.slower.items())
        return f"{self.request.name:58} {self.text:46} {cells:52} {self.seconds:6.1f} s"


def outcome(request: Request) -> Outcome:
    began, spec = process_time(), request.spec
    source = costs_for(spec, None)
    lengths = expected_lengths(spec, None, request.mean)
    advice = advise(spec, source.costs, lengths, margin=source.accuracy.tie)
    try:
        best = advice.best
    except UserError as error:
        return Outcome(request, str(error).partition("; ")[2], {}, process_time() - began)
    text = f"{best.candidate.name} {best.seconds:.4g} s"
    return Outcome(request, text, dict(_slower(advice)), process_time() - began)


def _slower(advice: Advice) -> Iterator[tuple[str, float]]:
    """Yield how much slower the choice is than the fastest of each kind; with a lag apart from the others."""
    seconds = advice.best.seconds
    for method in ("search", "guideline", "usual"):
        found = [item.seconds for item in advice.comparable if item.candidate.method == method]
        if found:
            yield method, seconds / min(found) - 1
    lagging = [item.seconds for item in advice.feasible if item.lag > advice.best.lag]
    if lagging:
        yield "lag", seconds / min(lagging) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="requests whose name has these words")
    options = parser.parse_args()
    outcomes = []
    for request in requests():
        if options.only in request.name:
            outcomes.append(outcome(request))
            print(outcomes[-1].row(), flush=True)
    fitting = [each for each in outcomes if each.slower]
    worst = [max((share for name, share in each.slower.items() if name != "lag"), default=0.0) for each in fitting]
    print(f"{len(outcomes)} requests, {len(fitting)} fitting; the choice is slower than the fastest found")
    for share in (0.02, 0.05, 0.1):
        print(f"  by more than {share:.0%} in {sum(each > share + 1e-9 for each in worst)}")
    lags = [each.slower["lag"] for each in fitting if "lag" in each.slower]
    print(f"a lag is faster by more than 10 % in {sum(each > 0.1 for each in lags)} of {len(lags)}")
    times = [each.seconds for each in outcomes]
    print(f"time: mean {mean(times):.1f} s, most {max(times):.1f} s")


if __name__ == "__main__":
    main()
