"""Rewrite a graph for a rollout engine, or for a policy that generates while another one is trained.

Column ``logprobs``: of the sampled tokens under the weights that training of the step starts from, which the loss takes
its ratio to. ``rollout_logprobs``: under the distribution that they were sampled from. Where nothing corrects for their
difference one of them serves for both (plan/old_logprobs.py), and a gate (``parity``) compares the two engines.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from flexrlhf.config.algorithms.base import ImportanceSpec, SampledSpec
from flexrlhf.config.engines import facts_of
from flexrlhf.config.spec import ParitySpec, Spec
from flexrlhf.errors import UserError
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Graph, Operator, after
from flexrlhf.plan.old_logprobs import also_writing, check_setting, from_generation, from_training, logprob_source


def with_rollout(graph: Graph, spec: Spec, is_remote: bool) -> Graph:
    """Return ``graph`` for the rollout engine of ``spec``. ``is_remote``: inference is on other ranks than training.

    Raises UserError for settings of rollouts that do not go with the algorithm.
    """
    check_rollout(graph, spec)
    if graph.generated is None:
        return graph
    algorithm, rollout = spec.algorithm, spec.rollout
    importance = algorithm.importance if isinstance(algorithm, SampledSpec) else None
    if importance is not None:
        graph = _corrected_graph(graph, importance)
    source = logprob_source(graph, spec, is_remote)
    match source.kind:
        case "generation":
            graph = from_generation(graph, source, spec)
        case "training":
            graph = from_training(graph, source, spec)
        case "forward" if rollout.has_copy and importance is None:
            graph = replace(graph, operators=also_writing(graph.operators, "rollout_logprobs"))
    rounds = is_remote and spec.sync.dtype is not None
    if rollout.parity is not None and (rollout.has_copy or rounds):
        graph = _with_parity(graph, rollout.parity, spec, of_copy=rounds and not rollout.has_copy)
    is_late = spec.schedule.lag > 0 and (rollout.has_copy or importance is not None)
    return _after_late_forwards(graph, rollout.has_copy and is_remote) if is_late else graph


def check_rollout(graph: Graph, spec: Spec) -> None:
    """Raise UserError for an engine that generates nothing, and for log-probs that cannot agree."""
    algorithm, rollout = spec.algorithm, spec.rollout
    generates = any(operator.kind == "generate" for operator in graph.evaluation)
    if spec.eval is not None and spec.eval.temperature is not None and not generates:
        raise UserError(f"eval.temperature: evaluations of {algorithm.name} generate nothing; remove it")
    check_setting(graph, spec)
    if not rollout.has_copy:
        if rollout.parity != ParitySpec() and spec.sync.dtype is None:
            raise UserError(
                "rollout.parity: transformers generates with the actor's weights unless sync.dtype rounds them; remove "
                "it, or give guards.sampled_logprobs"
            )
        return
    if rollout.is_hybrid and spec.schedule.lag:
        raise UserError(
            f"schedule.lag: 1 needs shadows, and rollout.engine {rollout.engine} generates on the ranks that train the "
            "actor; use lag 0, or rollout.engine: transformers"
        )
    least = facts_of(rollout.engine).least_temperature
    if isinstance(algorithm, SampledSpec) and algorithm.temperature < least:
        raise UserError(
            f"algorithm.temperature: {rollout.engine} raises what is below {least} to it, found "
            f"{algorithm.temperature:g}; use at least {least}, or rollout.engine: transformers"
        )
    if graph.generated is None:
        raise UserError(
            f"rollout.engine: {rollout.engine} has nothing to do, since {algorithm.name} trains on responses of the "
            f"data set; remove rollout"
        )
    if compares_cut_logprobs(spec):
        raise UserError(
            "rollout.parity: top_p, top_k and min_response_tokens cut the sampling distribution, so the engine's "
            "log-probs are not those of the policy that the trainer computes; use null"
        )


def compares_cut_logprobs(spec: Spec) -> bool:
    """Whether the parity gate would compare log-probs of the whole distribution with log-probs of a part of it."""
    algorithm = spec.algorithm
    return isinstance(algorithm, SampledSpec) and algorithm.is_cut and spec.rollout.parity is not None


def _corrected_graph(graph: Graph, importance: ImportanceSpec) -> Graph:
    """Return ``graph`` under importance correction, with log-probs from engine and trained copy."""
    operators = also_writing((_corrected(operator) for operator in graph.operators), "rollout_logprobs")
    if importance.reject is not None:
        operators = _with_rejection(operators)
    return replace(graph, operators=operators)


def _with_rejection(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Return ``operators`` with the rejection of responses behind the advantages; the actor trains on the rest."""
    written, compared = ("kept_mask",), ("logprobs", "rollout_logprobs", "loss_mask")
    rejection = Operator("rejection", "combine", "actor", compared, written, function="rejection")
    reading = ("train_actor", "covariance")
    kept = tuple(replace(o, reads=(*o.reads, *written)) if o.name in reading else o for o in operators)
    return after(kept, "advantages", rejection)


