"""Axes of parallelism: how ranks share the work on one model, in a row for each axis.

Layouts, groups, checks, memory, prices, search and texts read the rows. What one axis alone has, such as the exchanges
of ring attention, is in a module of its own, which a table finds by the name of the axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Axis:
    """One axis of parallelism.

    name:          setting of its degree, and purpose of the groups of its ranks.
    words:         its name in sentences.
    splits:        what each rank has a part of. Parts of features and of layers make one copy of the weights together;
                   parts of tokens are computed with further copies; parts of experts are stored by copies that are
                   alike in all else, and may have other rows.
    is_outer:      whether replicas lie between its ranks, which else are neighbours inside a replica.
    near:          whether its ranks must share a node.
    crosses_with:  settings of a model and their values with which its ranks need not.
    is_shared:     whether a copy of a role that another engine computes has the degree of the role.
    goes_with:     settings of a model → their values that go with several ranks.
    """

    name: str
    words: str
    splits: Literal["features", "layers", "tokens", "experts"]
    is_outer: bool = False
    near: bool = True
    crosses_with: tuple[tuple[str, object], ...] = ()
    is_shared: bool = False
    goes_with: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: MappingProxyType({}), hash=False)

    @property
    def is_in_replica(self) -> bool:
        """Whether its ranks compute the same rows."""
        return self.splits != "experts"

    @property
    def has_copies(self) -> bool:
        """Whether each of its ranks has a copy of the weights, with which ZeRO shards and gradients are summed."""
        return self.splits == "tokens"

    @property
    def has_parts(self) -> bool:
        """Whether its ranks together have one copy of the weights."""
        return self.is_in_replica and not self.has_copies


AXES = (
    Axis("tp", "tensor parallel", "features", is_shared=True),
    Axis("pp", "pipeline stages", "layers", is_outer=True, near=False),
    Axis(
        "cp",
        "context parallel",
        "tokens",
        crosses_with=(("context_parallel", "ring"),),
        goes_with=MappingProxyType({"attention": ("auto",), "compile": (False,)}),
    ),
    Axis("ep", "expert parallel", "experts", near=False),
)
"""In the order of ``ParallelDims``. Of several inner axes the first has the nearest ranks."""
INNER = tuple(axis for axis in AXES if axis.is_in_replica and not axis.is_outer)
OUTER = tuple(axis for axis in AXES if axis.is_outer)
OF_COPIES = tuple(axis for axis in AXES if axis.has_copies)
OF_PARTS = tuple(axis for axis in AXES if axis.has_parts)
OF_EXPERTS = tuple(axis for axis in AXES if not axis.is_in_replica)
OF_REPLICA = OF_COPIES + OF_PARTS
"""Axes whose ranks are a replica, as texts name them."""
RARE = OF_COPIES + OF_EXPERTS
"""Axes along which few models have several ranks: tables and YAMLs name them only where some model has."""


class ParallelDims(NamedTuple):
    """Degree of each of ``AXES``: the number of ranks that share one model along it.

    It is a tuple, since it is in the keys of many tables.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @classmethod
    def of_settings(cls, section: object) -> ParallelDims:
        """Return the degrees in a section of the YAML, which may lack some settings of them."""
        return cls(*(getattr(section, name, 1) for name in cls._fields))

    def of(self, axis: Axis) -> int:
        """Return the degree of ``axis``."""
        degree: int = getattr(self, axis.name)
        return degree

    def product(self, axes: Iterable[Axis]) -> int:
        """Return the number of ranks along all of ``axes``."""
        return prod(map(self.of, axes))

    def several(self, axes: Iterable[Axis] = AXES) -> tuple[Axis, ...]:
        """Return the ones of ``axes`` that have several ranks."""
        return tuple(axis for axis in axes if self.of(axis) > 1)

    def without(self, axes: Iterable[Axis]) -> ParallelDims:
        """Return the degrees with one rank along each of ``axes``."""
        return self._replace(**{axis.name: 1 for axis in axes})

    def neighbours(self, crossing: tuple[str, ...]) -> int:
        """Return the number of ranks that must share a node, but for the axes that may cross nodes."""
        return _neighbours(self, crossing)

    def text(self, axes: Iterable[Axis] = AXES) -> str:
        """Return the degrees above 1, as texts list them."""
        return ", ".join(f"{axis.name} {self.of(axis)}" for axis in self.several(axes))

    @property
    def width(self) -> int:
        """Ranks of a replica between which no other replica lies."""
        return _products(self).width

    @property
    def replica(self) -> int:
        """Ranks of a replica."""
        return _products(self).replica

    @property
    def parts(self) -> int:
        """Ranks that together have one copy of the weights, whatever experts they share with others."""
        return _products(self).parts

    @property
    def row_parts(self) -> int:
        """Ranks that share the tokens of every row."""
        return _products(self).row_parts

    @property
    def expert_parts(self) -> int:
        """Copies of the weights that share the experts."""
        return _products(self).expert_parts


class _Products(NamedTuple):
    """Products of degrees, as the properties of ``ParallelDims`` have them."""

    width: int
    replica: int
    parts: int
    row_parts: int
    expert_parts: int


@lru_cache(maxsize=4096)
def _products(dims: ParallelDims) -> _Products:
    # searches read them several hundred thousand times, of few degrees
    return _Products(*map(dims.product, (INNER, OF_REPLICA, OF_PARTS, OF_COPIES, OF_EXPERTS)))


@lru_cache(maxsize=4096)
def _neighbours(dims: ParallelDims, crossing: tuple[str, ...]) -> int:
    return dims.product(axis for axis in INNER if axis.near and axis.name not in crossing)
