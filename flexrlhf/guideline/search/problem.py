"""The stated space: devices, the parts that are placed on them, the calls of a step, and the tables of their costs.

A *part* is one placed model: one decision. In the space of placement ratios ``actor`` is one part with three tasks; in
the space of ReaL (Mei et al., MLSys 2025) every model call is a part with one task. A *task* is a model call and
occupies its part's mesh. A *sync* sends weights from one part to another and occupies both meshes. A *transfer of rows*
between tasks occupies nothing: the reader begins that much later.

Costs depend on a mesh by its *shape* alone (size and kinds of devices, how nodes divide it), so a part states its
options once per shape and they are placed at every start.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import gcd, prod

from flexrlhf.api import Cluster
from flexrlhf.guideline.costs.relations import Relation

CONTIGUOUS_NODES = 16
"""Largest number of nodes for which every run of adjacent nodes is a mesh; beyond, only aligned powers of two and a few
splits."""

UNLIMITED = 1e15
"""Bytes of a device whose memory is not given."""


@dataclass(frozen=True)
class MeshShape:
    """All that options and costs may depend on of a mesh.

    size:      number of devices.
    kinds:     their kinds.
    per_node:  most of them in one node.
    unit:      groups of neighbours lie on one node each if their size divides it.
    is_even:   whether it has equally many devices in each of its nodes.
    is_whole:  whether it has all devices of its nodes.
    """

    size: int
    kinds: tuple[str, ...]
    per_node: int
    unit: int
    is_even: bool
    is_whole: bool

    @property
    def spans_nodes(self) -> bool:
        return self.size > self.per_node


@dataclass(frozen=True)
class Option:
    """One way to run a part on a mesh.

    seconds:   of each task of the part, in the problem's order.
    resting:   bytes that are allocated on each device of the mesh all the time.
    active:    the most bytes on a device that one of its tasks needs in addition.
    layout:    layout that syncs and row transfers depend on, such as (dp, tp, pp).
    settings:  the settings that the option stands for; the search does not read them.
    """

    seconds: tuple[float, ...]
    resting: float = 0.0
    active: float = 0.0
    layout: Hashable = ()
    settings: object = None


@dataclass(frozen=True)
class LinkEnd:
    """One end of a sync or of a row transfer."""

    shape: MeshShape
    layout: Hashable


LinkSeconds = Callable[[LinkEnd, LinkEnd, Relation], float]
LinkSide = Callable[[LinkEnd], Hashable]
"""What the time of a link depends on of one end: of two ends with the same one is enough."""


def whole_end(end: LinkEnd) -> Hashable:
    """Return all of ``end`` that a time may depend on."""
    return end.shape.size, end.shape.kinds, end.shape.per_node, end.layout


@dataclass(frozen=True)
class SearchPart:
    """A placed model. ``options``: mesh shape → its options there; none where the part cannot be placed."""

    name: str
    options: Callable[[MeshShape], Sequence[Option]]


@dataclass(frozen=True)
class SearchTask:
    """A model call.

    name:   unique in the problem.
    part:   the part that computes it.
    reads:  tasks of the same batch whose results it reads.
    lag:    batches by which it is behind the newest.
    """

    name: str
    part: str
    reads: tuple[str, ...] = ()
    lag: int = 0


@dataclass(frozen=True)
class SearchSync:
    """A weight transfer, with the lag of the task that trains the weights.

    One that stands before this task sends the weights that the step begins with.

    task:      the task that has trained them.
    to:        the part that receives them.
    seconds:   its duration, by both ends.
    every:     batches from one to the next.
    overlaps:  whether it proceeds while both parts go on, until ``to`` is used.
    side:      what ``seconds`` depend on of each end.
    """

    task: str
    to: str
    seconds: LinkSeconds
    every: int = 1
    overlaps: bool = False
    side: LinkSide = whole_end


@dataclass(frozen=True)
class RowTransfer:
    """Rows that arrive at the task ``reader`` ``seconds`` after the task ``writer`` ends.

    side:  what ``seconds`` depend on of each end.
    """

    writer: str
    reader: str
    seconds: LinkSeconds
    side: LinkSide = whole_end


@dataclass(frozen=True)
class DevicePool:
    """The devices of a cluster, numbered node after node.

    nodes:     kind of the devices of each node.
    per_node:  devices in a node.
    memory:    bytes of a device that may be used, by kind.
    borders:   first devices of the nodes but the first one; None: each has ``per_node`` devices.
    """

    nodes: tuple[str, ...]
    per_node: int
    memory: Mapping[str, float]
    borders: tuple[int, ...] | None = None

    @staticmethod
    def of(num_devices: int, per_node: int, memory: float, kind: str = "device") -> DevicePool:
        """Devices of one kind; a cluster smaller than a node is a smaller node.

        Raises ValueError where they are not whole nodes.
        """
        per_node = min(per_node, num_devices)
        if num_devices % per_node:
            raise ValueError(f"{num_devices} devices are not whole nodes of {per_node}")
        return DevicePool((kind,) * (num_devices // per_node), per_node, {kind: memory})

    @staticmethod
    def of_cluster(cluster: Cluster, usable: float, communicators: int) -> DevicePool:
        """Return the devices of ``cluster`` in nodes of one size: a larger node counts as several.

        ``usable``: share of a device's memory that may be used, next to that of its ``communicators``.
        """
        memory: dict[str, float] = {}
        for device in cluster.devices:
            size = cluster.memory_bytes(device.rank, communicators)
            mine = usable * (UNLIMITED if size is None else size)
            memory[device.device_class] = min(mine, memory.get(device.device_class, mine))
        ranks = [cluster.ranks_on_node(node) for node in range(cluster.num_nodes)]
        unit = gcd(*map(len, ranks))
        kinds = [cluster.devices[node[at]].device_class for node in ranks for at in range(0, len(node), unit)]
        return DevicePool(tuple(kinds), unit, memory, tuple(node[0] for node in ranks[1:]))

    @property
    def num_devices(self) -> int:
        return len(self.nodes) * self.per_node

    def kinds_of(self, start: int, size: int) -> tuple[str, ...]:
        """Kinds of the devices of a mesh, sorted."""
        if len(self.memory) == 1:
            return tuple(self.memory)
        return tuple(sorted(set(self.nodes[start // self.per_node : -(-(start + size) // self.per_node)])))

    @cached_property
    def node_borders(self) -> tuple[int, ...]:
        """First devices of the nodes but the first one."""
        usual = range(self.per_node, self.num_devices, self.per_node)
        return tuple(usual) if self.borders is None else self.borders

    def shape_of(self, start: int, size: int) -> MeshShape:
        """Return the shape of a mesh."""
        borders = self.node_borders
        inside = borders[bisect_right(borders, start) : bisect_left(borders, start + size)]
        ends = (start, *inside, start + size)
        parts = [after - before for before, after in pairwise(ends)]
        is_whole = all(end in (0, self.num_devices) or end in borders for end in (start, start + size))
        unit = gcd(size, *(border - start for border in inside))
        return MeshShape(size, self.kinds_of(start, size), max(parts), unit, min(parts) == max(parts), is_whole)

    @cached_property
    def runs(self) -> tuple[int, ...]:
        """First devices of the runs of adjacent nodes of one kind."""
        starts = [node for node in range(len(self.nodes)) if node == 0 or self.nodes[node] != self.nodes[node - 1]]
        return tuple(node * self.per_node for node in starts)


@dataclass(frozen=True)
class Meshes:
    """The meshes on which parts may be placed.

    blocks:  sizes (powers of two) whose aligned blocks are all meshes.
    listed:  other meshes, as (start, size).
    about:   description for a person.
    """

    blocks: tuple[int, ...]
    listed: tuple[tuple[int, int], ...]
    about: str = ""


def meshes_of(cluster: Cluster) -> Meshes:
    """Return the meshes of ``cluster`` if its nodes differ in size, else none, which stands for the usual ones."""
    nodes = [cluster.ranks_on_node(node) for node in range(cluster.num_nodes)]
    if len(set(map(len, nodes))) == 1:
        return Meshes((), ())
    inside = [
        (ranks[0] + at, size)
        for ranks in nodes
        for size in (1 << bit for bit in range((len(ranks) - 1).bit_length()))
        for at in range(0, len(ranks) - size + 1, size)
    ]
    starts = [ranks[0] for ranks in nodes] + [len(cluster.devices)]
    runs = [(first, last - first) for i, first in enumerate(starts) for last in starts[i + 1 :]]
    return Meshes((), (*inside, *runs), "powers of two inside a node, runs of whole nodes")


def usual_meshes(pool: DevicePool) -> Meshes:
    """Aligned blocks inside a node; whole adjacent nodes, all runs of them or, in large clusters, few."""
    inner, outer = _inside_nodes(pool)
    nodes, each = len(pool.nodes), pool.per_node
    if nodes <= CONTIGUOUS_NODES:
        runs = [(first * each, (last - first) * each) for first in range(nodes) for last in range(first + 1, nodes + 1)]
        return Meshes(inner, (*outer, *runs), "aligned powers of two inside a node, all runs of adjacent nodes")
    about = "aligned powers of two, 3/4 of the cluster and all but a power of two of nodes, from the first device"
    powers = [power for power in _powers(nodes) if each & (each - 1) == 0]
    splits = {nodes - power for power in _powers(nodes) if power < nodes} | {nodes * 3 // 4, nodes}
    others = sorted(size for size in splits if size not in powers)
    return Meshes(
        (*inner, *(power * each for power in powers)), (*outer, *((0, size * each) for size in others)), about
    )


def _inside_nodes(pool: DevicePool) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Meshes smaller than a node: as sizes of blocks, or listed when the size of a node is no power of two."""
    each = pool.per_node
    sizes = tuple(size for size in _powers(each) if size < each)
    if each & (each - 1) == 0:
        return sizes, ()
    blocks = [(size, offset) for size in sizes for offset in range(0, each - size + 1, size)]
    return (), tuple((n * each + offset, size) for n in range(len(pool.nodes)) for size, offset in blocks)


