"""Placing of models: a ratio vector, a mapping or explicit ranks become placed models with layouts and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

from flexrlhf.config.axes import INNER, OF_EXPERTS, OF_PARTS, OUTER, Axis, ParallelDims
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.placement_settings import PlacementEntry, PlacementMap
from flexrlhf.config.spec import RolloutSpec, Spec
from flexrlhf.errors import SettingError, UserError, either, nearest
from flexrlhf.placement.by_class import on_classes
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.layout import Layout, generation_layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.placement.placement import Placement, idle_warnings
from flexrlhf.placement.ratios import Roles, assign_ranks, has_shadows, ratio_text, vector_text
from flexrlhf.placement.rollout import rollout_settings, rollout_warnings


def place(spec: Spec, roles: Roles, can_shadow: bool, cluster: Cluster) -> Placement:
    """Place every model of ``roles``. Raises UserError with the nearest placement that works."""
    request, reason = on_classes(_entries(spec, roles, can_shadow), roles, cluster)
    is_vector = not isinstance(spec.placement, PlacementMap)
    ranks, warnings = assign_ranks(request, roles, cluster, is_vector)
    models = tuple(
        _placed(ModelName(name), entry, ranks[name], spec, roles, cluster) for name, entry in request.models.items()
    )
    if roles.rollout is not None and ModelName.rollout_of(roles.rollout) not in request.models:
        models += (_rollout_on_trained_ranks(next(m for m in models if m.role == roles.rollout), spec, roles, cluster),)
    if roles.rollout is not None:
        warnings = warnings + rollout_warnings(spec, roles.rollout)
    check_classes(models, request, cluster, is_vector)
    return Placement(models, len(cluster.devices), (*warnings, *idle_warnings(models)), reason=reason)


def _rollout_on_trained_ranks(trained: PlacedModel, spec: Spec, roles: Roles, cluster: Cluster) -> PlacedModel:
    """Return the rollout engine on the ranks of the trained copy; its replicas take rows as that copy's do.

    Where that copy has more tensor-parallel ranks, each rank's part of the engine contains the part that it trains.
    """
    entry = PlacementEntry(ranks=trained.ranks)
    rollout, layout = spec.rollout, trained.layout
    if rollout.dims == layout.dims.without(OF_EXPERTS) and layout.row_shares:
        entry = entry.model_copy(update={"row_shares": layout.row_shares})
    model = _placed(ModelName.rollout_of(trained.role), entry, trained.ranks, spec, roles, cluster)
    if rollout.is_hybrid and rollout.sleep:
        # adapters alone would be sent, and the weights that they do not change would be lost
        model = replace(model, is_hybrid=trained.settings.lora is None)
    dims = model.layout.dims
    if any(layout.dims.of(axis) % dims.of(axis) for axis in OF_PARTS) or model.layout.row_shares:
        return model
    return replace(model, layout=generation_layout(layout, dims))


def _entries(spec: Spec, roles: Roles, can_shadow: bool) -> PlacementMap:
    """Return the mapping form of ``spec.placement``, in vector order."""
    assert spec.placement != "auto", "the command line resolves auto before it plans"
    if spec.placement is None:
        return PlacementMap(models={name: PlacementEntry(ratio=Fraction(1)) for name in roles.all})
    if isinstance(spec.placement, PlacementMap):
        _check_hybrid(spec, has_shadows(spec.placement.models))
        return _check_names(spec.placement, roles, can_shadow)
    names = {len(roles.all): roles.all}
    if can_shadow:
        names[len(roles.with_shadows)] = roles.with_shadows
    if len(spec.placement) not in names:
        forms = " or ".join(f"{n} [{', '.join(order)}]" for n, order in names.items())
        raise UserError(
            f"placement: {spec.algorithm.name} takes a vector of {forms}, "
            f"found {len(spec.placement)} entries {vector_text(spec.placement)}"
        )
    entries = zip(names[len(spec.placement)], spec.placement, strict=True)
    _check_hybrid(spec, has_shadows(names[len(spec.placement)]))
    return PlacementMap(models={name: PlacementEntry(ratio=ratio) for name, ratio in entries})


def _check_hybrid(spec: Spec, has_shadows: bool) -> None:
    """Raise UserError for a shadow next to a copy that generates on the trained copy's ranks."""
    rollout = spec.rollout
    if rollout.is_hybrid and has_shadows:
        raise SettingError.of(
            "rollout",
            "engine",
            f"{rollout.engine} generates on the ranks that train the actor, and with shadows its "
            f"shadow generates; use transformers with models.actor.shadow: {{engine: {rollout.engine}, tp: "
            f"{rollout.tp}}}, or a placement without shadows",
        )


