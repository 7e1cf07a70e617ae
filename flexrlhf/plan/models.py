"""Models of a spec: those that follow from others are filled in, and their parameters get shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from os.path import realpath
from pathlib import Path

from flexrlhf.config.data_settings import DataSpec
from flexrlhf.config.model_settings import Head, LoraSpec, ModelSpec
from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.config.spec import Spec, SyncSpec
from flexrlhf.errors import UserError
from flexrlhf.operators.columns import LONGER
from flexrlhf.operators.graph import Graph
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.placement import Placement
from flexrlhf.plan.algorithm_graph import heads_of
from flexrlhf.plan.model_checks import check_family
from flexrlhf.plan.score_sources import SECTIONS
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.shapes import model_shape, read_config
from flexrlhf.weights.stored_model import StoredModel

_ORIGINS = {"ref": "actor", "critic": "reward", "cost_critic": "cost"}
"""Role → the one whose weights it starts from if it has none: a critic from the model that scores."""


LARGE_MB = 512.0
"""MB of logits, and of buckets, at which a GPU of any known class is busy; less where its memory is small."""
CRITICS = ("critic", "cost_critic")
CRITIC_RATE = 9e-6
"""Learning rate of a critic: OpenRLHF 0.11.2 has 9e-6, verl 0.9.1 1e-5, next to 1e-6 of an actor."""


def resolve_models(spec: Spec, graph: Graph, pending: Mapping[Path, ModelSpec] | None = None) -> Spec:
    """Return ``spec`` with models that a user may leave out: ref starts as the actor, critics as the model that scores.

    Settings of ``models.all`` are then in every role, and of adapters is known whether they are new. ``pending``: as of
    ``make_plan``. Raises UserError for a missing model, and for one without a role in ``graph``.
    """
    written = {role for role, model in spec.models if model is not None}
    shared = {role for role in written if _shares(spec, role, graph)}
    surplus = sorted(written - set(graph.roles) - shared)
    if surplus:
        raise UserError(f"models.{surplus[0]}: {_why_none(spec, surplus[0], graph)}")
    filled, of_all = dict(spec.models), spec.models.all
    for role in [role for role in _ORIGINS if role in graph.roles]:
        origin = _ORIGINS[role] if _ORIGINS[role] in graph.roles else "actor"
        filled[role] = _with_rate_of_critics(role, _weights_of(filled[role] or of_all or ModelSpec(), filled[origin]))
    policy, reference = filled["actor"], filled["ref"]
    if policy is not None and reference is not None and reference.share is None:
        filled["ref"] = _with_passes_of(policy, reference)
    for role in graph.roles:
        if filled.get(role) is None:
            hint = f"; or say with {role}: where scores come from" if role in SECTIONS else ""
            raise UserError(f"models.{role}: missing; {spec.algorithm.name} needs {', '.join(graph.roles)}{hint}")
        if of_all is not None and role not in graph.trained:
            # no settings of training from models.all
            taken = {name for name in ModelSpec.OF_TRAINING if getattr(filled[role], name) == getattr(of_all, name)}
            filled[role] = ModelSpec(**filled[role].model_dump(exclude_unset=True, exclude=taken))
        filled[role] = _with_text_limit(role, filled[role], spec.data)
        if filled[role].lora is not None and role in graph.trained:
            lora = _new_or_stored(role, filled[role], heads_of(graph)[role], pending or {})
            filled[role] = filled[role].model_copy(update={"lora": lora})
    return spec.with_models({**filled, "all": None})


def shares_reference(spec: Spec, graph: Graph) -> bool:
    """Whether the actor without its adapters is the reference: where the YAML has none, neither model nor place."""
    actor, placement = spec.models.actor, spec.placement
    if isinstance(placement, PlacementMap):
        is_placed = placement.operators is not None or any(name.split(".")[0] == "ref" for name in placement.models)
    else:
        is_placed = placement not in (None, "auto")
    has_adapters = actor is not None and actor.lora is not None
    return has_adapters and spec.models.ref is None and not is_placed and "ref" in graph.roles


def with_shared_reference(spec: Spec) -> Spec:
    """Return ``spec`` with the actor without its adapters as the reference.

    A copy of its own would give the same log-probs, and be as large as the actor.
    """
    return spec.with_models({"ref": ModelSpec(share="actor")})


def with_device_sizes(spec: Spec, cluster: Cluster) -> Spec:
    """Return ``spec`` with room for logits and for weights under way that suits its devices, if none is given.

    Small chunks would read the weight of a language head, and small buckets send messages, far more often than needed.
    """
    return _with_types(_sized(spec, lambda given, size: size if given is None else given, cluster), cluster)


def _with_types(spec: Spec, cluster: Cluster) -> Spec:
    """Return ``spec`` with models in bfloat16 where all devices compute in it, unless another type is written."""
    if not cluster.all_compute_in_bfloat16(spec.cluster):
        return spec
    models = {
        # DeepSpeed has no float32 gradients of 16-bit weights at stage 0
        role: model.model_copy(
            update={"dtype": "bfloat16" if model.zero >= model.facts.least_16_bit_zero else "float32"}
        )
        for role, model in spec.models
        if model is not None and model.share is None and "dtype" not in model.model_fields_set
    }
    return spec.with_models(models)


def without_device_sizes(spec: Spec) -> Spec:
    """Return ``spec`` without the sizes that ``with_device_sizes`` gives."""
    return _sized(spec, lambda given, size: None if given == size else given, Cluster.of(spec.cluster))


def _sized(spec: Spec, change: Callable[[float | None, float], float | None], cluster: Cluster) -> Spec:
    known = [DeviceClass.KNOWN[name].memory_gb for name in cluster.classes if name in DeviceClass.KNOWN]
    large = min(LARGE_MB, 10 * min(known)) if len(known) == len(cluster.classes) else None
    logits = large or ModelSpec.SMALL_LOGITS_MB
    models = {
        # one that shares the actor's weights has no settings of its own
        role: model
        if model is None or model.share is not None
        else model.model_copy(update={"logits_mb": change(model.logits_mb, logits)})
        for role, model in spec.models
    }
    bucket = change(spec.sync.bucket_mb, large or SyncSpec.SMALL_BUCKET_MB)
    sync = spec.sync.model_copy(update={"bucket_mb": bucket})
    return spec.with_models(models).model_copy(update={"sync": sync})


def _with_rate_of_critics(role: str, model: ModelSpec) -> ModelSpec:
    """Return a critic's settings with its own learning rate, if none is written."""
    optimizer = model.optimizer
    if role not in CRITICS or "learning_rate" in optimizer.model_fields_set:
        return model
    return model.model_copy(update={"optimizer": optimizer.model_copy(update={"learning_rate": CRITIC_RATE})})


