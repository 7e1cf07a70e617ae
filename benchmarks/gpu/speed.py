"""Tokens/s and MFU of PPO and GRPO by phase, from the timeline of a run, next to TRL's on the same prompts."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.clock import TimeBudget, Unfinished
from benchmarks.gpu.job import Job
from benchmarks.gpu.machine import Scale, memory_gb, peak_flops
from benchmarks.gpu.results import LeftOut, Row
from benchmarks.gpu.workload import run_config, write_data, write_model
from flexrlhf.config.spec_file import load_spec
from flexrlhf.guideline.costs.cost_model import Transformer, transformer_of
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.timeline import Span, Trace

STAGE = "speed"
LONG = "long"
KERNELS = ("auto", "sdpa")
"""Kernels of attention of long sequences: by their lengths, and under a mask as numbers."""
PHASES = ("generate", "forward", "train")
FREE = 0.85
"""Fraction of the free memory that a plan may take."""


@dataclass(frozen=True)
class StepRows:
    """Sequences of a step.

    rows:      prompts times samples
    prompt:    tokens of each prompt
    response:  mean tokens of a response
    """

    rows: int
    prompt: int
    response: float

    @property
    def tokens(self) -> float:
        """Tokens of all rows."""
        return self.rows * (self.prompt + self.response)


def run_speed(job: Job, budget: TimeBudget) -> Iterator[Row | LeftOut]:
    """Yield the figures of PPO and GRPO on one rank."""
    directory, scale, device = job.directory, job.scale, job.device
    peak, source = peak_flops(scale.dtype)
    for algorithm in ("grpo", "ppo"):
        found = _fitting(algorithm, directory, scale, device)
        if found is None:
            yield LeftOut(STAGE, algorithm, "no model fits the free memory")
            continue
        config, micro = found
        model = write_model(directory, config, scale.dtype, device)
        path = run_config(f"{algorithm}-speed", directory, replace(scale, micro=micro), model, device)
        try:
            yield from _measured(algorithm, path, budget, peak)
            yield _trl(algorithm, directory, scale, model, device, budget, job.trl)
        except Unfinished as error:
            yield LeftOut(STAGE, algorithm, str(error))
    yield Row(STAGE, "peak of MFU", f"{peak / 1e12:.3g} TFLOP/s, {source}", {"flops": peak})


def run_long(job: Job, budget: TimeBudget) -> Iterator[Row | LeftOut]:
    """Yield the figures of GRPO of few long sequences on one rank, by kernel of attention."""
    directory, scale, device = job.directory / "long", job.scale.of_long_sequences, job.device
    write_data(directory, scale)
    found = _fitting("grpo", directory, scale, device)
    if found is None:
        yield LeftOut(LONG, "GRPO", "no model fits the free memory")
        return
    model, scale = write_model(directory, found[0], scale.dtype, device), replace(scale, micro=found[1])
    peak, _ = peak_flops(scale.dtype)
    for kernel in KERNELS:
        path = run_config(f"grpo-long-{kernel}", directory, scale, model, device)
        settings = (f"models.all.attention={kernel}",)
        try:
            for row in _measured("grpo", path, budget, peak, settings):
                yield replace(row, stage=LONG, measurement=f"{row.measurement}, attention {kernel}")
        except Unfinished as error:
            yield LeftOut(LONG, kernel, str(error))


def _fitting(algorithm: str, directory: Path, scale: Scale, device: str) -> tuple[dict[str, Any], int] | None:
    """Return the first config whose plan fits the free memory of the device, and the most tokens of its passes."""
    free = memory_gb()
    for config in scale.large:
        for micro in (scale.micro, scale.micro // 2, scale.micro // 4):
            path = run_config(f"{algorithm}-speed", directory, replace(scale, micro=micro), config, device)
            memories = make_plan(load_spec(path, ())).memories
            if free is None or max(memory.peak_bytes for memory in memories) < FREE * free * 1e9:
                return config, micro
    return None


def _measured(
    algorithm: str, path: Path, budget: TimeBudget, peak: float, settings: Sequence[str] = ()
) -> Iterator[Row]:
    plan = make_plan(load_spec(path, settings))
    further = (word for setting in settings for word in ("--set", setting))
    # one that takes too long leaves time for the others
    budget.run([sys.executable, "-m", "flexrlhf", "run", str(path), *further], most=budget.left / 2)
    directory = plan.spec.directory
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][1:]
    lengths = [step["response_length"] for step in steps]
    sequences = StepRows(plan.batch.num_rows, plan.lengths.prompt, sum(lengths) / len(lengths))
    spans = [span for span in Trace.read(directory / "timeline.json").spans if span.step in range(1, plan.spec.steps)]
    models = {model.role: _shape(plan, model) for model in plan.placement.models}
    size = f"{algorithm.upper()}, {models['actor'].parameters / 1e6:.0f} M, {plan.model('actor').dtype}"
    seconds = _seconds(plan, spans, len(steps))
    for phase in PHASES:
        yield _phase_row(size, phase, plan, models, sequences, seconds[phase], peak)
    total = sum(step["seconds"] for step in steps) / len(steps)
    rate = sequences.tokens / total
    yield Row(STAGE, f"{size}: step", f"{total:.2f} s, {rate:.0f} tokens/s", {"seconds": total, "tokens_s": rate})


def _shape(plan: Plan, model: PlacedModel) -> Transformer:
    shape = plan.shapes[model.role]
    assert shape is not None, "made here, of a known family"
    return transformer_of(shape, model.head, is_adapted=False)


def _seconds(plan: Plan, spans: Sequence[Span], steps: int) -> dict[str, float]:
    """Return a step's time in each phase, in seconds."""
    kinds = {f"{operator.name} on {operator.role}": operator.kind for operator in plan.graph.operators}
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.kind == "run":
            seconds[kinds.get(span.label, "other")] += (span.end - span.start) / steps
    return seconds


