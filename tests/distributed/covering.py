"""Choices in cases of the equality suite: which pairs of the whole product the default cases cover, and a covering
array of triples (Cohen et al. 1997), which `make test-all` runs.

A bug of one choice, or of two together, is seen by a default case; of three by `make test-all`.
``python tests/distributed/covering.py`` prints the pairs with the number of default cases of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import combinations

from cases import COMPUTE, DEFAULT, PREFERENCES, SETTINGS, SHAPES, SUPERVISED, Case, algorithm_of, every_case

FAMILY = {"ppo": "critic", "ac-share": "one trunk", "safe-rlhf": "costs", "remax": "baseline"}
"""Families of algorithms that sample responses; all others compare groups."""
Pair = tuple[str, str]


def choices(case: Case) -> dict[str, str]:
    """Choices of a case, by factor."""
    shape, setting = SHAPES[case.shape], SETTINGS[case.setting]
    schedule, algorithm = shape.get("schedule", {}), algorithm_of(case.setting)
    models = [value for value in setting.get("models", {}).values() if isinstance(value, dict)]
    rows = setting["algorithm"].get("prompts_per_step", 8)
    return {
        "algorithm": "supervised"
        if case.setting in SUPERVISED
        else "preference"
        if case.setting in PREFERENCES
        else FAMILY.get(algorithm, "groups"),
        "placement": _placement(case),
        "engine": _engine(case),
        "rollout": case.rollout.partition("-")[0],
        "chunks": "chunks" if schedule.get("num_chunks", 1) > 1 else "whole steps",
        "lag": ("lag 0", "lag 1", "larger lag")[min(schedule.get("lag", 0), 2)],
        "sync": "rare syncs" if shape.get("sync", {}).get("every", 1) > 1 else "every sync",
        "weights": "adapters" if any("lora" in model for model in models) else "all weights",
        "rows": "even rows" if rows % 4 == 0 else "uneven rows",
        "memory": "turns" if "tight" in case.shape else "together",
    }


def _placement(case: Case) -> str:
    placement = SHAPES[case.shape]["placement"]
    if isinstance(placement, dict):
        names = set(placement)
        return "operators" if "operators" in names else "disaggregated" if "actor.shadow" in names else "interleaved"
    if len(placement) == 6:
        return "disaggregated"
    return "co-located" if case.ranks == 1 or set(placement) == {1} else "interleaved"


def _engine(case: Case) -> str:
    """Engine of the actor, or of the only model."""
    settings = COMPUTE.get(case.compute, {}).get("actor", {})
    if settings.get("engine") in ("deepspeed", "megatron"):
        return str(settings["engine"])
    if settings.get("cp", 1) > 1:
        return "context parallel"
    if settings.get("tp", 1) > 1:
        return "tensor parallel"
    # one rank has no shards
    placement = SHAPES[case.shape]["placement"]
    is_alone = case.ranks == 2 and isinstance(placement, list) and set(placement) == {0.5}
    return "FSDP2" if settings.get("zero", 0) and not is_alone else "replicas"


def pairs(cases: Iterable[Case]) -> Counter[tuple[Pair, Pair]]:
    """Pairs of choices, with the number of cases of each."""
    return Counter(pair for case in cases for pair in combinations(choices(case).items(), 2) if _may_interact(*pair))


def _may_interact(one: Pair, other: Pair) -> bool:
    """Whether a pair must be covered. vLLM, which takes seconds to start, reads weights and writes rows: it is combined
    only with placements, lags and weights. Outside a pass, context-parallel ranks have rows as tensor-parallel
    ones and weights as replicas: they are combined with nothing."""
    if ("engine", "context parallel") in (one, other):
        return False
    if ("rollout", "vllm") not in (one, other):
        return True
    return not {one[0], other[0]}.isdisjoint({"placement", "lag", "weights"})


def covering(cases: Iterable[Case], others: Iterable[Case]) -> list[Case]:
    """Few of ``cases`` that have, with ``others``, all combinations of theirs; always the one that adds most."""
    covered = set().union(*map(_combinations, others))
    found = {case: _combinations(case) for case in cases}
    heap = [(-len(each), number, case) for number, (case, each) in enumerate(found.items())]
    heapify(heap)
    chosen = []
    while heap:
        count, number, case = heappop(heap)
        left = found[case] - covered
        if left and len(left) == -count:
            chosen.append(case)
            covered |= left
        elif left:
            heappush(heap, (-len(left), number, case))
    return chosen


def _combinations(case: Case) -> set[tuple[Pair, ...]]:
    """Triples of choices; the setting with each placement and engine; pairs of shape, engine's settings and rollout."""
    made = list({**choices(case), "ranks": str(case.ranks)}.items())
    named = [("shape", case.shape), ("compute", case.compute), ("rollout settings", case.rollout)]
    of_setting = [(("setting", case.setting), each) for each in made if each[0] in ("placement", "engine")]
    return {*combinations(made, 3), *combinations(named, 2), *of_setting}


def main() -> None:
    covered = pairs(DEFAULT)
    for (one, other), count in sorted(pairs(every_case()).items()):
        print(f"{covered[one, other]:4d} of {count:4d}  {one[1]} with {other[1]}")


if __name__ == "__main__":
    main()
