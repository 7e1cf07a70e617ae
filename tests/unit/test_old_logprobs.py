"""Runs that compute the log-probs of the policy without a forward pass of their own, and their graphs."""

from __future__ import annotations

from typing import Any

import pytest
from small_runs import RECOMPUTE, TINY, plan_of, spec_of
from test_simulate import Fixed

from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.operators.graph import Operator
from flexrlhf.plan.pipeline import ResolvedSpec
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.plan.rollout_engine import with_rollout
from flexrlhf.strategies.instructions import Move, Run

SIX = [0.5] * 6
FIVE = [0.5] * 5
REUSE = "rollout.logprobs=reuse"
NO_KL = "algorithm.kl=null"
HALF = "models.actor.dtype=bfloat16"
TWO = "algorithm.num_mini_batches=2"
IMPORTANCE = "algorithm.importance={}"
VLLM = "rollout.engine=vllm"
GRPO = "algorithm={name: grpo, prompts_per_step: 8, samples_per_prompt: 2}"
GENERATION, TRAINING, FORWARD = "generation", "training", "forward"


def operators_of(plan: Plan) -> dict[str, Operator]:
    return {operator.name: operator for operator in plan.graph.operators}


def source_of(plan: Plan) -> str:
    """Which pass ``logprobs`` come from, by the columns of the graph alone."""
    writer = plan.graph.producers.get("logprobs")
    kind = TRAINING if writer is None else {"generate": GENERATION, "forward": FORWARD}[writer.kind]
    train = operators_of(plan)["train_actor"]
    assert train.function.startswith("on_policy") == (writer is None) == ("logprobs" not in train.reads)
    assert (kind != FORWARD) == bool(plan.graph.left_out)
    return kind


@pytest.mark.parametrize(
    ("placement", "overrides", "source"),
    [
        # a penalty in the reward reads them before training
        (None, (), GENERATION),
        (SIX, (), GENERATION),
        (SIX, ("schedule.lag=1",), GENERATION),
        (SIX, ("sync.every=2",), GENERATION),
        (None, (TWO,), GENERATION),
        (None, (NO_KL, TWO), GENERATION),
        (None, (NO_KL, "algorithm.epochs=2"), GENERATION),
        (None, (RECOMPUTE,), FORWARD),
        (None, (NO_KL, RECOMPUTE), FORWARD),
        # decoding rounds otherwise in 16 bits
        (None, (HALF,), FORWARD),
        (None, (HALF, REUSE), GENERATION),
        (SIX, ("models.actor.shadow={dtype: bfloat16}",), FORWARD),
        # nothing proves that decoding is the function that is trained
        (None, ("guards.sampled_logprobs=warn",), FORWARD),
        (None, ("guards.sampled_logprobs=off",), FORWARD),
        # other weights have sampled the replayed responses
        (None, ("debug.replay=runs/other",), FORWARD),
        # one pass of training
        (None, (NO_KL,), TRAINING),
        (None, (NO_KL, HALF), TRAINING),
        (FIVE, (NO_KL,), TRAINING),
        (FIVE, (NO_KL, HALF), TRAINING),
        (FIVE, (NO_KL, "sync.every=2"), GENERATION),
        (FIVE, (NO_KL, HALF, "sync.every=2"), FORWARD),
        (FIVE, (NO_KL, HALF, "schedule.lag=1"), FORWARD),
        (FIVE, (NO_KL, "models.actor.shadow={dtype: bfloat16}"), FORWARD),
        (None, (NO_KL, "guards.sampled_logprobs=off"), TRAINING),
        (None, (NO_KL, REUSE), GENERATION),
        (None, (NO_KL, "algorithm.surrogate=kl-cov"), GENERATION),
        (None, (GRPO,), TRAINING),
        (None, (GRPO, HALF), TRAINING),
        (None, (GRPO, "algorithm.num_mini_batches=2"), GENERATION),
        # the KL of responses that are not trained on is reported by the advantages alone
        (None, (GRPO, "algorithm.dynamic_sampling={}"), GENERATION),
        (None, ("algorithm.kl={place: loss}", "algorithm.freeze_actor_steps=1"), GENERATION),
        (None, ("algorithm.name=raft", "algorithm.kl={place: loss}", "models.critic=null"), GENERATION),
        # with a correction the trained copy computes them before it trains, whatever has sampled
        (None, (IMPORTANCE,), TRAINING),
        (SIX, (IMPORTANCE, "schedule.lag=1", "sync.every=2", HALF), TRAINING),
        (None, (IMPORTANCE, TWO), FORWARD),
        (None, ("algorithm.importance={reject: {}}",), FORWARD),
        (None, (IMPORTANCE, "algorithm.top_p=0.9"), TRAINING),
        # a rollout engine
        (None, (VLLM,), FORWARD),
        (None, (VLLM, REUSE), GENERATION),
        (None, (VLLM, NO_KL), TRAINING),
        (SIX, (VLLM,), GENERATION),
        (SIX, (VLLM, REUSE), GENERATION),
        (SIX, (VLLM, IMPORTANCE, "schedule.lag=1"), TRAINING),
    ],
)
def test_where_log_probs_come_from(placement: Any, overrides: tuple[str, ...], source: str) -> None:
    assert source_of(plan_of(placement, 4, *overrides)) == source