def _check_names(placement: PlacementMap, roles: Roles, can_shadow: bool) -> PlacementMap:
    allowed = roles.with_shadows if can_shadow else roles.all
    for name in placement.models:
        if name not in allowed:
            known = (*allowed, *PlacementMap.SETTINGS)
            if roles.rollout is None and ModelName(name).is_rollout and ModelName(name).role in roles.trained:
                raise UserError(f"placement: {name} needs an engine of its own; set rollout.engine: vllm, or remove it")
            if can_shadow and ModelName(name).is_shadow and ModelName(name).role == roles.rollout:
                raise UserError(
                    f"placement: with a rollout engine {name} is that engine; call it "
                    f"{ModelName.rollout_of(roles.rollout)}"
                )
            raise UserError(f"placement: no model {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    shadowed = has_shadows(placement.models)
    # what generates is apart, if anything is; other roles may do without a shadow
    required = [name for name in roles.with_shadows if not name.copy or (shadowed and name.role == roles.generating)]
    missing = [name for name in required if name not in placement.models]
    if missing:
        raise UserError(f"placement: {', '.join(missing)} missing; give {', '.join(required)}")
    if placement.train_share is not None and not shadowed:
        raise UserError("placement.train_share: needs shadow models (a disaggregated placement); remove it")
    named = [name for name in roles.with_shadows if name in placement.models]
    return placement.model_copy(update={"models": {name: placement.models[name] for name in named}})


def _placed(
    name: ModelName, entry: PlacementEntry, ranks: tuple[int, ...], spec: Spec, roles: Roles, cluster: Cluster
) -> PlacedModel:
    model = spec.models.of(name.role) or ModelSpec()
    if name.is_rollout:
        layout = make_layout(name, "rollout", entry, ranks, Degrees.of(spec.rollout), cluster)
        settings = cluster.settings_on(rollout_settings(model, layout, spec), model.fallback_dtype, ranks)
        return PlacedModel(name, layout, False, settings, spec.rollout)
    settings = cluster.settings_on(model.of_shadow if name.is_shadow else model, model.fallback_dtype, ranks)
    layout = make_layout(name, f"models.{name}", entry, ranks, Degrees.of(settings), cluster)
    placed = PlacedModel(name, layout, name in roles.trained, settings, head=roles.heads[name.role])
    return placed.sharded_on(cluster)


@dataclass(frozen=True)
class Degrees:
    """Degrees of a placed model, and where its ranks may lie.

    dims:         degree of each axis.
    crossing:     axes whose ranks may be on several nodes, though such ranks usually share one.
    whole_nodes:  whether the ranks of an axis may be all ranks of several nodes.
    """

    dims: ParallelDims
    crossing: tuple[str, ...] = ()
    whole_nodes: bool = False

    @classmethod
    def of(cls, settings: ModelSpec | RolloutSpec) -> Self:
        """Return the degrees of a model's settings, or of a rollout engine."""
        if isinstance(settings, RolloutSpec):
            return cls(settings.dims, whole_nodes=True)
        return cls(settings.dims, settings.crossing_axes)

    def check(self, name: str, section: str, ranks: tuple[int, ...], cluster: Cluster) -> None:
        """Raise UserError for degrees that do not divide the ranks, and for ranks of a replica that would exchange
        activations between nodes, whose links are slow.
        """
        size, dims, outer, inner = len(ranks), self.dims, ParallelDims(), ParallelDims()
        for axis in (*OUTER, *INNER, *OF_EXPERTS):
            degree, neighbours = dims.of(axis), inner.replica
            left = size // (outer.replica * (neighbours if axis.is_in_replica else inner.parts))
            fits = (n for n in range(1, left + 1) if left % n == 0)
            works = (n for n in fits if self._is_near(axis, n, neighbours, ranks, cluster))
            if left % degree:
                of = f"{left} copies of {name} on its {size} devices"
                if axis.has_parts:
                    of = f"{size} devices of {name}" + "".join(
                        f" in {outer.of(each)} {each.words}" for each in outer.several()
                    )
                raise SettingError.of(section, axis.name, f"{degree} does not divide the {of}; use {either(works)}")
            if not self._is_near(axis, degree, neighbours, ranks, cluster):
                use = either(works) + "".join(f", or {setting} {value}" for setting, value in axis.crosses_with)
                raise SettingError.of(section, axis.name, f"{degree} ranks of {name} would lie on two nodes; use {use}")
            if axis.is_outer:
                outer = outer._replace(**{axis.name: degree})
            elif axis.is_in_replica:
                inner = inner._replace(**{axis.name: degree})

    def _is_near(self, axis: Axis, degree: int, neighbours: int, ranks: tuple[int, ...], cluster: Cluster) -> bool:
        """Whether ``degree`` ranks along ``axis`` may lie as they do; ``neighbours``: ranks from one to the next."""
        if degree == 1 or not axis.near or axis.name in self.crossing:
            return True
        return _stays_on_node(ranks, degree * neighbours, cluster, self.whole_nodes)


def make_layout(
    name: str, section: str, entry: PlacementEntry, written: tuple[int, ...], degrees: Degrees, cluster: Cluster
) -> Layout:
    """Return the layout on ascending ranks; ``row_shares`` are in the order in which the user wrote the ranks.

    ``section``: of the YAML, with the degrees. Raises UserError for degrees and shares that do not fit the ranks.
    """
    ranks = tuple(sorted(written))
    degrees.check(name, section, ranks, cluster)
    layout = Layout(ranks, degrees.dims)
    shares = entry.row_shares
    if shares is None:
        # a replica is as fast as its slowest rank
        speeds = {rank: cluster.speed(rank) for rank in ranks}
        if len(set(speeds.values())) == 1:
            return layout
        shares = tuple(Fraction(min(map(speeds.__getitem__, replica))) for replica in layout.replica_sets)
    elif len(shares) != layout.dp:
        raise UserError(f"placement: {name} has {layout.dp} replicas, but row_shares has {len(shares)} entries")
    elif layout.dp == len(ranks):
        shares = tuple(share for _, share in sorted(zip(written, shares, strict=True)))
    return replace(layout, row_shares=() if len(set(shares)) == 1 else shares)


def _stays_on_node(ranks: tuple[int, ...], tp: int, cluster: Cluster, whole_nodes: bool = False) -> bool:
    """Whether neighbours are on one node; or, with ``whole_nodes``, on nodes that have no other ranks."""
    nodes = [{cluster.node_of(rank) for rank in ranks[i : i + tp]} for i in range(0, len(ranks), tp)]
    return all(
        len(each) == 1 or (whole_nodes and sum(len(cluster.ranks_on_node(node)) for node in each) == tp)
        for each in nodes
    )


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
    """Return the mapping that pins a model or allows it to span, which no vector does."""
    ratios = {key: ratio_text(entry.ratio) for key, entry in request.models.items() if entry.ratio is not None}
    pinned = f"{{{name}: {{ratio: {ratios[name]}, on: {device_class}}}, ...}}"
    spanning = ", ".join(f"{key}: {ratio}" for key, ratio in ratios.items())
    return f"write a mapping that pins it, such as {pinned}, or allows it: {{{spanning}, span_classes: true}}"
