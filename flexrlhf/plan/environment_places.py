"""Machines of the processes in which episodes run, and the ranks that call them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from flexrlhf.placement.layout import Layout
from flexrlhf.plan.episodes import process_machines
from flexrlhf.plan.plan import Plan

Machine = int | str
"""Number of a node of the cluster, or HOST:PORT of a further machine."""


def processes_by_rank(plan: Plan) -> dict[int, tuple[Machine, ...]]:
    """Return the machine of each process, by the rank whose rows it has; none without an environment.

    Evaluations run on the trained copy, whose ranks have processes of their own unless they also generate.
    """
    return {rank: machines for layout in reversed(_layouts(plan)) for rank, machines in _of_layout(plan, layout)}


def processes_by_machine(plan: Plan) -> Mapping[Machine, int]:
    """Return how many processes run the episodes of a step on each machine."""
    layouts = _layouts(plan)[:1]
    return Counter(each for layout in layouts for _, machines in _of_layout(plan, layout) for each in machines)


def episodes_of_process(plan: Plan) -> int:
    """Return the most episodes of a process that await a reply together: of the rows of a chunk on a replica."""
    layouts, batch = _layouts(plan)[:1], plan.batch
    counts = [
        -(-len(batch.prompts_on(layout, rank, batch.chunk(index))) * batch.samples_per_prompt // len(machines))
        for layout in layouts
        for rank, machines in _of_layout(plan, layout)
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


def _of_layout(plan: Plan, layout: Layout) -> Iterator[tuple[int, tuple[Machine, ...]]]:
    """Yield the rank that calls the environments for a replica, and the machine of each of its processes."""
    environment = plan.spec.environment
    assert environment is not None, "episodes are of an environment"
    for replica, ranks in enumerate(layout.replica_sets):
        yield ranks[0], process_machines(environment, layout, replica, plan.cluster)
