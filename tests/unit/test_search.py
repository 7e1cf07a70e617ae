"""The search for placements: seconds are those of the walk, its optimum that of brute force, its bound a bound."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from benchmarks.fast_walk import overlaps_of, play
from flexrlhf.guideline.costs.relations import Relation
from flexrlhf.guideline.search.assignments import clock
from flexrlhf.guideline.search.bounds import UNDECIDED, PartialAssignments, areas_of, floors_of, partial_bound
from flexrlhf.guideline.search.branch_and_bound import search
from flexrlhf.guideline.search.cycles import cycle_bound
from flexrlhf.guideline.search.evaluate import call_graph, call_seconds, evaluate
from flexrlhf.guideline.search.evaluate import link_seconds as seconds_of_link
from flexrlhf.guideline.search.problem import (
    Assignment,
    Choice,
    DevicePool,
    LinkEnd,
    LinkSeconds,
    MeshShape,
    Option,
    RowTransfer,
    SearchPart,
    SearchProblem,
    SearchSync,
    SearchTask,
)
from flexrlhf.guideline.search.tables import tables_of

SCALE = {"same": 0.2, "overlapping": 0.5, "disjoint": 1.0}


def link_seconds(base: float) -> LinkSeconds:
    def seconds(source: LinkEnd, to: LinkEnd, relation: Relation) -> float:
        return base * SCALE[relation] * (1 + (source.layout != to.layout)) / min(source.shape.size, to.shape.size)

    return seconds


def part(name: str, tasks: int, seed: int, num_options: int = 2, slow: str = "") -> SearchPart:
    """Return a part with options of random speed that need the more memory the faster they are."""

    def options(shape: MeshShape) -> list[Option]:
        rng = random.Random(f"{name} {seed} {shape.size}")
        stated = []
        for number in range(num_options):
            speed = rng.uniform(0.5, 1.5)
            factor = 1 + (slow in shape.kinds) * (slow != "")
            seconds = tuple(factor * rng.uniform(1, 4) / speed / shape.size**0.8 for _ in range(tasks))
            stated.append(
                Option(seconds, 8 * speed / shape.size, 4 * rng.uniform(0.5, 1) / shape.size, number % 2, number)
            )
        return stated

    return SearchPart(name, options)


def ratio_space(pool: DevicePool, seed: int, lag: int = 0, shadow: bool = False) -> SearchProblem:
    """Actor and critic with several tasks, ref; optionally a shadow actor that generates."""
    generates = "shadow" if shadow else "actor"
    parts = [part("actor", 1 if shadow else 2, seed), part("critic", 2, seed), part("ref", 1, seed)]
    calls: list[SearchTask | SearchSync] = [
        SearchTask("generate", generates),
        SearchTask("scores", "ref", ("generate",)),
        SearchTask("values", "critic", ("generate",)),
        SearchTask("train_actor", "actor", ("scores", "values"), lag),
        SearchTask("train_critic", "critic", ("scores", "values"), lag),
    ]
    if shadow:
        parts.append(part("shadow", 1, seed))
        calls.insert(4, SearchSync("train_actor", "shadow", link_seconds(2.0), overlaps=bool(seed % 2)))
    rows = (
        RowTransfer("scores", "train_actor", link_seconds(0.3), side=lambda end: (end.shape.size, end.layout)),
        RowTransfer("generate", "scores", link_seconds(0.2)),
    )
    return SearchProblem(pool, tuple(parts), tuple(calls), rows)


def call_space(pool: DevicePool, seed: int, num_options: int = 2) -> SearchProblem:
    """Space of a part for each call, as in ReaL."""
    names = ("generate", "scores", "values", "train")
    parts = tuple(part(name, 1, seed, num_options) for name in names)
    calls = (
        SearchTask("generate", "generate"),
        SearchTask("scores", "scores", ("generate",)),
        SearchTask("values", "values", ("generate",)),
        SearchTask("train", "train", ("scores", "values")),
        SearchSync("train", "generate", link_seconds(1.0)),
    )
    return SearchProblem(pool, parts, calls)


def choices(problem: SearchProblem, part: int) -> list[Choice]:
    stated = problem.parts[part]
    return [
        Choice(stated.name, start, size, option)
        for start, size in problem.all_meshes
        for option in stated.options(problem.shape_of(start, size))
    ]


def fits(problem: SearchProblem, assignment: Assignment) -> bool:
    for device in range(problem.pool.num_devices):
        options = [c.option for c in assignment if c.start <= device < c.start + c.size]
        used = sum(option.resting for option in options) + max((option.active for option in options), default=0.0)
        if used > problem.pool.memory[problem.pool.nodes[device // problem.pool.per_node]]:
            return False
    return True


def all_plans(problem: SearchProblem) -> Iterator[Assignment]:
    return product(*(choices(problem, part) for part in range(len(problem.parts))))


def brute_force(problem: SearchProblem) -> float:
    return min((evaluate(problem, plan) for plan in all_plans(problem) if fits(problem, plan)), default=math.inf)


def mixed(memory: float = 9.0) -> DevicePool:
    return DevicePool(("fast", "slow"), 2, {"fast": memory, "slow": memory * 0.6})


PROBLEMS = {
    "co-located": lambda seed: ratio_space(DevicePool.of(4, 4, 12.0), seed),
    "two nodes": lambda seed: ratio_space(DevicePool.of(4, 2, 9.0), seed),
    "three nodes": lambda seed: ratio_space(DevicePool.of(3, 1, 12.0), seed),
    "lag": lambda seed: ratio_space(DevicePool.of(4, 4, 12.0), seed, lag=1),
    "shadow": lambda seed: ratio_space(DevicePool.of(2, 2, 20.0), seed, shadow=True),
    "shadow with lag": lambda seed: ratio_space(DevicePool.of(2, 1, 20.0), seed, lag=1, shadow=True),
    "mixed": lambda seed: ratio_space(mixed(), seed),
    "calls": lambda seed: call_space(DevicePool.of(3, 3, 14.0), seed),
    "roomy": lambda seed: call_space(DevicePool.of(2, 2, 1e9), seed),
}


def shares_device(first: Choice, second: Choice) -> bool:
    return first.start < second.start + second.size and second.start < first.start + first.size


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_plan_takes_the_same_seconds_alone_and_among_many(name: str) -> None:
    """To the bit: by the walk of the simulation, on arrays, and by the fast walk of the benchmark."""
    for seed in range(8):
        problem = PROBLEMS[name](seed)
        rng, stated = random.Random(seed), [choices(problem, part) for part in range(len(problem.parts))]
        graph, plans = call_graph(problem), [tuple(map(rng.choice, stated)) for _ in range(40)]
        links = [[seconds_of_link(problem, link, plan) for link in graph.links] for plan in plans]
        seconds = [call_seconds(graph, plan, of_links) for plan, of_links in zip(plans, links, strict=True)]
        walked = [evaluate(problem, plan) for plan in plans]
        spans = [[(choice.start, choice.start + choice.size) for choice in plan] for plan in plans]
        fast = [play(graph, *each) for each in zip(seconds, links, map(overlaps_of, spans), strict=True)]
        assert fast == walked
        overlaps = {
            (i, j): np.array([shares_device(plan[i], plan[j]) for plan in plans])
            for i, j in combinations(range(graph.num_parts), 2)
        }
        delays = list(np.array(links).T) if graph.links else []
        assert clock(graph, list(np.array(seconds).T), delays, overlaps, len(plans)).tolist() == walked


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_plan_is_faster_than_the_result(name: str) -> None:
    for seed in range(2):
        problem = PROBLEMS[name](seed)
        result = search(problem, 30.0)
        assert result.is_finished
        assert result.seconds == pytest.approx(brute_force(problem), rel=1e-9)
        assert result.is_optimal == result.is_feasible
        if result.is_feasible:
            assert fits(problem, result.assignment)
            assert evaluate(problem, result.assignment) == pytest.approx(result.seconds, rel=1e-12)


def test_equal_problems_have_equal_plans() -> None:
    plans = [[plan.assignment for plan in search(call_space(DevicePool.of(4, 4, 9.0), 3)).best] for _ in range(2)]
    keys = [[[(c.part, c.start, c.size, c.option.settings) for c in plan] for plan in kept] for kept in plans]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("seed", range(4))
def test_more_memory_is_never_slower(seed: int) -> None:
    seconds = [search(ratio_space(DevicePool.of(4, 4, memory), seed)).seconds for memory in (3.0, 6.0, 9.0, 14.0, 30.0)]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("seed", range(4))
def test_more_options_are_never_slower(seed: int) -> None:
    seconds = [search(call_space(DevicePool.of(4, 4, 9.0), seed, num)).seconds for num in (1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)


def test_a_problem_without_a_plan_is_infeasible() -> None:
    result = search(ratio_space(DevicePool.of(4, 4, 1.0), 0))
    assert not result.is_feasible
    assert not result.is_optimal
    assert result.is_finished
    assert result.seconds == math.inf
    assert result.pruned_by_memory > 0
    assert result.rejected[0].reason.endswith("GB")


def test_a_part_that_can_be_nowhere_has_no_plan() -> None:
    problem = call_space(DevicePool.of(4, 4, 9.0), 0)
    nowhere = replace(problem.parts[0], options=lambda shape: [])
    result = search(SearchProblem(problem.pool, (nowhere, *problem.parts[1:]), problem.calls))
    assert result.is_finished
    assert not result.is_feasible


@pytest.mark.parametrize("limit", [0.0, 0.05, 0.3])
def test_the_bound_holds_whenever_the_search_stops(limit: float) -> None:
    problem = call_space(DevicePool.of(16, 4, 9.0), 1, 12)
    best = search(problem, 60.0)
    assert best.is_optimal
    stopped = search(problem, limit)
    assert stopped.bound <= best.seconds * (1 + 1e-9)
    assert stopped.seconds >= best.seconds * (1 - 1e-9)


def test_a_sync_of_options_that_do_not_fit_lowers_no_bound() -> None:
    """The copy leaves 6 bytes of 10 to the trained model, whose option with a fast sync takes 9."""

    def options(resting: dict[int, float]) -> SearchPart:
        stated = [Option((1.0,), size, 0.0, layout, layout) for layout, size in resting.items()]
        return SearchPart("copy" if len(stated) == 1 else "trained", lambda shape: stated)

    def seconds(source: LinkEnd, to: LinkEnd, relation: Relation) -> float:
        return 3.0 if source.layout == 0 else 0.0

    parts = options({0: 5.0, 1: 9.0}), options({0: 4.0})
    calls = SearchTask("generate", "copy"), SearchTask("train", "trained", ("generate",))
    problem = SearchProblem(DevicePool.of(1, 1, 10.0), parts, (*calls, SearchSync("train", "copy", seconds)))
    tables = tables_of(problem)
    floors = floors_of(tables, areas_of(tables), np.ones((2, len(tables.shapes)), dtype=np.bool_))
    row = np.zeros((1, 2), dtype=np.int64)
    undecided = PartialAssignments((0, 1), row, row, row + UNDECIDED)
    assert partial_bound(tables, floors, undecided, math.inf) == [search(problem).seconds] == [5.0]
    assert partial_bound(tables, floors, undecided, 1.0) == [2.0], "above the goal links are left out"


@pytest.mark.parametrize("gap", [0.02, 0.2])
def test_a_gap_is_kept(gap: float) -> None:
    problem = ratio_space(DevicePool.of(16, 4, 9.0), 2, lag=1, shadow=True)
    best, near = search(problem), search(problem, gap=gap)
    assert near.gap <= gap * (1 + 1e-9)
    assert near.bound <= best.seconds <= near.seconds * (1 + 1e-9)


def test_the_plans_kept_are_distinct_and_in_order() -> None:
    best = search(call_space(DevicePool.of(4, 4, 9.0), 5)).best
    assert len({plan.assignment for plan in best}) == len(best) > 1
    assert [plan.seconds for plan in best] == sorted(plan.seconds for plan in best)


def test_faster_plans_that_do_not_fit_are_reported() -> None:
    problem = ratio_space(DevicePool.of(4, 4, 6.0), 1)
    result = search(problem)
    assert result.rejected
    for rejected in result.rejected:
        assert rejected.seconds < result.seconds
        assert rejected.over > 0
        assert not fits(problem, rejected.assignment)


def test_a_part_keeps_to_the_devices_where_it_has_options() -> None:
    """A part that is pinned to a kind of device states no option elsewhere."""
    problem = ratio_space(mixed(20.0), 0)
    actor = problem.parts[0]
    pinned = SearchPart("actor", lambda shape: actor.options(shape) if shape.kinds == ("slow",) else [])
    result = search(SearchProblem(problem.pool, (pinned, *problem.parts[1:]), problem.calls, problem.rows))
    assert result.is_optimal
    assert result.assignment[0].start >= 2


def test_a_sync_that_is_due_every_second_step_costs_half() -> None:
    def problem(every: int) -> SearchProblem:
        options = [Option((1.0,))]
        parts = (SearchPart("trained", lambda shape: options), SearchPart("follows", lambda shape: options))
        calls = (
            SearchTask("generate", "follows"),
            SearchTask("train", "trained", ("generate",)),
            SearchSync("train", "follows", lambda source, to, relation: 1.0, every),
        )
        return SearchProblem(DevicePool.of(1, 1, 1.0), parts, calls)

    assert search(problem(1)).seconds == pytest.approx(3.0)
    assert search(problem(2)).seconds == pytest.approx(2.5)


def test_a_sync_that_overlaps_hides_behind_what_its_parts_do_meanwhile() -> None:
    """Two devices: a critic trains after the actor, and the weights of the actor are read a second later."""

    def seconds(overlaps: bool, taken: float) -> float:
        def part(name: str, device: int, *durations: float) -> SearchPart:
            return SearchPart(name, lambda shape: [Option(durations)] if shape.kinds == (str(device),) else [])

        parts = (part("shadow", 0, 1.0), part("ref", 0, 1.0), part("actor", 1, 1.0), part("critic", 1, 1.0))
        calls = (
            SearchTask("scores", "ref"),
            SearchTask("generate", "shadow", ("scores",)),
            SearchTask("train", "actor", ("generate",)),
            SearchSync("train", "shadow", lambda source, to, relation: taken, overlaps=overlaps),
            SearchTask("train_critic", "critic", ("generate",)),
        )
        pool = DevicePool(("0", "1"), 1, {"0": 9.0, "1": 9.0})
        return search(SearchProblem(pool, parts, calls)).seconds

    # scores, generate, train, weights
    assert [seconds(False, taken) for taken in (1.0, 3.0)] == [4.0, 6.0]
    # generate, train, weights: scores of the next batch are computed meanwhile
    assert [seconds(True, taken) for taken in (0.5, 1.0, 3.0)] == [2.5, 3.0, 5.0]


def test_the_bound_counts_weights_that_come_in_the_background() -> None:
    """Else a step would seem as short as one whose training runs a batch behind."""
    pool = DevicePool(("0", "1"), 1, {"0": 9.0, "1": 9.0})
    parts = tuple(SearchPart(name, lambda shape: [Option((1.0,))]) for name in ("shadow", "actor"))
    calls = (
        SearchTask("generate", "shadow"),
        SearchTask("train", "actor", ("generate",)),
        SearchSync("train", "shadow", lambda source, to, relation: 4.0, overlaps=True),
    )
    graph = call_graph(SearchProblem(pool, parts, calls))
    assert cycle_bound(graph, [1.0, 2.0, 4.0], [], {(0, 1): False}, 1, {}).tolist() == [7.0]


def test_the_space_counts_every_mesh_and_option() -> None:
    problem = ratio_space(DevicePool.of(4, 4, 9.0), 0)
    assert search(problem).space == (7 * 2) ** 3


@pytest.mark.parametrize(
    "calls", [(SearchTask("train", "a", ("generate",)), SearchTask("generate", "a")), (SearchTask("x", "b"),)]
)
def test_a_problem_that_makes_no_sense_is_refused(calls: tuple[SearchTask, ...]) -> None:
    with pytest.raises(ValueError, match="stands before|no part or task"):
        search(SearchProblem(DevicePool.of(1, 1, 1.0), (SearchPart("a", lambda shape: [Option((1.0, 1.0))]),), calls))


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 12, 24, 96, 256])
def test_meshes_are_inside_a_node_or_whole_nodes(devices: int) -> None:
    per_node = 4 if devices > 4 and devices % 8 else 8
    problem = SearchProblem(DevicePool.of(devices, per_node, 1.0), (), ())
    each = problem.pool.per_node
    assert len(set(problem.all_meshes)) == len(problem.all_meshes)
    assert (0, devices) in problem.all_meshes
    for start, size in problem.all_meshes:
        assert 0 <= start < start + size <= devices
        if size < each:
            assert start // each == (start + size - 1) // each
        else:
            assert start % each == size % each == 0


def test_no_plan_of_a_mixed_and_uneven_cluster_is_faster_than_the_result() -> None:
    for seed in range(2):
        problem = call_space(DevicePool(("fast", "slow", "slow"), 1, {"fast": 14.0, "slow": 10.0}), seed)
        result = search(problem)
        assert result.seconds == pytest.approx(brute_force(problem), rel=1e-9)
