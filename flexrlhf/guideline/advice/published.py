"""Usual placements of published systems, in the engines of a spec."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from flexrlhf.api import ModelSpec, Strategy
from flexrlhf.guideline.advice.candidates import Candidate, offloaded_spaces
from flexrlhf.guideline.advice.proposals import TOO_LARGE, Allowed, Vector, choose_settings, vector_ranks
from flexrlhf.guideline.advice.request import PPO_ROLES
from flexrlhf.guideline.advice.searched_step import is_allowed
from flexrlhf.guideline.advice.sketch import SearchModel
from flexrlhf.guideline.advice.space import Space, on_all_devices
from flexrlhf.guideline.search.branch_and_bound import search


def usual(space: Space, seconds: float, gap: float) -> Iterator[Candidate]:
    """Yield the placements: all models on all devices with the settings that are fastest, or those of DeepSpeed-Chat
    and OpenRLHF, HybridFlow's split and the symmetric heuristic of ReaL's comparison.

    seconds:  work of the search for the settings of the first, in seconds that it takes on an ordinary core.
    gap:      share of its time by which it may miss the fastest settings.
    """
    roles, one = space.roles.all, Fraction(1)
    everywhere = (one,) * len(roles)
    yield _usual_colocated(space, seconds, gap)
    yield _usual(space, f"{Strategy.COLOCATED} ZeRO-3", everywhere, _is_zero3)
    yield _usual(space, "standalone", (one / len(roles),) * len(roles))
    if set(roles) == set(PPO_ROLES):
        yield _usual(space, "split", (one / 2,) * len(roles))
    widest = min(8, space.pool.per_node)
    yield _usual(space, f"symmetric, tp {widest}", everywhere, lambda model, settings: settings.tp == widest)


def _is_zero3(model: SearchModel, settings: ModelSpec) -> bool:
    """Whether a model is sharded by ZeRO-3 alone; a rollout engine never is."""
    return model.is_rollout or (settings.zero == 3 and settings.tp == 1)


def _usual_colocated(space: Space, seconds: float, gap: float) -> Candidate:
    """Return all models on all devices, each with its fastest settings that fit."""
    result = search(on_all_devices(space), seconds, gap)
    if result.is_feasible and is_allowed(result.seconds):
        return Candidate("usual", Strategy.COLOCATED, space, result.assignment)
    reason = TOO_LARGE if result.pruned_by_memory else "no settings there"
    return Candidate("usual", Strategy.COLOCATED, space, None, reason)


def _usual(space: Space, name: str, vector: Vector, allowed: Allowed | None = None) -> Candidate:
    """Return the placement of ``vector``, with idle models in host memory if nothing fits otherwise."""
    ranks = vector_ranks(space, vector)
    if ranks is None:
        return Candidate("usual", name, space, None, "these shares are no whole devices, or of several classes")
    assignment = choose_settings(space, ranks, allowed)
    for label, variant in offloaded_spaces(space) if assignment == TOO_LARGE else ():
        found = choose_settings(variant, ranks, allowed)
        if not isinstance(found, str):
            return Candidate("usual", f"{name}, {label}", variant, found)
    if isinstance(assignment, str):
        return Candidate("usual", name, space, None, assignment)
    return Candidate("usual", name, space, assignment)
