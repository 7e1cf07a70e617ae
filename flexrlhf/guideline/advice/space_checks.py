"""Checks of models and settings that no placement could have, before a space of placements is searched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexrlhf.api import (
    Cluster,
    EngineFacts,
    Families,
    Layout,
    ModelName,
    ModelShape,
    ModelSpec,
    PlacedModel,
    ResolvedSpec,
    Spec,
    UserError,
    check_settings,
    either,
)


def with_types_of_stages(written: Spec, spec: Spec, cluster: Cluster) -> Spec:
    """Return ``spec`` with models in bfloat16 where their type and ZeRO stage are open and their engine trains 16 bits
    from a later stage than 0 on, which is then chosen."""
    if not cluster.all_compute_in_bfloat16(spec.cluster):
        return spec
    changed = {}
    for role, model in spec.models:
        own = written.models.of(role) or written.models.all or ModelSpec()
        is_open = not {"zero", "dtype"} & own.model_fields_set
        if model is not None and model.facts.least_16_bit_zero and is_open:
            changed[role] = model.model_copy(update={"dtype": "bfloat16"})
    return spec.with_models(changed)


def check_searched_settings(resolved: ResolvedSpec, role: str) -> None:
    """Raise UserError for settings of a role that no placement could have, whatever ZeRO stage is chosen for it."""
    settings, roles = resolved.spec.models.of(role), resolved.roles
    assert settings is not None, f"{role} is resolved"
    is_fixed = "zero" in settings.model_fields_set
    errors = []
    for zero in (settings.zero,) if is_fixed else settings.facts.zero:
        chosen = settings.model_copy(update={"zero": zero})
        try:
            check_settings(
                PlacedModel(ModelName(role), Layout((0,)), role in roles.trained, chosen, head=roles.heads[role])
            )
            return
        except UserError as error:
            errors.append(error)
    raise errors[-1]


def check_searched_models(
    spec: Spec, shapes: Mapping[str, ModelShape], roles: Sequence[str], generated: str | None
) -> None:
    """Raise UserError for an engine that lacks a kind of calls of its role under every placement, and for a model whose
    sizes are not known.
    """
    full = either(EngineFacts.full_engines())
    for role in roles:
        settings = spec.models.of(role)
        assert settings is not None, f"{role} is resolved"
        EngineFacts.check_name(f"models.{role}.engine", settings.engine)
        if not settings.facts.trains:
            raise UserError(
                f"models.{role}.engine: {settings.engine} only generates; use {full} here, and "
                f"rollout.engine: {settings.engine} to generate with it"
            )
        engines = [name for name in (settings.engine, settings.of_shadow.engine) if EngineFacts.is_engine(name)]
        serves = {kind for name in engines for kind in EngineFacts.of(name).kinds}
        if role == generated and not spec.rollout.has_copy and "generate" not in serves:
            raise UserError(
                f"models.{role}.engine: {settings.engine} does not support generate; set rollout.engine: vllm, or use "
                f"{full} here"
            )
        if role not in shapes or shapes[role].sizes is None:
            raise UserError(
                f"models.{role}: seconds follow from the sizes of a model, which the config of this family does not "
                f"give; known families: {', '.join(Families.KNOWN)}"
            )
