"""How far a run is from its reference, quantity by quantity, against the tolerances of the design."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from launcher import Outcome
from reference_ppo import TIE, Metric, Reference, Result, Step, distance
from reference_supervised import run_supervised
from torch import Tensor

from flexrlhf.spec import Spec

RELATIVE = 1e-5
EXACT = ("tokens", "response_mask", "finished", "policy_version")
REAL = ("rollout_logprobs", "logprobs", "ref_logprobs", "scores", "values", "advantages", "returns")
COUNTED = (
    *("ratio_clipped", "value_clipped", "reward_clipped", "truncated", "response_length", "pair_accuracy"),
    *("eval_accuracy", "eval_distinct_2", "eval_response_length"),
    *("importance_clipped", "policy_lag", "rollout_requests"),
)


@dataclass(frozen=True)
class Deviation:
    """``size``: relative, or the number of entries where none may differ. ``step`` None: after the last."""

    step: int | None
    quantity: str
    size: float
    limit: float

    def __str__(self) -> str:
        when = "after the last step" if self.step is None else f"step {self.step}"
        if not self.limit:
            return f"{when}, {self.quantity} differs in {self.size:.0f} entries"
        return f"{when}, {self.quantity} is {self.size:.1e} off, allowed {self.limit:.0e}"


OF_RUN = {"algorithm", "data", "eval", "steps", "seed"}
OF_MODELS = {"path", "share", "lora", "optimizer"}
"""What numbers depend on."""
_REFERENCES: dict[str, Result] = {}


def reference_of(spec: Spec) -> Result:
    """One reference for all runs that must have its numbers: placement, chunks and engines are left out of the key."""
    models = {
        role: model.model_dump(mode="json", include=OF_MODELS) for role, model in spec.models if model is not None
    }
    run = spec.model_dump(mode="json", include=OF_RUN)
    key = json.dumps([run, models, spec.schedule.lag, spec.sync.every])
    if key not in _REFERENCES:
        _REFERENCES[key] = Reference(spec).run() if spec.algorithm.name == "ppo" else run_supervised(spec)
    return _REFERENCES[key]


def deviations(outcome: Outcome) -> list[Deviation]:
    """All comparisons of a run, step by step, in the order in which a step computes them."""
    spec = outcome.plan.spec
    reference = reference_of(spec)
    if spec.algorithm.name == "ppo":
        reference = _after_ties(outcome, reference)
    found = [d for number, step in enumerate(reference.steps) for d in _step_deviations(outcome, number, step)]
    for role, weights in reference.weights.items():
        found.append(Deviation(None, f"weights of {role}", distance(outcome.weights(role), weights), RELATIVE))
    return found


def _after_ties(outcome: Outcome, reference: Result) -> Result:
    """Where a tie went the other way the rest is compared on the run's own tokens, of which each must win or tie."""
    tokens = [outcome.columns(step)["tokens"] for step in range(len(reference.steps))]
    for number, (step, drawn) in enumerate(zip(reference.steps, tokens, strict=True)):
        differing = (step.columns["tokens"] != drawn).nonzero()
        if not len(differing):
            continue
        row, place = differing[0].tolist()
        position, margins = place - outcome.plan.spec.data.max_prompt_tokens, step.answers[row].margins
        if position not in range(len(margins)) or margins[position] > TIE:
            # no tie: the columns are compared as they are, and the first that differs may be one of an earlier step
            return reference
        where = f"{outcome.case.name}: step {number}, row {row}, position {position}"
        warnings.warn(f"{where}: a tie by {margins[position]:.1e} went the other way", stacklevel=2)
        return Reference(outcome.plan.spec, forced=tokens).run()
    return reference


def _step_deviations(outcome: Outcome, number: int, step: Step) -> Iterator[Deviation]:
    columns = outcome.columns(number) if step.columns else {}
    for name in EXACT if step.columns else ():
        differing = int((columns[name].long() != step.columns[name].long()).sum())
        yield Deviation(number, name, float(differing), 0.0)
    for name in _real(outcome) if step.columns else ():
        yield Deviation(number, name, _largest(columns[name], step.columns[name]), RELATIVE)
    metrics = outcome.metrics[number]
    for name, metric in step.metrics.items():
        yield Deviation(number, name, _metric_deviation(metrics[name], metric), 1e-12 if name in COUNTED else RELATIVE)


def _real(outcome: Outcome) -> tuple[str, ...]:
    """Log-probs of the rollout are a column where something else tells those of the policy."""
    spec, written = outcome.plan.spec, outcome.plan.graph.producers
    is_corrected = spec.algorithm.importance is not None
    is_compared = spec.rollout.engine != "transformers" and "trainer_logprobs" not in written
    assert ("rollout_logprobs" in written) == (is_corrected or is_compared), sorted(written)
    return REAL if "rollout_logprobs" in written else REAL[1:]


def _largest(column: Tensor, reference: Tensor) -> float:
    """Largest difference, relative to the largest magnitude of the column."""
    return float((column - reference).abs().max() / reference.abs().max())


def _metric_deviation(value: float, metric: Metric) -> float:
    return abs(value - metric.value) / metric.scale if metric.scale else abs(value)
