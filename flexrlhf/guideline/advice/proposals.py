"""Conversion of meshes and options to a Spec that ``flexrlhf plan`` accepts; settings for models on given ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from flexrlhf.api import (
    OF_PARTS,
    RARE,
    Cluster,
    ClusterSpec,
    ModelName,
    ModelSpec,
    PlacementMap,
    Spec,
    UserError,
)
from flexrlhf.guideline.advice.sketch import SearchModel
from flexrlhf.guideline.advice.space import Space, chunk_counts, with_schedule
from flexrlhf.guideline.search.evaluate import evaluate
from flexrlhf.guideline.search.problem import Assignment, Choice, Option, SearchProblem, device_bytes

Vector = tuple[Fraction, ...]
TOO_LARGE = "none of the allowed settings fits into memory"
SWAPS = 100
"""Changes of settings that are tried to make models fit."""


def spec_of(space: Space, assignment: Assignment) -> Spec:
    """Return the space's spec with the placement and the settings of ``assignment``."""
    models: dict[str, ModelSpec] = {}
    shadows: dict[str, ModelSpec] = {}
    rollout = space.spec.rollout
    for choice in assignment:
        name = ModelName(choice.part)
        settings = choice.option.settings
        assert isinstance(settings, ModelSpec), "options of a Space have settings"
        if name.is_rollout:
            rollout = rollout.with_dims(settings.dims).model_copy(update={"kv_tokens": settings.generate_tokens})
        elif name.is_shadow:
            shadows[name.role] = settings
        else:
            models[name.role] = settings
    changes: dict[str, object] = {"rollout": rollout, "placement": None}
    if space.has_less_memory:
        changes["cluster"] = usable_cluster(space.spec.cluster, space.usable, space.communicators)
    spec = space.spec.with_models(models).model_copy(update=changes)
    for role, shadow in shadows.items():
        own = dict(_of_shadow(shadow, models[role]))
        spec = spec.with_settings({f"models.{role}.shadow.{name}": value for name, value in own.items()})
    return spec.model_copy(update={"placement": _placement(space, spec, assignment)})


def usable_cluster(cluster: ClusterSpec, share: float, communicators: int) -> ClusterSpec:
    """Return ``cluster`` with a share of each device's memory next to that of its ``communicators``."""
    if not cluster.nodes:
        return cluster.model_copy(update={"memory_gb": cluster.memory_gb and share * cluster.memory_gb})
    nodes = []
    for node in cluster.nodes:
        alone = cluster.model_copy(update={"nodes": (node.model_copy(update={"count": 1}),)})
        size = Cluster.of(alone).memory_bytes(0, communicators)
        nodes.append(node.model_copy(update={"memory_gb": size and round(share * size / 1e9, 3)}))
    return cluster.model_copy(update={"nodes": tuple(nodes)})


def _of_shadow(settings: ModelSpec, own: ModelSpec) -> Iterator[tuple[str, object]]:
    """Yield the chosen settings of a shadow; None: the same as its role's ``own``."""
    parts = (axis.name for axis in OF_PARTS if axis.name in settings.facts.axes)
    for name in ("zero", *parts, "micro_batch_tokens", "generate_tokens"):
        yield name, getattr(settings, name)
    for name in ("shard", *(axis.name for axis in RARE)):
        yield name, None if getattr(settings, name) == getattr(own, name) else getattr(settings, name)


def _placement(space: Space, spec: Spec, assignment: Assignment) -> Vector | PlacementMap:
    """Vector that gives the same ranks (where all devices are alike, their mirror image), else the ranks."""
    placed = [choice for choice in assignment if space.has_shadows or not ModelName(choice.part).is_rollout]
    total = space.pool.num_devices
    vector = tuple(Fraction(choice.size, total) for choice in placed)
    ranks = {choice.part: choice.ranks for choice in placed}
    mirrored = {name: tuple(total - 1 - rank for rank in reversed(mine)) for name, mine in ranks.items()}
    packed = vector_ranks(space, vector)
    if packed == ranks or (packed == mirrored and len(set(space.pool.nodes)) == 1):
        return vector
    return PlacementMap.of_ranks(ranks)


