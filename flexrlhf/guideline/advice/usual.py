"""Usual placements of published systems, in the engines of a spec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from flexrlhf.config.spec import ModelSpec
from flexrlhf.guideline.advice.candidates import Candidate
from flexrlhf.guideline.advice.host_offload import offload_sets
from flexrlhf.guideline.advice.model_options import SearchModel
from flexrlhf.guideline.advice.proposals import TOO_LARGE, Allowed, Vector, choose_settings, vector_ranks
from flexrlhf.guideline.advice.request import PPO_ROLES
from flexrlhf.guideline.advice.space import Space, is_allowed
from flexrlhf.guideline.search.branch_and_bound import search
from flexrlhf.guideline.search.problem import Meshes

COLOCATED = "co-located"
COLOCATED_SECONDS = 4.0
"""Seconds that the search for settings on all devices may take."""


def usual(space: Space, gap: float) -> Iterator[Candidate]:
    """Yield the placements: all models on all devices with the settings that are fastest, or those of DeepSpeed-Chat
    and OpenRLHF, HybridFlow's split and the symmetric heuristic of ReaL's comparison.

    ``gap``: share of its time by which the first may miss the fastest settings.
    """
    roles, one = space.roles.all, Fraction(1)
    everywhere = (one,) * len(roles)
    yield _colocated(space, gap)
    yield _usual(space, f"{COLOCATED} ZeRO-3", everywhere, _is_zero3)
    yield _usual(space, "standalone", (one / len(roles),) * len(roles))
    if is_ppo(space):
        yield _usual(space, "split", (one / 2,) * len(roles))
    widest = min(8, space.pool.per_node)
    yield _usual(space, f"symmetric, tp {widest}", everywhere, lambda model, settings: settings.tp == widest)


def is_ppo(space: Space) -> bool:
    """Whether the algorithm has PPO's four models."""
    return set(space.roles.all) == set(PPO_ROLES)


def _is_zero3(model: SearchModel, settings: ModelSpec) -> bool:
    """Whether a model is sharded by ZeRO-3 alone; a rollout engine never is."""
    return model.is_rollout or (settings.zero == 3 and settings.tp == 1)


def _colocated(space: Space, gap: float) -> Candidate:
    """Return all models on all devices, each with its fastest settings that fit."""
    problem = replace(space.problem(), meshes=Meshes((), ((0, space.pool.num_devices),), "all devices"))
    result = search(problem, COLOCATED_SECONDS, gap)
    if result.is_feasible and is_allowed(result.seconds):
        return Candidate("usual", COLOCATED, space, result.assignment)
    return Candidate("usual", COLOCATED, space, None, TOO_LARGE if result.pruned_by_memory else "no settings there")


def _usual(space: Space, name: str, vector: Vector, allowed: Allowed | None = None) -> Candidate:
    """Return the placement of ``vector``, with idle models in host memory where nothing fits otherwise."""
    ranks = vector_ranks(space, vector)
    if ranks is None:
        return Candidate("usual", name, space, None, "these shares are no whole devices, or of several classes")
    assignment = choose_settings(space, ranks, allowed)
    for _, offloaded in offload_sets(space) if assignment == TOO_LARGE else ():
        variant = replace(space, offloaded=offloaded)
        found = choose_settings(variant, ranks, allowed)
        if not isinstance(found, str):
            return Candidate("usual", name, variant, found)
    if isinstance(assignment, str):
        return Candidate("usual", name, space, None, assignment)
    return Candidate("usual", name, space, assignment)
