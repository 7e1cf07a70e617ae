"""Classes of devices in a vector: training takes the one with more memory and speed, in any order of the nodes."""

from __future__ import annotations

from itertools import permutations

import pytest
from small_runs import plan_of

from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan, format_short_plan

A100, V100 = "A100-80G", "V100-32G"
TRAINED, SHADOWS, FROZEN = ("actor", "critic"), ("actor.shadow", "critic.shadow"), ("ref", "reward")
ORDERS = sorted(set(permutations((A100, A100, V100, V100))))
TABLE_III = dict.fromkeys((*TRAINED, *SHADOWS), (A100, 4)) | dict.fromkeys(FROZEN, (V100, 8))
PAIRS = dict.fromkeys(TRAINED, (A100, 8)) | dict.fromkeys(FROZEN, (V100, 4))
SIDES = dict.fromkeys(TRAINED, (A100, 8)) | dict.fromkeys((*SHADOWS, *FROZEN), (V100, 8))


def planned_on(order: tuple[str, ...], placement: object) -> Plan:
    nodes = ", ".join(f"{{devices: 4, class: {name}}}" for name in order)
    return plan_of(placement, 16, f"cluster={{nodes: [{nodes}]}}", "rollout.engine=transformers")


def homes(plan: Plan) -> dict[str, tuple[str, int]]:
    """Class and number of the devices of each model."""
    found = {}
    for model in plan.placement.models:
        (device_class,) = {plan.cluster.devices[rank].device_class for rank in model.ranks}
        found[str(model.name)] = device_class, len(model.ranks)
    return found


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        # FlexRLHF, table III: training and generation on A100, reference and reward on V100
        ([0.25, 0.25, 0.25, 0.25, 0.5, 0.5], TABLE_III),
        # the same by shares of each class, as not all models fit into one otherwise
        ([0.5, 0.5, 0.5, 0.5, 1, 1], TABLE_III),
        ([1, 1, 0.5, 0.5], PAIRS),
        ([0.5, 0.5, 0.25, 0.25], PAIRS),
        ({"actor": 1, "critic": 1, "ref": 0.5, "reward": 0.5}, PAIRS),
        ([0.5] * 6, SIDES),
        (None, PAIRS | dict.fromkeys(FROZEN, (V100, 8))),
        ({"actor": {"ratio": 1, "on": "V100"}, "critic": 1, "ref": 1, "reward": {"ratio": 1, "on": "V100"}},
         {"actor": (V100, 8), "critic": (A100, 8), "ref": (A100, 8), "reward": (V100, 8)}),
    ],
    ids=["table III", "shares of classes", "pairs", "pairs of all", "a mapping", "sides", "no vector", "pinned"],
)  # fmt: skip
def test_any_order_of_nodes_gives_the_same_layout(placement: object, expected: dict[str, tuple[str, int]]) -> None:
    for order in ORDERS:
        plan = planned_on(order, placement)
        assert homes(plan) == expected, order
        # ranks are numbered by the nodes as written
        assert [plan.cluster.devices[rank].device_class for rank in range(0, 16, 4)] == list(order)
        if "actor.shadow" in expected and expected["actor.shadow"][0] == A100:
            nodes = {name: {plan.cluster.node_of(rank) for rank in plan.placement[name].ranks} for name in expected}
            assert nodes["actor"] == nodes["critic"] and not nodes["actor"] & nodes["actor.shadow"]


@pytest.mark.parametrize("order", [(V100, V100, A100, A100), (A100, V100, A100, V100)], ids=str)
def test_a_plan_says_where_models_are_and_why(order: tuple[str, ...]) -> None:
    plan = planned_on(order, [1, 1, 0.5, 0.5])
    reason = (
        "actor, critic on A100-80G; ref, reward on V100-32G: models that train take A100-80G, with most memory times "
        "speed; a ratio counts the devices of the model's class, else not all would fit into one; `on:` pins a model"
    )
    assert f"  device classes: {reason}" in format_plan(plan).splitlines()
    assert "actor, critic on A100-80G; ref" in format_short_plan(plan, 200)
    assert not planned_on((A100,) * 4, [1, 1, 0.5, 0.5]).placement.reason
    everywhere = {"ranks": list(range(16))}
    assert not planned_on(order, dict.fromkeys((*TRAINED, *FROZEN), everywhere)).placement.reason


def test_classes_of_which_nothing_is_known_are_taken_as_listed() -> None:
    nodes = "[{devices: 2, class: one}, {devices: 2, class: other}]"
    plan = plan_of([1, 1, 0.5, 0.5], 4, f"cluster={{nodes: {nodes}, device: cpu}}")
    assert homes(plan) == {"actor": ("one", 2), "critic": ("one", 2), "ref": ("other", 1), "reward": ("other", 1)}
    assert "take one, the first, as nothing known of the classes differs" in plan.placement.reason
    faster = nodes.replace("one", "one, speed: 1").replace("other", "other, speed: 3/2")
    assert homes(plan_of([1, 1, 0.5, 0.5], 4, f"cluster={{nodes: {faster}, device: cpu}}"))["actor"] == ("other", 2)
