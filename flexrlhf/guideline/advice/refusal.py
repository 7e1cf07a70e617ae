"""Refusal where no placement fits: why, and what would help. Each change is planned before it is suggested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from flexrlhf.config.engines import facts_of
from flexrlhf.config.spec import MAX_DEVICES, ClusterSpec, LoraSpec, ModelSpec, NodeSpec, Spec
from flexrlhf.config.spec_file import dump_spec, parse_spec
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import UserError, either
from flexrlhf.guideline.advice.candidates import RejectedCandidate
from flexrlhf.guideline.advice.last_resort import last_resort, last_spaces, least_needed
from flexrlhf.guideline.advice.request import GPUS_PER_NODE
from flexrlhf.guideline.advice.space import UNLIMITED, Space, make_space
from flexrlhf.placement.devices import DEVICE_CLASSES
from flexrlhf.text import bytes_text

SECONDS = 20.0
"""Seconds in which changes are tried."""
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


def refusal_text(base: Space, rejected: Sequence[RejectedCandidate]) -> str:
    """Return one sentence: that nothing fits, why, and the changes that would help."""
    until = perf_counter() + SECONDS
    nothing = f"no placement of these models fits {_devices(base)}"
    opened = _first_that_fits(base, freed(base), until)
    if opened is not None:
        fixed = fixed_settings(base).items()
        named = [f"{name}: {value}" for name, value in fixed if name in opened.text.split()]
        return f"{nothing} with {' and '.join(named)}; it would fit {opened.text}"
    lacking = _without_settings(base)
    if lacking:
        return f"{nothing}: {lacking} has no settings there (heads, type, engine or a setting in the YAML)"
    single = [_first_that_fits(base, series, until) for series in changes(base)]
    helps = [each.text for each in single if each is not None]
    if not helps and (pair := _first_that_fits(base, pairs(base), until)) is not None:
        helps = [pair.text]
    hint = f"it would fit {either(helps)}" if helps else "no change that was tried would help"
    return f"{nothing} ({_cause(base, rejected)}); {hint}"


def _devices(base: Space) -> str:
    """Return the devices of each class as ``4 H100-80G and 4 A100-40G``."""
    return " and ".join(f"{len(base.cluster.ranks_on(name))} {name}" for name in base.cluster.classes)


def _first_that_fits(base: Space, series: Iterable[Change], until: float) -> Change | None:
    """Return the first change under which a plan fits. ``series``: the smaller changes first."""
    return next((change for change in series if perf_counter() < until and _fits(base, change.spec, until)), None)


def _fits(base: Space, spec: Spec, until: float) -> bool:
    try:
        parse_spec(read_yaml(dump_spec(spec, short=True)))
        return last_resort(make_space(spec, base.costs, base.lengths, base.pending), until) is not None
    except UserError:
        return False


def _without_settings(base: Space) -> str:
    """Return a model that has no settings on any mesh, with and without shadows; empty where there is none."""
    lacking = [[name for name, size in least_needed(space).items() if size is None] for _, space in last_spaces(base)]
    return lacking[0][0] if lacking and all(lacking) else ""


def _cause(base: Space, rejected: Sequence[RejectedCandidate]) -> str:
    """Return which model needs more than any device has, with its leanest settings, or why there is nothing to
    place."""
    found: dict[str, float] = {}
    for _, space in last_spaces(base):
        for name, size in least_needed(space).items():
            found[name] = min(size or UNLIMITED, found.get(name, UNLIMITED))
    memory = max(_memory_of(base))
    largest = max(found, key=lambda name: found[name], default="")
    has = f"of {bytes_text(int(memory))}"
    if largest and found[largest] > memory:
        return f"{largest} alone needs {bytes_text(int(found[largest]))} on a device {has}"
    if found:
        return f"the models need more than a device {has}"
    reasons = "; ".join(dict.fromkeys(item.reason for item in rejected if item.reason))
    return reasons or "lag, rare syncs or the strategy need shadow models, which there are none of here"


def _memory_of(space: Space) -> list[float]:
    """Return the bytes of the devices of each class."""
    return [each / space.usable for each in space.pool.memory.values()]


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
    able = {role: each for role, each in settings.items() if facts_of(each.engine).offload}
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
