"""Changes of a whole request with which ``advise`` refuses, and settings of a YAML that leave it fewer placements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from flexrlhf.api import (
    Cluster,
    ClusterSpec,
    DeviceClass,
    EngineFacts,
    LoraSpec,
    ModelSpec,
    ParallelDims,
    RolloutSpec,
    Spec,
)

LEAST_RESPONSE = 128
"""Tokens of the shortest responses that are suggested."""
MOST_TIMES = 64
"""Most devices that are suggested, as a multiple of those there are."""
DEGREES = ("zero", "shard", *ParallelDims._fields)
"""Settings by which a model is split over ranks."""
SIZES = ("micro_batch_tokens", "generate_tokens")
"""Settings of the sizes of its passes."""
_SAVINGS = ("activation_checkpointing", "offload_activations", "tiled_mlp", "offload_optimizer")
OF_MODELS = (*DEGREES, *SIZES, *_SAVINGS)
OF_ROLLOUT = (*RolloutSpec.AXES, "kv_tokens")
OF_SCHEDULE = ("strategy", "lag", "num_chunks")
OF_SYNC = ("every",)
"""Settings of models, the rollout engine, the schedule and syncs that allow fewer placements than their defaults."""


@dataclass(frozen=True)
class RequestChange:
    """Changes of a request that are made together, by setting. ``text``: in words, after "it would fit"."""

    text: str
    changes: Mapping[str, object]


def fixed_settings(spec: Spec, roles: Iterable[str]) -> dict[str, object]:
    """Return the settings of the YAML that leave fewer placements to choose from, with their values."""
    sections: dict[str, tuple[BaseModel | None, Sequence[str]]] = {}
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
        yield RequestChange(f"without {setting}", {setting: ...})
    if settings:
        yield RequestChange(f"without {' and '.join(settings)}", dict.fromkeys(settings, ...))


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
            yield RequestChange(f"{first.text} {second.text}", {**first.changes, **second.changes})


def _with_parameters_on_host(spec: Spec, roles: Iterable[str]) -> Iterator[RequestChange]:
    """Yield the request with ZeRO-3 shards in host memory between passes, which is searched only where
    nothing else fits."""
    models, name = _models(spec, roles), "offload_parameters"
    able = [role for role, each in models.items() if each.facts.offload and name not in each.model_fields_set]
    if able:
        values = {"zero": 3, name: True}
        changes = {f"models.{role}.{key}": value for role in able for key, value in values.items()}
        yield RequestChange("with models.ROLE.zero 3 and offload_parameters", changes)


def _with_offloading_engine(spec: Spec, trained: Iterable[str], cluster: Cluster) -> Iterator[RequestChange]:
    """Yield the request with trained models on the engine whose optimizer states, and then parameters too, can be in
    host memory."""
    engine = EngineFacts.offloading_engine()
    others = [role for role, model in _models(spec, trained).items() if model.engine != engine]
    if engine and others and cluster.has_known_gpus(spec.cluster):
        changes = {f"models.{role}.engine": engine for role in others}
        change = RequestChange(f"with --engine {engine} (models.ROLE.engine)", changes)
        yield change
        for more in _with_parameters_on_host(spec.with_settings(changes), others):
            yield RequestChange(f"{change.text} and {more.text.removeprefix('with ')}", {**changes, **more.changes})


def _with_own_decoding(spec: Spec) -> Iterator[RequestChange]:
    """Yield the request without a rollout engine, whose copy of the weights and cache stay on the devices."""
    if spec.rollout.has_copy:
        plain = RolloutSpec(engine="transformers", logprobs=spec.rollout.logprobs)
        yield RequestChange(f"with --rollout {plain.engine} (rollout.engine)", {"rollout": plain})


def _with_adapters(spec: Spec, trained: Iterable[str]) -> Iterator[RequestChange]:
    """Yield the request with adapters on all models that are trained."""
    whole = [role for role, model in _models(spec, trained).items() if model.lora is None]
    if whole:
        changes = {f"models.{role}.lora": LoraSpec() for role in whole}
        yield RequestChange(f"with adapters (--lora {LoraSpec().rank}, models.ROLE.lora)", changes)


def _shorter(spec: Spec) -> Iterator[RequestChange]:
    """Yield the request with shorter responses."""
    tokens = spec.data.max_response_tokens // 2
    while tokens >= LEAST_RESPONSE:
        setting = "data.max_response_tokens"
        yield RequestChange(f"with responses of at most {tokens} tokens ({setting})", {setting: tokens})
        tokens //= 2


def _more_devices(spec: Spec) -> Iterator[RequestChange]:
    """Yield the request on about twice as many devices, four times ..."""
    times = 2
    while times <= MOST_TIMES and times * spec.cluster.num_devices <= Spec.MAX_DEVICES:
        cluster = enlarged(spec.cluster, times)
        yield RequestChange(f"on {cluster.num_devices} devices", {"cluster": cluster})
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
            changes = {"cluster.nodes": nodes, "cluster.memory_gb": memory}
            yield RequestChange(f"with {device.memory_gb:g} GB on each device ({device.name})", changes)


def _models(spec: Spec, roles: Iterable[str]) -> dict[str, ModelSpec]:
    """Return the resolved settings of ``roles``."""
    found = {role: model for role in roles if (model := spec.models.of(role)) is not None}
    assert set(found) == set(roles), "all roles are resolved"
    return found