def _with_parity(graph: Graph, parity: ParitySpec, spec: Spec, of_copy: bool) -> Graph:
    """Return ``graph`` with the parity gate, at steps in which engine and trained copy hold the same weights.

    ``of_copy``: the engine is a copy of the actor in transformers, whose weights are rounded, and ``logprobs`` are its.

    The engine generates batch b with the weights after k * floor(max(0, b - lag) / k) batches, k = sync.every. With a
    lag that is step 0 alone; else also the first step after a sync, which may have gone wrong. Where no forward writes
    ``logprobs``, the trained copy computes its own for the gate.
    """
    role, k = _role_of(graph), spec.sync.every
    every, also = (spec.steps, 0) if spec.schedule.lag else (lcm(parity.every, k), k)
    operators = list(graph.operators)
    of_engine = "rollout_logprobs" if "rollout_logprobs" in graph.producers else "logprobs"
    compared = (of_engine, "logprobs")
    producer = graph.producers.get("logprobs")
    if producer is None or producer.kind == "generate" or (of_copy and not producer.on_trained):
        own = ("trainer_logprobs",)
        compared = (of_engine, *own)
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
    in_order = sorted(operators, key=lambda operator: operator.kind == "train")  # training last, as one reads it
    return replace(graph, operators=tuple(in_order))


def _corrected(operator: Operator) -> Operator:
    """Return ``operator`` under importance correction: the trained copy computes ``logprobs`` before it trains, a KL
    penalty in the reward is that of the policy that sampled the tokens, and the loss reads both."""
    if "logprobs" in operator.writes:
        return replace(operator, on_trained=True)
    if operator.kind == "combine" and {"logprobs", "ref_logprobs"} <= set(operator.reads):
        reads = tuple("rollout_logprobs" if name == "logprobs" else name for name in operator.reads)
        return replace(operator, reads=reads)
    if operator.kind == "train" and "logprobs" in operator.reads:
        return replace(operator, reads=(*operator.reads, "rollout_logprobs"))
    return operator


def _after_late_forwards(graph: Graph, is_alone: bool) -> Graph:
    """Return ``graph`` with combines on the trained copy if they read its forwards' columns, a step later with a lag.

    ``is_alone``: no other copy than the trained one can forward.
    """
    role = _role_of(graph)
    forwards = [o for o in graph.operators if (o.kind, o.role) == ("forward", role) and (is_alone or o.on_trained)]
    late = {column for operator in forwards for column in operator.writes}

    def moved(operator: Operator) -> Operator:
        waits = operator.kind == "combine" and late & set(operator.reads)
        return replace(operator, on_trained=True) if waits else operator

    return replace(graph, operators=tuple(moved(operator) for operator in graph.operators))


def _role_of(graph: Graph) -> str:
    assert graph.generated is not None, "a rollout engine needs an operator that generates"
    return graph.generated
