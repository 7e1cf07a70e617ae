"""Responses in segments (``rollout.segment_tokens``): settings, their refusals, and the graph that follows."""

from __future__ import annotations

from random import Random

import pytest
from small_runs import plan_of, spec_of

from flexrlhf.operators.columns import TEXT, Column, Qualifier
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.rollout import KeptSlots
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.stored_columns import stored_columns
from flexrlhf.strategies.instructions import Run
from flexrlhf.trainer.prompt_attempts import LACKING, TAKEN, next_taken, replacing_positions

GRPO = "algorithm={name: grpo, prompts_per_step: 8, samples_per_prompt: 2}"
BASELINE = "algorithm={name: reinforce++, prompts_per_step: 8, samples_per_prompt: 2, baseline: group}"
REMAX = "algorithm={name: remax, prompts_per_step: 8}"
SFT = ("algorithm={name: sft, prompts_per_step: 8}", "models={actor: {init: {model_type: llama}}}")
THREE, ENDED = "rollout.segment_tokens=3", "rollout.groups=as-ended"
PROCESS = ("algorithm.supervision=process", "reward={model: reward, level: step, separator: '.'}")
DYNAMIC = "algorithm.dynamic_sampling={rounds: 2}"
FROZEN = "algorithm.freeze_actor_steps=1"
PTX, TEXTS = "algorithm.ptx={path: texts.jsonl}", Column.qualified((*TEXT, "loss_mask"), Qualifier.PTX)


@pytest.mark.parametrize(
    ("rollout", "segments"),
    [
        ("{}", 1),
        ("{segment_tokens: 1}", 8),
        ("{segment_tokens: 3}", 3),
        ("{segment_tokens: 4}", 2),
        ("{segment_tokens: 8, max_segments: 2}", 2),
        ("{segment_tokens: 1, max_segments: 5}", 5),
        # a run that goes on may need further places for rows of shorter segments
        ("{segment_tokens: 3, max_segments: 5}", 5),
    ],
)
def test_segments_of_eight_tokens(rollout: str, segments: int) -> None:
    """As many as the longest response needs, or as are set; a step has a place for each."""
    plan = plan_of(None, 1, f"rollout={rollout}", "schedule.num_blocks=1")
    assert plan.batch == BatchShape(8 * segments, segments=segments)
    assert (plan.batch.num_new, plan.batch.num_taken) == (8, 8)
    assert plan.spec.most_stale == segments - 1
    assert plan.num_steps_kept == (segments > 1)


def test_the_oldest_token_adds_up() -> None:
    assert spec_of([0.5] * 6, 2, THREE, "schedule.lag=4", "sync.every=2").most_stale == 4 + 1 + 2


def test_generation_carries_its_columns_and_all_others_read_which_rows_are_present() -> None:
    whole, cut = (plan_of(None, 1, "rollout.logprobs=reuse", *further).graph for further in ((), (THREE,)))
    assert [operator.name for operator in cut.operators] == [operator.name for operator in whole.operators]
    for operator, before in zip(cut.operators, whole.operators, strict=True):
        if operator.kind == "generate":
            assert operator.writes == (*before.writes, Column.PRESENT) and operator.reads == before.reads
            # the mask of a sequence follows from the masks of its prompt and its response
            assert set(operator.carries) == set(operator.writes) - {"attention_mask"}
        else:
            # staleness is reported with the mask of a loss
            stale = ("policy_version",) if "loss_mask" in operator.writes else ()
            assert operator.reads == (*before.reads, *stale, Column.PRESENT) and operator.writes == before.writes
            assert not operator.carries
    assert cut.evaluation == whole.evaluation


@pytest.mark.parametrize(
    ("algorithm", "number"),
    [((GRPO,), 1), ((GRPO, *PROCESS), 2), ((BASELINE,), 1), ((BASELINE.replace("group", "none"),), 0)],
    ids=["grpo", "process", "baseline", "no baseline"],
)
def test_responses_that_end_alone_are_compared_with_the_scores_of_their_group(
    algorithm: tuple[str, ...], number: int
) -> None:
    """Of earlier steps; other operators compute for single rows."""
    plans = [plan_of(None, 1, *algorithm, THREE, *further) for further in ((), (ENDED,))]
    assert [plan.batch.is_by_row for plan in plans] == [False, True]
    waiting, alone = (plan.graph for plan in plans)
    assert [operator.name for operator in alone.operators] == [operator.name for operator in waiting.operators]
    for operator, before in zip(alone.operators, waiting.operators, strict=True):
        scores = (Column.GROUP_SCORES, Column.GROUP_STEPS)[: number if operator.name == "advantages" else 0]
        assert operator.writes == (*before.writes, *scores) and operator.carries == (*before.carries, *scores)


def test_rows_of_two_responses_are_trained_on_when_both_have_ended() -> None:
    """Both are carried until then, on the ranks that generate each, which read whether the step before trained on the
    row. Under a lag the combine stays with generation, also where all that reads it is on the ranks of training."""
    sides = "{actor.rollout: {ranks: [1]}, actor: {ranks: [0]}, ref: {ranks: [0]}, reward: {ranks: [0]}}"
    vllm = ("rollout.engine=vllm", "algorithm.importance={cap: 2.0}")
    plan = plan_of(None, 2, REMAX, THREE, f"placement={sides}", "schedule.lag=2", *vllm)
    sampled, greedy, joined, *others = plan.graph.operators
    assert (sampled.name, greedy.name) == ("generate", "greedy") and joined.joins_responses
    for operator in (sampled, greedy):
        own = {name for name in operator.writes if not name.startswith("attention_mask")}
        assert set(operator.carries) == own | {Column.PRESENT} and Column.PRESENT not in operator.writes
    assert joined.writes == (Column.PRESENT,) and {"finished", "finished.greedy"} < set(joined.reads)
    assert all(Column.PRESENT in operator.reads for operator in others)
    lags = {run.operator.name: run.lag for run in plan.schedule.instructions if isinstance(run, Run)}
    assert lags[joined.name] == 0 and lags["train_actor"] == 2


