"""Models are reloaded before they are due, where memory allows, and a simulated step is shorter by what that hides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flexrlhf.config.spec import Spec
from flexrlhf.guideline.simulation.inputs import longest_lengths
from flexrlhf.guideline.simulation.simulate import Simulation, simulate
from flexrlhf.guideline.simulation.simulation_text import format_simulation
from flexrlhf.guideline.simulation.walk import TimedInstruction, steady_seconds
from flexrlhf.placement.placed import ModelName
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.strategies.instructions import Offload, Reload, Run
from flexrlhf.strategies.prefetch import Residence, Transition, Transitions, bring_forward


@pytest.fixture(scope="module")
def plan() -> Plan:
    """PPO of 13B on eight GPUs of 40 GB: either of the two trained models fits next to frozen ones, not both."""
    settings: dict[str, Any] = {"init": "llama-2-13b", "zero": 3, "micro_batch_tokens": 4096, "generate_tokens": 32768}
    trained = {**settings, "activation_checkpointing": True}
    spec = {
        "name": "tight",
        "algorithm": {"name": "ppo", "prompts_per_step": 128},
        "models": {"actor": trained, "critic": trained, "ref": settings, "reward": settings},
        "placement": [1, 1, 1, 1],
        "rollout": {"engine": "transformers"},
        "data": {"path": "prompts.jsonl", "max_prompt_tokens": 512, "max_response_tokens": 512},
        "cluster": {"nodes": [{"devices": 8, "class": "A100-40G"}]},
        "steps": 10,
    }
    return make_plan(Spec.parse(spec))


@pytest.fixture(scope="module")
def simulation(plan: Plan) -> Simulation:
    return simulate(plan, lengths=longest_lengths(plan))


def test_a_reload_precedes_calls_that_leave_room_for_its_model(plan: Plan) -> None:
    listed = [each for each in plan.schedule.for_rank(0) if isinstance(each, Offload | Reload | Run)]
    labels = [f"{each.kind} {each.label}" for each in listed if not (isinstance(each, Offload | Reload) and each.rare)]
    # the actor's forward pass leaves room for frozen models, theirs for the critic, and training for no other model
    assert labels == [
        *("offload critic", "reload actor", "run generate on actor", "reload ref", "reload reward"),
        *("run logprobs on actor", "offload actor", "reload critic", "run ref_logprobs on ref", "run scores on reward"),
        *("offload reward", "offload ref", "run values on critic", "offload critic", "reload actor"),
        *("run advantages on actor", "run train_actor on actor", "offload actor", "reload critic"),
        "run train_critic on critic",
    ]
    overlapping = [each.model for each in listed if isinstance(each, Reload) and each.overlaps and not each.rare]
    assert overlapping == ["ref", "reward", "critic"]
    copied = [each.model for each in listed if isinstance(each, Offload) and each.copies and not each.rare]
    assert copied == ["critic", "actor"], "models are copied out after their training alone"
    assert all(memory.peak_bytes <= (plan.device_bytes(memory.rank) or 0) for memory in plan.memories)
    lines = format_plan(plan).splitlines()
    assert any("reload ref" in line and "in the background" in line for line in lines)
    assert any("offload ref" in line and "unchanged: not copied" in line for line in lines)


CALLS = "logprobs", "ref_logprobs", "scores", "values"


@pytest.mark.parametrize(
    ("fits_from", "rare", "first"),
    [
        pytest.param((1, 0), None, {"actor": 1, "critic": 1}, id="not before the reload ahead of it"),
        pytest.param((3, 3), None, {"actor": 2, "critic": 3}, id="where memory allows"),
        pytest.param((1, 0), 3, {"actor": 1, "critic": 4}, id="not before a change for a call that most steps skip"),
    ],
)
def test_a_reload_goes_before_the_first_call_that_leaves_room(
    plan: Plan, fits_from: tuple[int, int], rare: int | None, first: dict[str, int]
) -> None:
    """Reloads of the actor, due before call 2, and of the critic, due before call 4, each with the first call that
    leaves room for it."""
    found = {x.operator.name: x for x in plan.schedule.instructions if isinstance(x, Run)}
    calls = [found[name] for name in (*CALLS, "train_critic")]
    actor, critic, other = map(ModelName, ("actor", "critic", "other"))
    before: Transitions = {2: [Transition(Reload, actor)], 4: [Transition(Reload, critic)]}
    if rare is not None:
        before[rare] = [Transition(Offload, other)]
    used = [set[ModelName]() if index in before else {other} for index in range(5)]
    residence = Residence(
        *(0, calls, used, [index == rare for index in range(5)], before, {}),
        on_device=frozenset(),
        movable=frozenset({actor, critic}),
        engines=frozenset(),
    )
    bring_forward(residence, lambda index, models: index >= fits_from[critic in models])
    assert {each.model: index for index, changes in before.items() for each in changes if each.kind is Reload} == first


def test_a_simulated_step_is_shorter_by_hidden_copies(simulation: Simulation) -> None:
    regular = [each for item, each in zip(simulation.priced, simulation.instructions, strict=True) if not item.is_rare]
    blocking = steady_seconds([replace(each, copies="", needs=()) for each in regular], len(simulation.blocks))
    assert blocking - simulation.seconds == pytest.approx(simulation.copying - simulation.exposed)
    # exposed: both exchanges of the trained models, and the actor that comes back for its training
    back = [item.cost.seconds for item in simulation.regular if item.instruction.kind == "reload"]
    out = [item.cost.seconds for item in simulation.regular if item.instruction.kind == "offload"]
    assert simulation.exposed == pytest.approx(3 * max(out), rel=0.02)
    assert simulation.copying == pytest.approx(sum(back) + sum(out))
    assert 0 < simulation.exposed < 0.5 * simulation.copying
    (line,) = (each for each in simulation_lines(simulation) if "to host memory and back" in each)
    assert "52% hidden" in line


def simulation_lines(simulation: Simulation) -> list[str]:
    from flexrlhf.guideline.simulation.inputs import costs_for

    return format_simulation(simulation, costs_for(simulation.plan.spec, None)).splitlines()


CALL, OTHER = TimedInstruction((0,), 5.0), TimedInstruction((0,), 1.0, needs=(0,))


@pytest.mark.parametrize(
    ("listed", "seconds"),
    [
        pytest.param([TimedInstruction((0,), 2.0, copies="back", model=0), CALL, OTHER], 6.0, id="hidden"),
        pytest.param([CALL, TimedInstruction((0,), 2.0, copies="back", model=0), OTHER], 8.0, id="due at once"),
        pytest.param([TimedInstruction((0,), 7.0, copies="back", model=0), CALL, OTHER], 8.0, id="hidden in part"),
        pytest.param(
            [
                TimedInstruction((0,), 2.0, copies="out", model=1),
                TimedInstruction((0,), 3.0, copies="back", model=0),
                OTHER,
            ],
            4.0,
            id="exchanged: both directions at once",
        ),
        pytest.param([TimedInstruction((0,), 2.0, copies="out", model=1), CALL], 7.0, id="memory is used at once"),
        pytest.param(
            [
                TimedInstruction((0,), 2.0, copies="back", model=1),
                TimedInstruction((0,), 2.0, copies="back", model=0),
                CALL,
                OTHER,
            ],
            6.0,
            id="one after the other",
        ),
    ],
)
def test_copies_are_made_next_to_the_work_of_a_device(listed: list[TimedInstruction], seconds: float) -> None:
    assert steady_seconds(listed, 1) == pytest.approx(seconds)
