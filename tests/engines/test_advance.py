"""Rows that go on inside one call: the clock changes the order of work and no token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scripted_rows import ScriptedRows, random_delays
from small_models import TINY, engine_for, placed
from test_carried_rows import prompts_of
from test_decoding import PLAIN, SAMPLINGS, assert_same
from torch import Tensor

from flexrlhf.engines import decoding
from flexrlhf.engines.base import Engine
from flexrlhf.engines.slots import Slots
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
def test_rows_have_the_same_tokens_in_any_order_of_replies(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in rounds, in which each turn waits for the slowest reply; also with fewer slots than rows, and with several
    tokens between two looks."""
    expected = source(name, 0, longest=0)
    Engine.advance(engine_with(100, **MODELS[kind]), expected, SAMPLINGS[name])
    columns = expected.columns()
    assert len(expected.batches) == TURNS and columns["sampled"].sum(1).unique().numel() > 3
    assert ("experts" in columns) == ("experts" in kind)
    for seed, (rows_together, between) in enumerate(((100, 1), (100, 3), (5, 1), (5, 3), (1, 1))):
        monkeypatch.setattr(decoding, "tokens_between_looks", lambda device, between=between: between)
        engine, made = engine_with(rows_together, **MODELS[kind]), source(name, seed)
        engine.advance(made, SAMPLINGS[name])
        assert not made.out and engine.num_requests == sum(made.batches)
        assert_same(made.columns(), columns)


@pytest.mark.parametrize("between", [1, 3])
def test_a_turn_reads_the_reply_alone(between: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if other rows had its slot meanwhile, or the row was decoded on behind its end."""
    monkeypatch.setattr(decoding, "tokens_between_looks", lambda device: between)
    counts, read = list[int](), Slots._read

    def counted(slots: Slots, rows: list[int], first: int, tokens: Tensor, begun: list[int], ends: list[int]) -> None:
        counts.append(sum(ends[row] - begun[row] for row in rows))
        read(slots, rows, first, tokens, begun, ends)

    monkeypatch.setattr(Slots, "_read", counted)
    batch, delay = prompts_of(0, 6, 2), random_delays(5, 9)
    made = ScriptedRows(batch, PLAIN, LENGTHS.response, TURNS, lambda row, turn: turn and delay(row, turn), short)
    engine_with(100).advance(made, PLAIN)
    prompts = int((batch["prompt_mask"][::2].sum(1) - 1).sum())
    replies = sum(state.sampled.count(0) for state in made.rows.values())
    assert replies > 20
    assert sum(counts) == prompts + replies


def test_other_rows_go_on_while_a_slow_one_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So decoding takes as many passes as the longest row, in rounds as the longest turns."""
    never = replace(PLAIN, eos_token_ids=(10**6,))
    batch, engine = prompts_of(0, 6), engine_with(100)
    slow, passes, next_logits = batch.rows[3].item(), list[int](), Slots.next_logits
    monkeypatch.setattr(Slots, "next_logits", lambda slots: passes.append(len(slots.lengths)) or next_logits(slots))

    def limit(row: int, turn: int) -> int:
        return 20 if row == slow and turn == 0 else 2

    found = []
    for advance in (TorchEngine.advance, Engine.advance):
        rows = ScriptedRows(batch, never, LENGTHS.response, TURNS, lambda row, turn: 0, limit)
        passes.clear()
        advance(engine, rows, never)
        found.append((rows.columns(), len(passes)))
    (columns, one_by_one), (expected, in_rounds) = found
    assert_same(columns, expected)
    assert one_by_one == int(columns["sampled"].sum(1).max()) < in_rounds == 20 + 2 * (TURNS - 1)
