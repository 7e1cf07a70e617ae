"""Processes in which episodes run: how many the ranks have that call them, and the nodes of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.placement.layout import Layout
from flexrlhf.plan.plan import Plan


def processes_of(environment: EnvironmentSpec, layout: Layout, replica: int) -> int:
    """Return the processes in which the episodes of a replica run: its share, and at least one."""
    first, last = (environment.processes * each // layout.dp for each in (replica, replica + 1))
    return max(1, last - first)


def processes_by_rank(plan: Plan) -> dict[int, int]:
    """Return the number of processes by the rank whose rows they have; none without an environment.

    Evaluations run on the trained copy, whose ranks have processes of their own unless they also generate.
    """
    return {rank: count for layout in reversed(_layouts(plan)) for rank, count in _of_layout(plan, layout)}


def processes_by_node(plan: Plan) -> Mapping[int, int]:
    """Return how many processes run the episodes of a step on each node."""
    found = Counter[int]()
    for layout in _layouts(plan)[:1]:
        for rank, count in _of_layout(plan, layout):
            found[plan.cluster.node_of(rank)] += count
    return found


def episodes_of_process(plan: Plan) -> int:
    """Return the most episodes of a process that await a reply together: of the rows of a chunk on a replica."""
    layouts, batch = _layouts(plan)[:1], plan.batch
    counts = [
        -(-len(batch.prompts_on(layout, rank, batch.chunk(index))) * batch.samples_per_prompt // count)
        for layout in layouts
        for rank, count in _of_layout(plan, layout)
        for index in range(batch.num_chunks)
    ]
    return max(counts, default=0)


def _layouts(plan: Plan) -> tuple[Layout, ...]:
    """Return the layout of the ranks that generate, and of the ranks that evaluate if any do."""
    interacting = next((each for each in plan.graph.operators if each.kind == "interact"), None)
    if interacting is None:
        return ()
    layouts = plan.placement.layout_of(interacting), plan.placement[interacting.role].layout
    return layouts if plan.spec.eval is not None else layouts[:1]


def _of_layout(plan: Plan, layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield the rank that calls the environments for a replica, and the number of its processes."""
    environment = plan.spec.environment
    assert environment is not None, "episodes are of an environment"
    for replica, ranks in enumerate(layout.replica_sets):
        yield ranks[0], processes_of(environment, layout, replica)
