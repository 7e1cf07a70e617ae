"""Size of a rollout engine's cache that the YAML leaves out: what other models and calls leave of the device's memory.

The cache is as large as fits with the schedule of a plan, so no model is offloaded for it that would otherwise stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flexrlhf.config.spec import Spec
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.plan import Plan
from flexrlhf.text import counted

ROUNDS = 4
"""Sizes that are tried."""
FILLED = 0.9
"""Share of a device's memory up to which a cache grows, as in vLLM: the rest is for fragments, which no plan counts."""


def _sized_cache(plan: Plan) -> PlacedModel | None:
    """Return the rollout engine whose cache has the size that memory leaves; None if there is none, or the YAML sets
    the size, or devices have an unknown one."""
    model = next((each for each in plan.placement.models if each.has_cache), None)
    if model is None or plan.spec.rollout.kv_tokens is not None or plan.device_bytes(model.ranks[0]) is None:
        return None
    return None if "generate_tokens" in plan.model(model.role).model_fields_set else model


def with_residency(bare: Plan, only: int | None = None) -> Plan:
    """Return ``bare`` with Offload and Reload, and the cache of its rollout engine as large as memory leaves.

    ``only``: the rank whose memory is wanted. If that lacks no memory, all ranks of a cache limit its size.
    """
    model = _sized_cache(bare)
    if model is None:
        return bare.with_residency(only)
    least = _with_tokens(bare, bare.spec.padded_row)
    if only is not None and not any(_fits(each.with_residency(only), only) for each in (bare, least)):
        return bare.with_residency(only)
    unsized = bare.with_residency()
    plan = unsized
    if not _fits(plan):
        plan = least.with_residency()
        if not _fits(plan):
            return unsized
    plan = _with_tokens(plan, _most_tokens(plan, model))
    sized = plan.placement[model.name]
    rollout = plan.spec.rollout.model_copy(update={"kv_tokens": sized.settings.generate_tokens})
    return replace(plan, spec=plan.spec.model_copy(update={"rollout": rollout}), cache=_text(plan, sized))


def unsized_spec(plan: Plan) -> Spec:
    """Return the spec of ``plan`` without the size of a cache that is not written, which other settings may change."""
    spec = plan.spec
    if not plan.cache:
        return spec
    return spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"kv_tokens": None})})


def _fits(plan: Plan, only: int | None = None) -> bool:
    """Whether all ranks have the memory that they need, or the rank ``only``."""
    memories = plan.memories if only is None else (plan.memory(only),)
    return all(each.peak_bytes <= (plan.device_bytes(each.rank) or each.peak_bytes) for each in memories)


def _with_tokens(plan: Plan, tokens: int) -> Plan:
    """Return ``plan`` with room for ``tokens`` in the cache of its rollout engine, or of one of each operator."""
    placed = tuple(_sized(each, tokens, plan) if each.has_cache else each for each in plan.placement.models)
    sized = replace(plan, placement=replace(plan.placement, models=placed))
    # it depends on layouts alone
    vars(sized)["alike"] = plan.alike
    return sized


def _sized(model: PlacedModel, tokens: int, plan: Plan) -> PlacedModel:
    assert model.rollout is not None, "a cache is a rollout engine's"
    settings = model.settings.model_copy(update={"generate_tokens": min(tokens, _all_tokens(plan, model))})
    return replace(model, settings=settings, rollout=model.rollout.model_copy(update={"kv_tokens": tokens}))


def _all_tokens(plan: Plan, model: PlacedModel) -> int:
    """Return the tokens of all rows of a step on one rank of ``model``, at their longest."""
    return plan.spec.padded_row * plan.batch.most_rows(model.layout)


def _most_tokens(plan: Plan, model: PlacedModel) -> int:
    """Return the tokens that fit the cache of ``model``, and of engines of other operators, on all of their ranks, at
    least as many as it has."""
    had = plan.placement[model.name].settings.generate_tokens
    whole = _all_tokens(plan, model)
    ranks = {plan.alike[rank]: each for each in plan.placement.models if each.has_cache for rank in each.ranks}
    limits = {rank: max(FILLED * (plan.device_bytes(rank) or 0), plan.memories[rank].peak_bytes) for rank in ranks}
    block, tokens, fitting = model.facts.cache_block, whole, had
    # calls need less memory next to a smaller cache, so one that is smaller by what is lacking fits
    for _ in range(ROUNDS):
        tried = _with_tokens(plan, tokens)
        rooms = (each for rank, engine in ranks.items() for each in _room(plan, tried, engine, rank, limits[rank]))
        room = min(rooms, default=0.0)
        fitting = max(fitting, tokens) if room >= 0 else fitting
        tokens = min(whole, tokens + int(room // block) * block)
        if tokens <= fitting:
            break
    return fitting


def _room(plan: Plan, tried: Plan, model: PlacedModel, rank: int, limit: float) -> Iterator[float]:
    """Yield the tokens for which each phase with the cache has room on ``rank`` in addition; negative: too many."""
    before, after = plan.memories[rank], tried.memory(rank)
    tokens = [each.placement[model.name].settings.generate_tokens for each in (plan, tried)]
    sizes = [each.sizing.kv_bytes(each.placement[model.name]) for each in (plan, tried)]
    if tokens[0] == tokens[1]:
        return
    of_token = (sizes[1] - sizes[0]) / (tokens[1] - tokens[0])
    known = {(each.kind, each.model): each.states for each in before.phases}
    yield from (
        (limit - each.total) / of_token for each in after.phases if each.states > known.get((each.kind, each.model), 0)
    )


def _text(plan: Plan, model: PlacedModel) -> str:
    tokens, row = model.settings.generate_tokens, plan.spec.padded_row
    rows = plan.sizing.texts.rows_decoded(model, plan.batch.most_rows(model.layout))
    return f"{tokens} fit: {counted(tokens // row, 'row')} of {row} tokens; at most {counted(rows, 'row')} at a time"


def is_short_of_cache(plan: Plan) -> bool:
    """Whether a cache takes whatever memory is left, and has not all rows of a step at their longest."""
    models = [each for each in plan.placement.models if each.has_cache and plan.cache]
    return any(each.settings.generate_tokens < _all_tokens(plan, each) for each in models)
