"""Rules of the published guidelines: judged by the figures of a plan, and followed by the guideline's own placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from flexrlhf.config.placement_settings import ClusterSpec, NodeSpec
from flexrlhf.config.spec import Spec
from flexrlhf.guideline.advice.advise import PROPOSALS
from flexrlhf.guideline.advice.candidates import Candidate, FeasibleCandidate, check
from flexrlhf.guideline.advice.guideline_plan import GuidelineResult, guideline
from flexrlhf.guideline.advice.guideline_rules import (
    DISAGGREGATE,
    EVEN_PHASES,
    IN_NODES,
    INTERLEAVE,
    OLDER_INFER,
    RULES,
    SHADOW_SHARE,
    SPARE_SHADOW,
    STOP_BEFORE_FULL,
    GuidelineRule,
    RuleVerdict,
    judged,
)
from flexrlhf.guideline.advice.proposals import spec_of as spec_of_assignment
from flexrlhf.guideline.advice.request import AdviceRequest, nodes_of_eight
from flexrlhf.guideline.advice.space import make_space, with_schedule
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.simulation.simulate import Simulation, simulate
from flexrlhf.placement.cluster import Cluster
from flexrlhf.plan.pipeline import make_plan

PPO = ("actor", "critic", "ref", "reward")
NEWER = {"count": 1, "devices": 8, "class": "A100-80G"}
OLDER = {"count": 2, "devices": 4, "class": "V100-32G", "network_gb_s": 12.5}


def spec_of(model: str, nodes: int | Sequence[Mapping[str, Any]], *overrides: str, **changes: Any) -> Spec:
    cluster = nodes_of_eight(nodes, "A100-80G") if isinstance(nodes, int) else tuple(nodes)
    request = AdviceRequest(dict.fromkeys(PPO, model), cluster, 256, 256, 512, mini_batches=8)
    return replace(request, **changes).spec(overrides)


def simulated(spec: Spec, *vector: float) -> Simulation:
    placed = spec.model_copy(update={"placement": tuple(Fraction(each).limit_denominator(64) for each in vector)})
    return simulate(make_plan(placed), AnalyticCosts())


def verdicts(simulation: Simulation) -> dict[str, RuleVerdict]:
    return {each.rule.name: each for each in judged(simulation)}


SHARED = (3 / 8, 3 / 8, 5 / 8, 5 / 8, 3 / 8, 3 / 8)
ALONE = (1 / 2, 1 / 16, 3 / 8, 3 / 8, 1 / 32, 1 / 32)
STATES = {
    "shared": (SHARED, ("followed", "contradicted", "contradicted"), "12 of 32 devices (38%) with critic.shadow, ref"),
    "alone": (ALONE, ("followed", "followed", "contradicted"), "actor.rollout has 16 of 32 devices (50%) alone"),
    "co-located": ((1, 1, 1, 1), ("contradicted", "not applicable", "not applicable"), "no shadow actor"),
}
"""A placement → its states by three rules, and what is said of the shadow actor."""


@pytest.mark.parametrize(("vector", "states", "evidence"), STATES.values(), ids=STATES)
def test_rules_are_judged_by_the_plan_and_not_by_their_conditions(
    vector: tuple[float, ...], states: tuple[str, ...], evidence: str
) -> None:
    found = verdicts(simulated(spec_of("qwen2.5-1.5b", 32), *vector))
    assert tuple(found[rule.name].state for rule in (DISAGGREGATE, SHADOW_SHARE, EVEN_PHASES)) == states
    assert evidence in found[SHADOW_SHARE.name].evidence


def test_memory_is_full_by_the_share_of_the_fullest_device() -> None:
    simulation = simulated(spec_of("qwen2.5-1.5b", 2), 1, 1, 1, 1)
    peak = max(memory.peak_bytes for memory in simulation.plan.memories)
    for share, state in ((0.94, "followed"), (0.96, "contradicted")):
        node = NodeSpec.model_validate({"devices": 2, "class": "A100-80G", "memory_gb": peak / 1e9 / share})
        found = judged(simulation, Cluster.of(ClusterSpec(nodes=(node,))))
        (verdict,) = (each for each in found if each.rule is STOP_BEFORE_FULL)
        assert verdict.state == state and f"({share:.0%})" in verdict.evidence


def test_a_copy_that_gathers_over_nodes_leaves_its_node() -> None:
    """Of ZeRO-3, at every token; not where each node stores all shards, nor a rollout engine."""
    changes = {"rollout": "transformers"}
    states = []
    for overrides in (("models.actor.zero=3",), ("models.actor.zero=3", "models.actor.shard=node"), ()):
        states.append(
            verdicts(simulated(spec_of("qwen2.5-1.5b", 16, *overrides, **changes), 1, 1, 1, 1))[IN_NODES.name]
        )
    assert [each.state for each in states] == ["contradicted", "followed", "followed"]
    assert states[0].evidence == "actor gathers its weights over 2 nodes at every token"


# --- the guideline's own placement


def ruled(spec: Spec) -> tuple[GuidelineResult, dict[str, RuleVerdict]]:
    """The guideline's placement, proposed within narrower limits until a plan fits, and its verdicts."""
    base = make_space(spec, AnalyticCosts(), None)
    plain = with_schedule(base, spec.schedule.num_chunks, 0)
    shadowed = with_schedule(replace(base, has_shadows=True), spec.schedule.num_chunks, 0)
    for _ in range(PROPOSALS):
        found = guideline(plain, shadowed)
        checked = check(Candidate("guideline", found.name, found.space, found.assignment))
        if isinstance(checked, FeasibleCandidate):
            break
        plain, shadowed = (replace(each, limits=checked.limits) for each in (plain, shadowed))
    assert isinstance(checked, FeasibleCandidate), checked.reason
    return found, {each.rule.name: each for each in judged(checked.simulation, found.space.cluster)}