def vector_ranks(space: Space, vector: Vector) -> dict[str, tuple[int, ...]] | None:
    """Placed model → its ranks when ``vector`` is packed; None if the vector fits no split of the devices, if it counts
    those of one class, or if a model's ranks are not a run."""
    spec = space.spec.model_copy(update={"placement": vector})
    try:
        placement = replace(space, spec=spec).place()
    except UserError:
        return None
    # without shadows a rollout engine has the ranks of the trained copy
    follows = space.roles.rollout is not None and not space.has_shadows
    placed = [model for model in placement.models if not (follows and model.rollout is not None)]
    ranks: dict[str, tuple[int, ...]] = {model.name: model.ranks for model in placed}
    sizes = [ratio * space.pool.num_devices for ratio in vector]
    are_runs = all(mine[-1] - mine[0] + 1 == len(mine) for mine in ranks.values())
    return ranks if are_runs and sizes == list(map(len, ranks.values())) else None


Allowed = Callable[[SearchModel, ModelSpec], bool]


def choose_settings(
    space: Space, ranks: Mapping[str, tuple[int, ...]], allowed: Allowed | None = None
) -> Assignment | str:
    """Choose settings for models on ``ranks``, each a run of devices: the fastest, leaner ones where memory is short.

    ``allowed``: which settings may be chosen. Returns the reason if there are none.
    """
    problem = space.problem
    # a rollout engine that is not in ranks has those of its role
    placed = [ranks.get(model.name) or ranks[model.role] for model in space.models]
    pools = [_choices(problem, model, own, allowed) for model, own in zip(space.models, placed, strict=True)]
    for model, pool in zip(space.models, pools, strict=True):
        if not pool:
            return f"{model.name} has no setting of this kind there (heads, type, engine or a setting in the YAML)"
    chosen = [min(pool, key=lambda choice: sum(choice.option.seconds)) for pool in pools]
    for _ in range(SWAPS):
        device = _fullest(problem, chosen)
        if device is None:
            return tuple(chosen)
        swap = _cheapest_swap(chosen, pools, device)
        if swap is None:
            return TOO_LARGE
        chosen[swap[0]] = swap[1]
    return TOO_LARGE


def with_fastest_settings(space: Space, assignment: Assignment) -> Assignment:
    """Replace each model's settings by its fastest that fit, on the same meshes.

    A search accepts slower ones where another model's time hides them, such as needless recomputation.
    """
    problem = space.problem
    chosen = list(assignment)
    for index, choice in enumerate(chosen):
        for option in sorted(_options_at(problem, choice), key=lambda option: sum(option.seconds)):
            tried = [*chosen[:index], replace(choice, option=option), *chosen[index + 1 :]]
            if option == choice.option:
                break
            fits = _fullest(problem, tried) is None
            if fits and evaluate(problem, tuple(tried)) <= evaluate(problem, tuple(chosen)):
                chosen = tried
                break
    return tuple(chosen)


def _options_at(problem: SearchProblem, choice: Choice) -> Sequence[Option]:
    """Options of a part on its mesh."""
    part = next(part for part in problem.parts if part.name == choice.part)
    return part.options(problem.shape_of(choice.start, choice.size))


def fastest_options(problem: SearchProblem, choice: Choice) -> Choice | None:
    """Return a part's fastest settings on its mesh, whatever memory they need; None if it has none there."""
    options = _options_at(problem, choice)
    fastest = min(options, key=lambda option: sum(option.seconds), default=None)
    return None if fastest is None else replace(choice, option=fastest)


