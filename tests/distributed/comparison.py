"""Deviation of a run from its reference, quantity by quantity, against the tolerances of the design."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from launcher import Outcome
from reference import Reference
from reference_models import distance
from reference_responses import Response, Result, Step
from reference_sampling import TIE
from reference_supervised import Supervised
from reference_terms import Metric
from torch import Tensor

from flexrlhf.config.algorithms.base import SampledSpec
from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.algorithms.ppo import AcShareSpec
from flexrlhf.config.number_settings import OF_MODELS, OF_RUN
from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.config.spec import Spec
from flexrlhf.metrics import METRICS
from flexrlhf.verify.deviations import FLOAT32

RELATIVE = FLOAT32.numbers
EXACT = (
    *("tokens", "response_mask", "finished", "policy_version"),
    *("loss_mask", "step_ends", "kept_mask", "selected_tokens", "outcome", "data_position"),
    *("episode", "turns", "turn_ends", "tool_calls", "failed_tool_calls"),
)
"""Columns of whole numbers, without the qualifiers after their dots."""
BEFORE = re.compile(r".*\.(opened|turn)")
"""Columns of episodes before their turns, and of responses before the last reply."""
NOT_REFERENCED = ("attention_mask", "experts", "trainer_logprobs", "computed_logprobs")
"""Columns that the reference lacks: masks follow from the tokens, training from experts, the others are compared in the
run."""
UNREFERENCED_METRICS = re.compile(
    "|".join(["step|rollout_engine|parity_.*|router_mismatch|(pair|eval)_accuracy|.*_skipped", *METRICS.times])
)
"""Metrics that the reference may lack: times, the gate's, metrics decided by rounding, metrics of 16 bits."""
COUNTED = (
    *(
        "ratio_clipped",
        "value_clipped",
        "cost_value_clipped",
        "reward_clipped",
        "truncated",
        "response_length",
        "pair_accuracy",
    ),
    *("score_invalid", "score_failed", "text_cut", "eval_text_cut", "group_alike"),
    *("kept_length_ratio", "prompts_taken", "prompts_left_out"),
    *(
        "turns_mean",
        "reply_length_mean",
        "episode_ended",
        "episode_failed",
        "episode_failed_raise",
        "episodes_failed_in_a_row",
        "tool_calls",
        "eval_turns_mean",
        "eval_episode_failed",
    ),
    *("eval_accuracy", "eval_distinct_2", "eval_response_length", "eval_truncated", "eval_score_invalid"),
    *("eval_pass_at_1", "eval_pass_at_k", "eval_score_failed"),
    *(
        "importance_clipped",
        "importance_rejected",
        "covariance_selected",
        "response_steps",
        "staleness_max",
        "staleness_dropped",
        *("rollout_requests", "late_replies"),
    ),
)


@dataclass(frozen=True)
class Deviation:
    """``size``: relative, or the number of differing entries if none may differ. ``step`` None: after the last."""

    step: int | None
    quantity: str
    size: float
    limit: float

    def __str__(self) -> str:
        when = "after the last step" if self.step is None else f"step {self.step}"
        if not self.limit:
            return f"{when}, {self.quantity} differs in {self.size:.0f} entries"
        return f"{when}, {self.quantity} is {self.size:.1e} off, allowed {self.limit:.0e}"


_REFERENCES: dict[str, Result] = {}


def reference_of(spec: Spec, before: tuple[int, int] | None = None) -> Result:
    """One reference for all runs that must give its results: placement, chunks and engines are not in the key.

    ``before``: as of ``Reference``.
    """
    models = {
        role: model.model_dump(mode="json", include=set(OF_MODELS)) for role, model in spec.models if model is not None
    }
    run = spec.model_dump(mode="json", include={*OF_RUN, "steps"})
    del run["algorithm"]["protocols"]
    # of an episode that has one
    (run["environment"] or {}).pop("sequences", None)
    # values of a shared trunk come from the copy that computes them
    values_of = spec.rollout.engine if isinstance(spec.algorithm, AcShareSpec) or spec.num_segments > 1 else None
    models_apart = sorted(spec.placement.models) if isinstance(spec.placement, PlacementMap) else None
    segments = [models_apart, spec.rollout.segment_tokens, spec.rollout.max_segments, spec.rollout.groups]
    # where late replies are carried, the clock decides which tokens have which weights
    recorded = str(spec.directory) if spec.rollout.carries_late else None
    key = json.dumps([run, models, spec.schedule.lag, spec.sync.every, values_of, segments, before, recorded])
    if key not in _REFERENCES:
        is_sampled = isinstance(spec.algorithm, PolicySpec)
        _REFERENCES[key] = Reference(spec, before=before).run() if is_sampled else Supervised(spec).run()
    return _REFERENCES[key]


def deviations(outcome: Outcome, before: tuple[int, int] | None = None) -> list[Deviation]:
    """All comparisons of a run, step by step, in the order in which a step computes them. ``before``: as of
    ``Reference``."""
    spec = outcome.plan.spec
    reference = reference_of(spec, before)
    if isinstance(spec.algorithm, PolicySpec):
        reference = _after_ties(outcome, reference, before)
    found = [d for number, step in enumerate(reference.steps) for d in _step_deviations(outcome, number, step)]
    for role, weights in reference.weights.items():
        found.append(Deviation(None, f"weights of {role}", distance(outcome.weights(role), weights), RELATIVE))
    return found