FLEXRLHF = [rule.name for rule in RULES if rule.source == "FlexRLHF"]


def test_the_guideline_interleaves_by_halves_on_one_node() -> None:
    found, states = ruled(spec_of("llama-7b", 8))
    assert not found.misses and states[INTERLEAVE.name].state == "followed"
    assert {states[name].state for name in FLEXRLHF} == {"followed", "not applicable"}


def test_the_guideline_disaggregates_on_three_nodes_with_even_phases() -> None:
    """In chunks: in one, phases take turns."""
    found, states = ruled(spec_of("llama-7b", 24))
    assert not found.misses and {states[name].state for name in FLEXRLHF} == {"followed", "not applicable"}
    assert all(states[rule.name].state == "followed" for rule in (DISAGGREGATE, SHADOW_SHARE, EVEN_PHASES, IN_NODES))
    assert found.assignment is not None
    for chunks, state in ((found.space.spec.schedule.num_chunks, "followed"), (1, "contradicted")):
        spec = spec_of_assignment(with_schedule(found.space, chunks, 0), found.assignment)
        simulation = simulate(make_plan(spec), AnalyticCosts())
        parts, verdict = simulation.part_seconds, verdicts(simulation)[EVEN_PHASES.name]
        assert verdict.state == state
        assert all(f"{part} {seconds:.1f} s" in verdict.evidence for part, seconds in parts.items())


def test_a_shadow_actor_is_on_newer_devices_that_training_can_spare() -> None:
    _, states = ruled(spec_of("qwen2.5-1.5b", (OLDER, NEWER)))
    assert states[OLDER_INFER.name].state == states[SPARE_SHADOW.name].state == "followed"
    assert "actor, critic on" in states[OLDER_INFER.name].evidence and "A100-80G" in states[SPARE_SHADOW.name].evidence


@pytest.mark.parametrize(
    ("nodes", "gigabytes", "overrides", "rule", "reason"),
    [
        (1, 26, (), INTERLEAVE, "lack memory"),
        (3, 13, (), DISAGGREGATE, "neither side has the memory"),
        (3, 16, (), SHADOW_SHARE, "too little memory"),
        (3, 70, ("schedule.num_chunks=1",), EVEN_PHASES, "room for 1 chunk"),
    ],
)
def test_a_rule_that_cannot_be_followed_has_a_reason(
    nodes: int, gigabytes: int, overrides: tuple[str, ...], rule: GuidelineRule, reason: str
) -> None:
    node = {"count": nodes, "devices": 2, "class": "A100-80G", "memory_gb": gigabytes}
    found, states = ruled(spec_of("qwen2.5-1.5b", (node,), *overrides))
    assert reason in found.misses[rule.name] and states[rule.name].state == "contradicted"
