"""Settings between those that a search tries: sizes of passes and of caches, recomputation and ZeRO stages, changed one
by one on the meshes of an assignment as long as a step gets shorter.

Settings of the placements to choose from are then changed with their plans: a search counts memory as if a model was
next to others that a plan has in host memory while it computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flexrlhf.api import ModelSpec, Plan, UserError, make_plan
from flexrlhf.guideline.advice.candidates import Candidate, FeasibleCandidate, check, ranked
from flexrlhf.guideline.advice.choice import Advice
from flexrlhf.guideline.advice.proposals import fits_memory, in_space
from flexrlhf.guideline.advice.sketch import SearchModel
from flexrlhf.guideline.advice.space import Space, allowed_chunks, with_schedule
from flexrlhf.guideline.search.assignments import ROUNDING
from flexrlhf.guideline.search.evaluate import evaluate
from flexrlhf.guideline.search.problem import Assignment, Choice

ROUNDS = 3
"""Times that the settings of every model are looked at."""
LEAST_GAIN = 1e-4
"""Share of a step's time by which a change has to shorten it."""
LEAST_PLANNED = 1e-3
"""Share by which it has to as a search counts it, whatever memory it needs, to be planned."""
REFINED = 3
"""Placements whose settings are changed with their plans: the fastest ones, and the one to use."""
NEAR = 0.1
"""Share of the fastest one's seconds by which they may be slower."""
DEVICES_PLANNED = 1024
"""Plans of changes of each of them are of so many devices together."""
MOST_PLANS = 40
"""Most plans of changes of each of them."""


def refined(space: Space, assignment: Assignment) -> Assignment:
    """Return ``assignment`` with the settings that shorten a step most within the memory that is left, one model after
    the other until none does."""
    problem, chosen = space.problem, assignment
    seconds = evaluate(problem, chosen)
    for _ in range(ROUNDS):
        before = seconds
        for index, model in enumerate(space.models):
            for option in space.faster_options(model, chosen[index]):
                tried = (*chosen[:index], replace(chosen[index], option=option), *chosen[index + 1 :])
                if not fits_memory(problem, tried):
                    continue
                taken = evaluate(problem, tried)
                if taken < (1 - LEAST_GAIN) * seconds:
                    chosen, seconds = tried, taken
                # the next ones take longer by themselves
                break
        if seconds == before:
            break
    return chosen


def with_planned_settings(advice: Advice) -> Advice:
    """Return ``advice`` with the settings and chunks of the placements to choose from that shorten a step most within
    the memory that a plan has."""
    fastest = min((item.seconds for item in advice.comparable), default=0.0)
    near = [item for item in advice.comparable if item.seconds <= (1 + NEAR) * fastest]
    done: list[FeasibleCandidate] = []
    for _ in range(REFINED if near else 0):
        item = next((each for each in (*near, advice.best) if all(each is not other for other in done)), None)
        if item is None:
            break
        found = _planned(item)
        near = [each for each in near if each is not item]
        done.append(found)
        others = (each for each in advice.feasible if each is not item)
        advice = replace(advice, feasible=ranked((*others, found)))
    return advice


