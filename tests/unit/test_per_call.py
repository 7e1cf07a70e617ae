"""ReaL's space, one placement for each call: the result of the search fits, and no co-located plan is faster."""

from __future__ import annotations

import pytest

from benchmarks.systems.per_call import PPO_CALLS, PerCallSpace
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.costs.cost_model import Transformer
from flexrlhf.guideline.search.branch_and_bound import search
from flexrlhf.guideline.search.evaluate import evaluate
from flexrlhf.guideline.search.problem import Choice, DevicePool, LinkEnd
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.placement.devices import DeviceClass

DEVICE = DeviceClass.KNOWN["A100-80G"]
LLAMA_7B = Transformer(32, 4096, 11008, 32, 32, 128, 32000)
GAP = 0.05


@pytest.fixture(scope="module")
def space() -> PerCallSpace:
    scorer = LLAMA_7B.as_scorer()
    models = {"actor": LLAMA_7B, "ref": LLAMA_7B, "critic": scorer, "reward": scorer}
    pool = DevicePool.of(8, 8, 0.9 * DEVICE.memory_gb * 1e9, DEVICE.name)
    return PerCallSpace(models, {DEVICE.name: DEVICE}, pool, AnalyticCosts(), TextLengths(256, (256,)), 128, 4)


def test_every_call_has_a_placement_of_its_own_that_fits(space: PerCallSpace) -> None:
    problem = space.problem()
    result = search(problem, 30.0, GAP)
    assert [choice.part for choice in result.assignment] == [call.name for call in PPO_CALLS]
    assert evaluate(problem, result.assignment) == pytest.approx(result.seconds, rel=1e-12)
    (memory,) = space.pool.memory.values()
    for device in range(space.pool.num_devices):
        options = [c.option for c in result.assignment if c.start <= device < c.start + c.size]
        assert sum(option.resting for option in options) + max(option.active for option in options) <= memory * (
            1 + 1e-9
        )


def test_no_plan_on_all_devices_with_one_layout_is_faster(space: PerCallSpace) -> None:
    problem, counted = space.problem(), 0
    bound, whole = search(problem, 30.0, GAP).bound, problem.shape_of(0, 8)
    (memory,) = space.pool.memory.values()
    for dp, tp in ((8, 1), (4, 2), (2, 4), (1, 8)):
        options = [[o for o in part.options(whole) if o.settings[:3] == (dp, tp, 1)] for part in problem.parts]
        chosen = [min(of_part, key=lambda option: option.seconds) for of_part in options if of_part]
        needed = sum(option.resting for option in chosen) + max((option.active for option in chosen), default=0)
        if len(chosen) == len(problem.parts) and needed <= memory:
            plan = tuple(Choice(part.name, 0, 8, option) for part, option in zip(problem.parts, chosen, strict=True))
            assert evaluate(problem, plan) >= bound * (1 - 1e-9)
            counted += 1
    assert counted


def test_weights_move_only_where_layouts_differ(space: PerCallSpace) -> None:
    problem = space.problem()
    sync = next(call for call in problem.calls if not hasattr(call, "name"))
    train, generate = (next(p for p in problem.parts if p.name == name) for name in ("actor train", "actor generate"))
    shape = problem.shape_of(0, 8)
    ends = [[LinkEnd(shape, option.layout) for option in part.options(shape)] for part in (train, generate)]
    for source in ends[0]:
        for to in ends[1]:
            assert (sync.seconds(source, to, "same") == 0) == (source.layout == to.layout)
