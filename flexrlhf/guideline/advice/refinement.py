"""Settings between those that a search tries: sizes of passes and of caches, recomputation and ZeRO stages, changed one
by one on the meshes of an assignment as long as a step gets shorter."""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.guideline.advice.proposals import fits_memory
from flexrlhf.guideline.advice.space import Space
from flexrlhf.guideline.search.evaluate import evaluate
from flexrlhf.guideline.search.problem import Assignment

ROUNDS = 3
"""Times that the settings of every model are looked at."""
LEAST_GAIN = 1e-4
"""Share of a step's time by which a change has to shorten it."""


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