def _after_ties(outcome: Outcome, reference: Result, before: tuple[int, int] | None) -> Result:
    """After a tie that went the other way the rest is compared on the run's own tokens, each of which must win or
    tie."""
    columns = [outcome.columns(step) for step in range(len(reference.steps))]
    sampled = [{name: step[name] for name in ("tokens", "tokens.greedy") if name in step} for step in columns]
    for number, (step, tokens) in enumerate(zip(reference.steps, sampled, strict=True)):
        whole = {name: _of_places(step, column) for name, column in tokens.items() if name in step.columns}
        differing = {name: (step.columns[name] != column).nonzero() for name, column in whole.items()}
        name = next((name for name, places in differing.items() if len(places)), None)
        if name is None:
            continue
        row, place = differing[name][0].tolist()
        position = place - outcome.plan.spec.data.max_prompt_tokens
        margins = _response(step.responses[row], name).margins
        if position not in range(len(margins)) or margins[position] > TIE:
            # no tie: the columns are compared as they are, and the first that differs may be one of an earlier step
            return reference
        where = f"{outcome.case.name}: step {number}, {name}, row {row}, position {position}"
        warnings.warn(f"{where}: a tie by {margins[position]:.1e} went the other way", stacklevel=2)
        return Reference(outcome.plan.spec, sampled, before).run()
    return reference


def _response(response: Response, column: str) -> Response:
    """The response whose tokens are in ``column``."""
    return response.greedy if column == "tokens.greedy" and response.greedy is not None else response


def _of_places(step: Step, column: Tensor) -> Tensor:
    """The rows of a recorded column that the reference has."""
    return column if step.places is None else column[step.places]


def _step_deviations(outcome: Outcome, number: int, step: Step) -> Iterator[Deviation]:
    columns = {name: column for name, column in outcome.columns(number).items() if not BEFORE.fullmatch(name)}
    if step.places is not None:
        found = columns.pop("present").nonzero().flatten().tolist()
        for name in ("group_scores", "group_steps"):
            columns.pop(name, None)
        yield Deviation(number, "present", float(len(set(found).symmetric_difference(step.places))), 0.0)
        columns = {name: _of_places(step, column) for name, column in columns.items()}
    if step.columns:
        _check_written(outcome, set(columns), set(step.columns))
    for name, expected in step.columns.items():
        if name not in columns:
            continue
        if name.partition(".")[0] in EXACT:
            differing = int((columns[name].long() != expected.long()).sum())
            yield Deviation(number, name, float(differing), 0.0)
        else:
            yield Deviation(number, name, _largest(columns[name], expected), RELATIVE)
    metrics, k = dict(outcome.metrics[number]), outcome.plan.batch.sequences
    if k > 1:
        unused = metrics.pop("rows_unused", 0)
        rows = sum(metrics[name] for name in metrics if name.startswith("rows_") and name != "rows_in_flight")
        yield Deviation(number, "rows_unused", abs(unused - (k - 1) * rows), 0.0)
        metrics["rows_in_flight"] //= k
        for name in ("sequences_mean", "eval_sequences_mean"):
            yield Deviation(number, name, abs(metrics.pop(name, 1.0) - 1.0), 0.0)
    further = {name for name in metrics.keys() - step.metrics.keys() if not UNREFERENCED_METRICS.fullmatch(name)}
    assert not further, f"{outcome.case.name} reports {sorted(further)}, which nothing is compared with"
    # Megatron counts no tokens of experts
    staged = {role for role, model in outcome.plan.spec.models if model is not None and model.engine == "megatron"}
    for name, metric in step.metrics.items():
        if name.removesuffix("_expert_load_max") in staged:
            continue
        is_counted = name in COUNTED or name.startswith("rows_")
        yield Deviation(number, name, _metric_deviation(metrics[name], metric), 1e-12 if is_counted else RELATIVE)


def _check_written(outcome: Outcome, written: set[str], expected: set[str]) -> None:
    """Check that all columns of a run are compared, and that it lacks at most two of the reference's.

    Log-probs of the rollout are a column if another pass computes the policy's; the policy's are no column if the
    training pass computes them.
    """
    spec, producers = outcome.plan.spec, outcome.plan.graph.producers
    is_corrected = isinstance(spec.algorithm, SampledSpec) and spec.algorithm.importance is not None
    writer = producers.get("logprobs")
    is_compared = spec.rollout.engine != "transformers" and writer is not None and writer.kind == "forward"
    has_both = is_corrected or is_compared or (writer is None and isinstance(spec.algorithm, PolicySpec))
    assert ("rollout_logprobs" in producers) == has_both, sorted(producers)
    missing = expected - written - ({"rollout_logprobs"} if writer is not None else {"logprobs"})
    assert not missing, f"{outcome.case.name} wrote no {sorted(missing)}"
    further = {name for name in written - expected if name.partition(".")[0] not in NOT_REFERENCED}
    assert not further, f"{outcome.case.name} wrote {sorted(further)}, which nothing is compared with"


def _largest(column: Tensor, reference: Tensor) -> float:
    """Largest difference, relative to the column's largest magnitude; non-finite entries must be the same in both."""
    known = reference.isfinite()
    if not known.equal(column.isfinite()):
        return float("inf")
    if not known.any():
        return 0.0
    difference, size = (float(x[known].abs().max()) for x in (column - reference, reference))
    return difference / size if size else difference


def _metric_deviation(value: float, metric: Metric) -> float:
    return abs(value - metric.value) / metric.scale if metric.scale else abs(value)
