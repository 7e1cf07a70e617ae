"""Elements that cross to and from each rank in a Sync: what its buffers have room for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.shards import Part, Parts
from flexrlhf.weights.sync_plan import adapter_elements, sent_parts, uncovered
from flexrlhf.weights.transfers import NodeOf, overlap


@dataclass(frozen=True)
class Volumes:
    """Most elements that cross to and from a rank in one Sync.

    packed:    of its part of the trained model.
    first:     received from ranks of the trained model.
    received:  from these, and from ranks of the copy on its node that send on what they have received.
    sent_on:   to such ranks.
    """

    packed: int
    first: int
    received: int
    sent_on: int


@dataclass(frozen=True)
class _Pair:
    """Source and destination of a Sync, equal to any whose ranks store the same parts.

    stored:  all that the parts of both depend on in addition to ``shape``.
    """

    stored: object
    shape: ModelShape
    node_of: NodeOf | None
    source: PlacedModel = field(compare=False)
    destination: PlacedModel = field(compare=False)


def _stored(model: PlacedModel) -> object:
    """Return all that the parts on the ranks of ``model`` depend on, but for its shape."""
    is_plain = model.settings.lora is None
    return model.layout, model.engine, model.split, model.num_shards, model.rollout is None, is_plain


class SyncVolumes:
    """Volumes of the ranks of a Sync, computed when they are first needed, once for ranks with the same parts on nodes
    with the same; plans that differ in other settings share them.

    A rank packs its part of a tensor for each tensor-parallel rank that stores the same; and once more where some ranks
    of the copy have a part themselves and others not, and where some are on a node that has it.
    """

    @classmethod
    def of(
        cls, source: PlacedModel, destination: PlacedModel, shape: ModelShape, node_of: NodeOf | None = None
    ) -> SyncVolumes:
        """Return the volumes between a trained model and a copy."""
        stored = tuple(map(_stored, (source, destination)))
        return cls._cached(_Pair(stored, shape, node_of, source, destination))

    @classmethod
    @lru_cache(maxsize=256)
    def _cached(cls, pair: _Pair) -> SyncVolumes:
        return cls(pair)

    def __init__(self, pair: _Pair) -> None:
        self._pair, source, destination, node_of = pair, pair.source, pair.destination, pair.node_of
        self._is_in_place = destination.is_filled_in_place(source)
        self._found: dict[object, Volumes] = {}
        self._parts: dict[object, Parts] = {}
        self._merged: dict[object, int] = {}
        self._numbers = _alike_weights(pair)
        self._names = frozenset(self._numbers)
        common = set(source.ranks) & set(destination.ranks)
        self._times = 1 + bool(common and common != set(destination.ranks))
        self._nodes: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        if node_of is not None:
            for side, model in enumerate((source, destination)):
                for rank in model.ranks:
                    self._nodes[node_of(rank)][side].append(rank)
            is_on_both = any(sent and stored for sent, stored in self._nodes.values())
            self._times *= 1 + (is_on_both and len(self._nodes) > 1)
        self._num_receiving = sum(bool(stored) for _, stored in self._nodes.values())
        self._of_nodes: dict[int, _NodeParts] = {}

    def on(self, rank: int, overlaps: bool = False) -> Volumes:
        """Return the volumes to and from ``rank`` in one Sync; ``overlaps``: that overlaps other work."""
        own, needed = self._sent(rank), self._needed(rank)
        here = self._node(rank) if needed is not None and self._nodes else None
        key = id(own), id(needed), here and here.key, overlaps
        if key not in self._found:
            self._found[key] = self._volumes(own or {}, needed or {}, here, overlaps)
        return self._found[key]

    def merged_on(self, rank: int) -> int:
        """Return the elements of the adapters that a rank of the trained model merges before a Sync sends the weights,
        once for ranks that gather the same parts."""
        source, destination, shape = self._pair.source, self._pair.destination, self._pair.shape
        key = source.position(source.shard_set(rank)[0])
        if key not in self._merged:
            self._merged[key] = adapter_elements(source, destination, shape, rank)
        return self._merged[key]

    def _volumes(self, own: Parts, needed: Parts, here: _NodeParts | None, overlaps: bool) -> Volumes:
        numbers = self._numbers
        received = sum(numbers[name] * uncovered(part, own.get(name)) for name, part in needed.items())
        if self._is_in_place:
            return Volumes(0, received, received, 0)
        sizes = (numbers[name] * self._copies.get(name, 1) * part.num_elements for name, part in own.items())
        packed = self._times * sum(sizes)
        far = [] if here is None else [(numbers[name], *here.crossing(name, part)) for name, part in needed.items()]
        pieces = [(number * -(-elements // ranks), ranks) for number, elements, ranks in far]
        first = received - sum(number * elements for number, elements, _ in far) + sum(size for size, _ in pieces)
        # also to another node, where a chain has several
        is_chained = not overlaps and self._num_receiving > 1
        return Volumes(packed, first, received, sum(size for size, ranks in pieces if ranks > 1 or is_chained))

    @cached_property
    def _copies(self) -> Mapping[str, int]:
        """Number of ranks of one replica of the copy that store the same part of a weight, by name."""
        replica = self._pair.destination.layout.of_weights.replica_sets[0]
        found: dict[str, list[Part]] = defaultdict(list)
        for rank in replica:
            for name, part in (self._needed(rank) or {}).items():
                found[name].append(part)
        kinds = {name: len({*parts}) for name, parts in found.items()}
        return {name: len(parts) // kinds[name] for name, parts in found.items()}

    def _sent(self, rank: int) -> Parts | None:
        """Return the parts of the trained model on ``rank``, of one of the weights that are alike each; None where it
        is not."""
        source, destination, shape = self._pair.source, self._pair.destination, self._pair.shape
        return self._at(source, rank, lambda: sent_parts(source, destination, shape, rank, self._names))

    def _needed(self, rank: int) -> Parts | None:
        """Return the parts of the copy on ``rank``, of the same weights; None where it is not."""
        destination, shape = self._pair.destination, self._pair.shape
        return self._at(destination, rank, lambda: shape.trained_parts(destination, rank, self._names))

    def _at(self, model: PlacedModel, rank: int, parts: Callable[[], Parts]) -> Parts | None:
        if rank not in model.layout.places:
            return None
        key = model.name, model.position(rank)
        if key not in self._parts:
            self._parts[key] = parts()
        return self._parts[key]

    def _node(self, rank: int) -> _NodeParts:
        """Return the parts that the node of ``rank`` stores."""
        assert self._pair.node_of is not None, "without nodes nothing crosses"
        node = self._pair.node_of(rank)
        if node not in self._of_nodes:
            sources, copies = self._nodes[node]
            sent = {id(parts): parts for each in sources if (parts := self._sent(each)) is not None}
            stored = tuple(parts for each in copies if (parts := self._needed(each)) is not None)
            self._of_nodes[node] = _NodeParts(tuple(sent.values()), stored)
        return self._of_nodes[node]


@dataclass(frozen=True)
class _NodeParts:
    """Parts that the ranks of a node store: as source the different ones, as destination one for each rank."""

    sent: tuple[Parts, ...]
    stored: tuple[Parts, ...]

    @cached_property
    def key(self) -> object:
        """Equal for nodes whose ranks share their parts."""
        return frozenset(map(id, self.sent)), tuple(sorted(map(id, self.stored)))

    def crossing(self, name: str, part: Part) -> tuple[int, int]:
        """Return the elements of ``part`` of a weight that no rank of the node has as source, and the ranks there that
        store the same."""
        known = {each[name] for each in self.sent if name in each}
        elements = part.num_elements - sum(overlap(each, part) for each in known)
        return elements, sum(each.get(name) == part for each in self.stored)


def _alike_weights(pair: _Pair) -> dict[str, int]:
    """Return the number of the weights of which any rank stores the same parts, as layers have, by the name of the
    first of them."""
    source, destination, shape = pair.source, pair.destination, pair.shape
    # other ranks of a stage share its parts in the same way
    stages = [sent_parts(source, destination, shape, rank) for rank in source.layout.along("pp", source.ranks[0])]
    stages += [shape.trained_parts(destination, rank) for rank in destination.layout.along("pp", destination.ranks[0])]
    alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in {name: None for parts in stages for name in parts}:
        alike[tuple(id(parts.get(name)) for parts in stages)].append(name)
    return {names[0]: len(names) for names in alike.values()}
