"""Placement of each operator: ``placement.operators`` becomes placed models.

Operators of a role with the same ranks and settings share a copy of its weights. The copy that trains is the role's own
(the first one of a role that is not trained); every other one is called as its first operator, such as
``actor.generate``. It is filled from the role's own copy before its first call in a step and freed after its last one
(``strategies/syncs.py``): the parameter reallocation of ReaL (Mei et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.placement_settings import OperatorPlacement, PlacementMap
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError, nearest
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.place import check_classes, make_layout, on_devices, sharded_as_set
from flexrlhf.placement.placed import ModelName, PlacedModel, PlacedOperator, Placement
from flexrlhf.placement.ratios import Roles, assign_ranks

Entries = Mapping[str, OperatorPlacement]
Way = tuple[Layout, ModelSpec]
"""How a copy computes; operators of a role with the same one share a copy."""


def place_operators(spec: Spec, operators: Sequence[PlacedOperator], roles: Roles, cluster: Cluster) -> Placement:
    """Return the copies that ``operators`` need, the model calls of a step.

    Raises UserError for operators that are left out or unknown, and with the nearest placement that works.
    """
    assert isinstance(spec.placement, PlacementMap) and spec.placement.operators is not None, "of operators"
    entries = spec.placement.operators
    _check_rollout(spec, roles)
    _check_names(entries, operators)
    request = PlacementMap(models=dict(entries), span_classes=spec.placement.span_classes)
    ranks, warnings = assign_ranks(request, roles, cluster)
    models, copies = list[PlacedModel](), dict[str, ModelName]()
    for role in roles.all:
        own = [operator for operator in operators if operator.role == role and operator.name in entries]
        ways = {each.name: _way(each, entries[each.name], ranks[each.name], spec, cluster) for each in own}
        for model, names in _copies(own, ways, roles, cluster):
            models.append(model)
            copies |= dict.fromkeys(names, model.name)
    check_classes(models, request, cluster, is_vector=False)
    return Placement(tuple(models), len(cluster.devices), tuple(warnings), copies)


def _copies(
    operators: Sequence[PlacedOperator], ways: Mapping[str, Way], roles: Roles, cluster: Cluster
) -> Iterator[tuple[PlacedModel, list[str]]]:
    """Yield the copies of a role, its own one first, each with the operators that it computes."""
    sharing: dict[str, list[str]] = {}
    for operator in sorted(operators, key=lambda each: each.kind != "train"):
        alike = next((first for first in sharing if ways[first] == ways[operator.name]), operator.name)
        sharing.setdefault(alike, []).append(operator.name)
    for first, names in sharing.items():
        role, (layout, settings), is_own = operators[0].role, ways[first], first == next(iter(sharing))
        name = ModelName.of(role, "" if is_own else first)
        settings = settings if is_own else settings.of_copy({})
        settings = on_devices(settings, settings.fallback_dtype, layout.ranks, cluster)
        trained = is_own and role in roles.trained
        model = PlacedModel(name, layout, trained, settings, head=roles.heads[role], operator=first)
        yield sharded_as_set(model, cluster), names


def _way(
    operator: PlacedOperator, entry: OperatorPlacement, ranks: tuple[int, ...], spec: Spec, cluster: Cluster
) -> Way:
    model = spec.models.of(operator.role)
    assert model is not None, f"{operator.role} is resolved"
    is_other = entry.engine not in (None, model.engine)
    dropped = {"config": {}, "pp": 1, "shard": "all"} if is_other else {}
    settings = model.model_copy(update={**dropped, **entry.settings})
    section = f"placement.operators.{operator.name}"
    layout = make_layout(operator.name, section, entry, ranks, (settings.tp, settings.pp), cluster)
    return layout, settings


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


def _check_rollout(spec: Spec, roles: Roles) -> None:
    """Raise UserError for a rollout engine, whose place and settings are in ``rollout``."""
    if roles.rollout is not None:
        raise UserError(
            f"placement.operators: rollout.engine {spec.rollout.engine} is placed with its model; use transformers, or "
            f"a placement of models"
        )
