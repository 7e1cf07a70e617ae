"""The engine that generates: its choice (``rollout.engine: auto``), the same on every machine, whatever is installed;
and the graph rewritten for it, or for a policy that generates while another one is trained.

Column ``logprobs``: of the sampled tokens under the weights that training of the step starts from, which the loss takes
its ratio to. ``rollout_logprobs``: under the distribution that they were sampled from. Where nothing corrects for their
difference one of them serves for both (plan/old_logprobs.py), and a gate (``parity``) compares the two engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lcm
from pathlib import Path

from flexrlhf.config.algorithms.base import ImportanceSpec
from flexrlhf.config.engines import EngineFacts
from flexrlhf.config.model_families import Families
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.config.spec import RolloutSpec, Spec
from flexrlhf.errors import UserError, either
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Graph, Operator, after
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.placed import ModelName
from flexrlhf.plan.algorithm_graph import heads_of
from flexrlhf.plan.old_logprobs import (
    also_writing,
    check_setting,
    from_generation,
    from_training,
    logprob_source,
)
from flexrlhf.plan.router_replay import with_router_replay
from flexrlhf.weights.shapes import read_config


def with_rollout_engine(
    spec: Spec, graph: Graph, cluster: Cluster, pending: Mapping[Path, ModelSpec], obstacle: str = ""
) -> tuple[Spec, str]:
    """Return ``spec`` with the engine that generates, and why it is that one; no reason if it is written, or where
    transformers is the only candidate.

    spec:      its models are resolved.
    pending:   directory → model, for models that an earlier run of the command will write.
    obstacle:  why vLLM cannot generate, which ``spec`` does not show.

    Raises UserError for settings that the chosen engine does not have.
    """
    role = graph.generated
    if spec.rollout.engine != "auto":
        return spec, ""
    if role is None:
        return _with_transformers(spec, f"{spec.algorithm.name} trains on responses of the data set"), ""
    if not cluster.all_compute_in_bfloat16(spec.cluster):
        unknown = "not all devices of cluster.nodes are GPUs of known classes that compute in bfloat16"
        return _with_transformers(spec, unknown), ""
    family = _family(spec, role, pending)
    if obstacle := obstacle or _obstacle(spec, graph, role, family):
        return _with_transformers(spec, obstacle), f"transformers, since {obstacle}"
    devices = " and ".join(cluster.classes)
    chosen = EngineFacts.of_auto().name
    return _with_engine(spec, chosen), f"{chosen}, since all devices are {devices}, and it serves {family} models"


def _obstacle(spec: Spec, graph: Graph, role: str, family: str) -> str:
    """Return why the engine of ``auto`` cannot generate, or is not chosen; empty for no reason."""
    facts, model, placement = EngineFacts.of_auto(), spec.models.of(role), spec.placement
    entries = placement.models if isinstance(placement, PlacementMap) else {}
    has_copies = spec.schedule.lag > 0 or spec.sync.every > 1 or any(ModelName(name).copy for name in entries)
    has_copies |= isinstance(placement, tuple) and len(placement) > len(graph.roles)
    name, least = facts.name, facts.least_temperature
    obstacles = {
        f"{name} serves {either(Families.SERVED)} models": family not in Families.SERVED,
        f"models.{role}.cuda_graphs is for transformers": model is not None and model.cuda_graphs,
        f"the {role} also computes values": heads_of(graph)[role] == "both",
        f"models.{role}.router_replay records experts, which {name} does not return here": (
            model is not None and model.has_replay
        ),
        f"models.{role}.shadow is the copy that generates": model is not None and model.shadow is not None,
        f"placement has {ModelName.shadow_of(role)}": ModelName.shadow_of(role) in entries,
        "an operator of placement.operators generates with an engine of its own": any(
            spec.operators[each.name].engine not in (None, name)
            for each in graph.operators
            if each.kind == "generate" and each.name in spec.operators
        ),
        f"{name} samples at a temperature of at least {least}": spec.algorithm.temperature < least,
        "top_p, top_k or min_response_tokens cut the distribution that rollout.parity compares (null: it does not)": (
            compares_cut_logprobs(spec)
        ),
        "rollout.logprobs: recompute needs a copy of the actor": has_copies and spec.recomputes_next_to_generation,
    }
    return next((text for text, is_so in obstacles.items() if is_so), "")


def _family(spec: Spec, role: str, pending: Mapping[Path, ModelSpec]) -> str:
    """Return the family of the model that generates."""
    model = spec.models.of(role)
    assert model is not None, f"{role} is resolved"
    return str(read_config(role, model.origin(pending))["model_type"])


def _with_transformers(spec: Spec, obstacle: str) -> Spec:
    """Return ``spec`` with transformers, which generates since vLLM has an ``obstacle``. Raises UserError for settings
    that it does not have."""
    surplus = spec.rollout.surplus("transformers")
    if spec.rollout.has_own_parity and spec.sync.dtype is None:
        surplus.append("parity")
    if surplus:
        raise UserError(
            f"rollout.{surplus[0]}: has no effect, since rollout.engine auto is transformers here ({obstacle}); remove "
            f"{', '.join(surplus)}, or write an engine that has it"
        )
    return _with_engine(spec, "transformers")


def _with_engine(spec: Spec, engine: str) -> Spec:
    """Return ``spec`` with an engine that remains one that is not written: a short YAML leaves it out."""
    written, settings = spec.rollout.model_fields_set - {"engine"}, {**dict(spec.rollout), "engine": engine}
    return spec.model_copy(update={"rollout": RolloutSpec.model_construct(written, **settings)})


def with_rollout(graph: Graph, spec: Spec, is_remote: bool) -> Graph:
    """Return ``graph`` for the rollout engine of ``spec``. ``is_remote``: inference is on other ranks than training.

    Raises UserError for settings of rollouts that do not go with the algorithm.
    """
    check_rollout(graph, spec)
    if graph.generated is None:
        return with_router_replay(graph, spec)
    rollout, importance = spec.rollout, spec.algorithm.importance
    if importance is not None:
        graph = _corrected_graph(graph)
    graph = _with_kept_tokens(graph, spec, importance)
    source, reason = logprob_source(graph, spec, is_remote)
    match source:
        case "generation":
            graph = from_generation(graph, reason, spec)
        case "training":
            graph = from_training(graph, reason, spec)
        case "forward" if rollout.has_copy and importance is None:
            graph = replace(graph, operators=also_writing(graph.operators, "rollout_logprobs"))
    rounds = is_remote and spec.sync.dtype is not None
    if rollout.parity is not None and (rollout.has_copy or rounds):
        graph = _with_parity(graph, rollout.parity.every, spec, of_copy=rounds and not rollout.has_copy)
    return with_router_replay(graph, spec)


def check_rollout(graph: Graph, spec: Spec) -> None:
    """Raise UserError for an engine that generates nothing, and for log-probs that cannot agree."""
    algorithm, rollout = spec.algorithm, spec.rollout
    generates = any(operator.kind == "generate" for operator in graph.evaluation)
    if spec.eval is not None and spec.eval.temperature is not None and not generates:
        raise UserError(f"eval.temperature: evaluations of {algorithm.name} generate nothing; remove it")
    check_setting(graph, spec)
    if not rollout.has_copy:
        if rollout.has_own_parity and spec.sync.dtype is None:
            raise UserError(
                "rollout.parity: transformers generates with the actor's weights unless sync.dtype rounds them; remove "
                "it, or give guards.sampled_logprobs"
            )
        return
    if rollout.is_hybrid and spec.schedule.lag:
        raise UserError(
            f"schedule.lag: {spec.schedule.lag} needs shadows, and rollout.engine {rollout.engine} generates on the "
            "ranks that train the actor; use lag 0, or rollout.engine: transformers"
        )
    least = rollout.facts.least_temperature
    if algorithm.temperature < least:
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
    return spec.algorithm.is_cut and spec.rollout.parity is not None


def _corrected_graph(graph: Graph) -> Graph:
    """Return ``graph`` under importance correction, with log-probs from engine and trained copy."""
    return replace(graph, operators=also_writing((_corrected(each) for each in graph.operators), "rollout_logprobs"))


def _with_kept_tokens(graph: Graph, spec: Spec, importance: ImportanceSpec | None) -> Graph:
    """Return ``graph`` with the rejection of tokens behind the advantages, if ``importance`` leaves some out; the actor
    trains on the rest. What writes the mask that it trains on reads the tokens' versions, to report their staleness."""
    operators, limit = graph.operators, importance.max_staleness if importance is not None else None
    mask = "loss_mask"
    compared = ("logprobs", "rollout_logprobs") if importance is not None and importance.reject is not None else ()
    if compared or (limit is not None and limit < spec.most_stale):
        mask = "kept_mask"
        rejection = Operator("rejection", "combine", "actor", (*compared, "loss_mask"), (mask,), function="rejection")
        reading = ("train_actor", "covariance")
        kept = tuple(replace(o, reads=(*o.reads, mask)) if o.name in reading else o for o in operators)
        operators = after(kept, "advantages", rejection)
    if limit is not None and limit >= spec.most_stale:
        reason = f"no token is staler than {spec.most_stale}, so algorithm.importance.max_staleness {limit} keeps all"
        graph = replace(graph, left_out=(*graph.left_out, ("kept_mask", reason)))
    if spec.most_stale and "policy_version" in graph.producers:
        read = ("policy_version",)
        operators = tuple(replace(o, reads=(*o.reads, *read)) if mask in o.writes else o for o in operators)
    return replace(graph, operators=operators)


def _with_parity(graph: Graph, every: int, spec: Spec, of_copy: bool) -> Graph:
    """Return ``graph`` with the parity gate, at steps in which engine and trained copy hold the same weights.

    every:    steps between two comparisons.
    of_copy:  the engine is a copy of the actor in transformers, whose weights are rounded, and ``logprobs`` are its.

    The engine generates batch b with the weights after k * floor(max(0, b - lag) / k) batches, k = sync.every. With a
    lag, or in segments, that is step 0 alone; else also the first step after a sync, which may have gone wrong. Where
    no forward writes ``logprobs``, the trained copy computes its own for the gate.
    """
    role, k = _role_of(graph), spec.sync.every
    is_stale = spec.schedule.lag > 0 or spec.num_segments > 1
    every, also = (spec.steps, 0) if is_stale else (lcm(every, k), k)
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


def _role_of(graph: Graph) -> str:
    assert graph.generated is not None, "a rollout engine needs an operator that generates"
    return graph.generated
