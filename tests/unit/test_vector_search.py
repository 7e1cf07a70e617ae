"""Placements by ratio vectors are part of every search: none is faster than its result, wherever a side ends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from flexrlhf.config.model_settings import Head
from flexrlhf.config.placement_settings import PlacementEntry, PlacementMap
from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.proposals import spec_of
from flexrlhf.guideline.advice.searched_step import FORBIDDEN
from flexrlhf.guideline.advice.space import make_space, with_schedule
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.costs.relations import Relation
from flexrlhf.guideline.search.branch_and_bound import search
from flexrlhf.guideline.search.evaluate import evaluate
from flexrlhf.guideline.search.problem import (
    Assignment,
    Choice,
    DevicePool,
    LinkEnd,
    Meshes,
    MeshShape,
    RowTransfer,
    SearchProblem,
    SearchSync,
    Vectors,
)
from flexrlhf.guideline.search.vectors import sizes_of
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.placement.cluster import Cluster, Device
from flexrlhf.placement.ratios import Roles, assign_ranks
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.strategies.instructions import Offload
from tests.unit.test_advise import random_assignment, spec_for
from tests.unit.test_search import fits, ratio_space

HEADS: dict[str, Head] = {"actor": "causal", "critic": "scalar", "ref": "causal"}
ROLES = Roles(("actor", "critic", "ref"), ("actor", "critic"), HEADS, "actor", "actor")


def problem_for(pool: DevicePool, seed: int, shadow: bool) -> SearchProblem:
    """Return a problem of three models; with shadows, of four, whose sides share no device."""
    problem = ratio_space(pool, seed, lag=int(shadow), shadow=shadow)
    if not shadow:
        return replace(problem, vectors=Vectors((("actor", "critic", "ref"),)))
    apart = [("scores", "train_actor"), ("scores", "train_critic"), ("generate", "values")]
    rows = (*(RowTransfer(*pair, only_between_sides) for pair in apart), *problem.rows[1:])
    calls = tuple(replace(c, seconds=only_between_sides) if isinstance(c, SearchSync) else c for c in problem.calls)
    vectors = Vectors((("actor", "critic"), ("shadow", "ref")))
    return replace(problem, rows=rows, calls=calls, vectors=vectors)


def only_between_sides(source: LinkEnd, to: LinkEnd, relation: Relation) -> float:
    return 0.2 / source.shape.size if relation == "disjoint" else FORBIDDEN


def vectors(pool: DevicePool, shadow: bool) -> Iterator[dict[str, tuple[int, int]]]:
    """Meshes by name of every vector of whole devices, as the placement packs them."""
    cluster = Cluster(tuple(Device(rank, rank // pool.per_node, "any") for rank in range(pool.num_devices)))
    names = (*(("actor.rollout",) if shadow else ()), "actor", "critic", "ref")
    for sizes in product(range(1, pool.num_devices + 1), repeat=len(names)):
        ratios = {name: Fraction(size, pool.num_devices) for name, size in zip(names, sizes, strict=True)}
        entries = {name: PlacementEntry(ratio=ratio) for name, ratio in ratios.items()}
        try:
            ranks, _ = assign_ranks(PlacementMap(models=entries), ROLES, cluster)
        except UserError:
            continue
        yield {name.replace("actor.rollout", "shadow"): (mine[0], len(mine)) for name, mine in ranks.items()}


def assignments(problem: SearchProblem, meshes: dict[str, tuple[int, int]]) -> Iterator[Assignment]:
    """Every choice of options on ``meshes`` that fits."""
    shapes = {name: problem.shape_of(*mesh) for name, mesh in meshes.items()}
    choices = [[Choice(p.name, *meshes[p.name], each) for each in p.options(shapes[p.name])] for p in problem.parts]
    yield from (assignment for assignment in product(*choices) if fits(problem, assignment))


@pytest.mark.parametrize(
    ("devices", "per_node", "shadow"), [(6, 6, False), (6, 3, True), (8, 4, False), (12, 4, False)]
)
def test_no_vector_is_faster_than_the_result(devices: int, per_node: int, shadow: bool) -> None:
    """Nor, as branches prove, where no other mesh is tried than all devices."""
    pool, found = DevicePool.of(devices, per_node, 9.0), []
    problem = replace(problem_for(pool, devices, shadow), meshes=Meshes((), ((0, devices),)))
    for meshes in vectors(pool, shadow):
        shapes = [problem.shape_of(*mesh) for mesh in meshes.values()]
        if all(shape.per_node >= min(shape.size, per_node) for shape in shapes):
            found += [evaluate(problem, each) for each in assignments(problem, meshes)]
    result = search(problem, 60.0)
    assert len(found) > 100
    assert result.is_finished and result.is_optimal
    assert result.seconds <= min(found) * (1 + 1e-9)
    assert search(replace(problem, vectors=None), 60.0).seconds > result.seconds


def test_a_part_that_follows_has_the_devices_of_the_other() -> None:
    pool = DevicePool.of(6, 3, 20.0)
    problem = replace(
        ratio_space(pool, 1, shadow=True), vectors=Vectors((("actor", "critic", "ref"),), {"shadow": "actor"})
    )
    (best, *_) = search(problem, 60.0).best
    assert evaluate(problem, best.assignment) == pytest.approx(best.seconds, rel=1e-12)


@pytest.mark.parametrize(("devices", "step"), [(1, 1), (12, 1), (24, 1), (32, 1), (40, 2), (160, 8), (1024, 32)])
def test_sizes_are_parts_of_nodes_or_whole_nodes(devices: int, step: int) -> None:
    pool = DevicePool.of(devices, min(4 if devices == 12 else 8, devices), 1.0)
    assert sizes_of(pool) == tuple(range(step, devices + 1, step))


@pytest.mark.parametrize(
    ("start", "size", "per_node", "unit", "is_even", "is_whole"),
    [
        (0, 12, 8, 4, False, False),
        (4, 12, 8, 4, False, False),
        (4, 8, 4, 4, True, False),
        (8, 16, 8, 8, True, True),
        (6, 4, 2, 2, True, False),
        (1, 5, 5, 5, True, False),
        (13, 11, 8, 1, False, False),
    ],
)
def test_a_shape_is_as_nodes_divide_it(
    start: int, size: int, per_node: int, unit: int, is_even: bool, is_whole: bool
) -> None:
    pool = DevicePool.of(24, 8, 1.0)
    assert pool.shape_of(start, size) == MeshShape(size, ("device",), per_node, unit, is_even, is_whole)


@pytest.mark.parametrize(("nodes", "devices"), [(3, 4), (2, 6)])
def test_sides_that_end_inside_a_node_take_the_seconds_of_the_simulator(nodes: int, devices: int) -> None:
    """On any run of devices, also where the plan has no group of ranks on two nodes."""
    rng, costs = random.Random(nodes), AnalyticCosts()
    cluster = ({"count": nodes, "devices": devices, "class": "A100-80G"},)
    base = make_space(spec_for(8, "qwen2.5-0.5b", nodes=cluster, rollout="vllm"), costs, None)
    end, pairs, inside = nodes * devices, [], 0
    runs = tuple((at, size) for at in range(end) for size in range(1, end - at + 1))
    for has_shadows, lag in [(False, 0), (True, 1)]:
        space = with_schedule(replace(base, has_shadows=has_shadows), 1, lag)
        problem = space.problem
        anywhere = replace(problem, meshes=replace(problem.meshes, blocks=(), listed=runs))
        for _ in range(25):
            assignment = random_assignment(space, anywhere, rng)
            if assignment is None:
                continue
            plan = make_plan(spec_of(space, assignment))
            if {each.model for each in plan.schedule.instructions if isinstance(each, Offload)} <= {"actor.rollout"}:
                pairs.append((evaluate(problem, assignment), simulate(plan, costs).seconds))
                inside += any(problem.shape_of(each.start, each.size).unit < devices < each.size for each in assignment)
    assert len(pairs) > 30 and inside > 10
    assert [fast for fast, _ in pairs] == pytest.approx([whole for _, whole in pairs], rel=1e-12)


def test_no_ratio_of_a_class_is_faster_than_the_result() -> None:
    """On two classes the models of each share its devices."""
    pool = DevicePool(("fast", "slow"), 3, {"fast": 9.0, "slow": 7.0})
    problem = replace(problem_for(pool, 2, False), meshes=Meshes((), ((0, 3),)))
    cluster, found = Cluster(tuple(Device(rank, rank // 3, "fast" if rank < 3 else "slow") for rank in range(6))), []
    for where in product(product(("fast", "slow"), range(1, 4)), repeat=3):
        entries = {
            name: PlacementEntry(ratio=Fraction(size, 3), on=kind)
            for name, (kind, size) in zip(ROLES.all, where, strict=True)
        }
        ranks, _ = assign_ranks(PlacementMap(models=entries), ROLES, cluster)
        meshes = {name: (mine[0], len(mine)) for name, mine in ranks.items()}
        found += [evaluate(problem, each) for each in assignments(problem, meshes)]
    result = search(problem, 60.0)
    assert len(found) > 150 and result.is_optimal
    assert result.seconds <= min(found) * (1 + 1e-9)
    assert search(replace(problem, vectors=None), 60.0).seconds > result.seconds
