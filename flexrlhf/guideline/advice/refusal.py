"""Last resorts where no placement fits, and what would help: each change is planned before it is suggested.

A last resort fills all of a device's memory and keeps any idle model in host memory. What does not fit then fits in no
way that ``advise`` or a plan could find.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flexrlhf.config.spec import MAX_DEVICES, ClusterSpec, LoraSpec, ModelSpec, Spec
from flexrlhf.engines.capabilities import CAPABILITIES
from flexrlhf.errors import UserError, either
from flexrlhf.guideline.advice.candidates import Candidate, FeasibleCandidate, RejectedCandidate, check
from flexrlhf.guideline.advice.host_offload import offload_sets, offloaded_spaces
from flexrlhf.guideline.advice.space import UNLIMITED, Space, is_allowed, make_space, with_schedule
from flexrlhf.guideline.search.assignments import ROUNDING
from flexrlhf.guideline.search.branch_and_bound import search
from flexrlhf.guideline.search.problem import MeshShape, SearchProblem
from flexrlhf.placement.devices import DEVICE_CLASSES
from flexrlhf.text import bytes_text

SECONDS = 2.0
"""Seconds that the search of one space may take, where any plan that fits will do."""
GAP = 0.5
"""Share of its time by which such a plan may miss the fastest."""
CHECKED = 3
"""Results of a search that are planned."""
LEAST_RESPONSE = 128
"""Tokens of the shortest responses that are suggested."""
MOST_TIMES = 64
"""Most devices that are suggested, as a multiple of those there are."""
FREED = (
    "zero",
    "tp",
    "pp",
    "micro_batch_tokens",
    "generate_tokens",
    "activation_checkpointing",
    "offload_optimizer",
)
"""Settings of models that a search chooses where the YAML leaves them open."""


@dataclass(frozen=True)
class Change:
    """A change of a request.

    text:  what it is, after "it would fit ".
    spec:  the request with it.
    """

    text: str
    spec: Spec


def last_resorts(base: Space) -> list[Candidate]:
    """Return the first placement that fits with all memory and idle models in host memory; none: there is none."""
    for label, space in _spaces(base, if_each_fits=True):
        result = search(space.problem(), SECONDS, GAP)
        for item in result.best[:CHECKED]:
            candidate = Candidate("search", label, space, item.assignment)
            if is_allowed(item.seconds) and isinstance(check(candidate), FeasibleCandidate):
                return [candidate]
    return []


def _spaces(base: Space, if_each_fits: bool = False) -> Iterator[tuple[str, Space]]:
    """Yield (label, space) of all that could fit: with and without shadows, and with models in host memory.

    ``if_each_fits``: only those in which every model fits while it computes, which host memory for others does not
    change.
    """
    lag = base.spec.schedule.lag
    tried = [] if lag else [("without shadows", with_schedule(base, base.spec.schedule.num_chunks, 0))]
    if base.graph.can_shadow and base.pool.num_devices > 1 and base.spec.rollout.engine != "torch":
        tried.append(("with shadows", replace(_in_turn(base), has_shadows=True)))
    for label, plain in tried:
        space = replace(plain, usable=1.0)
        if if_each_fits and not _each_fits(space):
            continue
        for name, variant in reversed([*offloaded_spaces(space, offload_sets(space))]):
            yield f"{label}, {name}", variant
        yield f"{label}, memory full", space


def _in_turn(space: Space) -> Space:
    """Return ``space`` with syncs that overlap nothing, where the YAML leaves that open."""
    if space.spec.sync.overlap != "auto":
        return space
    spec = space.spec.model_copy(update={"sync": space.spec.sync.model_copy(update={"overlap": False})})
    return replace(space, spec=spec, enumerator=replace(space.enumerator, spec=spec))


def refusal_text(base: Space, rejected: Sequence[RejectedCandidate]) -> str:
    """Return one sentence: that nothing fits, what needs most, and the changes that would help."""
    single = [change.text for series in _changes(base) if (change := _first_that_fits(base, series)) is not None]
    helps = single or [change.text for change in [_first_that_fits(base, _pairs(base))] if change is not None]
    hint = f"it would fit {either(helps)}" if helps else "no change that was tried alone would help"
    devices = f"{base.pool.num_devices} {either(base.cluster.classes)}"
    return f"no placement of these models fits {devices} ({_cause(base, rejected)}); {hint}"


def _first_that_fits(base: Space, series: Iterator[Change]) -> Change | None:
    """Return the first change under which a plan fits. ``series``: the smaller changes first."""
    return next((change for change in series if _fits(base, change.spec)), None)


def _fits(base: Space, spec: Spec) -> bool:
    try:
        return bool(last_resorts(make_space(spec, base.costs, base.lengths)))
    except UserError:
        return False


def _cause(base: Space, rejected: Sequence[RejectedCandidate]) -> str:
    """Return which model needs more than any device has, with its leanest settings, or why there is nothing to
    place."""
    found: dict[str, float] = {}
    for _, space in _spaces(base):
        for name, size in _least_needed(space):
            found[name] = min(size, found.get(name, UNLIMITED))
    memory = max(_memory_of(base))
    largest = max(found, key=lambda name: found[name], default="")
    has = f"of {bytes_text(int(memory))}"
    if largest and found[largest] > memory:
        return f"{largest} alone needs {bytes_text(int(found[largest]))} on a device {has}"
    reasons = "; ".join(dict.fromkeys(item.reason for item in rejected if item.reason))
    return f"the models need more than a device {has}" if found and memory else reasons


def _memory_of(space: Space) -> list[float]:
    """Return the bytes of the devices of each class."""
    return [each / space.usable for each in space.pool.memory.values()]


def _each_fits(space: Space) -> bool:
    """Whether every model fits some of the devices while it computes."""
    problem = space.problem()
    most = max(problem.pool.memory.values()) * (1 + ROUNDING)
    shapes = sorted(_shapes(problem), key=lambda shape: -shape.size)
    return all(
        any(each.resting + each.active <= most for shape in shapes for each in part.options(shape))
        for part in problem.parts
    )


def _shapes(problem: SearchProblem) -> set[MeshShape]:
    return {problem.shape_of(*mesh) for mesh in problem.all_meshes}


def _least_needed(space: Space) -> Iterator[tuple[str, float]]:
    """Yield (model, least bytes on a device while it computes) over all meshes and settings."""
    problem = space.problem()
    for part in problem.parts:
        options = [each for shape in _shapes(problem) for each in part.options(shape)]
        if options:
            yield part.name, min(each.resting + each.active for each in options)


def _changes(base: Space) -> Iterator[Iterator[Change]]:
    """Yield the series of changes, one of each kind."""
    yield _freed(base)
    yield _with_parameters_on_host(base)
    yield _with_adapters(base, base.spec)
    yield _shorter(base.spec)
    yield _more_devices(base.spec)
    yield _more_memory(base)


def _pairs(base: Space) -> Iterator[Change]:
    """Yield adapters together with more devices or memory."""
    for adapted in _with_adapters(base, base.spec):
        for change in (*_more_devices(adapted.spec), *_more_memory(replace(base, spec=adapted.spec))):
            yield Change(f"{adapted.text} {change.text}", change.spec)


def _freed(base: Space) -> Iterator[Change]:
    """Yield the request without the settings that the YAML fixes although a search would choose them."""
    models, names = {}, list[str]()
    for role in base.roles.all:
        settings = _model(base.spec, role)
        fixed = [name for name in FREED if name in settings.model_fields_set]
        kept = settings.model_fields_set - set(fixed)
        models[role] = ModelSpec.model_construct(kept, **{name: getattr(settings, name) for name in kept})
        names += [f"models.{role}.{name}" for name in fixed]
    if names:
        yield Change(f"without {either(names)}", _with_models(base.spec, models))


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
    """Yield the request on twice as many devices, four times ..."""
    times = 2
    while times <= MOST_TIMES and times * spec.cluster.num_devices <= MAX_DEVICES:
        cluster = _times(spec.cluster, times)
        yield Change(f"on {cluster.num_devices} devices", spec.model_copy(update={"cluster": cluster}))
        times *= 2


def _times(cluster: ClusterSpec, times: int) -> ClusterSpec:
    """Return ``cluster`` with more devices: up to eight in a node, then more nodes."""
    if not cluster.nodes:
        return cluster.model_copy(update={"devices": times * cluster.num_devices})
    if len(cluster.nodes) == 1 and cluster.nodes[0].count == 1:
        (node,) = cluster.nodes
        inside = min(times, max(1, 8 // node.devices))
        larger = node.model_copy(update={"devices": inside * node.devices, "count": times // inside})
        return cluster.model_copy(update={"nodes": (larger,)})
    nodes = tuple(node.model_copy(update={"count": times * node.count}) for node in cluster.nodes)
    return cluster.model_copy(update={"nodes": nodes})


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
