"""Rows that go on inside one call: the clock changes the order of work and no token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scripted_rows import ScriptedRows, random_delays
from small_models import TINY, engine_for, placed
from test_carried_rows import prompts_of
from test_decoding import SAMPLINGS, assert_same, calls_of

from flexrlhf.engines.base import Engine
from flexrlhf.engines.torch.engine import TorchEngine
from flexrlhf.operators.columns import Lengths

LENGTHS, TURNS = Lengths(prompt=7, response=24), 4
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "slots": {},
    "waves": {"init": {"model_type": "mistral", "sliding_window": 4}},
    "experts in slots": {"init": EXPERTS, "router_replay": "rollout"},
}


def engine_with(rows_together: int, init: dict[str, Any] = TINY, **settings: Any) -> TorchEngine:
    model = placed(generate_tokens=rows_together * LENGTHS.total, init={**TINY, **init}, **settings)
    return engine_for(model, lengths=LENGTHS)


def short(row: int, turn: int) -> int:
    return 1 + (row + turn) % 7


def source(name: str, seed: int, longest: int = 9) -> ScriptedRows:
    batch, delay = prompts_of(0, 6, 2), random_delays(seed, longest)
    return ScriptedRows(batch, SAMPLINGS[name], LENGTHS.response, TURNS, delay, short)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("slots", "plain"), ("slots", "greedy and least"), ("slots", "stop"), ("slots", "all"), ("waves", "all")]
    + [("experts in slots", "plain")],
)
def test_rows_have_the_same_tokens_in_any_order_of_replies(kind: str, name: str) -> None:
    """As in rounds, in which each turn waits for the slowest reply; also with fewer slots than rows."""
    expected = source(name, 0, longest=0)
    Engine.advance(engine_with(100, **MODELS[kind]), expected, SAMPLINGS[name])
    columns = expected.columns()
    assert len(expected.batches) == TURNS and columns["sampled"].sum(1).unique().numel() > 3
    assert ("experts" in columns) == ("experts" in kind)
    for seed, rows_together in enumerate((100, 100, 5, 1)):
        engine, made = engine_with(rows_together, **MODELS[kind]), source(name, seed)
        engine.advance(made, SAMPLINGS[name])
        assert not made.out and engine.num_requests == sum(made.batches)
        assert_same(made.columns(), columns)


def test_other_rows_go_on_while_a_slow_one_is_decoded() -> None:
    """So decoding takes as many passes as the longest row, in rounds as the longest turns."""
    never = replace(SAMPLINGS["plain"], eos_token_ids=(10**6,))
    batch, engine = prompts_of(0, 6), engine_with(100)
    slow = batch.rows[3].item()

    def rows() -> ScriptedRows:
        return ScriptedRows(batch, never, LENGTHS.response, TURNS, lambda row, turn: 0, limit)

    def limit(row: int, turn: int) -> int:
        return 20 if row == slow and turn == 0 else 2

    made, in_rounds = rows(), rows()
    with calls_of(engine._model) as calls:
        engine.advance(made, never)
    with calls_of(engine._model) as calls_in_rounds:
        Engine.advance(engine, in_rounds, never)
    assert_same(made.columns(), in_rounds.columns())
    passes, passes_in_rounds = (sum(width == 1 for _, width in each) for each in (calls, calls_in_rounds))
    longest = int(made.columns()["sampled"].sum(1).max())
    assert passes == longest and passes_in_rounds == 20 + 2 * (TURNS - 1) > passes
