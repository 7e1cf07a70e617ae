"""Ranks by ratios: a pool of devices is split into two sides if there are shadows, and models are packed in lanes.

Ratios are exact fractions of a pool of devices. A pool is the whole cluster, or one device class when models are pinned
``on`` it, then the others share what remains. With shadows a pool for both training and inference models is split into
a training side (first ranks) and an inference side (the rest); FlexRLHF, section 3 (Disaggregated).

A lane is the list of ranks once over; two models in one lane never overlap. Models take the first lane with room, in
vector order, along node boundaries. ``[0.5, 0.5, 0.5, 0.5]`` on 8 ranks::

    lane 0   actor  0 1 2 3   critic 4 5 6 7
    lane 1   ref    0 1 2 3   reward 4 5 6 7
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations

from flexrlhf.config.model_settings import Head
from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.errors import UserError
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.placed import ModelName, PlacedOperator


@dataclass(frozen=True)
class Roles:
    """Roles of a graph.

    all:        in vector order.
    trained:    those that may have shadows.
    heads:      by role.
    rollout:    the role that a rollout engine generates for; with shadows that engine is its shadow.
    generating: the role that generates; None: the data set has the responses.
    """

    all: tuple[str, ...]
    trained: tuple[str, ...]
    heads: Mapping[str, Head] = field(hash=False)
    rollout: str | None = None
    generating: str | None = None

    @property
    def shadows(self) -> tuple[ModelName, ...]:
        return tuple(
            ModelName.rollout_of(role) if role == self.rollout else ModelName.shadow_of(role) for role in self.trained
        )

    @property
    def without_shadows(self) -> tuple[ModelName, ...]:
        return tuple(map(ModelName, self.all))

    @property
    def with_shadows(self) -> tuple[ModelName, ...]:
        return self.shadows + self.without_shadows

    def needs_trained(self, operator: PlacedOperator) -> bool:
        """Whether ``operator`` computes with the weights that are trained under every placement: next to a rollout
        engine its role has no other copy for forward passes, where models are placed."""
        is_next_to_engine = operator.role == self.rollout and operator.kind == "forward"
        return operator.kind == "train" or operator.on_trained or is_next_to_engine


def has_shadows(names: Iterable[str]) -> bool:
    """Whether a placed model is a copy that follows another one."""
    return any(ModelName(name).copy for name in names)


def assign_ranks(
    request: PlacementMap, roles: Roles, cluster: Cluster, is_vector: bool = False
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Return ranks by placed model: explicit ones as written, the others pool by pool; and warnings.

    ``is_vector``: whether a vector was written, whose entries errors then name.
    """
    ranks = {name: _explicit(name, e.ranks, cluster) for name, e in request.models.items() if e.ranks is not None}
    warnings: list[str] = []
    for pool, names in _pools(request, cluster).items():
        ratios = {n: ratio for n in names if (ratio := request.models[n].ratio) is not None}
        packing = _place_in_pool(ratios, pool, roles, request, cluster)
        if packing is None:
            raise UserError(_no_split(ratios, len(pool), roles, request, is_vector))
        ranks |= packing.ranks
        warnings += packing.warnings
    _check_sides(ranks, roles)
    return ranks, warnings


def _explicit(name: str, ranks: tuple[int, ...], cluster: Cluster) -> tuple[int, ...]:
    if max(ranks) >= len(cluster.devices):
        raise UserError(
            f"placement: {name} on rank {max(ranks)}, but the cluster has {len(cluster.devices)} devices "
            f"(ranks 0 to {len(cluster.devices) - 1})"
        )
    return ranks


def _check_sides(ranks: dict[str, tuple[int, ...]], roles: Roles) -> None:
    """Raise UserError for a device of both training and inference with shadows: one side would wait for the other.

    A frozen model may be on either side, but not on both.
    """
    if not has_shadows(ranks):
        return
    training = {rank: name for name in reversed(roles.trained) for rank in ranks[name]}
    for name in ranks:
        shared = sorted(training.keys() & ranks[name])
        if ModelName(name).copy and shared:
            raise UserError(
                f"placement: with shadows {training[shared[0]]} (training) and {name} (inference) must not share a "
                f"device, both are on rank {shared[0]}; give them disjoint ranks"
            )
        inference = {rank for other in ranks if ModelName(other).copy for rank in ranks[other]}
        both = sorted(inference.intersection(ranks[name])) if name not in roles.trained and shared else []
        if both:
            raise UserError(
                f"placement: {name} is on rank {shared[0]}, which trains, and on rank {both[0]}, which generates or "
                f"infers with shadows; give it ranks of one side"
            )


