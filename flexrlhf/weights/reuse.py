"""Weights that a copy and the model that it follows have in common on a rank, and that are stored once there.

A copy that exists from a Sync to its last call has the weights of its source meanwhile. A tensor of it that the rank
has all of, or a slice of it, is a view of the source's. A tensor that contains the source's shard stores it for the
source, whose own memory is freed until the copy is released: the zero redundancy of HybridFlow (Sheng et al. 2024, sec.
5.3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.boxes import intersection
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.shards import Part, Parts


@dataclass(frozen=True)
class Reuse:
    """Weights of a copy on a rank that are not stored twice, by name.

    views:         views of the source's tensors.
    groups:        tensors that contain the source's, whose memory is freed while the copy exists; those of a group have
                   one memory in the source, so that all of them move before that is freed.
    parts:         of the copy on the rank.
    source_parts:  of the source, by the copy's names.
    """

    views: frozenset[str]
    groups: tuple[tuple[str, ...], ...]
    parts: Parts
    source_parts: Parts

    @cached_property
    def lent(self) -> frozenset[str]:
        """Names of the tensors of all groups."""
        return frozenset(name for group in self.groups for name in group)

    def source_elements(self, names: Iterable[str]) -> int:
        """Return the elements of the source's parts called ``names``."""
        return sum(self.source_parts[name].num_elements for name in names)

    @cached_property
    def most_moved(self) -> int:
        """Elements of the source's largest group: while it moves, both memories exist."""
        return max(map(self.source_elements, self.groups), default=0)

    @classmethod
    def of(cls, source: PlacedModel, copy: PlacedModel, shape: ModelShape, rank: int, lends: bool) -> Reuse:
        """Return the weights of ``copy`` and ``source``, which have no obstacle to it, that are stored once on
        ``rank``.

        lends:  whether the source is not used while the copy exists.
        """
        parts, stored = shape.parts_on(copy, rank), shape.parts_on(source, rank)
        names = [name for name, _ in shape.on_rank(copy, rank).parameters if not ParameterName(name).is_router_bias]
        common = {name: stored[name] for name in names if name in stored}
        views = frozenset(name for name, part in common.items() if _contains(part, parts[name]))
        fused: dict[str, list[str]] = defaultdict(list)
        for name in sorted(common) if lends and not source.shared_buffer else ():
            fused[ParameterName(name).fused if source.facts.fused_layers else name].append(name)
        groups = tuple(
            tuple(names)
            for names in fused.values()
            if views.isdisjoint(names) and all(_contains(parts[name], common[name]) for name in names)
        )
        return cls(views, groups, parts, common)


def _contains(outer: Part, inner: Part) -> bool:
    """Whether a part of a tensor, not empty, is inside another one, of which it then is a view."""
    return intersection(outer.box, inner.box) == inner.box
