"""Plans of evaluations over several placed models, for any number of prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_runs import TINY, plan_of

from flexrlhf.config.algorithms import ALGORITHMS
from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.spec import Spec
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.simulation.inputs import longest_lengths
from flexrlhf.guideline.simulation.pricing import Pricer
from flexrlhf.metrics import METRICS
from flexrlhf.operators.named_functions import COMBINES
from flexrlhf.placement.groups import Group
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.schedule_text import schedule_table
from flexrlhf.strategies.instructions import Eval, Move, Run, Save
from flexrlhf.strategies.residency import resident_models
from flexrlhf.text import rank_marks
from flexrlhf.trainer.evaluation_batches import EvaluationShape, evaluation_shape, walk_evaluation

HELD_OUT = "eval={path: held_out.jsonl, every: 2}"
SIX = [0.5] * 6
HALVES = [1, 1, 0.5, 0.5]
GATHERED = "models.reward.tp=2"
BEST = "save.best=eval_reward_mean"


def evaluation_of(plan: Plan) -> Eval:
    (found,) = (x for x in plan.schedule.instructions if isinstance(x, Eval))
    return found


def shown(plan: Plan) -> list[str]:
    return [
        f"{rank_marks(x.ranks, plan.placement.num_ranks)}  {x.kind}  {x.label}"
        + (f"  {x.primitive}" if isinstance(x, Move) else "")
        for x in evaluation_of(plan).instructions
    ]


# --- the list


def test_who_sends_what_where_the_reward_model_has_half_of_the_ranks() -> None:
    assert shown(plan_of(HALVES, 2, HELD_OUT)) == [
        "##  run  generate on actor",
        "##  move  tokens, attention_mask actor -> reward  point_to_point",
        "##  run  diversity on actor",
        ".#  run  scores on reward",
        "##  move  scores reward -> actor  point_to_point",
        "##  run  held_out_scores on actor",
    ]


@pytest.mark.parametrize("lag", [0, 1])
def test_who_sends_what_with_six_models(lag: int) -> None:
    """The trained actor generates, on the other side from the reward model; its shadow has no part in it."""
    plan = plan_of(SIX, 4, HELD_OUT, f"schedule.lag={lag}")
    assert shown(plan) == [
        "##..  run  generate on actor",
        "####  move  tokens, attention_mask actor -> reward  point_to_point",
        "##..  run  diversity on actor",
        "..##  run  scores on reward",
        "####  move  scores reward -> actor  point_to_point",
        "##..  run  held_out_scores on actor",
    ]
    scores = evaluation_of(plan).moves[1]
    assert [(t.source, t.destination, t.prompts) for t in scores.transfers] == [
        (2, 0, (0, 1, 2, 3)),
        (3, 1, (4, 5, 6, 7)),
    ]
    assert evaluation_of(plan).ranks == (0, 1, 2, 3) and evaluation_of(plan).lag == lag


def test_ranks_without_any_of_its_models_walk_past() -> None:
    plan = plan_of(None, 4, HELD_OUT, "placement={actor: 0.25, critic: 0.5, ref: {ranks: [2]}, reward: {ranks: [3]}}")
    assert evaluation_of(plan).ranks == (0, 3)


def test_functions_are_asked_where_the_answers_are() -> None:
    rule = "reward=[{model: reward}, {rule: length, target_tokens: 4}]"
    assert shown(plan_of(HALVES, 2, HELD_OUT, rule)) == [
        "##  run  generate on actor",
        "##  move  tokens, attention_mask actor -> reward  point_to_point",
        "##  run  diversity on actor",
        ".#  run  scores_reward on reward",
        "##  run  scores_called on actor",
        "##  move  scores.reward reward -> actor  point_to_point",
        "##  run  scores on actor",
        "##  run  held_out_scores on actor",
    ]


def test_a_shared_reference_is_the_actor_in_evaluations_too() -> None:
    raw = {
        "name": "pairs",
        "algorithm": {"name": "dpo"},
        "models": {"actor": {"init": TINY, "lora": {}}, "ref": {"share": "actor"}},
        "data": {"path": "pairs.jsonl"},
    }
    operators = {operator.name: operator for operator in make_graph(Spec.parse(raw)).evaluation}
    assert (operators["ref_logprobs"].role, operators["ref_logprobs"].adapters) == ("actor", False)


def test_a_reference_on_other_ranks_sends_what_pairs_are_compared_with() -> None:
    raw = {
        "name": "pairs",
        "algorithm": {"name": "dpo", "prompts_per_step": 8},
        "models": {"actor": {"init": TINY}},
        "data": {"path": "pairs.jsonl"},
        "eval": {"path": "held_out.jsonl"},
        "cluster": {"devices": 2},
        "placement": [1, 0.5],
    }
    assert shown(make_plan(Spec.parse(raw))) == [
        "##  run  logprobs on actor",
        "#.  run  ref_logprobs on ref",
        "##  move  ref_logprobs ref -> actor  point_to_point",
        "##  run  accuracy on actor",
    ]


def test_its_moves_have_groups_and_bytes_of_its_own_samples() -> None:
    plan = plan_of(SIX, 4, HELD_OUT, "eval.samples_per_prompt=3")
    move = evaluation_of(plan).moves[0]
    assert Group("move", move.ranks) in plan.groups
    # 8 prompts of 3 answers: 12 tokens of 4 bytes and 12 of a mask
    assert plan.traffic.move_bytes(move, evaluation_of(plan).batch) == 8 * 3 * (12 * 4 + 12)
    assert any("move  tokens, attention_mask  actor -> reward" in line for line in schedule_table(plan))


def test_the_evaluated_models_must_be_there_where_they_are_placed() -> None:
    evaluation = evaluation_of(plan_of(HALVES, 2, HELD_OUT))
    assert resident_models(evaluation, ("actor", "critic", "ref")) == ("actor",)
    assert resident_models(evaluation, ("actor", "critic", "reward")) == ("actor", "reward")


def test_its_price_is_that_of_its_operators() -> None:
    settings = (HELD_OUT, "cluster={nodes: [{devices: 2, class: A100-80G}]}")

    def parts(*overrides: str) -> dict[str, float]:
        plan = plan_of(HALVES, 2, *settings, *overrides)
        return dict(Pricer(plan, AnalyticCosts(), longest_lengths(plan)).price(evaluation_of(plan)).parts)

    once, twice = parts(), parts("eval.samples_per_prompt=2")
    assert set(once) == {"generate", "moves", "diversity", "scores", "held_out_scores"}
    assert twice == parts("algorithm.samples_per_prompt=2")
    assert twice["moves"] > once["moves"] and twice["diversity"] > once["diversity"]


# --- evaluation prompts in batches


@pytest.mark.parametrize("count", [1, 3, 7, 8, 9, 20])
@pytest.mark.parametrize(
    "layout", [Layout((0,)), Layout((0, 1, 2)), Layout((3, 1), ParallelDims(tp=2)), Layout(tuple(range(12)))]
)
def test_every_held_out_prompt_is_held_by_one_replica(count: int, layout: Layout) -> None:
    shape = evaluation_shape(count, BatchShape(8, 2))
    found = [shape.prompts_on(layout, ranks[0], shape.mini_batches) for ranks in layout.sets("tp")]
    assert sorted(prompt for prompts in found for prompt in prompts) == list(range(count))
    assert all(list(prompts) == sorted(prompts) for prompts in found)
    assert shape.num_rows == 2 * count
    assert [prompt for m in shape.mini_batches for prompt in shape.prompts(m)] == list(range(count))


@pytest.mark.parametrize(("places", "dp"), [(8, 4), (64, 8), (12, 3), (100, 4)])
def test_few_prompts_lie_all_over_the_replicas(places: int, dp: int) -> None:
    layout = Layout(tuple(range(dp)))
    for count in range(1, places + 1):
        shape = evaluation_shape(count, BatchShape(places))
        sizes = [len(shape.prompts_on(layout, rank, range(1))) for rank in layout.ranks]
        assert max(sizes) <= -(-count // dp) + 1, (count, sizes)


def walked(plan: Plan, count: int, rank: int) -> list[tuple[str, range]]:
    evaluation = evaluation_of(plan)
    shape = evaluation_shape(count, evaluation.batch)
    return [
        (f"{each.operator.name}" if isinstance(each, Run) else f"{each.columns[0]} {each.primitive}", batches)
        for _, each, batches in walk_evaluation(evaluation, shape, rank)
    ]


def test_the_list_is_walked_for_each_batch_and_statistics_come_last() -> None:
    first, second, both = range(0, 1), range(1, 2), range(0, 2)
    assert walked(plan_of(HALVES, 2, HELD_OUT), 13, 0) == [
        ("generate", first),
        ("tokens point_to_point", first),
        ("scores point_to_point", first),
        ("generate", second),
        ("tokens point_to_point", second),
        ("scores point_to_point", second),
        ("diversity", both),
        ("held_out_scores", both),
    ]


def test_a_batch_with_empty_places_is_not_gathered_in_equal_shares() -> None:
    plan = plan_of(None, 2, HELD_OUT, GATHERED)
    assert [move.primitive for move in evaluation_of(plan).moves] == ["all_gather"]
    found = [name for name, _ in walked(plan, 8 + 4, 0) if name.startswith("tokens")]
    assert found == ["tokens all_gather", "tokens all_to_all"]


def test_a_move_that_brings_no_prompt_of_a_batch_is_left_out() -> None:
    """The one evaluation prompt of the last batch lies on rank 0 for both models."""
    plan = plan_of(None, 2, HELD_OUT, "placement={actor: 1, critic: 1, ref: 1, reward: {ranks: [0]}}")
    assert [len(move.transfers) for move in evaluation_of(plan).moves] == [2, 1]
    names = [name for name, batches in walked(plan, 9, 1) if batches == range(1, 2)]
    assert names == ["generate"]


def test_a_walk_sends_the_prompts_that_there_are() -> None:
    evaluation = evaluation_of(plan_of(HALVES, 2, HELD_OUT))
    shape: EvaluationShape = evaluation_shape(10, evaluation.batch)
    sent = [
        (batches.start, sorted(prompt for transfer in each.transfers for prompt in transfer.prompts))
        for _, each, batches in walk_evaluation(evaluation, shape, 0)
        if isinstance(each, Move) and "scores" in each.columns
    ]
    mine = set(shape.prompts_on(Layout((0, 1)), 0, shape.mini_batches))
    assert sent == [(0, sorted(mine & set(range(8)))), (1, sorted(mine & {8, 9}))]
    assert len(mine & {8, 9}) == 1


# --- the best model


def test_the_best_models_are_saved_behind_the_evaluation() -> None:
    closing = [x for x in plan_of(None, 2, HELD_OUT, BEST).schedule.instructions if isinstance(x, Eval | Save)]
    assert [(type(x), x.every, x.at_end, getattr(x, "best", None)) for x in closing] == [
        (Eval, 2, True, None),
        (Save, 2, True, "eval_reward_mean"),
        (Save, 2, True, "eval_reward_mean"),
        (Save, 3, True, None),
        (Save, 3, True, None),
    ]
    plain = [x for x in plan_of(None, 2, HELD_OUT).schedule.instructions if isinstance(x, Save)]
    assert [replace(x, best=None) for x in closing if isinstance(x, Save) and x.best is None] == plain


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_evaluation_tells_metrics_by_which_a_model_may_be_chosen(name: str) -> None:
    kind = {"name": name, "samples_per_prompt": 2} if name in ("grpo", "rloo", "gspo") else {"name": name}
    raw = {"name": "run", "algorithm": kind, "models": {}, "data": {"path": "rows.jsonl"}}
    graph = make_graph(Spec.parse(raw))
    combined = [operator.function for operator in graph.evaluation if operator.kind == "combine"]
    assert all(COMBINES[function].metrics for function in combined)
    known = {metric.name for metric in METRICS}
    assert graph.evaluation_metrics and set(graph.evaluation_metrics) <= known


def test_better_is_strictly_more_but_less_where_the_metric_says_so() -> None:
    assert METRICS.named("eval_reward_mean").is_better(1.0, None)
    assert METRICS.named("eval_reward_mean").is_better(1.1, 1.0) and not METRICS.named("eval_reward_mean").is_better(
        1.0, 1.0
    )
    assert METRICS.named("eval_nll").is_better(0.9, 1.0) and not METRICS.named("eval_nll").is_better(1.1, 1.0)
    assert not METRICS.named("eval_nll").is_better(float("nan"), None)
