"""Processes in which episodes run: how many the ranks have that call them, and the nodes of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexrlhf.placement.layout import Layout

if TYPE_CHECKING:
    from flexrlhf.plan.plan import Plan


@dataclass(frozen=True)
class EpisodeProcesses:
    """Processes of the environment of a plan; none without one."""

    plan: Plan

    def by_rank(self) -> dict[int, int]:
        """Return the number of processes by the rank whose rows they have; none without an environment.

        Evaluations run on the trained copy, whose ranks have processes of their own unless they also generate.
        """
        return {rank: count for layout in reversed(self._layouts()) for rank, count in self._of_layout(layout)}

    def by_node(self) -> Mapping[int, int]:
        """Return how many processes run the episodes of a step on each node."""
        found = Counter[int]()
        for layout in self._layouts()[:1]:
            for rank, count in self._of_layout(layout):
                found[self.plan.cluster.node_of(rank)] += count
        return found

    @property
    def most_episodes(self) -> int:
        """Most episodes of a process that await a reply together: of the rows of a chunk on a replica."""
        layouts, batch = self._layouts()[:1], self.plan.batch
        samples = batch.samples_per_prompt // batch.sequences
        counts = [
            -(-len(batch.prompts_on(layout, rank, batch.chunk(index))) * samples // count)
            for layout in layouts
            for rank, count in self._of_layout(layout)
            for index in range(batch.num_chunks)
        ]
        return max(counts, default=0)

    def most_calls(self, rank: int) -> int:
        """Return the most calls of ``rank`` that await replies at the same time; 0: it plays no episodes. If rows go on
        one by one, each row of all its generates has a call, since some may be late while others are made."""
        layouts = [layout for layout in self._layouts() if rank in layout.places]
        is_free = self.plan.spec.rollout.order == "free"
        return sum(map(self.plan.batch.most_rows, layouts)) if is_free else min(1, len(layouts))

    def _layouts(self) -> tuple[Layout, ...]:
        """Return the layouts of the ranks that generate, greedy responses too, and of the ranks that evaluate if any
        do."""
        playing, placement = [each for each in self.plan.graph.operators if each.has_replies], self.plan.placement
        evaluating = [placement[each.role].layout for each in playing[:1] if self.plan.spec.eval is not None]
        return (*map(placement.layout_of, playing), *evaluating)

    def _of_layout(self, layout: Layout) -> Iterator[tuple[int, int]]:
        """Yield the rank that calls the environments for a replica, and the number of its processes."""
        environment = self.plan.spec.environment
        assert environment is not None, "episodes are of an environment"
        for replica, ranks in enumerate(layout.replica_sets):
            yield ranks[0], environment.processes_of(replica, layout.dp)