def _powers(limit: int) -> list[int]:
    """Powers of two up to ``limit``."""
    return [1 << bit for bit in range(limit.bit_length()) if 1 << bit <= limit]


@dataclass(frozen=True)
class Vectors:
    """Placement by ratios: parts in the order in which they are packed in lanes (``placement/ratios.py``).

    sides:    the parts of the first devices, of training, and those of the rest; or all parts on all devices.
    follows:  part → the part whose devices it has.
    """

    sides: tuple[tuple[str, ...], ...]
    follows: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """A space of placements and all that their seconds follow from.

    pool:    the devices.
    parts:   the models to place.
    calls:   tasks and syncs in the order in which every device runs its share of them, step after step.
    rows:    row transfers; between other tasks nothing travels.
    meshes:  where parts may be placed; the usual ones where none are given.
    vectors: how ratios place the parts, in addition; None: they do not.
    """

    pool: DevicePool
    parts: tuple[SearchPart, ...]
    calls: tuple[SearchTask | SearchSync, ...]
    rows: tuple[RowTransfer, ...] = ()
    meshes: Meshes = field(default=Meshes((), ()))
    vectors: Vectors | None = None

    def __post_init__(self) -> None:
        if self.meshes == Meshes((), ()):
            object.__setattr__(self, "meshes", usual_meshes(self.pool))
        _check_names(self)

    @cached_property
    def tasks(self) -> dict[str, SearchTask]:
        """Name → task."""
        return {call.name: call for call in self.calls if isinstance(call, SearchTask)}

    @cached_property
    def all_meshes(self) -> tuple[tuple[int, int], ...]:
        """Every mesh, as (start, size)."""
        end = self.pool.num_devices
        blocks = [(at, size) for size in self.meshes.blocks for at in range(0, end - size + 1, size)]
        return (*blocks, *self.meshes.listed)

    def shape_of(self, start: int, size: int) -> MeshShape:
        """Return the shape of a mesh."""
        shape = self._shapes.get((start, size))
        if shape is None:
            shape = self._shapes[start, size] = self.pool.shape_of(start, size)
        return shape

    @cached_property
    def _shapes(self) -> dict[tuple[int, int], MeshShape]:
        """Mesh → its shape, filled on use."""
        return {}

    def size_of_space(
        self, num_options: Mapping[tuple[int, MeshShape], int], num_meshes: Mapping[MeshShape, int]
    ) -> int:
        """Number of assignments in the space, before anything is left out."""
        return prod(
            sum(number * num_options.get((part, shape), 0) for shape, number in num_meshes.items())
            for part in range(len(self.parts))
        )


