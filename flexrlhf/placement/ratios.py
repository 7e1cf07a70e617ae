"""Placement ratios: a ratio vector, a mapping or explicit ranks become placed models.

Ratios are exact fractions of a pool of devices. A pool is the whole cluster, or one device class when models are pinned
``on`` it, then the others share what remains. With shadows a pool for both training and inference models is split into
a training side (first ranks) and an inference side (the rest); FlexRLHF, section 3 (Disaggregated).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations

from flexrlhf.config.spec import PLACEMENT_SETTINGS, Head, ModelSpec, PlacementEntry, PlacementMap, Spec
from flexrlhf.errors import UserError, either, nearest
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.dtypes import on_devices
from flexrlhf.placement.generation_order import generation_layout
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.names import ROLLOUT, SHADOW, ModelName
from flexrlhf.placement.packing import DeviceRequest, Packing, pack
from flexrlhf.placement.placed import PlacedModel, Placement
from flexrlhf.placement.rollout import rollout_settings, rollout_warnings


@dataclass(frozen=True)
class Roles:
    """Roles of a graph.

    all:      in vector order.
    trained:  those that may have shadows.
    heads:    by role.
    rollout:  the role that a rollout engine generates for; with shadows that engine is its shadow.
    """

    all: tuple[str, ...]
    trained: tuple[str, ...]
    heads: Mapping[str, Head] = field(hash=False)
    rollout: str | None = None

    @property
    def shadows(self) -> tuple[ModelName, ...]:
        return tuple(ModelName.of(role, ROLLOUT if role == self.rollout else SHADOW) for role in self.trained)

    @property
    def without_shadows(self) -> tuple[ModelName, ...]:
        return tuple(map(ModelName, self.all))

    @property
    def with_shadows(self) -> tuple[ModelName, ...]:
        return self.shadows + self.without_shadows


def place(spec: Spec, roles: Roles, can_shadow: bool, cluster: Cluster) -> Placement:
    """Place every model of ``roles``. Raises UserError with the nearest placement that works."""
    request = _entries(spec, roles, can_shadow)
    ranks, warnings = assign_ranks(request, roles, cluster)
    models = tuple(
        _placed(ModelName(name), entry, ranks[name], spec, roles, cluster) for name, entry in request.models.items()
    )
    if roles.rollout is not None and ModelName.of(roles.rollout, ROLLOUT) not in request.models:
        models += (_rollout_on_trained_ranks(next(m for m in models if m.role == roles.rollout), spec, roles, cluster),)
    if roles.rollout is not None:
        warnings = warnings + rollout_warnings(spec, roles.rollout)
    check_classes(models, request, cluster, is_vector=not isinstance(spec.placement, PlacementMap))
    return Placement(models, len(cluster.devices), tuple(warnings))


def _rollout_on_trained_ranks(trained: PlacedModel, spec: Spec, roles: Roles, cluster: Cluster) -> PlacedModel:
    """Return the rollout engine on the ranks of the trained copy; its replicas take rows as that copy's do.

    Where that copy has more tensor-parallel ranks, each rank's part of the engine contains the part that it trains.
    """
    entry = PlacementEntry(ranks=trained.ranks)
    if (spec.rollout.tp, spec.rollout.pp) == (trained.layout.tp, trained.layout.pp) and trained.layout.row_shares:
        entry = entry.model_copy(update={"row_shares": trained.layout.row_shares})
    model = _placed(ModelName.of(trained.role, ROLLOUT), entry, trained.ranks, spec, roles, cluster)
    if spec.rollout.is_hybrid and spec.rollout.sleep:
        # adapters alone would be sent, and the weights that they do not change would be lost
        model = replace(model, is_hybrid=trained.settings.lora is None)
    training, own = trained.layout, model.layout
    if training.tp % own.tp or training.pp % own.pp or own.row_shares:
        return model
    return replace(model, layout=generation_layout(training, own.tp, own.pp))


def _entries(spec: Spec, roles: Roles, can_shadow: bool) -> PlacementMap:
    """Return the mapping form of ``spec.placement``, in vector order."""
    assert spec.placement != "auto", "the command line resolves auto before it plans"
    if spec.placement is None:
        return PlacementMap(models={name: PlacementEntry(ratio=Fraction(1)) for name in roles.all})
    if isinstance(spec.placement, PlacementMap):
        _check_hybrid(spec, _has_shadows(spec.placement.models))
        return _check_names(spec.placement, roles, can_shadow)
    names = {len(roles.all): roles.all}
    if can_shadow:
        names[len(roles.with_shadows)] = roles.with_shadows
    if len(spec.placement) not in names:
        forms = " or ".join(f"{n} [{', '.join(order)}]" for n, order in names.items())
        raise UserError(
            f"placement: {spec.algorithm.name} takes a vector of {forms}, "
            f"found {len(spec.placement)} entries {_shown(spec.placement)}"
        )
    entries = zip(names[len(spec.placement)], spec.placement, strict=True)
    _check_hybrid(spec, _has_shadows(names[len(spec.placement)]))
    return PlacementMap(models={name: PlacementEntry(ratio=ratio) for name, ratio in entries})


def _check_hybrid(spec: Spec, has_shadows: bool) -> None:
    """Raise UserError for a shadow next to a copy that generates on the trained copy's ranks."""
    rollout = spec.rollout
    if rollout.is_hybrid and has_shadows:
        raise UserError(
            f"rollout.engine: {rollout.engine} generates on the ranks that train the actor, and with shadows its "
            f"shadow generates; use transformers with models.actor.shadow: {{engine: {rollout.engine}, tp: "
            f"{rollout.tp}}}, or a placement without shadows"
        )