def test_a_step_takes_prompts_by_the_scores_of_the_step_before() -> None:
    """In one attempt; generation and scores read them, and the training that accounts for rows."""
    plan = plan_of(None, 1, GRPO, THREE, DYNAMIC)
    take, *others = plan.graph.operators
    assert (
        take.takes_prompts
        and take.writes == (Column.POSITION,)
        and set(take.carries) > {"scores", Column.PRESENT, Column.POSITION}
    )
    readers = {operator.name for operator in others if Column.POSITION in operator.reads}
    assert readers == {"generate", "train_actor"}
    assert {each.attempt for each in plan.schedule.instructions if isinstance(each, Run)} == {None}
    # places for two shares of new prompts, of which one is taken in the mean
    assert plan.batch.num_prompts == 8 * 2 * 3 and (plan.batch.num_new, plan.batch.num_taken) == (8, 16)


def test_each_group_that_is_left_out_is_replaced_by_the_next_prompt() -> None:
    """So that the groups that are under way or trained on stay at one share a step; in the order of the data."""
    shape, random = BatchShape(4 * 2 * 3, 2, segments=3, attempts=2), Random("replaced")
    state: dict[str, float] = {TAKEN: 0.0}
    taken, left_out = list[int](), 0
    for step in range(1, 40):
        ended = random.choice((0, 1, 2, 7))
        wanted = shape.num_new + int(state.get(LACKING, 0)) + ended
        positions = replacing_positions(shape, step, wanted, int(state[TAKEN]))
        state = next_taken(shape, state, len(positions), ended)
        taken, left_out = [*taken, *positions.values()], left_out + ended
        # at the places of new prompts, apart from each other
        assert len(positions) == min(wanted, 8) and all(prompt % 3 == step % 3 for prompt in positions)
        halves = [sum(prompt in shape.prompts(0)[part] for prompt in positions) for part in (slice(12), slice(12, 24))]
        assert abs(halves[0] - halves[1]) <= 1
        assert taken == list(range(len(taken))) and len(taken) - left_out + state[LACKING] == 4 * step


@pytest.mark.parametrize(
    "overrides",
    [
        (*SFT, "rollout.segment_tokens=null"),
        (GRPO, THREE, DYNAMIC),
        (GRPO, THREE, "rollout.groups=wait"),
    ],
)
def test_what_the_refusals_name_works(overrides: tuple[str, ...]) -> None:
    make_plan(spec_of(None, 1, *overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        (THREE, PTX, FROZEN),
        (GRPO, THREE, DYNAMIC, FROZEN),
        (REMAX, THREE),
        (THREE, ENDED),
        (BASELINE, THREE, ENDED),
        (GRPO, THREE, ENDED, PTX, "algorithm.truncation=mask-loss"),
    ],
)
def test_segments_go_with_other_settings(overrides: tuple[str, ...]) -> None:
    assert plan_of(None, 1, *overrides).batch.segments == 3


@pytest.mark.parametrize(("algorithm", "slots"), [("algorithm.prompts_per_step=8", 24), (REMAX, 48)])
def test_every_row_under_way_has_a_slot_which_is_planned_in_memory(algorithm: str, slots: int) -> None:
    """Greedy responses have slots of their own; caches stay between calls, and a call has none in addition."""
    renewed, plan = (plan_of(None, 1, algorithm, THREE, f"rollout.caches={caches}") for caches in ("renewed", "kept"))
    (name,) = plan.kept_slots
    assert plan.kept_slots[name].rows == slots and not renewed.kept_slots
    of_call, cached = (
        next(phase for phase in each.memory(0).phases if phase.kind == "generate") for each in (renewed, plan)
    )
    bytes_of_call = of_call.parts["KV cache"]
    assert bytes_of_call is not None and "KV cache" not in cached.parts
    kept, none = (each.state(each.placement[name], 0) for each in (plan, renewed))
    assert kept is not None and none is not None
    assert kept.buffers - none.buffers == bytes_of_call * slots // 24 == kept.resting - none.resting


@pytest.mark.parametrize(
    ("lag", "every", "renewed"),
    [(0, None, []), (0, 2, [2, 4, 6]), (2, 2, [4, 6]), (1, 3, [4, 7]), (0, 1, [*range(1, 8)])],
)
def test_caches_are_renewed_in_the_first_batch_behind_a_checkpoint(
    lag: int, every: int | None, renewed: list[int]
) -> None:
    """With a lag of k behind the checkpoint after n steps batch n + k is generated first."""
    slots = KeptSlots(1, 3, lag, every)
    assert [step for step in range(1, 8) if slots.period(step) != slots.period(step - 1)] == renewed


def test_a_step_has_texts_for_the_responses_that_it_takes() -> None:
    """At one place of each number, whatever has ended: as many as without segments and attempts."""
    one = plan_of(None, 1, GRPO, PTX)
    for further in ((), (THREE,), (DYNAMIC,), (THREE, DYNAMIC)):
        plan = plan_of(None, 1, GRPO, PTX, *further)
        assert len(plan.batch.rows(tuple(plan.batch.first_places))) == one.batch.num_rows
        stored = stored_columns(plan.schedule.instructions, plan.batch, TEXTS, 0)
        assert [stored.prompts[name] for name in TEXTS] == [one.batch.num_prompts] * len(TEXTS)
