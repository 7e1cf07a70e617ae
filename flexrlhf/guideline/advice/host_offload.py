"""Spaces in which idle models are in host memory: which models that may be, and when it may pay.

A plan offloads models where a device would overflow (``strategies/residency.py``), the one that is used farthest in the
future first. A search counts two transfers for each time that such a model is used, which is about as many or more, so
its results are planned and simulated before they are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flexrlhf.guideline.advice.proposals import fastest_options
from flexrlhf.guideline.advice.space import Space
from flexrlhf.guideline.search.evaluate import evaluate
from flexrlhf.guideline.search.problem import Assignment, Choice

OffloadSet = tuple[str, frozenset[str]]
"""Name in tables, and the models that are in host memory while others compute."""


def offload_sets(space: Space) -> tuple[OffloadSet, ...]:
    """Return the sets of models that are tried: those that are not trained; all but one that a rollout engine on the
    same devices follows; all, so that this one and the engine are there together only while weights are sent."""
    idle = _idle(space)
    frozen = frozenset(name for name in idle if name not in space.roles.trained)
    followed = frozenset() if space.has_shadows else frozenset(each.role for each in space.sketch.followers)
    return _distinct(
        (
            ("frozen models offloaded", frozen),
            ("idle models offloaded", idle - followed),
            ("all models offloaded", idle),
        )
    )


def _distinct(sets: tuple[OffloadSet, ...]) -> tuple[OffloadSet, ...]:
    """Return the sets that have a member, each once."""
    named = {members: name for name, members in reversed(sets) if members}
    return tuple((name, members) for name, members in sets if named.get(members) == name)


def _idle(space: Space) -> frozenset[str]:
    """Return the models that other models follow in the order of calls. A rollout engine has a sleep of its own."""
    return frozenset(name for name in space.names if not name.is_rollout and any(space.switches(name)))


def offloaded_spaces(space: Space, sets: tuple[OffloadSet, ...]) -> Iterator[tuple[str, Space]]:
    """Yield (label, space) with each of ``sets`` in host memory."""
    for name, members in sets:
        yield name, replace(space, offloaded=members)


def is_short_of_memory(space: Space, best: Assignment, seconds: float, margin: float) -> bool:
    """Whether a step with more memory, on the meshes of ``best`` or with all models on all devices, is shorter than
    ``seconds``, and no tie with them.

    ``margin``: share of the shorter step by which the other may be longer in a tie.
    """
    problem = space.problem
    total = space.pool.num_devices
    for meshes in (best, tuple(replace(choice, start=0, size=total) for choice in best)):
        fastest = [fastest_options(problem, choice) for choice in meshes]
        whole: tuple[Choice, ...] = tuple(choice for choice in fastest if choice is not None)
        if len(whole) == len(best) and (1 + margin) * evaluate(problem, whole) < seconds:
            return True
    return False