def fastest_chunking(space: Space, assignments: Sequence[Assignment]) -> tuple[float, Space, Assignment]:
    """Seconds, space and assignment of the fastest of ``assignments`` in any number of chunks that is tried.

    Settings stay as they are.
    """
    timed: list[tuple[float, int, Space, Assignment]] = []
    for number in chunk_counts(space):
        chunked = with_schedule(space, number, space.spec.schedule.lag)
        problem = chunked.problem
        for assignment in assignments:
            whole = in_space(chunked, problem, assignment)
            timed.append((evaluate(problem, whole), len(timed), chunked, whole))
    seconds, _, chunked, assignment = min(timed, key=lambda item: item[:2])
    return seconds, chunked, assignment


def in_space(space: Space, problem: SearchProblem, assignment: Assignment) -> Assignment:
    """Return the same meshes and settings with the calls of ``space``."""
    moved = []
    for choice, model in zip(assignment, space.models, strict=True):
        assert isinstance(choice.option.settings, ModelSpec), "options of a Space have settings"
        shape = problem.shape_of(choice.start, choice.size)
        moved.append(replace(choice, option=space.option(model, shape, choice.option.settings)))
    return tuple(moved)


def in_problem(problem: SearchProblem, assignment: Assignment) -> Assignment | None:
    """Return the same meshes and settings in a problem with other calls; None if it has no such option."""
    moved = []
    for choice in assignment:
        options = _options_at(problem, choice)
        same = next((option for option in options if option.settings == choice.option.settings), None)
        if same is None:
            return None
        moved.append(replace(choice, option=same))
    return tuple(moved)


def _choices(problem: SearchProblem, model: SearchModel, ranks: Sequence[int], allowed: Allowed | None) -> list[Choice]:
    start, size = ranks[0], len(ranks)
    assert tuple(ranks) == tuple(range(start, start + size)), f"{model.name} on {ranks}"
    part = next(part for part in problem.parts if part.name == model.name)
    found = []
    for option in part.options(problem.shape_of(start, size)):
        assert isinstance(option.settings, ModelSpec), "options of a Space have settings"
        if allowed is None or allowed(model, option.settings):
            found.append(Choice(model.name, start, size, option))
    return found


def fits_memory(problem: SearchProblem, chosen: Sequence[Choice]) -> bool:
    """Whether every device has enough memory."""
    return _fullest(problem, chosen) is None


def _fullest(problem: SearchProblem, chosen: Sequence[Choice]) -> int | None:
    """Device that lacks most memory; None if all have enough."""
    starts = sorted({choice.start for choice in chosen})
    lacking = {at: device_bytes(chosen, at) - _memory(problem, at) for at in starts}
    worst = max(lacking, key=lambda at: lacking[at])
    return worst if lacking[worst] > 0 else None


def _memory(problem: SearchProblem, device: int) -> float:
    (kind,) = problem.pool.kinds_of(device, 1)
    return problem.pool.memory[kind]


def _covers(choice: Choice, device: int) -> bool:
    return choice.start <= device < choice.start + choice.size


def _cheapest_swap(
    chosen: Sequence[Choice], pools: Sequence[Sequence[Choice]], device: int
) -> tuple[int, Choice] | None:
    """(model, choice) of the change of one model's settings that costs least time for the bytes it frees on ``device``.

    None if no change frees any.
    """
    before = device_bytes(chosen, device)
    best: tuple[float, int, Choice] | None = None
    for index, pool in enumerate(pools):
        if not _covers(chosen[index], device):
            continue
        others = [each.option for at, each in enumerate(chosen) if at != index and _covers(each, device)]
        resting = sum(option.resting for option in others)
        active = max((option.active for option in others), default=0.0)
        seconds = sum(chosen[index].option.seconds)
        for choice in pool:
            option = choice.option
            freed = before - (resting + option.resting + max(active, option.active))
            if freed > 0:
                slower = sum(option.seconds) - seconds
                price = slower / freed if slower > 0 else -freed
                if best is None or price < best[0]:
                    best = price, index, choice
    return None if best is None else best[1:]
