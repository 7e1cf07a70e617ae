"""A spec as the mapping of a YAML that gives the same spec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexrlhf.config.model_settings import ModelSpec, ModelsSpec
from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.config.presets.filling import trained_roles

if TYPE_CHECKING:
    from flexrlhf.config.spec import Spec


def written_settings(spec: Spec, short: bool) -> dict[str, Any]:
    """Return the mapping of ``Spec.written``."""
    spec = spec.as_written
    if short:
        spec = spec.model_copy(update={"rollout": spec.rollout.as_written})
    raw = spec.model_dump(mode="json", by_alias=True, exclude_defaults=short)
    raw["models"] = {role: model for role, model in raw["models"].items() if model is not None}
    for role, model in spec.models:
        # not the default of every device, and not the one of every reference
        for name in ("dtype", *(ModelSpec.PASS_SETTINGS if role == "ref" else ())):
            if model is not None and name in model.model_fields_set:
                raw["models"].setdefault(role, {})[name] = getattr(model, name)
    if spec.models.all is not None:
        raw["models"] = _written_models(spec.models)
    if spec.algorithm.like is not None:
        for role in trained_roles(spec.algorithm.like, spec.algorithm.name):
            model = spec.models.of(role)
            if model is not None:
                raw["models"][role] = {
                    **raw["models"].get(role, {}),
                    "optimizer": model.optimizer.model_dump(mode="json"),
                }
    raw["algorithm"] = spec.algorithm.written(short)
    if isinstance(spec.placement, PlacementMap):
        further = {key: each for key, each in raw["placement"].items() if key != "models"}
        if spec.placement.operators is None:
            further.pop("operators", None)
        raw["placement"] = {**raw["placement"]["models"], **further}
    return raw


def _written_models(models: ModelsSpec) -> dict[str, Any]:
    """Return ``all`` and the roles as they are written: a default of a role may differ from ``all``."""
    written = {role: model for role, model in (("all", models.all), *models) if model is not None}
    raw = {role: model.model_dump(mode="json", exclude_unset=True) for role, model in written.items()}
    shared = raw["all"].items()
    return {
        role: model if role == "all" else dict(each for each in model.items() if each not in shared)
        for role, model in raw.items()
    }