def _check_names(problem: SearchProblem) -> None:
    """Raise ValueError for blocks that are no powers of two, and for names that nothing has."""
    if any(size & (size - 1) for size in problem.meshes.blocks):
        raise ValueError("blocks are of powers of two; list other meshes")
    parts, tasks = {part.name for part in problem.parts}, problem.tasks
    named: Iterable[tuple[str, Iterable[str]]] = [(task.part, task.reads) for task in tasks.values()]
    syncs = [call for call in problem.calls if isinstance(call, SearchSync)]
    missing = ({part for part, _ in named} | {sync.to for sync in syncs}) - parts
    missing |= {name for _, reads in named for name in reads} - set(tasks)
    missing |= {sync.task for sync in syncs} - set(tasks)
    missing |= {name for rows in problem.rows for name in (rows.writer, rows.reader)} - set(tasks)
    if missing:
        raise ValueError(f"no part or task of this name: {', '.join(sorted(missing))}")


@dataclass(frozen=True)
class Choice:
    """A part's mesh and option."""

    part: str
    start: int
    size: int
    option: Option

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.start, self.start + self.size))


Assignment = tuple[Choice, ...]
"""A choice for every part, in the problem's order."""


def device_bytes(chosen: Sequence[Choice], device: int) -> float:
    """Return the most bytes that the parts on a device need."""
    resting, active = 0.0, 0.0
    for choice in chosen:
        if choice.start <= device < choice.start + choice.size:
            resting += choice.option.resting
            active = max(active, choice.option.active)
    return resting + active