def _phase_row(
    size: str, phase: str, plan: Plan, models: dict[str, Transformer], sequences: StepRows, seconds: float, peak: float
) -> Row:
    # log-probs that only the first step compares are in no step that counts
    roles = [operator.role for operator in plan.graph.operators if operator.kind == phase and operator.every == 1]
    flops = sum(_flops(phase, models[role], sequences) for role in roles)
    tokens = sequences.rows * sequences.response if phase == "generate" else sequences.tokens * len(roles)
    rate, mfu = tokens / seconds, flops / seconds / peak
    found = f"{seconds:.2f} s, {rate:.0f} tokens/s, MFU {mfu:.1%}"
    return Row(STAGE, f"{size}: {phase}", found, {"seconds": seconds, "tokens_s": rate, "mfu": mfu})


def _flops(phase: str, model: Transformer, sequences: StepRows) -> float:
    """Return the FLOPs of a step's real tokens in products and causal attention; training counts three times."""
    width = sequences.prompt + sequences.response
    layers = model.layers * model.matrix_parameters
    attention = 2 * model.layers * model.heads * model.head_dim * width * width
    # only responses have log-probs
    head = model.head_parameters * (sequences.response if model.head == "causal" else width)
    return (3 if phase == "train" else 1) * sequences.rows * (2 * layers * width + attention + 2 * head)


def _trl(
    algorithm: str,
    directory: Path,
    scale: Scale,
    model: Path,
    device: str,
    budget: TimeBudget,
    trl: str | None,
) -> Row | LeftOut:
    """Train by TRL with the same prompts and sizes, and return its step time in seconds."""
    name = f"{algorithm.upper()} by TRL"
    if trl is None:
        return LeftOut(STAGE, name, "trl is not installed; --trl PYTHON names an environment that has it")
    request = directory / f"trl-{algorithm}.json"
    sizes = vars(replace(scale, small={}, large=()))
    settings = {"algorithm": algorithm, "model": str(model), "device": device, "directory": str(directory)}
    request.write_text(json.dumps({**sizes, **settings}))
    script = Path(__file__).with_name("trl_steps.py")
    variables = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    try:
        budget.run([trl, str(script), str(request)], variables, most=budget.left / 2)
    except Unfinished as error:
        return LeftOut(STAGE, name, str(error))
    found = json.loads(request.with_suffix(".found").read_text())
    rate = scale.prompts * scale.samples * (scale.prompt + found["response"]) / found["seconds"]
    text = f"{found['seconds']:.2f} s, {rate:.0f} tokens/s, trl {found['trl']}, responses of {found['response']:.1f}"
    return Row(STAGE, f"{name}: step", text, {"seconds": found["seconds"], "tokens_s": rate})