def _planned(item: FeasibleCandidate) -> FeasibleCandidate:
    """Return ``item`` with chunks and with settings of one model after the other, until none has a faster plan."""
    plans = iter(range(max(1, min(MOST_PLANS, DEVICES_PLANNED // item.candidate.space.pool.num_devices))))
    for _ in range(ROUNDS):
        before = item.seconds
        for index in range(len(item.candidate.space.models)):
            item = _with_settings(item, index, plans)
        item = _with_cache_of_plan(_with_chunks(item, plans), plans)
        if item.seconds >= (1 - LEAST_PLANNED) * before:
            break
    return item


def _with_chunks(item: FeasibleCandidate, plans: Iterator[int]) -> FeasibleCandidate:
    """Return ``item`` in the number of chunks with the fastest plan, unless its chunks follow from rules."""
    own = item.candidate
    assert own.assignment is not None, "what fits has settings"
    schedule = own.space.spec.schedule
    for number in () if own.method == "guideline" else allowed_chunks(own.space):
        if number != schedule.num_chunks:
            chunked = with_schedule(own.space, number, schedule.lag)
            tried = replace(own, space=chunked, assignment=in_space(chunked, chunked.problem, own.assignment))
            item = _faster_plan(item, tried, plans) or item
    return item


def _with_settings(item: FeasibleCandidate, index: int, plans: Iterator[int]) -> FeasibleCandidate:
    """Return ``item`` with the settings of one model that have the fastest plan.

    Of those that are faster by themselves the ones that need more bytes are the faster ones: the most that a plan has
    room for are found by halves.
    """
    own = item.candidate
    assert own.assignment is not None, "what fits has settings"
    choices = _frontier(own.space, own.space.models[index], own.assignment[index])
    low, at, high = 0, len(choices) - 1, len(choices)
    while low < high:
        tried = replace(own, assignment=(*own.assignment[:index], choices[at], *own.assignment[index + 1 :]))
        faster = _faster_plan(item, tried, plans)
        if faster is None:
            high = at
        else:
            item, low = faster, at + 1
        at = (low + high) // 2
    return item


def _with_cache_of_plan(item: FeasibleCandidate, plans: Iterator[int]) -> FeasibleCandidate:
    """Return ``item`` with the cache of its rollout engine as large as a plan makes it, if that is faster."""
    own, space = item.candidate, item.candidate.space
    assert own.assignment is not None, "what fits has settings"
    index = next((index for index, model in enumerate(space.models) if model.is_rollout), None)
    if index is None or space.spec.rollout.kv_tokens is not None or next(plans, None) is None:
        return item
    rollout = own.spec.rollout.model_copy(update={"kv_tokens": None})
    try:
        sized = make_plan(own.spec.model_copy(update={"rollout": rollout}), space.pending).spec.rollout.kv_tokens
    except UserError:
        return item
    choice = own.assignment[index]
    settings, shape = choice.option.settings, space.problem.shape_of(choice.start, choice.size)
    assert isinstance(settings, ModelSpec), "options of a Space have settings"
    if sized is None or sized <= settings.generate_tokens:
        return item
    option = space.option(space.models[index], shape, settings.model_copy(update={"generate_tokens": sized}))
    assignment = (*own.assignment[:index], replace(choice, option=option), *own.assignment[index + 1 :])
    return _faster_plan(item, replace(own, assignment=assignment), plans) or item


def _faster_plan(item: FeasibleCandidate, tried: Candidate, plans: Iterator[int]) -> FeasibleCandidate | None:
    """Return ``tried`` if it may be faster, ``plans`` are left, and its plan has a shorter step than ``item`` and fits
    as well."""
    if _seconds(tried) > (1 - LEAST_PLANNED) * _seconds(item.candidate) or next(plans, None) is None:
        return None
    checked = check(_with_memory_of(item.plan, tried))
    if not isinstance(checked, FeasibleCandidate) or checked.excess > max(1 + ROUNDING, item.excess):
        return None
    return checked if checked.seconds < (1 - LEAST_GAIN) * item.seconds else None


def _with_memory_of(plan: Plan, candidate: Candidate) -> Candidate:
    """Return ``candidate`` with the memory that fewer communicators leave, if ``plan`` has fewer than were assumed and
    its YAML sets memory."""
    space, number = candidate.space, max(1, plan.most_communicators)
    if not space.has_less_memory or number >= space.communicators:
        return candidate
    return replace(candidate, space=replace(space, limits=replace(space.limits, communicators=number)))


def _seconds(candidate: Candidate) -> float:
    """Return the seconds of a step as a search counts them."""
    assert candidate.assignment is not None, "what is planned has settings"
    return evaluate(candidate.space.problem, candidate.assignment)


def _frontier(space: Space, model: SearchModel, choice: Choice) -> list[Choice]:
    """Return the settings of a model that are faster by themselves than ``choice`` and than all that need fewer bytes,
    in the order of bytes."""
    found: list[Choice] = []
    least = sum(choice.option.seconds)
    faster = [replace(choice, option=option) for option in space.faster_options(model, choice)]
    for each in sorted(faster, key=lambda each: (each.option.resting + each.option.active, sum(each.option.seconds))):
        if sum(each.option.seconds) < least:
            found.append(each)
            least = sum(each.option.seconds)
    return found
