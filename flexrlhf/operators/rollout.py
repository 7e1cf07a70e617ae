"""What changes in a graph when another engine generates, or another policy than the one that is trained.

Column ``logprobs``: of the sampled tokens under the weights that training of the step starts from, which the loss takes
its ratio to. ``rollout_logprobs``: under the distribution that they were drawn from. Where nothing corrects for their
difference one of them serves for both, and a gate (``parity``) compares the two engines.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from flexrlhf.config.algorithms import ImportanceSpec, SampledSpec
from flexrlhf.config.spec import ParitySpec, Spec
from flexrlhf.errors import UserError
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Graph, Operator

LEAST_TEMPERATURE = 0.01
"""Of vLLM, which silently takes it for anything smaller but 0."""


def with_rollout(graph: Graph, spec: Spec, is_remote: bool) -> Graph:
    """``graph`` for the rollout engine of ``spec``. ``is_remote``: it sits on other ranks than the trained copy.

    Raises UserError for settings of rollouts that do not go with the algorithm.
    """
    check_rollout(graph, spec)
    algorithm, rollout = spec.algorithm, spec.rollout
    importance = algorithm.importance if isinstance(algorithm, SampledSpec) else None
    is_separate = rollout.engine != "transformers"
    if importance is None and not is_separate:
        return graph
    is_told = importance is None and is_remote
    told = _told_by_engine(graph) if is_told else _told_by_both(graph, importance)
    if is_separate and rollout.parity is not None:
        told = _compared(told, rollout.parity, spec, is_told)
    return _beside_its_forwards(told, is_separate and is_remote) if spec.schedule.lag else told


def check_rollout(graph: Graph, spec: Spec) -> None:
    """Raise UserError for an engine that nothing is generated with, and for log-probs that cannot agree."""
    algorithm, rollout = spec.algorithm, spec.rollout
    draws = any(operator.kind == "generate" for operator in graph.evaluation)
    if spec.eval is not None and spec.eval.temperature is not None and not draws:
        raise UserError(f"eval.temperature: evaluations of {algorithm.name} generate nothing; remove it")
    if rollout.engine == "transformers":
        return
    if isinstance(algorithm, SampledSpec) and algorithm.temperature < LEAST_TEMPERATURE:
        raise UserError(
            f"algorithm.temperature: {rollout.engine} raises what is below {LEAST_TEMPERATURE} to it, found "
            f"{algorithm.temperature:g}; use at least {LEAST_TEMPERATURE}, or rollout.engine: transformers"
        )
    if graph.generated is None:
        raise UserError(
            f"rollout.engine: {rollout.engine} has nothing to do, since {algorithm.name} trains on answers of the data "
            f"set; remove rollout"
        )
    if isinstance(algorithm, SampledSpec) and algorithm.is_cut and rollout.parity is not None:
        raise UserError(
            "rollout.parity: top_p, top_k and min_response_tokens cut the sampling distribution, so the engine's "
            "log-probs are not those of the policy that the trainer computes; use null"
        )


def _told_by_engine(graph: Graph) -> Graph:
    """No copy beside the engine forwards: its log-probs are the policy's."""
    kept = [_not_writing(operator, "logprobs") for operator in graph.operators if operator.writes != ("logprobs",)]
    return replace(graph, operators=tuple(_also_writing(operator, "logprobs") for operator in kept))


def _not_writing(operator: Operator, column: str) -> Operator:
    return replace(operator, writes=tuple(name for name in operator.writes if name != column))


def _told_by_both(graph: Graph, importance: ImportanceSpec | None) -> Graph:
    """Engine and trained copy each tell log-probs of the tokens."""
    corrected = [_corrected(operator) if importance is not None else operator for operator in graph.operators]
    return replace(graph, operators=tuple(_also_writing(operator, "rollout_logprobs") for operator in corrected))


def _also_writing(operator: Operator, column: str) -> Operator:
    """``operator``; if it generates what is trained on, with ``column`` among what it writes."""
    is_drawn = operator.kind == "generate" and not operator.is_greedy
    return replace(operator, writes=(*operator.writes, column)) if is_drawn else operator


def _compared(graph: Graph, parity: ParitySpec, spec: Spec, is_told: bool) -> Graph:
    """``graph`` with the gate, at steps in which engine and trained copy hold the same weights.

    Those that the engine draws batch b with are as old as k * floor(max(0, b - lag) / k), k = sync.every. With a lag
    that is step 0 alone; else also the first step behind a sync, which may have gone wrong. ``is_told``: the engine's
    log-probs stand for the policy's, so the trained copy has to compute its own.
    """
    role, k = _role_of(graph), spec.sync.every
    every, also = (spec.steps, 0) if spec.schedule.lag else (lcm(parity.every, k), k)
    operators = list(graph.operators)
    compared = ("rollout_logprobs", "logprobs")
    if is_told:
        compared = ("logprobs", "trainer_logprobs")
        own = ("trainer_logprobs",)
        operators.append(Operator(own[0], "forward", role, TEXT, own, every=every, also=also, on_trained=True))
    operators.append(
        Operator(
            "parity",
            "combine",
            role,
            (*compared, "tokens", "response_mask"),
            function="parity",
            barrier=True,
            every=every,
            also=also,
            on_trained=True,
        )
    )
    return replace(graph, operators=_before_training(operators))


def _corrected(operator: Operator) -> Operator:
    """The trained copy computes ``logprobs`` before it trains; a penalty in the reward is that of the policy which
    drew the tokens; the loss reads both."""
    if "logprobs" in operator.writes:
        return replace(operator, on_trained=True)
    if operator.kind == "combine" and "logprobs" in operator.reads:
        reads = tuple("rollout_logprobs" if name == "logprobs" else name for name in operator.reads)
        return replace(operator, reads=reads)
    if operator.kind == "train" and "logprobs" in operator.reads:
        return replace(operator, reads=(*operator.reads, "rollout_logprobs"))
    return operator


def _beside_its_forwards(graph: Graph, is_alone: bool) -> Graph:
    """What the trained copy forwards comes with a lag a step later: what is combined with that waits for it there.

    ``is_alone``: no copy beside the engine can forward, so that one does it all.
    """
    role = _role_of(graph)
    forwards = [o for o in graph.operators if (o.kind, o.role) == ("forward", role) and (is_alone or o.on_trained)]
    late = {column for operator in forwards for column in operator.writes}

    def moved(operator: Operator) -> Operator:
        waits = operator.kind == "combine" and late & set(operator.reads)
        return replace(operator, on_trained=True) if waits else operator

    return replace(graph, operators=tuple(moved(operator) for operator in graph.operators))


def _role_of(graph: Graph) -> str:
    assert graph.generated is not None, "an engine is asked for only where something is generated"
    return graph.generated


def _before_training(operators: list[Operator]) -> tuple[Operator, ...]:
    """A graph stands in the order that a person would read it."""
    return tuple(sorted(operators, key=lambda operator: operator.kind == "train"))
