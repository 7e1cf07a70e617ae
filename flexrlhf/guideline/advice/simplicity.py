"""Choice among placements that are predicted to take about as long: the simplest of them.

A difference that is smaller than the accuracy of the predictions (``costs/accuracy.csv``) is a tie: it buys no
placement that is harder to reason about. Simple is, in this order:

1. a ratio vector, before ranks that are listed one by one;
2. few distinct ratios, and of them whole ones: ``[1,1,1,1]`` before ``[0.5,0.5,0.5,0.5]`` before ``[1,0.8,1,0.8]``;
3. few copies of weights: no shadows before shadows;
4. models and optimizers that stay on their devices, before those that are in host memory.

Of equally simple ones the faster is chosen, and none that is slower than the fastest usual placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from flexrlhf.config.spec import ModelSpec, PlacementMap, Spec
from flexrlhf.guideline.advice.candidates import Candidate, FeasibleCandidate


def complexity(candidate: Candidate) -> tuple[int, ...]:
    """Return the key by which placements are ordered, the simplest first."""
    space, ratios = candidate.space, set(ratios_of(candidate))
    return (
        isinstance(candidate.spec.placement, PlacementMap),
        len(ratios),
        min(ratios) < 1,
        space.has_shadows,
        len(space.offloaded) + len(optimizers_on_host(candidate.spec)),
    )


def optimizers_on_host(spec: Spec) -> list[str]:
    """Return the roles whose optimizer's state is in host memory."""
    return [role for role, model in spec.models if isinstance(model, ModelSpec) and model.offload_optimizer]


def ratios_of(candidate: Candidate) -> list[Fraction]:
    """Return the share of the devices that each placed model has, a rollout engine on the ranks of its role left
    out."""
    placement, total = candidate.spec.placement, candidate.space.pool.num_devices
    if isinstance(placement, PlacementMap):
        return [Fraction(len(entry.ranks or ()), total) for entry in placement.models.values()]
    assert isinstance(placement, tuple), "proposals have a vector or ranks"
    return list(placement)


def tied(feasible: Sequence[FeasibleCandidate], margin: float) -> list[FeasibleCandidate]:
    """Return the placements that count as equally fast as the fastest, which comes first.

    feasible:  fastest first.
    margin:    share of the fastest placement's seconds by which another one may be slower and count as equally fast.
    """
    return [item for item in feasible if item.seconds <= (1 + margin) * feasible[0].seconds]


def simplest(feasible: Sequence[FeasibleCandidate], margin: float) -> FeasibleCandidate:
    """Return the simplest of the placements that are equally fast; of equally simple ones the faster.

    ``feasible``: at least one, fastest first.
    """
    usual = min((item.seconds for item in feasible if item.candidate.method == "usual"), default=float("inf"))
    equal = [item for item in tied(feasible, margin) if item.seconds <= usual]
    return min(equal, key=lambda item: (complexity(item.candidate), item.seconds))
