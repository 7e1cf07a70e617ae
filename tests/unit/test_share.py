"""A reference without a copy of its own: the actor's base weights, without its adapters, compute its log-probs."""

from __future__ import annotations

import pytest
from small_runs import plan_of, spec_of

from flexrlhf.config.algorithms.ppo import PpoSpec
from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan

SHARED = ("models.actor.lora={rank: 2}", "models.ref.share=actor")
THREE = ("actor", "critic", "reward")
FIVE = ("actor.shadow", "critic.shadow", *THREE)


def shared_plan(placement: object, devices: int, *overrides: str) -> Plan:
    return plan_of(placement, devices, *SHARED, *overrides)


@pytest.mark.parametrize(
    ("placement", "settings", "shares"),
    [
        (None, (), True),
        ({"actor": 1, "critic": 0.5, "reward": 1}, (), True),
        (None, ("models.ref={}",), False),
        (None, ("models.ref.dtype=float32",), False),
        ([1, 1, 1, 1], (), False),
        ({"actor": 1, "critic": 1, "ref": 1, "reward": 1}, (), False),
        (None, ("models.actor.lora=null",), False),
    ],
)
def test_the_actor_with_adapters_is_its_own_reference_where_nothing_is_said_of_one(
    placement: object, settings: tuple[str, ...], shares: bool
) -> None:
    plan = plan_of(placement, 2, "models.actor.lora={rank: 2}", *settings)
    assert ("ref" not in plan.graph.roles) == shares
    assert not shares or plan.schedule == plan_of(placement, 2, *SHARED).schedule
    # the resolved YAML says so, too
    assert make_plan(Spec.parse(read_yaml(plan.spec.dump()))).graph == plan.graph


# --- the graph


def test_the_role_goes_and_its_operators_run_without_adapters() -> None:
    before, after = PpoSpec().step_graph(), PpoSpec().step_graph().sharing("ref", "actor")
    assert after.roles == THREE
    assert after.trained == ("actor", "critic")
    pairs = zip(before.operators, after.operators, strict=True)
    assert [(old.name, new.role, new.adapters) for old, new in pairs if old != new] == [
        ("ref_logprobs", "actor", False)
    ]
    assert all(operator.adapters for operator in before.operators)


def test_nothing_else_about_the_graph_changes() -> None:
    before, after = PpoSpec().step_graph(), PpoSpec().step_graph().sharing("ref", "actor")
    assert after.waves == before.waves
    assert after.after_barrier == before.after_barrier
    assert (after.inputs, after.evaluation, after.data) == (before.inputs, before.evaluation, before.data)


def test_the_graph_follows_from_the_spec() -> None:
    assert make_graph(spec_of(None, 1, *SHARED)).roles == THREE
    assert make_graph(spec_of(None, 1)).roles == ("actor", "critic", "ref", "reward")


# --- placement


@pytest.mark.parametrize(
    ("vector", "names", "strategy"),
    [([1, 1, 1], THREE, "co-located"), ([1, 1, 0.5], THREE, "interleaving"), ([0.5] * 5, FIVE, "disaggregated")],
)
def test_vectors_have_no_entry_for_it(vector: list[float], names: tuple[str, ...], strategy: str) -> None:
    plan = shared_plan(vector, 2)
    assert tuple(model.name for model in plan.placement.models) == names
    assert plan.strategy == strategy
    assert set(plan.shapes) == set(THREE)


def test_a_mapping_has_no_entry_for_it() -> None:
    assert "ref" not in shared_plan({"actor": 1, "critic": 1, "reward": 1}, 2).placement
