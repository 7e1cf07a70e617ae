"""Leave the forward pass of ``logprobs`` out of a graph where another pass computes the same values.

Generation has computed the log-probs of the tokens that it sampled; a training pass that is the only one of its step
computes them of the weights that the step starts from. Ratios are then taken to those, and the plan has one forward
pass less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import Graph, Operator, is_own
from flexrlhf.operators.named_functions import LOSSES

COLUMN, REFERENCE = "logprobs", "ref_logprobs"
COMPARED = "computed_logprobs"
"""Log-probs of whole sequences in the first step, to compare with the ones of generation."""
LogprobPass = Literal["forward", "generation", "training"]
"""Pass that ``logprobs`` come from; forward: one of their own."""


def logprob_source(graph: Graph, spec: Spec, is_remote: bool) -> tuple[LogprobPass, str]:
    """Return which pass computes ``logprobs`` of ``graph``, and why they need no pass of their own, in words.

    graph:      of importance correction, if the algorithm has it.
    is_remote:  whether inference has a copy on other ranks.

    Raises UserError for a setting that cannot be.
    """
    setting, importance = spec.rollout.logprobs, spec.algorithm.importance
    if is_remote and spec.rollout.has_copy and importance is None:
        if spec.recomputes_next_to_generation:
            raise UserError(
                f"rollout.logprobs: recompute needs a copy of the actor next to {spec.rollout.engine}, which is on "
                f"other ranks than the trained one; use auto, or a placement without shadows"
            )
        return "generation", f"{spec.rollout.engine} returns those of the tokens that it samples"
    match setting:
        case "recompute":
            return "forward", ""
        case "reuse":
            return "generation", "rollout.logprobs: reuse takes those of generation"
    if _trains_in_one_pass(graph, spec) and _is_of_trained_weights(graph, spec, is_remote):
        return "training", "one mini-batch and one epoch, so the training pass computes them"
    if importance is None and _samples_by_the_same_function(graph, spec, is_remote):
        return "generation", "the same weights have computed them in generation, in float32"
    return "forward", ""


def check_setting(graph: Graph, spec: Spec) -> None:
    """Raise UserError if ``rollout.logprobs`` does nothing, or leaves out log-probs that a correction needs."""
    setting = spec.rollout.logprobs
    if setting != "auto" and graph.generated is None:
        raise UserError(
            f"rollout.logprobs: {setting} has nothing to do, since {spec.algorithm.name} trains on responses of the "
            f"data set; remove it"
        )
    if setting == "reuse" and spec.algorithm.importance is not None:
        raise UserError(
            "rollout.logprobs: reuse leaves out the log-probs that algorithm.importance compares with those of "
            "generation; use auto, or remove importance"
        )


def _trains_in_one_pass(graph: Graph, spec: Spec) -> bool:
    """Whether training makes one pass, and nothing before it reads ``logprobs`` but for a KL that it can report."""
    algorithm = spec.algorithm
    if (algorithm.num_mini_batches, algorithm.epochs) != (1, 1):
        return False
    readers = [operator for operator in graph.operators if COLUMN in operator.reads]
    if any(is_own(reader.function) for reader in readers):
        return False  # nothing but the column has them for a user's function
    earlier = [reader for reader in readers if reader.kind != "train"]
    return not earlier or (algorithm.reports_kl and [each.name for each in earlier] == ["advantages"])


def _is_of_trained_weights(graph: Graph, spec: Spec, is_remote: bool) -> bool:
    """Whether the copy that would compute ``logprobs`` has the weights that the step starts from, in the same type."""
    forward = graph.producers[COLUMN]
    if forward.on_trained or not is_remote:
        return True
    model = spec.models.of(forward.role)
    assert model is not None, f"{forward.role} is resolved"
    is_exact = model.of_shadow.dtype == model.dtype and spec.sync.dtype in (None, model.dtype)
    return spec.schedule.lag == 0 and spec.sync.every == 1 and spec.num_segments == 1 and is_exact


def _samples_by_the_same_function(graph: Graph, spec: Spec, is_remote: bool) -> bool:
    """Whether the copy that would compute ``logprobs`` has sampled with them, in float32.

    In 16 bits decoding rounds otherwise than a pass over whole sequences. The first step's comparison proves that
    decoding is the same function; responses that are replayed have been sampled by other weights.
    """
    model = spec.models.of(graph.producers[COLUMN].role)
    assert model is not None, f"{graph.producers[COLUMN].role} is resolved"
    is_compared = spec.guards.sampled_logprobs == "stop" and spec.debug.replay is None
    dtype = (model.of_shadow if is_remote else model).dtype
    has_one_version = spec.num_segments == 1
    return not spec.rollout.has_copy and is_compared and has_one_version and dtype == "float32"


def from_generation(graph: Graph, reason: str, spec: Spec) -> Graph:
    """Return ``graph`` without the forward of ``logprobs``: generation writes them."""
    return _left_out(replace(graph, operators=also_writing(graph.operators, COLUMN)), reason, spec)


def from_training(graph: Graph, reason: str, spec: Spec) -> Graph:
    """Return ``graph`` without the forward of ``logprobs``: training takes them from its own pass.

    The log-probs of generation remain a column, to recognise ties.
    """
    operators = [_on_policy(operator) for operator in graph.operators]
    if "rollout_logprobs" not in graph.producers:
        operators = list(also_writing(operators, "rollout_logprobs"))
    return _left_out(replace(graph, operators=tuple(operators)), reason, spec)


def _on_policy(operator: Operator) -> Operator:
    """Return ``operator`` without ``logprobs`` among its columns; advantages that report their KL leave it to a loss"""
    if COLUMN not in operator.reads:
        return operator
    unread = {COLUMN} if operator.kind == "train" else {COLUMN, REFERENCE}
    reads = tuple(name for name in operator.reads if name not in unread)
    function = LOSSES[operator.function].on_policy if operator.function in LOSSES else ""
    return replace(operator, reads=reads, function=function or operator.function)


def also_writing(operators: Iterable[Operator], column: str) -> tuple[Operator, ...]:
    """Return ``operators``; the one that generates the responses to train on also writes ``column``."""

    def writing(operator: Operator) -> Operator:
        return replace(operator, writes=(*operator.writes, column)) if operator.samples_responses else operator

    return tuple(writing(operator) for operator in operators)


def _left_out(graph: Graph, reason: str, spec: Spec) -> Graph:
    """Return ``graph`` without the forward of ``logprobs``, of which the first step's comparison remains."""
    operators: list[Operator] = []
    for operator in graph.operators:
        if operator.kind != "forward" or COLUMN not in operator.writes:
            operators.append(operator)
            continue
        if further := tuple(name for name in operator.writes if name != COLUMN):
            operators.append(replace(operator, name=further[0], writes=further))
        if _is_compared(spec):
            once = replace(operator, name=COMPARED, writes=(COMPARED,), every=max(spec.steps, 2), on_trained=False)
            operators.append(once)
    return replace(graph, operators=tuple(operators), left_out=(*graph.left_out, (COLUMN, reason)))


def _is_compared(spec: Spec) -> bool:
    """Whether log-probs as transformers sampled the tokens are compared with a pass over whole sequences."""
    return not spec.rollout.has_copy and spec.guards.sampled_logprobs != "off" and not spec.algorithm.is_cut