def _check_names(placement: PlacementMap, roles: Roles, can_shadow: bool) -> PlacementMap:
    allowed = roles.with_shadows if can_shadow else roles.all
    for name in placement.models:
        if name not in allowed:
            known = (*allowed, *PLACEMENT_SETTINGS)
            if roles.rollout is None and ModelName(name).is_rollout and ModelName(name).role in roles.trained:
                raise UserError(f"placement: {name} needs an engine of its own; set rollout.engine: vllm, or remove it")
            if can_shadow and ModelName(name).is_shadow and ModelName(name).role == roles.rollout:
                raise UserError(
                    f"placement: with a rollout engine {name} is that engine; call it {roles.rollout}.{ROLLOUT}"
                )
            raise UserError(f"placement: no model {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    required = roles.with_shadows if _has_shadows(placement.models) else roles.all
    missing = [name for name in required if name not in placement.models]
    if missing:
        raise UserError(f"placement: {', '.join(missing)} missing; give {', '.join(required)}")
    if placement.train_share is not None and required == roles.all:
        raise UserError("placement.train_share: needs shadow models (a disaggregated placement); remove it")
    return placement.model_copy(update={"models": {name: placement.models[name] for name in required}})


def _has_shadows(names: Iterable[str]) -> bool:
    return any(ModelName(name).copy for name in names)


def assign_ranks(request: PlacementMap, roles: Roles, cluster: Cluster) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Return ranks by placed model: explicit ones as written, the others pool by pool; and warnings."""
    ranks = {name: _explicit(name, e.ranks, cluster) for name, e in request.models.items() if e.ranks is not None}
    warnings: list[str] = []
    for pool, names in _pools(request, cluster).items():
        packing = _place_in_pool(
            {n: ratio for n in names if (ratio := request.models[n].ratio) is not None}, pool, roles, request, cluster
        )
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
    """Raise UserError for a device of both training and inference with shadows: one side would wait for the other."""
    if not _has_shadows(ranks):
        return
    for trained in roles.trained:
        for name in ranks:
            both = sorted(set(ranks[trained]) & set(ranks[name])) if name not in roles.trained else []
            if both:
                raise UserError(
                    f"placement: with shadows {trained} (training) and {name} (inference) must not share a device, "
                    f"both are on rank {both[0]}; give them disjoint ranks"
                )


def _pools(request: PlacementMap, cluster: Cluster) -> dict[tuple[int, ...], list[str]]:
    """Return the placed models whose ratios are shares of the same devices, by these devices."""
    pinned = {name: cluster.resolve_class(e.on) for name, e in request.models.items() if e.on and e.ranks is None}
    rest = tuple(d.rank for d in cluster.devices if d.device_class not in pinned.values())
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
) -> Packing:
    counts = {name: whole_devices(name, ratio, len(pool)) for name, ratio in ratios.items()}
    training = [name for name in counts if name in roles.trained]
    inference = [name for name in counts if name not in roles.trained]
    if not (_has_shadows(request.models) and training and inference):
        return pack([DeviceRequest(name, count) for name, count in counts.items()], pool, cluster)
    fitting = [
        _pack_sides(counts, training, inference, pool, side, cluster)
        for side in _side_readings(counts, training, len(pool), request.train_share)
        if _fits(counts, training, inference, side, len(pool))
    ]
    if not fitting:
        raise UserError(_no_reading(ratios, counts, training, request, len(pool)))
    return min(fitting, key=_num_shared_pairs)


def whole_devices(name: str, ratio: Fraction, num_devices: int) -> int:
    """Return ``ratio`` of ``num_devices``. Raises UserError with the nearest ratios where it is no whole number."""
    if not 0 < ratio <= 1:
        raise UserError(f"placement: ratio of {name} must lie in (0, 1], found {_number(ratio)}")
    count = ratio * num_devices
    if count.denominator != 1:
        low, high = max(1, int(count)), int(count) + 1
        near = [f"{_number(Fraction(n, num_devices))} ({n} of {num_devices})" for n in dict.fromkeys((low, high))]
        raise UserError(
            f"placement: ratio {_number(ratio)} of {name} is {_number(count)} of {num_devices} devices; "
            f"{'the nearest that work are' if len(near) > 1 else 'the nearest that works is'} {' and '.join(near)}"
        )
    return int(count)


def _side_readings(counts: dict[str, int], training: list[str], size: int, train_share: Fraction | None) -> list[int]:
    """Return the sizes of the training side to try; side by side first, so that it wins a tie."""
    if train_share is not None:
        return [whole_devices("train_share", train_share, size)]
    sizes = [counts[name] for name in training]
    return list(dict.fromkeys((sum(sizes), max(sizes))))


def _fits(counts: dict[str, int], training: list[str], inference: list[str], side: int, size: int) -> bool:
    return max(counts[n] for n in training) <= side and max(counts[n] for n in inference) <= size - side


def _pack_sides(
    counts: dict[str, int],
    training: list[str],
    inference: list[str],
    pool: tuple[int, ...],
    side: int,
    cluster: Cluster,
) -> Packing:
    left = pack([DeviceRequest(name, counts[name]) for name in training], pool[:side], cluster)
    right = pack([DeviceRequest(name, counts[name]) for name in inference], pool[side:], cluster)
    return Packing(left.ranks | right.ranks, left.warnings + right.warnings)


def _num_shared_pairs(packing: Packing) -> int:
    return sum(1 for a, b in combinations(packing.ranks.values(), 2) if set(a) & set(b))


def _no_reading(
    ratios: dict[str, Fraction],
    counts: dict[str, int],
    training: list[str],
    request: PlacementMap,
    size: int,
) -> str:
    """Return the error sentence with the nearest ratios that fit: those that remove the fewest devices."""
    train_share = request.train_share

    def text(shown: Iterable[Fraction]) -> str:
        """Return the vector; where only some models share the pool, names with ratios."""
        if len(ratios) == len(request.models):
            return _shown(shown)
        return ", ".join(f"{name}: {_number(ratio)}" for name, ratio in zip(ratios, shown, strict=True))

    found = f"placement: {text(ratios.values())} fits no split of {size} devices into a training and an inference side"
    if size < 2:
        return f"{found}: shadows need at least 2 devices"
    sides = [whole_devices("train_share", train_share, size)] if train_share is not None else range(1, size)

    def shrunk(side: int) -> dict[str, int]:
        return {name: min(count, side if name in training else size - side) for name, count in counts.items()}

    best = max((shrunk(side) for side in sides if 0 < side < size), key=lambda new: sum(new.values()), default=None)
    if best is None:
        return f"{found}: train_share must leave devices on both sides"
    return f"{found}; the nearest that does is {text(Fraction(best[name], size) for name in ratios)}"


def _placed(
    name: ModelName, entry: PlacementEntry, ranks: tuple[int, ...], spec: Spec, roles: Roles, cluster: Cluster
) -> PlacedModel:
    model = spec.models.of(name.role) or ModelSpec()
    if name.is_rollout:
        layout = make_layout(name, "rollout", entry, ranks, (spec.rollout.tp, spec.rollout.pp), cluster)
        settings = on_devices(rollout_settings(model, layout, spec), model.fallback_dtype, ranks, cluster)
        return PlacedModel(name, layout, False, settings, spec.rollout)
    settings = on_devices(model.of_shadow if name.is_shadow else model, model.fallback_dtype, ranks, cluster)
    layout = make_layout(name, f"models.{name}", entry, ranks, (settings.tp, settings.pp), cluster)
    placed = PlacedModel(name, layout, name in roles.trained, settings, head=roles.heads[name.role])
    return sharded_as_set(placed, cluster)


def sharded_as_set(model: PlacedModel, cluster: Cluster) -> PlacedModel:
    """Return ``model`` with the number of replicas over which its state is sharded by its setting ``shard``.

    Raises UserError unless every node has equally many of its replicas, and several.
    """
    if model.settings.shard == "all" or model.split == "whole":
        return model
    counts = Counter(cluster.node_of(ranks[0]) for ranks in model.layout.replica_sets)
    least, most = min(counts.values()), max(counts.values())
    if least < most:
        few, many = (next(node for node, count in counts.items() if count == each) for each in (least, most))
        raise UserError(
            f"{model.key('shard')}: node needs as many replicas of {model.name} on each of its nodes, found {least} on "
            f"node {few} and {most} on node {many}; use all, or place {max(2, least)} on each"
        )
    if most == 1:
        raise UserError(
            f"{model.key('shard')}: node needs several replicas of {model.name} on each of its nodes, found 1; "
            f"use all, or a smaller tp"
        )
    return replace(model, sharded_over=0 if len(counts) == 1 else most)


def make_layout(
    name: str, section: str, entry: PlacementEntry, written: tuple[int, ...], degrees: tuple[int, int], cluster: Cluster
) -> Layout:
    """Return the layout on ascending ranks, of ``degrees`` tp and pp; ``row_shares`` are in the order in which the
    user wrote the ranks.

    ``section``: of the YAML, with the degrees. Raises UserError for degrees and shares that do not fit the ranks.
    """
    ranks, (tp, pp) = tuple(sorted(written)), degrees
    _check_degrees(name, section, ranks, tp, pp, cluster)
    layout = Layout(ranks, tp, pp)
    shares = entry.row_shares
    if shares is None:
        # a replica is as fast as its slowest rank
        shares = tuple(Fraction(min(map(cluster.speed, replica))) for replica in layout.replica_sets)
    elif len(shares) != layout.dp:
        raise UserError(f"placement: {name} has {layout.dp} replicas, but row_shares has {len(shares)} entries")
    elif tp == pp == 1:
        shares = tuple(share for _, share in sorted(zip(written, shares, strict=True)))
    return replace(layout, row_shares=() if len(set(shares)) == 1 else shares)


def _check_degrees(name: str, section: str, ranks: tuple[int, ...], tp: int, pp: int, cluster: Cluster) -> None:
    """Raise UserError for degrees that do not divide the ranks, and for tensor-parallel ranks of a replica on several
    nodes, whose links are slow.
    """
    size = len(ranks)
    if size % pp:
        stages = either(n for n in range(1, size + 1) if size % n == 0)
        raise UserError(f"{section}.pp: {pp} does not divide the {size} devices of {name}; use {stages}")
    if size % (tp * pp) == 0 and _stays_on_node(ranks, tp, cluster):
        return
    works = [n for n in range(1, size + 1) if size % (n * pp) == 0 and _stays_on_node(ranks, n, cluster)]
    if size % (tp * pp):
        stages = f" in {pp} pipeline stages" if pp > 1 else ""
        raise UserError(f"{section}.tp: {tp} does not divide the {size} devices of {name}{stages}; use {either(works)}")
    raise UserError(f"{section}.tp: {tp} ranks of {name} would lie on two nodes; use {either(works)}")


def _stays_on_node(ranks: tuple[int, ...], tp: int, cluster: Cluster) -> bool:
    sets = (ranks[i : i + tp] for i in range(0, len(ranks), tp))
    return all(len({cluster.devices[rank].node for rank in members}) == 1 for members in sets)


_PIN_OR_SPAN = "pin it with `on:` or set placement.span_classes: true"


def check_classes(models: Sequence[PlacedModel], request: PlacementMap, cluster: Cluster, is_vector: bool) -> None:
    """Raise UserError for a model over two device classes, which runs at the slower one's pace, unless it is
    explicit.
    """
    for model in models:
        classes = {cluster.devices[rank].device_class for rank in model.ranks}
        # a rollout engine without an entry is where its role is
        entry = request.models.get(model.operator or model.name) or request.models[model.role]
        if len(classes) > 1 and not request.span_classes and entry.ranks is None:
            raise UserError(
                f"placement: {model.name} would span the device classes {', '.join(sorted(classes))}; "
                + (_as_mapping(request, model.name, min(classes)) if is_vector else _PIN_OR_SPAN)
            )


def _as_mapping(request: PlacementMap, name: str, device_class: str) -> str:
    """Return the mapping that expresses what a vector cannot."""
    ratios = {key: _number(entry.ratio) for key, entry in request.models.items() if entry.ratio is not None}
    pinned = f"{{{name}: {{ratio: {ratios[name]}, on: {device_class}}}, ...}}"
    spanning = ", ".join(f"{key}: {ratio}" for key, ratio in ratios.items())
    return f"write a mapping that pins it, such as {pinned}, or allows it: {{{spanning}, span_classes: true}}"


def _number(value: Fraction) -> str:
    return f"{float(value):g}" if Fraction(f"{float(value):g}") == value else str(value)


def _shown(ratios: Iterable[Fraction]) -> str:
    return "[" + ",".join(_number(ratio) for ratio in ratios) + "]"