def _pools(request: PlacementMap, cluster: Cluster) -> dict[tuple[int, ...], list[str]]:
    """Return the placed models whose ratios are shares of the same devices, by these devices."""
    pinned = {name: cluster.resolve_class(e.on) for name, e in request.models.items() if e.on and e.ranks is None}
    # training comes first: on the strongest class
    rest = tuple(
        rank for name in cluster.classes_by_strength if name not in pinned.values() for rank in cluster.ranks_on(name)
    )
    pools: dict[tuple[int, ...], list[str]] = {}
    for name, entry in request.models.items():
        if entry.ranks is not None:
            continue
        pool = cluster.ranks_on(pinned[name]) if name in pinned else rest
        if not pool:
            raise UserError(
                f"placement: no device is left for {name}: every class is pinned by another model; give it an `on:` too"
            )
        pools.setdefault(pool, []).append(name)
    return pools


def _place_in_pool(
    ratios: dict[str, Fraction], pool: tuple[int, ...], roles: Roles, request: PlacementMap, cluster: Cluster
) -> Packing | None:
    """Return the ranks of a pool; None if shadows are in it and no split into two sides fits."""
    counts = {name: whole_devices(name, ratio, len(pool)) for name, ratio in ratios.items()}
    training = [name for name in counts if name in roles.trained]
    inference = [name for name in counts if name not in roles.trained]
    if not (has_shadows(request.models) and training and inference):
        return pack([DeviceRequest(name, count) for name, count in counts.items()], pool, cluster)
    fitting: list[Packing] = []
    for side in _side_readings(counts, training, len(pool), request.train_share):
        if max(counts[n] for n in training) <= side and max(counts[n] for n in inference) <= len(pool) - side:
            left = pack([DeviceRequest(name, counts[name]) for name in training], pool[:side], cluster)
            right = pack([DeviceRequest(name, counts[name]) for name in inference], pool[side:], cluster)
            fitting.append(Packing(left.ranks | right.ranks, left.warnings + right.warnings))
    return min(fitting, key=_num_shared_pairs, default=None)


def _num_shared_pairs(packing: Packing) -> int:
    return sum(1 for a, b in combinations(packing.ranks.values(), 2) if set(a) & set(b))


def whole_devices(name: str, ratio: Fraction, num_devices: int) -> int:
    """Return ``ratio`` of ``num_devices``. Raises UserError with the nearest ratios if it is no whole number."""
    if not 0 < ratio <= 1:
        raise UserError(f"placement: ratio of {name} must lie in (0, 1], found {ratio_text(ratio)}")
    count = ratio * num_devices
    if count.denominator != 1:
        low, high = max(1, int(count)), int(count) + 1
        near = [f"{ratio_text(Fraction(n, num_devices))} ({n} of {num_devices})" for n in dict.fromkeys((low, high))]
        raise UserError(
            f"placement: ratio {ratio_text(ratio)} of {name} is {ratio_text(count)} of {num_devices} devices; "
            f"{'the nearest that work are' if len(near) > 1 else 'the nearest that works is'} {' and '.join(near)}"
        )
    return int(count)


def _side_readings(counts: dict[str, int], training: list[str], size: int, train_share: Fraction | None) -> list[int]:
    """Return the sizes of the training side to try; side by side first, so that it wins a tie."""
    if train_share is not None:
        return [whole_devices("train_share", train_share, size)]
    sizes = [counts[name] for name in training]
    return list(dict.fromkeys((sum(sizes), max(sizes))))


