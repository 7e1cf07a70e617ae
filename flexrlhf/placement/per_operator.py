"""Placement of each operator: ``placement.operators`` becomes placed models.

Operators of a role with the same ranks and settings, but for ``micro_batch_tokens``, share a copy of its weights. The
copy that trains is the role's own (the first one of a role that is not trained); every other one is called as its
first operator, such as
``actor.generate``. It is filled from the role's own copy before its first call in a step and freed after its last one
(``strategies/syncs.py``): the parameter reallocation of ReaL (Mei et al. 2024). With ``shadow: true`` it keeps its
weights instead and is synced after training, so that they may be older (``schedule.lag``, ``sync.every``). Where
``rollout.engine`` generates, the copies of operators that generate are that engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.placement_settings import OperatorPlacement, PlacementMap
from flexrlhf.config.spec import RolloutSpec, Spec
from flexrlhf.errors import SettingError, UserError, nearest
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.place import Degrees, check_classes, make_layout
from flexrlhf.placement.placed import ModelName, PlacedModel, PlacedOperator
from flexrlhf.placement.placement import Placement, idle_warnings
from flexrlhf.placement.ratios import Roles, assign_ranks
from flexrlhf.placement.rollout import rollout_settings, rollout_warnings

Entries = Mapping[str, OperatorPlacement]
RanksByOperator = Mapping[str, tuple[int, ...]]
"""Ranks of each operator."""


@dataclass(frozen=True)
class _Way:
    """Way in which a copy computes; operators of a role with the same one share a copy.

    rollout:  settings of a copy that a rollout engine generates with.
    is_kept:  whether it is a shadow.
    """

    layout: Layout
    settings: ModelSpec
    rollout: RolloutSpec | None
    is_kept: bool


def place_operators(spec: Spec, operators: Sequence[PlacedOperator], roles: Roles, cluster: Cluster) -> Placement:
    """Return the copies that ``operators`` need, the model calls of a step.

    Raises UserError for operators that are left out or unknown, and with the nearest placement that works.
    """
    assert isinstance(spec.placement, PlacementMap) and spec.placement.operators is not None, "of operators"
    entries = spec.placement.operators
    _check_names(entries, operators)
    for operator in operators:
        if operator.name in entries and _is_of_rollout(operator, roles):
            _check_rollout(operator, entries[operator.name], spec)
    request = PlacementMap(models=dict(entries), span_classes=spec.placement.span_classes)
    ranks, warnings = assign_ranks(request, roles, cluster)
    _check_shadows(operators, entries, ranks, spec, roles)
    if roles.rollout is not None:
        warnings += rollout_warnings(spec, roles.rollout)
    models, copies = list[PlacedModel](), dict[str, ModelName]()
    for role in roles.all:
        own = [operator for operator in operators if operator.role == role and operator.name in entries]
        ways = {each.name: _way(each, entries[each.name], ranks[each.name], spec, roles, cluster) for each in own}
        for model, names in _copies(own, ways, spec, roles, cluster):
            models.append(model)
            copies |= dict.fromkeys(names, model.name)
    check_classes(models, request, cluster, is_vector=False)
    _check_processes(models)
    tokens = {name: entry.micro_batch_tokens for name, entry in entries.items() if entry.micro_batch_tokens is not None}
    texts = (*warnings, *idle_warnings(models))
    return Placement(tuple(models), len(cluster.devices), texts, copies, pass_tokens=tokens)


def _copies(
    operators: Sequence[PlacedOperator], ways: Mapping[str, _Way], spec: Spec, roles: Roles, cluster: Cluster
) -> Iterator[tuple[PlacedModel, list[str]]]:
    """Yield the copies of a role, its own one first, each with the operators that it computes."""
    sharing: dict[str, list[str]] = {}
    for operator in sorted(operators, key=lambda each: each.kind != "train"):
        alike = next((first for first in sharing if ways[first] == ways[operator.name]), operator.name)
        sharing.setdefault(alike, []).append(operator.name)
    for first, names in sharing.items():
        role, way, is_own = operators[0].role, ways[first], first == next(iter(sharing))
        name = ModelName.of(role, "" if is_own else first)
        settings = way.settings if is_own or way.rollout is not None else way.settings.of_copy({})
        fallback = _model_of(role, spec).fallback_dtype
        settings = cluster.settings_on(settings, fallback, way.layout.ranks)
        model = PlacedModel(
            name,
            way.layout,
            trained=is_own and role in roles.trained,
            settings=settings,
            rollout=way.rollout,
            head=roles.heads[role] if way.rollout is None else "causal",
            operator=first,
            # adapters alone would be sent, and the weights that they do not change would be lost
            is_hybrid=_sleeps(way) and _model_of(role, spec).lora is None,
            is_kept=way.is_kept,
        )
        yield model.sharded_on(cluster), names


def _sleeps(way: _Way) -> bool:
    return way.rollout is not None and way.rollout.sleep and not way.is_kept


def _model_of(role: str, spec: Spec) -> ModelSpec:
    model = spec.models.of(role)
    assert model is not None, f"{role} is resolved"
    return model


def _way(
    operator: PlacedOperator,
    entry: OperatorPlacement,
    ranks: tuple[int, ...],
    spec: Spec,
    roles: Roles,
    cluster: Cluster,
) -> _Way:
    model, section = _model_of(operator.role, spec), f"placement.operators.{operator.name}"
    if _is_of_rollout(operator, roles):
        own = {name: degree for name in RolloutSpec.AXES if (degree := getattr(entry, name)) is not None}
        rollout = spec.rollout.model_copy(update=own)
        layout = make_layout(operator.name, section, entry, ranks, Degrees.of(rollout), cluster)
        settings = rollout_settings(model, layout, spec.model_copy(update={"rollout": rollout}))
        return _Way(layout, settings, rollout, entry.shadow)
    model = model.of_shadow if entry.shadow else model
    is_other = entry.engine not in (None, model.engine)
    dropped = {"config": {}, "shard": "all", **ModelSpec.OF_ONE_ENGINE} if is_other else {}
    settings = model.model_copy(update={**dropped, **entry.settings})
    layout = make_layout(operator.name, section, entry, ranks, Degrees.of(settings), cluster)
    return _Way(layout, settings, None, entry.shadow)


def _is_of_rollout(operator: PlacedOperator, roles: Roles) -> bool:
    return operator.kind == "generate" and operator.role == roles.rollout


def _check_names(entries: Entries, operators: Sequence[PlacedOperator]) -> None:
    """Raise UserError for an unknown operator, and for those that are left out.

    An operator that most steps skip, such as a check, needs no entry: it runs on the role's own copy.
    """
    known = [operator.name for operator in operators]
    for name in entries:
        if name not in known:
            raise UserError(
                f"placement.operators: no operator {name!r}{nearest(name, known)}; this run has {', '.join(known)}"
            )
    required = [each.name for each in operators if each.every == 1 and not each.on_trained]
    missing = [name for name in required if name not in entries]
    if missing:
        raise UserError(f"placement.operators: {', '.join(missing)} missing; give {', '.join(required)}")


def _check_rollout(operator: PlacedOperator, entry: OperatorPlacement, spec: Spec) -> None:
    """Raise UserError for settings of an operator that its rollout engine does not have."""
    rollout, section = spec.rollout, f"placement.operators.{operator.name}"
    if rollout.is_hybrid:
        raise SettingError.of(
            "rollout",
            "engine",
            f"{rollout.engine} generates on the ranks that train the {operator.role}, and {section} has a place for "
            f"generation; use transformers, and give tp there",
        )
    if entry.engine not in (None, rollout.engine):
        raise SettingError.of(
            section, "engine", f"{entry.engine} contradicts rollout.engine {rollout.engine}; remove one of them"
        )
    reasons = dict.fromkeys(("zero", "shard"), f"{rollout.engine} is sharded by tp and pp alone")
    reasons["micro_batch_tokens"] = f"{rollout.engine} composes its passes itself"
    for name, reason in reasons.items():
        if getattr(entry, name) is not None:
            raise SettingError.of(section, name, f"{reason}, found {getattr(entry, name)}; remove it")


def _check_shadows(
    operators: Sequence[PlacedOperator], entries: Entries, ranks: RanksByOperator, spec: Spec, roles: Roles
) -> None:
    """Raise UserError for shadows that need the trained weights or the ranks of training, and for a role that computes
    with older weights in some operators alone."""
    training = {rank: each.name for each in reversed(operators) if each.kind == "train" for rank in ranks[each.name]}
    is_late, shadowed = spec.schedule.lag > 0 or spec.sync.every > 1, set[str]()
    for each in operators:
        if each.name not in entries or not entries[each.name].shadow:
            continue
        key = f"placement.operators.{each.name}.shadow"
        if each.role not in roles.trained:
            raise UserError(f"{key}: {each.role} is not trained, so no copy of it is synced; remove it")
        if roles.needs_trained(each):
            raise UserError(f"{key}: {each.name} needs the weights that are trained; remove it")
        if shared := sorted(training.keys() & ranks[each.name]):
            raise UserError(
                f"{key}: rank {shared[0]} trains ({training[shared[0]]}), and a shadow would take its memory and wait "
                f"for it; give {each.name} ranks that train nothing"
            )
        shadowed.add(each.role)
    if not is_late:
        return
    setting = f"schedule.lag: {spec.schedule.lag}" if spec.schedule.lag else f"sync.every: {spec.sync.every}"
    for each in operators:
        infers = each.name in entries and each.adapters and not roles.needs_trained(each)
        follows = each.role in shadowed or (each.role == roles.generating and each.kind == "generate")
        if infers and follows and not entries[each.name].shadow:
            raise UserError(
                f"{setting}: {each.name} needs a copy with older weights than are trained; give it ranks that train "
                f"nothing and shadow: true in placement.operators.{each.name}"
            )


def _check_processes(models: Sequence[PlacedModel]) -> None:
    """Raise UserError for a rank with two copies of an engine of which a process can have one."""
    first: dict[int, PlacedModel] = {}
    for model in models:
        for rank in model.ranks if model.facts.one_in_process else ():
            other = first.setdefault(rank, model)
            if other is not model:
                raise UserError(
                    f"placement.operators.{model.operator}: rank {rank} has the {model.engine} of {other.operator}, "
                    f"and a process can have one; give both the same entry, or ranks of their own"
                )
