"""What changes in a graph when another engine generates, or another policy than the one that is trained.

Column ``logprobs``: of the sampled tokens under the weights that training of the step starts from, which the loss takes
its ratio to. ``rollout_logprobs``: under the distribution that they were drawn from. Where nothing corrects for their
difference one of them serves for both, and a gate (``parity``) compares the two engines.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from flexrlhf.errors import UserError
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.spec import ImportanceSpec, ParitySpec, SampledSpec, Spec


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
    every = _comparable_every(rollout.parity, spec) if is_separate and rollout.parity is not None else 0
    is_told = importance is None and is_remote
    told = _told_by_engine(graph, every) if is_told else _told_by_both(graph, importance, every)
    return _beside_its_forwards(told) if is_separate and is_remote and spec.schedule.lag else told


def check_rollout(graph: Graph, spec: Spec) -> None:
    """Raise UserError for an engine that nothing is generated with, and for log-probs that cannot agree."""
    algorithm, rollout = spec.algorithm, spec.rollout
    if rollout.engine == "transformers":
        return
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


def _comparable_every(parity: ParitySpec, spec: Spec) -> int:
    """Steps between two comparisons of engine and trainer, which must hold the same weights then.

    Those that the engine draws batch b with are as old as k * floor(max(0, b - lag) / k), k = sync.every.
    """
    return spec.steps if spec.schedule.lag else lcm(parity.every, spec.sync.every)


def _told_by_engine(graph: Graph, every: int) -> Graph:
    """No copy beside the engine forwards: its log-probs are the policy's, and the trained copy checks them.

    ``every`` 0: no gate.
    """
    operators: list[Operator] = []
    for operator in graph.operators:
        if operator.kind == "generate":
            operators.append(replace(operator, writes=(*operator.writes, "logprobs")))
        elif operator.writes != ("logprobs",):
            operators.append(operator)
    if every:
        role = _role_of(graph)
        column = "trainer_logprobs"
        trainer = Operator(column, "forward", role, TEXT, (column,), every=every, on_trained=True)
        operators += [trainer, _gate(role, ("logprobs", column), every)]
    return replace(graph, operators=_before_training(operators))


def _told_by_both(graph: Graph, importance: ImportanceSpec | None, every: int) -> Graph:
    """Engine and trained copy each tell log-probs of the tokens."""
    corrected = [_corrected(operator) if importance is not None else operator for operator in graph.operators]
    operators = [
        replace(operator, writes=(*operator.writes, "rollout_logprobs")) if operator.kind == "generate" else operator
        for operator in corrected
    ]
    if every:
        operators.append(_gate(_role_of(graph), ("rollout_logprobs", "logprobs"), every))
    return replace(graph, operators=_before_training(operators))


def _corrected(operator: Operator) -> Operator:
    """The trained copy computes ``logprobs`` before it trains; a penalty in the reward is that of the policy which
    drew the tokens; the loss reads both."""
    if operator.writes == ("logprobs",):
        return replace(operator, on_trained=True)
    if operator.kind == "combine" and "logprobs" in operator.reads:
        reads = tuple("rollout_logprobs" if name == "logprobs" else name for name in operator.reads)
        return replace(operator, reads=reads)
    if operator.kind == "train" and "logprobs" in operator.reads:
        return replace(operator, reads=(*operator.reads, "rollout_logprobs"))
    return operator


def _beside_its_forwards(graph: Graph) -> Graph:
    """What no copy beside the engine can forward, the trained one does, and with a lag a step later: what is combined
    with that waits for it there."""
    role = _role_of(graph)
    late = {column for each in graph.operators if (each.kind, each.role) == ("forward", role) for column in each.writes}

    def moved(operator: Operator) -> Operator:
        waits = operator.kind == "combine" and late & set(operator.reads)
        return replace(operator, on_trained=True) if waits else operator

    return replace(graph, operators=tuple(moved(operator) for operator in graph.operators))


def _role_of(graph: Graph) -> str:
    assert graph.generated is not None, "an engine is asked for only where something is generated"
    return graph.generated


def _gate(role: str, compared: tuple[str, str], every: int) -> Operator:
    reads = (*compared, "tokens", "response_mask")
    return Operator("parity", "combine", role, reads, function="parity", barrier=True, every=every, on_trained=True)


def _before_training(operators: list[Operator]) -> tuple[Operator, ...]:
    """A graph stands in the order that a person would read it."""
    return tuple(sorted(operators, key=lambda operator: operator.kind == "train"))