def _with_text_limit(role: str, model: ModelSpec, data: DataSpec) -> ModelSpec:
    """Return ``model`` with the longest text that it reads by its own tokenizer, if it does."""
    if not model.retokenize or model.max_text_tokens is not None:
        return model
    longest = LONGER * (data.max_prompt_tokens + data.max_response_tokens)
    has_config = model.path is not None and (Path(model.path) / "config.json").is_file()
    limit = read_config(role, model).get("max_position_embeddings") if has_config else None
    return model.model_copy(update={"max_text_tokens": min(longest, limit) if isinstance(limit, int) else longest})


def _new_or_stored(role: str, model: ModelSpec, head: Head, pending: Mapping[Path, ModelSpec]) -> LoraSpec:
    """Return the adapters of ``model``: the ones in its path if training goes on with them, else new ones.

    Raises UserError if it cannot go on with them, but has to.
    """
    lora, source = model.lora, StoredModel.of(role, model)
    assert lora is not None, "a model with adapters"
    before = None if source.path is None else pending.get(Path(realpath(source.path)))
    key, where = f"models.{role}.lora", f"the adapters in models.{role}.path"
    if (before is None and not source.has_adapters) or (before is not None and before.lora is None):
        if lora.new is False:
            raise UserError(f"{key}.new: false goes on with {where}, which has none; remove it")
        return lora
    stored = before.lora if before is not None else source.adapters
    shape = None if before is not None or stored is None else model_shape(role, model, head)
    if stored is not None and shape is not None and {*shape.lora_candidates} == {*(stored.targets or ())}:
        # as a run writes that has saved them
        stored = stored.model_copy(update={"targets": None})
    if stored is None and lora.new is False:
        raise UserError(
            f"{key}.new: false goes on with {where}, which are of another form than low-rank ones; use true"
        )
    others = [] if stored is None else _written_otherwise(lora, stored)
    if others and lora.new is False:
        raise UserError(f"{key}.{others[0]}; remove it, or use {key}.new: true, which merges those and trains new ones")
    if stored is None or others or lora.new:
        return lora.model_copy(update={"new": True})
    return stored.model_copy(update={"new": False})


def _written_otherwise(lora: LoraSpec, stored: LoraSpec) -> list[str]:
    """Return what ``lora`` has written otherwise than adapters in a directory have it, with both values."""
    found = []
    for name in ("rank", "alpha", "targets"):
        own, other = getattr(lora, name), getattr(stored, name)
        is_same = {*own} == {*(other or ())} if name == "targets" and own is not None else own == other
        if name in lora.model_fields_set and own is not None and not is_same:
            shown = [
                ", ".join(each) if isinstance(each, tuple) else each or "every linear layer" for each in (own, other)
            ]
            found.append(f"{name}: {shown[0]}, and the adapters in its path have {shown[1]}")
    return found


def roles_that_keep_starts(spec: Spec, graph: Graph) -> frozenset[str]:
    """Return the roles with a frozen copy of the adapters that they go on training: a reference computes with it."""
    found = {operator.role for operator in graph.operators if not operator.adapters}
    return frozenset(role for role in found if (model := spec.models.of(role)) is not None and model.goes_on_adapters)


def with_starts(placement: Placement, roles: Collection[str]) -> Placement:
    """Return ``placement`` with frozen copies of adapters in ``roles``; a rollout engine computes no reference."""
    models = (replace(each, keeps_start=each.role in roles and each.rollout is None) for each in placement.models)
    return replace(placement, models=tuple(models)) if roles else placement


