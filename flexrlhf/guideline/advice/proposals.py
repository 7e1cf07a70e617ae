"""From meshes and options back to a Spec that ``flexrlhf plan`` accepts, and settings for models with a fixed place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from flexrlhf.config.spec import ModelSpec, PlacementEntry, PlacementMap, ShadowSpec, Spec
from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.choices import Member
from flexrlhf.guideline.advice.space import Space, chunk_counts, with_schedule
from flexrlhf.guideline.search.evaluate import evaluate
from flexrlhf.guideline.search.problem import Assignment, Choice, Option, Problem
from flexrlhf.placement.names import ModelName
from flexrlhf.placement.ratios import place

Vector = tuple[Fraction, ...]
TOO_LARGE = "no settings that it allows fit into memory"
SWAPS = 100
"""Changes of settings that are tried to make models fit."""


def spec_of(space: Space, assignment: Assignment) -> Spec:
    """The space's spec with the placement and the settings of ``assignment``."""
    models: dict[str, ModelSpec] = {}
    shadows: dict[str, ShadowSpec] = {}
    rollout = space.spec.rollout
    for choice in assignment:
        name = ModelName(choice.part)
        settings = choice.option.settings
        assert isinstance(settings, ModelSpec), "options of a Space have settings"
        if name.is_rollout:
            rollout = rollout.model_copy(update={"tp": settings.tp, "kv_tokens": settings.generate_tokens})
        elif name.is_shadow:
            shadows[name.role] = _shadow_of(settings, space.spec.models.of(name.role))
        else:
            models[name.role] = settings
    for role, shadow in shadows.items():
        models[role] = models[role].model_copy(update={"shadow": shadow})
    spec = space.spec.model_copy(
        update={"models": space.spec.models.model_copy(update=models), "rollout": rollout, "placement": None}
    )
    return spec.model_copy(update={"placement": _placement(space, spec, assignment)})


def _shadow_of(settings: ModelSpec, base: ModelSpec | None) -> ShadowSpec:
    """What was chosen beside what the YAML says of this copy (its engine, its type)."""
    names = ("zero", "tp", "micro_batch_tokens", "generate_tokens")
    said = base.shadow if base is not None and base.shadow is not None else ShadowSpec()
    return said.model_copy(update={name: getattr(settings, name) for name in names})


def _placement(space: Space, spec: Spec, assignment: Assignment) -> Vector | PlacementMap:
    """A vector where one means the same ranks (or, on devices that are all alike, their mirror image), else ranks."""
    placed = [choice for choice in assignment if space.has_shadows or not ModelName(choice.part).is_rollout]
    total = space.pool.num_devices
    vector = tuple(Fraction(choice.size, total) for choice in placed)
    ranks = {choice.part: tuple(range(choice.start, choice.start + choice.size)) for choice in placed}
    turned = {name: tuple(total - 1 - rank for rank in reversed(mine)) for name, mine in ranks.items()}
    packed = vector_ranks(space, vector)
    if packed == ranks or (packed == turned and len(set(space.pool.nodes)) == 1):
        return vector
    return PlacementMap(models={name: PlacementEntry(ranks=mine) for name, mine in ranks.items()})


def vector_ranks(space: Space, vector: Vector) -> dict[str, tuple[int, ...]] | None:
    """Placed model → ranks, as a vector is packed; None where it fits no split of the devices."""
    spec = space.spec.model_copy(update={"placement": vector})
    try:
        placement = place(spec, space.roles, space.graph.can_shadow, space.cluster)
    except UserError:
        return None
    beside = space.roles.rollout is not None and not space.has_shadows
    return {model.name: model.ranks for model in placement.models if not (beside and model.rollout is not None)}


Allowed = Callable[[Member, ModelSpec], bool]


def settle(space: Space, ranks: Mapping[str, tuple[int, ...]], allowed: Allowed | None = None) -> Assignment | str:
    """Settings for models on ``ranks``, each a run of devices: the fastest, then smaller ones where memory does
    not do. ``allowed``: which settings are asked for. A text says why there are none.
    """
    problem = space.problem()
    pools = [_choices(problem, member, _ranks_of(member, ranks), allowed) for member in space.members]
    for member, pool in zip(space.members, pools, strict=True):
        if not pool:
            return f"{member.name} has no setting of this kind there (heads, type, engine or what the YAML says)"
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


