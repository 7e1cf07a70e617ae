"""Placing of models: a ratio vector, a mapping or explicit ranks become placed models with layouts and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

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
    if (rollout.tp, rollout.pp, 1) == (layout.tp, layout.pp, layout.cp) and layout.row_shares:
        entry = entry.model_copy(update={"row_shares": layout.row_shares})
    model = _placed(ModelName.rollout_of(trained.role), entry, trained.ranks, spec, roles, cluster)
    if rollout.is_hybrid and rollout.sleep:
        # adapters alone would be sent, and the weights that they do not change would be lost
        model = replace(model, is_hybrid=trained.settings.lora is None)
    own = model.layout
    if layout.tp % own.tp or layout.pp % own.pp or own.row_shares:
        return model
    return replace(model, layout=generation_layout(layout, own.tp, own.pp))


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
        layout = make_layout(name, "rollout", entry, ranks, Degrees.of_rollout(spec.rollout), cluster)
        settings = cluster.settings_on(rollout_settings(model, layout, spec), model.fallback_dtype, ranks)
        return PlacedModel(name, layout, False, settings, spec.rollout)
    settings = cluster.settings_on(model.of_shadow if name.is_shadow else model, model.fallback_dtype, ranks)
    layout = make_layout(name, f"models.{name}", entry, ranks, Degrees.of(settings), cluster)
    placed = PlacedModel(name, layout, name in roles.trained, settings, head=roles.heads[name.role])
    return placed.sharded_on(cluster)


@dataclass(frozen=True)
class Degrees:
    """Degrees of a replica.

    tp:           tensor-parallel ranks.
    pp:           pipeline stages.
    cp:           context-parallel ranks.
    ep:           expert-parallel ranks, which are replicas or context-parallel.
    crosses:      whether context-parallel ranks may be on several nodes.
    whole_nodes:  whether tensor-parallel ranks may be all ranks of several nodes.
    """

    tp: int
    pp: int
    cp: int = 1
    crosses: bool = False
    ep: int = 1
    whole_nodes: bool = False

    @classmethod
    def of_rollout(cls, rollout: RolloutSpec) -> Self:
        """Return the degrees of a rollout engine."""
        return cls(rollout.tp, rollout.pp, whole_nodes=True)

    @classmethod
    def of(cls, settings: ModelSpec) -> Self:
        """Return the degrees of a model's settings: of ring attention, which says so, ranks may be anywhere."""
        return cls(settings.tp, settings.pp, settings.cp, settings.context_parallel == "ring", settings.ep)

    def check(self, name: str, section: str, ranks: tuple[int, ...], cluster: Cluster) -> None:
        """Raise UserError for degrees that do not divide the ranks, and for ranks of a replica that would exchange
        activations between nodes, whose links are slow.
        """
        size, tp, pp, cp, whole = len(ranks), self.tp, self.pp, self.cp, self.whole_nodes
        if size % pp:
            stages = either(n for n in range(1, size + 1) if size % n == 0)
            raise SettingError.of(section, "pp", f"{pp} does not divide the {size} devices of {name}; use {stages}")
        if size % (tp * pp) == 0 and _stays_on_node(ranks, tp, cluster, whole):
            fits = [n for n in range(1, size + 1) if size % (n * tp * pp) == 0]
            if cp not in fits:
                raise SettingError.of(
                    section,
                    "cp",
                    f"{cp} does not divide the {size // (tp * pp)} copies of {name} on its {size} devices; "
                    f"use {either(fits)}",
                )
            if cp > 1 and not self.crosses and not _stays_on_node(ranks, cp * tp, cluster):
                stay = [n for n in fits if _stays_on_node(ranks, n * tp, cluster)]
                raise SettingError.of(
                    section,
                    "cp",
                    f"{cp} ranks of {name} would lie on two nodes; use {either(stay)}, or context_parallel ring",
                )
            copies, ep = size // (tp * pp), self.ep
            if copies % ep:
                divisors = [n for n in range(1, copies + 1) if copies % n == 0]
                raise SettingError.of(
                    section,
                    "ep",
                    f"{ep} does not divide the {copies} copies of {name} on its {size} devices; use {either(divisors)}",
                )
            return
        works = [n for n in range(1, size + 1) if size % (n * pp) == 0 and _stays_on_node(ranks, n, cluster, whole)]
        if size % (tp * pp):
            stages = f" in {pp} pipeline stages" if pp > 1 else ""
            raise SettingError.of(
                section, "tp", f"{tp} does not divide the {size} devices of {name}{stages}; use {either(works)}"
            )
        raise SettingError.of(section, "tp", f"{tp} ranks of {name} would lie on two nodes; use {either(works)}")


def make_layout(
    name: str, section: str, entry: PlacementEntry, written: tuple[int, ...], degrees: Degrees, cluster: Cluster
) -> Layout:
    """Return the layout on ascending ranks; ``row_shares`` are in the order in which the user wrote the ranks.

    ``section``: of the YAML, with the degrees. Raises UserError for degrees and shares that do not fit the ranks.
    """
    ranks = tuple(sorted(written))
    degrees.check(name, section, ranks, cluster)
    layout = Layout(ranks, degrees.tp, degrees.pp, cp=degrees.cp, ep=degrees.ep)
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
