"""Changes of settings that let a run fit: of one model on a rank, which ``plan`` suggests, and of a whole request, with
which ``advise`` refuses. A plan with a change shows whether it is possible, and which bytes it frees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexrlhf.config.engines import facts_of, offloading_engine
from flexrlhf.config.model_settings import LoraSpec, ModelSpec, ShadowSpec
from flexrlhf.config.placement_settings import ClusterSpec
from flexrlhf.config.spec import RolloutSpec, Spec
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.memory.budget import Compute
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Sync
from flexrlhf.strategies.workload import workload

LONG_ROW = 8192
"""Tokens of a prompt and its response from which several context-parallel ranks are tried."""
LEAST_RESPONSE = 128
"""Tokens of the shortest responses that are suggested."""
MOST_TIMES = 64
"""Most devices that are suggested, as a multiple of those there are."""
OF_MODELS = (
    *("zero", "shard", "tp", "pp", "cp", "ep", "micro_batch_tokens", "generate_tokens"),
    *("activation_checkpointing", "offload_activations", "tiled_mlp", "offload_optimizer"),
)
OF_ROLLOUT = ("tp", "pp", "kv_tokens")
OF_SCHEDULE = ("strategy", "lag", "num_chunks")
OF_SYNC = ("every",)
"""Settings of models, the rollout engine, the schedule and syncs that allow fewer placements than their defaults."""


@dataclass(frozen=True)
class SettingChange:
    """A new value for a setting.

    setting:  its key in the YAML
    value:    ``...``: the setting is left open, as if it were not written
    """

    setting: str
    value: Any = ...

    @property
    def key(self) -> str:
        """Last part of ``setting``."""
        return self.setting.rpartition(".")[2]

    @property
    def shown(self) -> str:
        """Value as it follows ``setting`` on the command line."""
        return f"={{rank: {self.value.rank}}}" if isinstance(self.value, LoraSpec) else f"={str(self.value).lower()}"

    @property
    def text(self) -> str:
        """Override as on the command line."""
        return self.setting + self.shown


Changes = tuple[SettingChange, ...]


@dataclass(frozen=True)
class RequestChange:
    """Changes of a request that are made together. ``text``: in words, after "it would fit"."""

    text: str
    changes: Changes


def changed_spec(spec: Spec, changes: Changes) -> Spec:
    """Return ``spec`` with ``changes``, which are not validated."""
    found: StrictModel = spec
    for change in changes:
        found = _changed(found, change.setting.split("."), change.value)
    assert isinstance(found, Spec)
    return found


def _changed(section: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    if isinstance(section, Mapping):
        return {**section, name: _changed(section[name], rest, value)}
    if rest:
        inner = dict(section)[name] if name != "shadow" else dict(section)[name] or ShadowSpec()
        return section.model_copy(update={name: _changed(inner, rest, value)})
    if value is not ...:
        return section.model_copy(update={name: value})
    kept = section.model_fields_set - {name}
    return type(section).model_construct(kept, **{each: getattr(section, each) for each in kept})


def changes_on(plan: Plan, rank: int) -> Iterator[SettingChange]:
    """Yield changes of the models on a rank and of syncs: engines and devices may refuse them."""
    for operator, tokens in plan.placement.pass_tokens.items():
        model = plan.placement[plan.placement.operators[operator]]
        width = plan.sizing.texts_of(model.role).width
        if rank in model.ranks and tokens >= 2 * width:
            half = tokens // 2 // width * width
            yield SettingChange(f"placement.operators.{operator}.micro_batch_tokens", half)
    for model in plan.placement.on_rank(rank):
        if model.rollout is not None:
            yield from _of_rollout(plan, model)
            continue
        if model.is_of_operators:
            continue  # it has the settings of its role
        changes = {**_of_any_copy(model), **_smaller_batches(plan, model, rank)}
        if model.facts.cp and plan.lengths.of_role(model.role).total >= LONG_ROW:
            changes["cp"] = [2 * model.settings.cp]
        sizes = plan.shapes[model.role].sizes if model.role in plan.shapes else None
        if model.facts.ep and sizes is not None and sizes.experts is not None:
            changes["ep"] = [times * model.settings.ep for times in (4, 16, 64)]
        if not model.is_shadow:
            changes |= _of_role(model, has_shape=model.role in plan.shapes)
        section = f"models.{model.role}" + ".shadow" * model.is_shadow
        for key, values in changes.items():
            yield from (SettingChange(f"{section}.{key}", value) for value in values)
    if any(isinstance(each, Sync) and each.overlaps for each in plan.schedule.instructions):
        yield SettingChange("sync.overlap", False)
    yield SettingChange("sync.bucket_mb", plan.spec.sync.bucket_bytes / 2e6)


def _of_rollout(plan: Plan, model: PlacedModel) -> Iterator[SettingChange]:
    """Yield changes of a rollout engine: a smaller cache, tensor parallelism, fewer bits, sleep."""
    rollout = plan.spec.rollout
    yield SettingChange("rollout.kv_tokens", max(plan.spec.padded_row, model.settings.generate_tokens // 2))
    yield SettingChange("rollout.tp", 2 * rollout.tp)
    if model.settings.dtype == "float32":
        yield SettingChange("rollout.dtype", "bfloat16")
    if not rollout.sleep:
        yield SettingChange("rollout.sleep", True)


def _of_any_copy(model: PlacedModel) -> dict[str, list[Any]]:
    """Return changes that any copy allows: more sharding and stages, fewer bits."""
    settings = model.settings
    return {
        "shard": ["all"] if model.is_sharded_in_nodes else [],
        "zero": [stage for stage in (1, 2, 3) if stage > settings.zero],
        "tp": [2 * settings.tp],
        "pp": [2 * settings.pp] if facts_of(model.engine).pp else [],
        "dtype": ["bfloat16", "float16"] if settings.dtype == "float32" else [],
    }


def _of_role(model: PlacedModel, has_shape: bool) -> dict[str, list[Any]]:
    """Return changes that a shadow takes from its role."""
    settings = model.settings
    changes: dict[str, list[Any]] = {
        key: [] if getattr(settings, key) else [True]
        for key in ("tiled_mlp", "activation_checkpointing", "offload_activations")
        + ("offload_optimizer", "offload_parameters")
    }
    if model.trained and settings.lora is None and has_shape:
        changes["lora"] = [LoraSpec()]
    return changes


def _smaller_batches(plan: Plan, model: PlacedModel, rank: int) -> dict[str, list[Any]]:
    """Return half of the tokens that are computed together."""
    texts = plan.sizing.texts_of(model.role)
    mine = workload(plan.schedule.for_rank(rank), plan.placement, plan.batch, rank)
    calls = [work for work, _ in mine if isinstance(work, Compute) and work.model == model.name]
    shared = [call for call in calls if call.kind != "generate" and call.tokens is None]
    passes = [plan.sizing.pass_size(model, call) for call in shared]
    decoded = [texts.rows_decoded(model, call.rows) for call in calls if call.kind == "generate"]
    most = max((size.tokens for size in passes), default=0)
    changes = {"micro_batch_tokens": [most // 2 // texts.width * texts.width]} if most >= 2 * texts.width else {}
    return changes | ({"generate_tokens": [max(decoded) // 2 * texts.width]} if max(decoded, default=0) > 1 else {})


def fixed_settings(spec: Spec, roles: Iterable[str]) -> dict[str, object]:
    """Return the settings of the YAML that leave fewer placements to choose from, with their values."""
    sections: dict[str, tuple[StrictModel | None, Sequence[str]]] = {}
    for role, model in _models(spec, roles).items():
        sections[f"models.{role}"] = model, OF_MODELS
        sections[f"models.{role}.shadow"] = model.shadow, OF_MODELS
    sections |= {"rollout": (spec.rollout, OF_ROLLOUT), "schedule": (spec.schedule, OF_SCHEDULE)}
    sections["sync"] = spec.sync, OF_SYNC
    return {
        f"{path}.{name}": getattr(section, name)
        for path, (section, names) in sections.items()
        for name in names
        if section is not None and name in section.model_fields_set and getattr(section, name) is not None
    }


def opening_changes(spec: Spec, roles: Iterable[str]) -> Iterator[RequestChange]:
    """Yield the request without each of the fixed settings, then without all of them."""
    settings = list(fixed_settings(spec, roles))
    for setting in settings if len(settings) > 1 else ():
        yield RequestChange(f"without {setting}", (SettingChange(setting),))
    if settings:
        yield RequestChange(f"without {' and '.join(settings)}", tuple(map(SettingChange, settings)))


def request_changes(
    spec: Spec, roles: Sequence[str], trained: Sequence[str], cluster: Cluster
) -> Iterator[Iterable[RequestChange]]:
    """Yield series of changes of models, lengths and devices, the smaller changes of each first."""
    yield _with_parameters_on_host(spec, roles)
    yield _with_offloading_engine(spec, trained, cluster)
    yield _with_own_decoding(spec)
    yield _with_adapters(spec, trained)
    yield _shorter(spec)
    yield _more_devices(spec)
    yield _more_memory(spec, cluster)


def paired_changes(
    spec: Spec, roles: Sequence[str], trained: Sequence[str], cluster: Cluster
) -> Iterator[RequestChange]:
    """Yield two changes together: first no fixed settings or adapters, then adapters, more devices or more memory."""
    opened, adapted = [*opening_changes(spec, roles)][-1:], [*_with_adapters(spec, trained)]
    for first in (*opened, *adapted):
        also = adapted if first in opened else []
        for second in (*also, *_more_devices(spec), *_more_memory(spec, cluster)):
            yield RequestChange(f"{first.text} {second.text}", first.changes + second.changes)


def _with_parameters_on_host(spec: Spec, roles: Iterable[str]) -> Iterator[RequestChange]:
    """Yield the request with ZeRO-3 shards in host memory between passes, which is searched only where
    nothing else fits."""
    models, name = _models(spec, roles), "offload_parameters"
    able = [
        role for role, each in models.items() if facts_of(each.engine).offload and name not in each.model_fields_set
    ]
    if able:
        values = {"zero": 3, name: True}
        changes = [SettingChange(f"models.{role}.{key}", value) for role in able for key, value in values.items()]
        yield RequestChange("with models.ROLE.zero 3 and offload_parameters", tuple(changes))


def _with_offloading_engine(spec: Spec, trained: Iterable[str], cluster: Cluster) -> Iterator[RequestChange]:
    """Yield the request with trained models on the engine whose optimizer states, and then parameters too, can be in
    host memory."""
    engine = offloading_engine()
    others = [role for role, model in _models(spec, trained).items() if model.engine != engine]
    if engine and others and cluster.has_known_gpus(spec.cluster):
        changes = tuple(SettingChange(f"models.{role}.engine", engine) for role in others)
        change = RequestChange(f"with --engine {engine} (models.ROLE.engine)", changes)
        yield change
        for more in _with_parameters_on_host(changed_spec(spec, changes), others):
            yield RequestChange(f"{change.text} and {more.text.removeprefix('with ')}", changes + more.changes)


def _with_own_decoding(spec: Spec) -> Iterator[RequestChange]:
    """Yield the request without a rollout engine, whose copy of the weights and cache stay on the devices."""
    if spec.rollout.has_copy:
        plain = RolloutSpec(engine="transformers", logprobs=spec.rollout.logprobs)
        yield RequestChange(f"with --rollout {plain.engine} (rollout.engine)", (SettingChange("rollout", plain),))


def _with_adapters(spec: Spec, trained: Iterable[str]) -> Iterator[RequestChange]:
    """Yield the request with adapters on all models that are trained."""
    whole = [role for role, model in _models(spec, trained).items() if model.lora is None]
    if whole:
        changes = tuple(SettingChange(f"models.{role}.lora", LoraSpec()) for role in whole)
        yield RequestChange(f"with adapters (--lora {LoraSpec().rank}, models.ROLE.lora)", changes)


def _shorter(spec: Spec) -> Iterator[RequestChange]:
    """Yield the request with shorter responses."""
    tokens = spec.data.max_response_tokens // 2
    while tokens >= LEAST_RESPONSE:
        change = SettingChange("data.max_response_tokens", tokens)
        yield RequestChange(f"with responses of at most {tokens} tokens ({change.setting})", (change,))
        tokens //= 2


def _more_devices(spec: Spec) -> Iterator[RequestChange]:
    """Yield the request on about twice as many devices, four times ..."""
    times = 2
    while times <= MOST_TIMES and times * spec.cluster.num_devices <= Spec.MAX_DEVICES:
        cluster = enlarged(spec.cluster, times)
        yield RequestChange(f"on {cluster.num_devices} devices", (SettingChange("cluster", cluster),))
        times *= 2


def enlarged(cluster: ClusterSpec, times: int) -> ClusterSpec:
    """Return ``cluster`` with at least ``times`` as many devices: up to eight in a node, then more nodes."""
    if not cluster.nodes:
        return cluster.model_copy(update={"devices": times * cluster.num_devices})
    nodes = [node.model_copy(update={"count": times * node.count}) for node in cluster.nodes]
    if len(nodes) == 1 and cluster.nodes[0].count == 1:
        devices = times * cluster.num_devices
        size = max(nodes[0].devices, min(devices, DeviceClass.PER_NODE))
        nodes = [nodes[0].model_copy(update={"devices": size, "count": -(-devices // size)})]
    return cluster.model_copy(update={"nodes": tuple(nodes)})


def _more_memory(spec: Spec, cluster: Cluster) -> Iterator[RequestChange]:
    """Yield the request on devices with the memory of each larger class; their speed stays."""
    largest = max((cluster.memory_bytes(rank) or 0) for rank in cluster.ranks) / 1e9
    classes = {each.usable_bytes / 1e9: each for each in reversed([*DeviceClass.KNOWN.values()])}
    for memory, device in sorted(classes.items()):
        if memory > largest > 0:
            nodes = tuple(node.model_copy(update={"memory_gb": memory}) for node in spec.cluster.nodes)
            changes = SettingChange("cluster.nodes", nodes), SettingChange("cluster.memory_gb", memory)
            yield RequestChange(f"with {device.memory_gb:g} GB on each device ({device.name})", changes)


def _models(spec: Spec, roles: Iterable[str]) -> dict[str, ModelSpec]:
    """Return the resolved settings of ``roles``."""
    found = {role: model for role in roles if (model := spec.models.of(role)) is not None}
    assert set(found) == set(roles), "all roles are resolved"
    return found
