"""Sharding is real: every rank stores 1/n of the state that its ZeRO stage splits, counted on the tensors.

With ``shard: node`` n are the ranks of a node.
"""

from __future__ import annotations

import math

import pytest
from cases import DEFAULT, STAGES, Case
from launcher import Launches, Outcome, params

from flexrlhf.placement.placed import PlacedModel

pytestmark = pytest.mark.timeout(3600)
TOLERANCE = 0.05
ALL = ("weights", "gradients", "optimizer")
SPLIT = {
    ("deepspeed", 1): ("optimizer",),
    ("deepspeed", 2): ("optimizer", "gradients"),
    ("deepspeed", 3): ALL,
    ("torch", 2): ALL,
    ("torch", 3): ALL,
}
"""Engine and stage → the state that it splits."""
# stages 1 and 2 of DeepSpeed split the concatenated tensors, and of a gradient that a split goes through both
# ranks keep the whole: little in a model of 32 layers, much in one of two
DEEP = [Case("deep", "all", ranks, compute) for ranks in (2, 4) for compute in ("replicas", *STAGES)]
IN_FULL_ALONE = [case for case in DEEP if case.ranks == 4 and case.compute != "torch-3"]
ADAPTED = [case for case in DEFAULT if "adapters" in case.setting and case.compute == "replicas"]
PLACED = [
    case
    for case in DEFAULT
    if case.ranks == 4 and (case.compute in ("torch-2", "torch-3", "deepspeed-3") or case.shape == "operators-nodes")
]


def whole(outcome: Outcome, model: PlacedModel) -> dict[str, int]:
    """Float32 bytes of a model that nothing splits."""
    shape = outcome.plan.shapes[model.role]
    weights, trained = (
        4 * sum(math.prod(size) for _, size in parameters) for parameters in (shape.parameters, shape.trained)
    )
    settings = model.settings.optimizer
    moments = 0 if settings.name == "sgd" else 2
    # ZeRO keeps float32 master weights in addition to a float32 model's weights
    masters = int(model.engine == "deepspeed" and model.settings.zero > 0)
    return {
        "weights": weights,
        "gradients": trained if model.trained else 0,
        "optimizer": (moments + masters) * trained if model.trained else 0,
    }


def shares(outcome: Outcome, model: PlacedModel, kind: str) -> list[float]:
    """Fraction of the whole state on each rank."""
    usage = outcome.trace["otherData"]["held_bytes"]
    return [usage[str(rank)][model.name][kind] / whole(outcome, model)[kind] for rank in model.ranks]


@pytest.mark.parametrize("case", params(DEEP + PLACED, IN_FULL_ALONE))
def test_a_rank_stores_its_part_of_sharded_state(launches: Launches, case: Case) -> None:
    outcome = launches.outcome(case)
    for model in (each for each in outcome.plan.placement.models if not each.is_transient):
        for kind in SPLIT.get((model.engine, model.settings.zero), ()):
            if whole(outcome, model)[kind]:
                found = shares(outcome, model, kind)
                number = model.sharded_over or model.layout.dp
                right = all(abs(share * number - 1) <= TOLERANCE for share in found)
                assert right, f"{case.name}: {kind} of {model.name}: {found}"


@pytest.mark.parametrize("case", params(DEEP + ADAPTED, IN_FULL_ALONE))
def test_a_rank_stores_all_unsharded_state(launches: Launches, case: Case) -> None:
    """Else the test above would show nothing. With adapters the frozen weights have no gradients and no optimizer."""
    outcome = launches.outcome(case)
    for model in outcome.plan.placement.models:
        stage = model.settings.zero
        # stage 1 frees other ranks' gradients before the update, though it does not promise that
        for kind in ("weights", "optimizer", *(["gradients"] if stage == 0 else [])):
            if kind not in SPLIT.get((model.engine, stage), ()) and whole(outcome, model)[kind]:
                assert shares(outcome, model, kind) == [1.0] * len(model.ranks), f"{case.name}: {kind} of {model.name}"