@pytest.mark.parametrize("settings", [(), (GRPO,), (NO_KL,), ("algorithm.name=ac-share", "models.critic=null")])
@pytest.mark.parametrize("is_remote", [False, True])
def test_to_recompute_changes_no_graph(settings: tuple[str, ...], is_remote: bool) -> None:
    resolved = ResolvedSpec.of(spec_of(None, 2, *settings, RECOMPUTE))
    assert with_rollout(resolved.graph, resolved.spec, is_remote) == resolved.graph


def test_of_generation_the_column_travels_to_its_readers() -> None:
    plan = plan_of(SIX, 2)
    assert "logprobs" in operators_of(plan)["generate"].writes
    moves = [x for x in plan.schedule.instructions if isinstance(x, Move) and "logprobs" in x.columns]
    assert [(move.sources, move.destinations) for move in moves] == [(("actor.shadow",), ("actor",))]


def test_of_training_nothing_reads_a_column() -> None:
    """Log-probs of the rollout remain where they were sampled: ties are recognised by them."""
    plan = plan_of([0.5] * 4, 2, GRPO)
    operators = operators_of(plan)
    assert "rollout_logprobs" in operators["generate"].writes
    assert not {"logprobs", "ref_logprobs"} & set(operators["advantages"].reads)
    assert "ref_logprobs" in operators["train_actor"].reads
    moved = {name for x in plan.schedule.instructions if isinstance(x, Move) for name in x.columns}
    assert not {"logprobs", "rollout_logprobs", "computed_logprobs"} & moved and "ref_logprobs" in moved


def test_a_trunk_of_both_heads_still_computes_values() -> None:
    for settings in ((), (NO_KL,)):
        operators = operators_of(plan_of(None, 1, "algorithm.name=ac-share", "models.critic=null", *settings))
        assert operators["values"].writes == ("values",) and "logprobs" not in operators
    assert operators["train_actor"].function == "on_policy_shared_loss"


def due_steps(plan: Plan, name: str) -> list[int]:
    (run,) = (x for x in plan.schedule.instructions if isinstance(x, Run) and x.operator.name == name)
    return [step for step in range(plan.spec.steps) if run.due(step, plan.spec.steps)]


def test_the_first_step_compares_log_probs_of_whole_texts() -> None:
    """Where it did before: the copy that samples, at the place of the forward that is left out."""
    for placement, overrides in ((None, ()), (SIX, ("schedule.lag=1",)), (None, (NO_KL,)), (SIX, (IMPORTANCE,))):
        plan = plan_of(placement, 2, *overrides)
        runs = {x.operator.name: x for x in plan.schedule.instructions if isinstance(x, Run)}
        assert runs["computed_logprobs"].model == runs["generate"].model
        assert due_steps(plan, "computed_logprobs") == [0]
    assert due_steps(plan_of(None, 2, "steps=1"), "computed_logprobs") == [0]
    for overrides in ((NO_KL, "guards.sampled_logprobs=off"), (IMPORTANCE, "algorithm.top_p=0.9"), (VLLM, NO_KL)):
        assert "computed_logprobs" not in operators_of(plan_of(None, 2, *overrides))


def test_a_gate_of_an_engine_has_log_probs_of_the_trained_copy_to_compare_with() -> None:
    for overrides, compared in (
        ((NO_KL,), "rollout_logprobs"),
        ((REUSE,), "logprobs"),
        ((IMPORTANCE,), "rollout_logprobs"),
    ):
        plan = plan_of(None, 2, VLLM, "rollout.parity.every=4", "steps=9", *overrides)
        operators = operators_of(plan)
        assert operators["parity"].reads[:2] == (compared, "trainer_logprobs")
        assert due_steps(plan, "parity") == due_steps(plan, "trainer_logprobs") == [0, 1, 4, 8]


def test_the_setting_goes_with_transformers() -> None:
    assert plan_of(None, 1, REUSE).spec.rollout.engine == "transformers"


def test_the_printed_plan_says_what_is_left_out_and_why() -> None:
    def lines(*overrides: str) -> list[str]:
        text = format_plan(plan_of(None, 2, *overrides)).splitlines()
        return text[text.index("left out") + 1 :][:1] if "left out" in text else []

    assert lines() == ["  logprobs: the same weights have computed them in generation, in float32"]
    assert lines(GRPO) == ["  logprobs: one mini-batch and one epoch, so the training pass computes them"]
    assert lines(REUSE) == ["  logprobs: rollout.logprobs: reuse takes those of generation"]
    assert lines(RECOMPUTE) == []


@pytest.mark.parametrize("overrides", [(), (NO_KL,), (GRPO,)])
def test_a_simulated_step_is_shorter_by_the_forward(overrides: tuple[str, ...]) -> None:
    """Fixed seconds: a forward takes 2; that of the first step's comparison is none of a usual step."""
    full, short = (simulate(plan_of(None, 2, *overrides, *more), Fixed()) for more in ((RECOMPUTE,), ()))
    assert full.seconds - short.seconds == 2
    assert [item.instruction.label for item in short.rare][0] == "computed_logprobs on actor"


def test_models_that_share_devices_need_no_more_memory() -> None:
    """The forward of the first step has the place of the one that is left out."""
    init = f"models.actor.init={ {**TINY, 'num_hidden_layers': 4} }"
    full, short = (plan_of(None, 2, init, *more) for more in ((RECOMPUTE,), ()))
    assert [memory.peak_bytes for memory in short.memories] == [memory.peak_bytes for memory in full.memories]