def _no_split(ratios: dict[str, Fraction], size: int, roles: Roles, request: PlacementMap, is_vector: bool) -> str:
    """Return the error sentence with the nearest ratios that fit: those that remove the fewest devices.

    For a vector it names the models, and the ones of a vector without shadows: its writer may have meant that one, with
    a model that the algorithm does not have.
    """
    train_share = request.train_share

    def text(shown: Iterable[Fraction]) -> str:
        """Return the vector; of a mapping, names with ratios."""
        if is_vector:
            return vector_text(shown)
        return ", ".join(f"{name}: {ratio_text(ratio)}" for name, ratio in zip(ratios, shown, strict=True))

    read, shorter = ("", "") if not is_vector else (f"is read as [{', '.join(request.models)}] and ", _shorter(roles))
    found = (
        f"placement: {text(ratios.values())} {read}fits no split of {size} devices into a training and an inference "
        f"side"
    )
    if size < 2:
        return f"{found}: shadows need at least 2 devices{shorter}"
    counts = {name: whole_devices(name, ratio, size) for name, ratio in ratios.items()}
    if shorter and len(roles.shadows) == 1 and size in counts.values():
        # its one entry too many is more likely a model's that is gone than a shadow's
        return found + shorter
    sides = [whole_devices("train_share", train_share, size)] if train_share is not None else range(1, size)
    shrunk = [
        {name: min(count, side if name in roles.trained else size - side) for name, count in counts.items()}
        for side in sides
        if 0 < side < size
    ]
    best = max(shrunk, key=lambda new: sum(new.values()), default=None)
    if best is None:
        return f"{found}: train_share must leave devices on both sides"
    return f"{found}; the nearest that does is {text(Fraction(best[name], size) for name in ratios)}{shorter}"


def _shorter(roles: Roles) -> str:
    """Return the clause about a vector without shadows."""
    number = len(roles.all)
    return f"; without shadows {number} {'entry is' if number == 1 else 'entries are'} enough, [{', '.join(roles.all)}]"


def ratio_text(value: Fraction) -> str:
    """Return a ratio as a decimal if that is exact, else as a fraction."""
    return f"{float(value):g}" if Fraction(f"{float(value):g}") == value else str(value)


def vector_text(ratios: Iterable[Fraction]) -> str:
    """Return a vector as it is written on the command line, in brackets."""
    return "[" + ",".join(ratio_text(ratio) for ratio in ratios) + "]"


@dataclass(frozen=True)
class DeviceRequest:
    """Placed model that needs ``count`` devices."""

    name: str
    count: int


@dataclass
class Packing:
    """Ranks by placed model, and warnings that name the models that straddle two nodes."""

    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def pack(requests: list[DeviceRequest], ranks: tuple[int, ...], cluster: Cluster) -> Packing:
    """Assign consecutive positions of ``ranks`` to every request. A request never exceeds ``len(ranks)``."""
    nodes = [cluster.devices[rank].node for rank in ranks]
    lanes: list[int] = []  # positions used in each lane
    packing = Packing()
    for request in requests:
        assert 0 < request.count <= len(ranks), f"{request} on {len(ranks)} ranks"
        lane = next((i for i, used in enumerate(lanes) if used + request.count <= len(ranks)), len(lanes))
        if lane == len(lanes):
            lanes.append(0)
        start = _start(nodes, lanes[lane], request.count)
        end = lanes[lane] = start + request.count
        packing.ranks[request.name] = tuple(sorted(ranks[start:end]))
        if start and _straddles(nodes, start, request.count):
            packing.warnings.append(f"{request.name} straddles nodes {nodes[start]} and {nodes[end - 1]}")
    return packing


def _straddles(nodes: list[int], start: int, count: int) -> bool:
    """Whether a model that starts inside a node leaves it."""
    return start > 0 and nodes[start - 1] == nodes[start] != nodes[start + count - 1]


def _start(nodes: list[int], used: int, count: int) -> int:
    """Return the lane's next free position, or the next node boundary if that avoids a straddle and still fits."""
    if used and _straddles(nodes, used, count):
        boundaries = (i for i in range(used, len(nodes)) if nodes[i - 1] != nodes[i])
        boundary = next(boundaries, len(nodes))
        if boundary + count <= len(nodes):
            return boundary
    return used
