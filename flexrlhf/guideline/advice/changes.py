"""Changes of a request that may make a placement fit, in series of one kind, the smaller changes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flexrlhf.config.spec import MAX_DEVICES, ClusterSpec, LoraSpec, ModelSpec, NodeSpec, Spec
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.engines.capabilities import CAPABILITIES
from flexrlhf.guideline.advice.request import GPUS_PER_NODE
from flexrlhf.guideline.advice.space import Space
from flexrlhf.placement.devices import DEVICE_CLASSES

LEAST_RESPONSE = 128
"""Tokens of the shortest responses that are suggested."""
MOST_TIMES = 64
"""Most devices that are suggested, as a multiple of those there are."""
OF_MODELS = (
    *("zero", "shard", "tp", "pp", "micro_batch_tokens", "generate_tokens"),
    *("activation_checkpointing", "offload_optimizer"),
)
OF_ROLLOUT = ("tp", "pp", "kv_tokens")
OF_SCHEDULE = ("strategy", "lag", "num_chunks")
OF_SYNC = ("every",)
"""Settings of models, the rollout engine, the schedule and syncs that allow fewer placements than their defaults."""


@dataclass(frozen=True)
class Change:
    """A change of a request.

    text:  what it is, after "it would fit ".
    spec:  the request with it.
    """

    text: str
    spec: Spec


def fixed_settings(base: Space) -> dict[str, object]:
    """Return the settings of the YAML that leave fewer placements to choose from, with their values."""
    sections: dict[str, tuple[StrictModel | None, Sequence[str]]] = {}
    for role in base.roles.all:
        settings = _model(base.spec, role)
        sections[f"models.{role}"] = settings, OF_MODELS
        sections[f"models.{role}.shadow"] = settings.shadow, OF_MODELS
    sections |= {
        "rollout": (base.spec.rollout, OF_ROLLOUT),
        "schedule": (base.spec.schedule, OF_SCHEDULE),
        "sync": (base.spec.sync, OF_SYNC),
    }
    return {
        f"{path}.{name}": getattr(section, name)
        for path, (section, names) in sections.items()
        for name in names
        if section is not None and name in section.model_fields_set and getattr(section, name) is not None
    }


def freed(base: Space) -> Iterator[Change]:
    """Yield the request without each of the fixed settings, then without all of them."""
    settings = list(fixed_settings(base))
    for setting in settings if len(settings) > 1 else ():
        yield Change(f"without {setting}", _without(base.spec, [setting]))
    if settings:
        yield Change(f"without {' and '.join(settings)}", _without(base.spec, settings))


def _without(spec: Spec, settings: Sequence[str]) -> Spec:
    opened: StrictModel = spec
    for setting in settings:
        opened = _open(opened, setting.split("."))
    assert isinstance(opened, Spec)
    return opened


def _open(section: StrictModel, path: Sequence[str]) -> StrictModel:
    """Return ``section`` with the setting at ``path`` left open."""
    name, *rest = path
    if rest:
        return section.model_copy(update={name: _open(dict(section)[name], rest)})
    kept = section.model_fields_set - {name}
    return type(section).model_construct(kept, **{each: getattr(section, each) for each in kept})


def changes(base: Space) -> Iterator[Iterator[Change]]:
    """Yield the series of changes of models, texts and devices."""
    yield _with_parameters_on_host(base)
    yield _with_adapters(base, base.spec)
    yield _shorter(base.spec)
    yield _more_devices(base.spec)
    yield _more_memory(base)


def pairs(base: Space) -> Iterator[Change]:
    """Yield two changes together: first no fixed settings or adapters, then adapters, more devices or more memory."""
    opened = [*freed(base)][-1:]
    for first in (*opened, *_with_adapters(base, base.spec)):
        space = replace(base, spec=first.spec)
        adapted = _with_adapters(space, first.spec) if first in opened else ()
        for second in (*adapted, *_more_devices(first.spec), *_more_memory(space)):
            yield Change(f"{first.text} {second.text}", second.spec)


def _with_adapters(base: Space, spec: Spec) -> Iterator[Change]:
    """Yield the request with adapters on all models that are trained."""
    trained = {role: _model(spec, role) for role in base.roles.trained}
    whole = {role: settings for role, settings in trained.items() if settings.lora is None}
    if whole:
        models = {role: settings.model_copy(update={"lora": LoraSpec()}) for role, settings in whole.items()}
        yield Change(f"with adapters (--lora {LoraSpec().rank}, models.ROLE.lora)", _with_models(spec, models))


def _with_parameters_on_host(base: Space) -> Iterator[Change]:
    """Yield the request with ZeRO-3 shards in host memory between passes, which has no price and so is not searched."""
    settings = {role: _model(base.spec, role) for role in base.roles.all}
    able = {role: each for role, each in settings.items() if CAPABILITIES[each.engine].offload}
    on_host = {"zero": 3, "offload_parameters": True}
    if any(not each.offload_parameters for each in able.values()):
        models = {role: each.model_copy(update=on_host) for role, each in able.items()}
        yield Change("with models.ROLE.zero 3 and offload_parameters", _with_models(base.spec, models))


def _shorter(spec: Spec) -> Iterator[Change]:
    """Yield the request with shorter responses."""
    tokens = spec.data.max_response_tokens // 2
    while tokens >= LEAST_RESPONSE:
        data = spec.data.model_copy(update={"max_response_tokens": tokens})
        text = f"with responses of at most {tokens} tokens (data.max_response_tokens)"
        yield Change(text, spec.model_copy(update={"data": data}))
        tokens //= 2


def _more_devices(spec: Spec) -> Iterator[Change]:
    """Yield the request on about twice as many devices, four times ..."""
    times = 2
    while times <= MOST_TIMES and times * spec.cluster.num_devices <= MAX_DEVICES:
        cluster = _times(spec.cluster, times)
        yield Change(f"on {cluster.num_devices} devices", spec.model_copy(update={"cluster": cluster}))
        times *= 2


def _times(cluster: ClusterSpec, times: int) -> ClusterSpec:
    """Return ``cluster`` with at least ``times`` as many devices: up to eight in a node, then more nodes."""
    if not cluster.nodes:
        return cluster.model_copy(update={"devices": times * cluster.num_devices})
    if len(cluster.nodes) == 1 and cluster.nodes[0].count == 1:
        return cluster.model_copy(update={"nodes": (_whole_nodes(cluster.nodes[0], times * cluster.num_devices),)})
    nodes = tuple(node.model_copy(update={"count": times * node.count}) for node in cluster.nodes)
    return cluster.model_copy(update={"nodes": nodes})


def _whole_nodes(node: NodeSpec, devices: int) -> NodeSpec:
    """Return as many whole nodes as ``devices`` need."""
    size = max(node.devices, min(devices, GPUS_PER_NODE))
    return node.model_copy(update={"devices": size, "count": -(-devices // size)})


def _more_memory(base: Space) -> Iterator[Change]:
    """Yield the request on devices with the memory of each larger class; their speed stays."""
    sizes = [base.cluster.memory_bytes(rank) for rank in base.cluster.ranks]
    largest = max((size or 0) for size in sizes) / 1e9
    classes = {each.usable_bytes / 1e9: each for each in reversed(DEVICE_CLASSES.values())}
    for memory, device in sorted(classes.items()):
        if memory > largest > 0:
            nodes = tuple(node.model_copy(update={"memory_gb": memory}) for node in base.spec.cluster.nodes)
            cluster = base.spec.cluster.model_copy(update={"nodes": nodes, "memory_gb": memory})
            text = f"with {device.memory_gb:g} GB on each device ({device.name})"
            yield Change(text, base.spec.model_copy(update={"cluster": cluster}))


def _model(spec: Spec, role: str) -> ModelSpec:
    settings = spec.models.of(role)
    assert settings is not None, f"{role} is resolved"
    return settings


def _with_models(spec: Spec, models: dict[str, ModelSpec]) -> Spec:
    return spec.model_copy(update={"models": spec.models.model_copy(update=dict(models))})