def polished(space: Space, assignment: Assignment) -> Assignment:
    """The same meshes with the quickest settings of each model that fit: a search is content with those that are hidden
    behind another model's, such as recomputing what need not be."""
    problem = space.problem()
    chosen = list(assignment)
    for index, choice in enumerate(chosen):
        part = next(part for part in problem.parts if part.name == choice.part)
        options = part.options(problem.shape_of(choice.start, choice.size))
        for option in sorted(options, key=lambda option: sum(option.seconds)):
            tried = [*chosen[:index], replace(choice, option=option), *chosen[index + 1 :]]
            if option == choice.option:
                break
            fits = _fullest(problem, tried) is None
            if fits and evaluate(problem, tuple(tried)) <= evaluate(problem, tuple(chosen)):
                chosen = tried
                break
    return tuple(chosen)


def seconds_of(space: Space, assignment: Assignment) -> float:
    return evaluate(space.problem(), assignment)


def in_chunks(space: Space, assignments: Sequence[Assignment]) -> tuple[float, Space, Assignment]:
    """The fastest of ``assignments`` in any number of chunks that is tried: its seconds, and its options there.

    Settings stay as they are.
    """
    found: list[tuple[float, int, Space, Assignment]] = []
    for number in chunk_counts(space):
        cut = with_schedule(space, number, space.spec.schedule.lag)
        problem = cut.problem()
        for assignment in assignments:
            moved = [_in_problem(problem, choice) for choice in assignment]
            whole = tuple(choice for choice in moved if choice is not None)
            if len(whole) == len(assignment):
                found.append((evaluate(problem, whole), len(found), cut, whole))
    seconds, _, cut, assignment = min(found, key=lambda item: item[:2])
    return seconds, cut, assignment


def _in_problem(problem: Problem, choice: Choice) -> Choice | None:
    """The same choice in a problem with other calls."""
    part = next(part for part in problem.parts if part.name == choice.part)
    options = part.options(problem.shape_of(choice.start, choice.size))
    found = next((option for option in options if option.settings == choice.option.settings), None)
    return None if found is None else replace(choice, option=found)


def _ranks_of(member: Member, ranks: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """A rollout engine that nobody placed lies beside its role."""
    return ranks.get(member.name) or ranks[member.role]


def _choices(problem: Problem, member: Member, ranks: Sequence[int], allowed: Allowed | None) -> list[Choice]:
    start, size = ranks[0], len(ranks)
    assert tuple(ranks) == tuple(range(start, start + size)), f"{member.name} on {ranks}"
    part = next(part for part in problem.parts if part.name == member.name)
    found = part.options(problem.shape_of(start, size))
    return [Choice(member.name, start, size, option) for option in found if _is_allowed(member, option, allowed)]


def _is_allowed(member: Member, option: Option, allowed: Allowed | None) -> bool:
    assert isinstance(option.settings, ModelSpec), "options of a Space have settings"
    return allowed is None or allowed(member, option.settings)


def device_bytes(chosen: Sequence[Choice], device: int) -> float:
    """What the models on a device need at the most."""
    mine = [choice.option for choice in chosen if choice.start <= device < choice.start + choice.size]
    return sum(option.resting for option in mine) + max((option.active for option in mine), default=0.0)


def _fullest(problem: Problem, chosen: Sequence[Choice]) -> int | None:
    """The device that lacks most; None where all have enough."""
    starts = sorted({choice.start for choice in chosen})
    lacking = {at: device_bytes(chosen, at) - _memory(problem, at) for at in starts}
    worst = max(lacking, key=lambda at: lacking[at])
    return worst if lacking[worst] > 0 else None


def _memory(problem: Problem, device: int) -> float:
    (kind,) = problem.pool.kinds_of(device, 1)
    return problem.pool.memory[kind]


def _cheapest_swap(
    chosen: Sequence[Choice], pools: Sequence[Sequence[Choice]], device: int
) -> tuple[int, Choice] | None:
    """The change of one model's settings that costs least time for the bytes that it frees on ``device``."""
    before = device_bytes(chosen, device)
    best: tuple[float, int, Choice] | None = None
    for index, pool in enumerate(pools):
        if not chosen[index].start <= device < chosen[index].start + chosen[index].size:
            continue
        for choice in pool:
            freed = before - device_bytes([*chosen[:index], choice, *chosen[index + 1 :]], device)
            if freed > 0:
                slower = sum(choice.option.seconds) - sum(chosen[index].option.seconds)
                price = slower / freed if slower > 0 else -freed
                if best is None or price < best[0]:
                    best = price, index, choice
    return None if best is None else best[1:]
