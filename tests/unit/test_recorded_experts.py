"""Router replay as it is planned: a column of so many bytes, who reads it, and refusals."""

from __future__ import annotations

from small_runs import plan_of

from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Move

SIZES = "vocab_size: 32, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 3"
HEADS = "num_attention_heads: 2, num_key_value_heads: 2"
EXPERTS = "num_experts: 8, num_experts_per_tok: 2, mlp_only_layers: [1]"
INIT = f"models.actor.init={{model_type: qwen3_moe, {SIZES}, {HEADS}, {EXPERTS}}}"
REPLAY, KEY = "models.actor.router_replay=rollout", "models.actor.router_replay"


def readers(plan: Plan) -> dict[str, str]:
    return {each.name: each.kind for each in plan.graph.operators if "experts" in each.reads}


def test_the_column_is_planned_as_any_other() -> None:
    plan = plan_of([0.5] * 6, 2, INIT, REPLAY, "rollout.logprobs=recompute")
    assert [each.name for each in plan.graph.operators if "experts" in each.writes] == ["generate"]
    # not by the reference, nor by the critic
    assert readers(plan) == {"logprobs": "forward", "train_actor": "train"}
    # 12 tokens, 2 layers with experts, 2 experts of each
    assert plan.lengths.row_bytes("experts") == 12 * 2 * 2
    many = INIT.replace("num_experts: 8", "num_experts: 257")
    assert plan_of(None, 2, many, REPLAY).lengths.row_bytes("experts") == 12 * 2 * 2 * 2
    moves = [each for each in plan.schedule.instructions if isinstance(each, Move)]
    assert any(transfer.column == "experts" for move in moves for transfer in move.transfers)
    assert readers(plan_of(None, 2, INIT, f"{KEY}=compare", "rollout.logprobs=recompute")) == {"train_actor": "train"}
    # an episode that is carried on takes them along
    carried = plan_of(None, 2, INIT, REPLAY, "environment={path: env.py}", "rollout.segment_tokens=4")
    assert "experts" in carried.graph.producers["experts"].carries
    without = plan_of(None, 2, INIT)
    assert not readers(without)
    assert plan_of(None, 2, INIT, REPLAY).row_bytes(0, 1) > without.row_bytes(0, 1)
