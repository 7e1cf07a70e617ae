"""Responses in segments (``rollout.segment_tokens``): settings, their refusals, and the graph that follows."""

from __future__ import annotations

import pytest
from small_runs import plan_of, spec_of

from flexrlhf.errors import UserError
from flexrlhf.operators.columns import GROUP_SCORES, PRESENT
from flexrlhf.placement.layout import BatchShape
from flexrlhf.plan.pipeline import make_plan

GRPO = "algorithm={name: grpo, prompts_per_step: 8, samples_per_prompt: 2}"
SFT = ("algorithm={name: sft, prompts_per_step: 8}", "models={actor: {init: {model_type: llama}}}")
THREE, ENDED = "rollout.segment_tokens=3", "rollout.groups=as-ended"


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        make_plan(spec_of(None, 1, *overrides))
    return str(caught.value)


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
            assert operator.writes == (*before.writes, PRESENT) and operator.reads == before.reads
            # the mask of a sequence follows from the masks of its prompt and its response
            assert set(operator.carries) == set(operator.writes) - {"attention_mask"}
        else:
            # staleness is reported with the mask of a loss
            stale = ("policy_version",) if "loss_mask" in operator.writes else ()
            assert operator.reads == (*before.reads, *stale, PRESENT) and operator.writes == before.writes
            assert not operator.carries
    assert cut.evaluation == whole.evaluation


def test_responses_that_end_alone_are_compared_with_the_scores_of_their_group() -> None:
    """Of earlier steps; other operators compute for single rows."""
    waiting, alone = (plan_of(None, 1, GRPO, THREE, *further).graph for further in ((), (ENDED,)))
    assert [operator.name for operator in alone.operators] == [operator.name for operator in waiting.operators]
    for operator, before in zip(alone.operators, waiting.operators, strict=True):
        assert operator.is_by_row == (operator.kind != "generate") and not before.is_by_row
        scores = (GROUP_SCORES,) if operator.function == "group_advantages" else ()
        assert operator.writes == (*before.writes, *scores) and operator.carries == (*before.carries, *scores)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("rollout.segment_tokens=0",), "config: rollout.segment_tokens: must be greater than or equal to 1, found 0"),
        (
            ("rollout.max_segments=2",),
            "config: rollout: max_segments 2 counts segments: give segment_tokens, or remove it",
        ),
        (
            (*SFT, THREE),
            "rollout.segment_tokens: 3 has nothing to cut, since sft trains on responses of the data set; use null",
        ),
        (
            ("algorithm={name: remax, prompts_per_step: 8}", THREE),
            "rollout.segment_tokens: 3 cuts one response to a prompt, and remax generates several (generate, greedy); "
            "use null",
        ),
        (
            (THREE, "algorithm.freeze_actor_steps=2"),
            "rollout.segment_tokens: 3 goes on with a response in the next step, and algorithm.freeze_actor_steps 2 "
            "leaves steps out; use null, or freeze_actor_steps: 0",
        ),
        (
            (GRPO, THREE, "algorithm.dynamic_sampling={}"),
            "rollout.segment_tokens: 3 trains on as many prompts as end in a step, and algorithm.dynamic_sampling "
            "chooses among as many as a step takes; use null, or dynamic_sampling: null",
        ),
        (
            (THREE, "algorithm.ptx={path: texts.jsonl}"),
            "rollout.segment_tokens: 3 trains on as many responses as end in a step, and algorithm.ptx on as many "
            "texts as a step takes prompts; use null, or ptx: null",
        ),
        (
            ("algorithm={name: raft, prompts_per_step: 8, samples_per_prompt: 2}", THREE, ENDED),
            "rollout.groups: as-ended trains on each response when it ends, and raft trains on the best of all "
            "responses to a prompt; use wait",
        ),
        (
            (
                "algorithm={name: reinforce++, prompts_per_step: 8, samples_per_prompt: 2, baseline: group}",
                THREE,
                ENDED,
            ),
            "rollout.groups: as-ended trains on each response when it ends, and baseline: group is the mean of all "
            "responses to a prompt; use wait",
        ),
        ((ENDED,), "config: rollout: groups: as-ended goes with segments: give segment_tokens, or remove it"),
        (
            ("rollout.segment_tokens=9",),
            "rollout.segment_tokens: 9 cuts nothing, since data.max_response_tokens is 8; use less, or null",
        ),
        (
            ("rollout={segment_tokens: 3, max_segments: 1}",),
            "rollout.max_segments: 1 would end each response after 3 tokens; use 2 or more, or "
            "data.max_response_tokens: 3 without segments",
        ),
        (
            ("rollout={segment_tokens: 3, groups: as-ended}",),
            "rollout.groups: as-ended trains on each response when it ends, and samples_per_prompt is 1; use wait",
        ),
        (
            ("algorithm.prompts_per_step=500000", THREE),
            "config: algorithm: 500000 prompts_per_step are 500000 rows a step in 3 segments each, more than a plan "
            "takes: use at most 333333",
        ),
    ],
)
def test_settings_that_cannot_be_cut_are_refused(overrides: tuple[str, ...], sentence: str) -> None:
    """Each with a value that works, which does."""
    assert refused(*overrides) == sentence


@pytest.mark.parametrize(
    "overrides",
    [
        (*SFT, "rollout.segment_tokens=null"),
        (GRPO, THREE, "algorithm.dynamic_sampling=null"),
        (THREE, "algorithm.freeze_actor_steps=0"),
        (THREE, "algorithm.ptx=null"),
        (GRPO, THREE, "rollout.groups=wait"),
    ],
)
def test_what_the_refusals_name_works(overrides: tuple[str, ...]) -> None:
    make_plan(spec_of(None, 1, *overrides))
