"""Bytes sent and bytes stored: torch sends the planned bytes, and no rank stores a model that is not placed on it."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from cases import DEFAULT, Case, algorithm_of
from launcher import Launches, Outcome
from safetensors.torch import load_file

from flexrlhf.strategies.instructions import Move, Sync

pytestmark = pytest.mark.timeout(3600)
CASES = [pytest.param(case, id=case.name) for case in DEFAULT]

Key = tuple[str, str, int | None, int]
"""Kind, label, chunk and step of an instruction."""


def planned_bytes(outcome: Outcome) -> Counter[Key]:
    plan, total = outcome.plan, Counter[Key]()
    for instruction in plan.schedule.instructions:
        for step in range(plan.spec.steps):
            if not instruction.due(step, plan.spec.steps):
                continue
            match instruction:
                case Move():
                    total["move", instruction.label, instruction.chunk, step] += plan.traffic.move_bytes(instruction)
                case Sync():
                    total["sync", instruction.label, None, step] += plan.traffic.sync_bytes(instruction) or 0
    return total


def counted_bytes(outcome: Outcome) -> Counter[Key]:
    total = Counter[Key]()
    for span in outcome.spans:
        if span["cat"] in ("move", "sync"):
            args = span["args"]
            total[span["cat"], span["name"], args.get("chunk"), args["step"]] += args["bytes_sent"]
    return total


def files_bytes(path: str | None) -> int:
    return sum(tensor.nbytes for tensor in load_file(f"{path}/model.safetensors").values())


@pytest.mark.parametrize("case", CASES)
def test_moves_and_syncs_send_the_planned_bytes(launches: Launches, case: Case) -> None:
    outcome = launches.outcome(case)
    assert counted_bytes(outcome) == planned_bytes(outcome), case.name


@pytest.mark.parametrize("case", [pytest.param(each, id=each.name) for each in DEFAULT if "episodes" in each.setting])
def test_columns_of_episodes_take_the_planned_bytes(launches: Launches, case: Case) -> None:
    """As many as of responses, however many turns there are; a guard compares log-probs in step 0 in addition.

    At most as many where a step does not train on all rows that it has: of the others there are no outcomes.
    """
    plan, found = launches.outcome(case).plan, launches.outcome(case).trace["otherData"]["row_bytes"]
    compared = sum(map(plan.lengths.row_bytes, ("rollout_logprobs", "response_mask")))
    for rank, held in found.items():
        planned = plan.row_bytes(int(rank), plan.num_steps_kept + 1)
        mine = [model.layout for model in plan.placement.on_rank(int(rank)) if model.role == "actor"]
        rows = max((len(plan.batch.prompts_on(each, int(rank), plan.batch.mini_batches)) for each in mine), default=0)
        guarded = rows * plan.batch.samples_per_prompt * compared
        if plan.batch.segments == plan.batch.attempts == 1:
            assert held - planned in (0, guarded), (rank, held, planned)
        else:
            assert held <= planned + guarded, (rank, held, planned)


@pytest.mark.parametrize("case", CASES)
def test_an_instruction_runs_on_the_ranks_that_it_names(launches: Launches, case: Case) -> None:
    outcome = launches.outcome(case)
    planned, done = defaultdict(Counter), defaultdict(Counter)
    for rank in range(case.ranks):
        for _, _, instruction in outcome.plan.schedule.walk(rank, outcome.plan.spec.steps):
            planned[instruction.label][rank] += 1
    for span in outcome.spans:
        done[span["name"]][span["tid"]] += 1
    assert done == planned, case.name


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_the_weights_placed_on_them_and_no_others(launches: Launches, case: Case) -> None:
    outcome = launches.outcome(case)
    usage = outcome.trace["otherData"]["held_bytes"]
    assert sorted(usage) == [str(rank) for rank in range(case.ranks)]
    for rank in range(case.ranks):
        placed = outcome.plan.placement.on_rank(rank)
        assert sorted(usage[str(rank)]) == sorted(model.name for model in placed), f"{case.name}, rank {rank}"
        for model in placed:
            state, place = outcome.plan.state(model, rank), f"{case.name}, rank {rank}, {model.name}"
            stored = 0 if model.is_transient else state and state.weights
            assert state is not None and usage[str(rank)][model.name]["weights"] == stored, place
            # a copy that generates lacks the head of values that the files of one trunk have
            is_part = model.rollout is not None and algorithm_of(case.setting) == "ac-share"
            is_whole = model.split == "whole" and model.layout.dims.tp == model.layout.dims.pp == 1 and not is_part
            if is_whole and model.settings.lora is None:
                # a copy may have views of its source's weights instead
                assert state.weights + state.viewed == files_bytes(model.settings.path), place


@pytest.mark.parametrize(
    ("case", "models"),
    [
        (Case("two", "halves", 2), ["actor critic ref", "actor critic reward"]),
        (Case("epochs", "six", 2), ["actor critic", "actor.shadow critic.shadow ref reward"]),
        pytest.param(
            *(Case("two", "classes", 4), ["actor critic", "actor critic", "ref", "reward"]), marks=pytest.mark.full
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_models_are_placed_as_in_the_paper(launches: Launches, case: Case, models: list[str]) -> None:
    usage = launches.outcome(case).trace["otherData"]["held_bytes"]
    assert [sorted(usage[str(rank)]) for rank in range(case.ranks)] == [names.split() for names in models]


@pytest.mark.parametrize("case", [param for param in CASES if "tight" in param.id])
def test_an_offloaded_model_leaves_the_planned_bytes(launches: Launches, case: Case) -> None:
    """After the last step, when some models wait in host memory."""
    outcome, offloaded = launches.outcome(case), 0
    for rank, models in outcome.trace["otherData"]["held_bytes"].items():
        for name, usage in models.items():
            state = outcome.plan.state(outcome.plan.placement[name], int(rank))
            if usage["host"]:
                offloaded += 1
                assert state is not None and usage["host"] == pytest.approx(state.offloaded, rel=0.02), (
                    case.name,
                    name,
                )
    assert offloaded, f"{case.name}: nothing was offloaded"
