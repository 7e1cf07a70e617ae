"""Rows that go on inside one call: the clock changes the order of work and no token."""

from __future__ import annotations

import pytest
from scripted_rows import ScriptedRows, random_delays
from small_models import TINY, engine_for, placed
from test_carried_rows import prompts_of
from test_decoding import SAMPLINGS, assert_same

from flexrlhf.engines.base import Engine
from flexrlhf.engines.torch.engine import TorchEngine
from flexrlhf.operators.columns import Lengths

LENGTHS, TURNS = Lengths(prompt=7, response=24), 4


def engine_with(rows_together: int, **init: object) -> TorchEngine:
    model = placed(generate_tokens=rows_together * LENGTHS.total, init={**TINY, **init})
    return engine_for(model, lengths=LENGTHS)


def short(row: int, turn: int) -> int:
    return 1 + (row + turn) % 7


def source(name: str, seed: int, longest: int = 9) -> ScriptedRows:
    batch, delay = prompts_of(0, 6, 2), random_delays(seed, longest)
    return ScriptedRows(batch, SAMPLINGS[name], LENGTHS.response, TURNS, delay, short)


@pytest.mark.parametrize("name", ["plain", "greedy and least", "stop", "all"])
@pytest.mark.parametrize("init", [{}, {"model_type": "mistral", "sliding_window": 4}], ids=["slots", "waves"])
def test_rows_have_the_same_tokens_in_any_order_of_replies(name: str, init: dict[str, object]) -> None:
    """As in rounds, in which each turn waits for the slowest reply; also with fewer slots than rows."""
    expected = source(name, 0, longest=0)
    Engine.advance(engine_with(100, **init), expected, SAMPLINGS[name])
    columns = expected.columns()
    assert len(expected.batches) == TURNS and columns["sampled"].sum(1).unique().numel() > 3
    for rows_together in (100, 5, 1):
        engine = engine_with(rows_together, **init)
        for seed in range(3):
            made = source(name, seed)
            engine.advance(made, SAMPLINGS[name])
            assert not made.out
            assert_same(made.columns(), columns)