def _why_none(spec: Spec, role: str, graph: Graph) -> str:
    """Return the reason why this run has no such role."""
    section = next((name for name in SECTIONS if role == name or role.startswith(f"{name}_")), None)
    if section is not None and dict(spec)[section] is not None:
        return f"no source of {section} is this model; add {{model: {role}}} there, or remove it here"
    return spec.algorithm.why_no(role) or f"{spec.algorithm.name} has no {role}; it has {', '.join(graph.roles)}"


def with_parity_limits(spec: Spec) -> Spec:
    """Return ``spec``, whose models have their types, with limits of the parity gate that suit the types of both
    sides."""
    rollout, actor, sent = spec.rollout, spec.models.actor, spec.sync.dtype
    parity = rollout.parity
    if (not rollout.has_copy and sent is None) or actor is None or parity is None:
        return spec
    is_exact = (rollout.dtype or actor.dtype) == actor.dtype == "float32" and sent is None
    limits = (
        {"max_difference": 1e-3, "mean_difference": 1e-4}
        if is_exact
        else {"p999_difference": 1.0, "mean_difference": 0.05}
    )
    missing = {name: limit for name, limit in limits.items() if getattr(parity, name) is None}
    parity = parity.model_copy(update=missing)
    return spec.model_copy(update={"rollout": rollout.model_copy(update={"parity": parity})})


def _shares(spec: Spec, role: str, graph: Graph) -> bool:
    """Whether ``role`` shares another's base weights in this graph. Raises UserError if that is not possible."""
    model = spec.models.of(role)
    if model is None or model.share is None:
        return False
    owner = spec.models.of(model.share)
    if role != "ref":
        raise UserError(f"models.{role}.share: only ref can share the actor's weights, found it on {role}")
    if owner is None or owner.lora is None:
        raise UserError(
            f"models.ref.share: {model.share} has no lora, so its weights are trained themselves; "
            f"give models.{model.share}.lora or remove models.ref.share"
        )
    return any(operator.role == model.share and not operator.adapters for operator in graph.operators)


def _with_passes_of(policy: ModelSpec, reference: ModelSpec) -> ModelSpec:
    """Return ``reference`` with the policy's composition of passes where it has none: kernels round by the shape of a
    pass, and the difference of equal weights' log-probs is to be 0.
    """
    left_out = [name for name in ModelSpec.PASS_SETTINGS if name not in reference.model_fields_set]
    taken = {name: getattr(policy, name) for name in left_out}
    # still left out
    return ModelSpec.model_construct(reference.model_fields_set, **{**dict(reference), **taken})


def _weights_of(model: ModelSpec, origin: ModelSpec | None) -> ModelSpec:
    if origin is None or model.path is not None or model.init is not None:
        return model
    trusted = model.trust_remote_code or origin.trust_remote_code
    return model.model_copy(update={"path": origin.path, "init": origin.init, "trust_remote_code": trusted})


def model_shapes(spec: Spec, graph: Graph, pending: Mapping[Path, ModelSpec]) -> dict[str, ModelShape]:
    """Return parameter shapes by role; a role is absent when its shape is known only once it is loaded.

    ``pending``: models that an earlier run will write, by directory.
    """
    shapes: dict[str, ModelShape] = {}
    keep_starts = roles_that_keep_starts(spec, graph)
    for role in origins_first(graph):
        model = spec.models.of(role)
        assert model is not None, f"{role} is resolved"
        lora, new_head, saved, saved_later = model.lora, role in graph.trained or model.new_head, None, False
        while (earlier := model.earlier(pending)) is not None:
            # the files that the earlier run starts from may lack a head that it trains and writes
            model, new_head, saved_later = earlier, True, True
            saved = saved or (None if model.save_dtype == "auto" or model.lora else model.save_dtype)
        is_sampled = role == graph.generated and spec.guards.sampled_logprobs == "stop"
        check_family(role, read_config(role, model), heads_of(graph)[role], is_sampled)
        shape = model_shape(role, model, heads_of(graph)[role], new_head)
        if shape is not None:
            shape = shape if saved is None else replace(shape, stored=saved)
            if lora is not None:
                shape = shape.with_adapters(role, lora, role in keep_starts)
                if lora.new is not False:
                    shape.check_rank(role, lora)
                elif not saved_later:
                    stored, head = StoredModel.of(role, model), {ParameterName.SCALAR_HEAD}
                    stored.adapter_tensors.check(stored.where, dict(shape.trained), head, "its base model")
            shapes[role] = first_equal(shape)
    return {role: shapes[role] for role in graph.roles if role in shapes}


def origins_first(graph: Graph) -> list[str]:
    """Return the roles in the order of checks: origins of others first, so that messages name written models."""
    return sorted(graph.roles, key=lambda role: role in _ORIGINS)


@lru_cache(maxsize=256)
def first_equal(shape: ModelShape) -> ModelShape:
    """Return the first shape that equals ``shape``, so that tables with shapes as keys need not compare parameters."""
    return shape
