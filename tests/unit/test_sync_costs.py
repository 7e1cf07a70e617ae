"""Weight syncs by their path: bytes that cross between nodes are the plan's, and times follow from links and ports."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import pytest
from small_runs import TINY, placed_model

from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.costs.cost_model import Links
from flexrlhf.guideline.costs.links import MeshSide, ModelLink, SyncWeights, sync_traffic
from flexrlhf.guideline.costs.relations import relation_of
from flexrlhf.guideline.simulation.pricing import side_of
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.weights.shapes import model_shape
from flexrlhf.weights.shards import part_elements
from flexrlhf.weights.sync_plan import SyncPlan

COSTS = AnalyticCosts()
PER_NODE = 4
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8}
SHAPE = model_shape("actor", ModelSpec(init=TINY | SIZES))
assert SHAPE is not None
WHOLE = 4 * sum(prod(size) for _, size in SHAPE.trained)
SOURCES: list[dict[str, Any]] = [
    {},
    {"zero": 3},
    *(
        {"engine": "megatron", "tp": tp, "pp": pp}
        for tp, pp in ((2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (2, 4), (4, 2))
    ),
]


@pytest.mark.parametrize(
    ("receiving", "overlaps"), [(None, False), (4, False), (12, False), (12, True)], ids=lambda each: f"{each}"
)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_bytes_that_cross_are_those_of_the_plan(source: dict[str, Any], receiving: int | None, overlaps: bool) -> None:
    """The busiest node sends or receives as much; up to norms, which every rank stores."""
    for size in (8, 16):
        ranks = tuple(range(size))
        copied = ranks if receiving is None else tuple(range(size, size + receiving))
        for tp in (1, 4):
            trained, copy = placed_model("actor", ranks, **source), placed_model("actor.shadow", copied, tp=tp)
            crossing: Counter[tuple[str, int]] = Counter()
            links = SyncPlan.bytes_by_link(trained, copy, SHAPE, 10**6, lambda rank: rank // PER_NODE, None, overlaps)
            for (sender, receiver), sent in links.items():
                if sender // PER_NODE != receiver // PER_NODE:
                    crossing["sent", sender // PER_NODE] += sent
                    crossing["received", receiver // PER_NODE] += sent
            parts = [SHAPE.trained_parts(copy, rank) for rank in copied]
            part = 4 * max(part_elements(each, list(each)) for each in parts)
            weights = SyncWeights(part, 0, 1, 1, overlaps)
            sides = side_of(trained, PER_NODE), side_of(copy, PER_NODE)
            found = sync_traffic(weights, *sides, relation_of(ranks, copied), several_nodes=True)
            assert found.across == pytest.approx(max(crossing.values(), default=0), rel=0.12), (size, tp)


def test_ranks_whose_part_stays_the_same_receive_nothing() -> None:
    alike = MeshSide(8, 8, 2, ParallelDims(tp=4), shards=4)
    assert sync_traffic(SyncWeights(100, 0, 1, 1), alike, alike, "same", several_nodes=True).total == 0


def seconds(links: Links, senders: int = 8, several_nodes: bool = True) -> float:
    """Time of 16 GB to as many ranks that each store all of it."""
    side = MeshSide(senders, senders, senders)
    weights = SyncWeights(16 * 10**9, 0, 100, 300)
    return ModelLink(side, side, "disjoint", links, several_nodes).sync_cost(COSTS, weights).seconds


@pytest.mark.parametrize("device", DeviceClass.KNOWN.values(), ids=lambda device: device.name)
def test_a_faster_path_is_never_slower(device: Any) -> None:
    links = Links(device.link_gb_s, device.node_gb_s)
    within, across = seconds(links, several_nodes=False), seconds(links)
    assert within < across
    assert seconds(Links(2 * links.device_gb_s, links.node_gb_s), several_nodes=False) < within
    assert seconds(Links(links.device_gb_s, 2 * links.node_gb_s)) < across
    by_senders = [seconds(links, senders) for senders in (1, 2, 4, 8)]
    assert by_senders == sorted(by_senders, reverse=True)


@pytest.mark.parametrize(("gigabytes", "measured"), [(671, 11.33), (1000, 16.04)], ids=["DeepSeek-V3.1", "Kimi-K2"])
def test_published_updates_through_all_ports(gigabytes: int, measured: float) -> None:
    """MoonshotAI's checkpoint-engine (README): 8-bit weights, all of them to each node of 256 H20."""
    device = DeviceClass.KNOWN["H20-96G"]
    side = MeshSide(256, 8, 32, ParallelDims(tp=8))
    link = ModelLink(side, side, "disjoint", Links(device.link_gb_s, device.node_gb_s), True)
    weights = SyncWeights(gigabytes * 10**9 // 8, 0, 100, 300)
    assert 0.75 * measured < link.sync_cost(COSTS, weights).seconds < 1.33 * measured
