"""How full the cache of a rollout gets, who waits for room, how long the last responses take, and segments."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_runs import plan_of

from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.simulation.generation_load import GenerationLoad, generation_load, load_lines, segment_trial
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.simulate import Simulation, simulate

A100 = "cluster={nodes: [{devices: 2, class: A100-80G}]}"
VLLM = ("rollout.engine=vllm", "models.actor.init.num_attention_heads=2", "models.actor.init.hidden_size=64")
LONG = ("algorithm.prompts_per_step=64", "data.max_prompt_tokens=16", "data.max_response_tokens=1024")
TAIL = (*(float(8 + each % 5) for each in range(60)), 500.0, 600.0, 800.0, 1000.0)


def simulated(lengths: tuple[float, ...], *settings: str) -> Simulation:
    return simulate(plan_of([1, 1, 1, 1], 2, A100, *VLLM, *LONG, *settings), AnalyticCosts(), TextLengths(16, lengths))


def load_of(lengths: tuple[float, ...], *settings: str) -> GenerationLoad:
    load = generation_load(simulated(lengths, *settings), AnalyticCosts())
    assert load is not None and load.call.rows == 32
    return load


def test_a_cache_with_room_for_all_rows_is_as_full_as_they_are_at_their_end() -> None:
    load = load_of((100.0,), "rollout.kv_tokens=65536")
    # 16 tokens of the prompt and half a page of 32; the first token is sampled with the prompt
    assert load.filled == pytest.approx(32 * (16 + 16 + 99) / load.pages.tokens)
    assert not load.waits and load.steps.repeats == 0
    lines = list(load_lines(simulated((100.0,), "rollout.kv_tokens=65536"), AnalyticCosts()))
    assert "none of the 32 rows of a replica waits or is preempted" in lines[0] and len(lines) == 2


def test_rows_that_outgrow_a_cache_wait_and_are_preempted() -> None:
    load = load_of((1000.0,), "rollout.kv_tokens=8192")
    assert load.waits and load.filled == 1.0
    (cache, room) = load_lines(simulated((1000.0,), "rollout.kv_tokens=8192"), AnalyticCosts())
    assert f"at most {load.most_rows:.0f} of 32 rows of a replica decode at once, others wait" in cache
    assert ("preempted" in cache) == (load.steps.repeats > 0)
    # whole pages of 32 tokens, 16 of them the prompt's
    assert "up to 240 tokens of a response, for 7 up to 1024" in room


def test_a_cache_that_is_filled_by_all_rows_of_full_length_has_room_for_them() -> None:
    load = load_of((1008.0,), f"rollout.kv_tokens={32 * 1024}", "data.max_response_tokens=1008")
    assert not load.waits and load.filled == 1.0 and load.rows_of(1008) == 32 and load.room(32) == 1008


def test_the_tail_is_the_part_of_the_steps_with_less_than_half_of_the_rows() -> None:
    load = load_of(TAIL, "rollout.kv_tokens=65536")
    # all but four of 64 lengths end by step 11; of 32 rows some are among the four
    assert 0.9 < load.tail < 1
    assert load_of((100.0,), "rollout.kv_tokens=65536").tail == 0
    halves = replace(load, steps=replace(load.steps, phases=load.steps.phases[:1]))
    assert halves.tail == 0


def test_segments_are_tried_where_lengths_have_a_tail() -> None:
    costs = AnalyticCosts()
    tail = simulated(TAIL, "rollout.kv_tokens=65536")
    trial = segment_trial(tail, costs, generation_load(tail, costs))
    assert trial is not None and trial.tokens == 256 and trial.parts.tokens == 256
    assert trial.gain == pytest.approx(trial.parts.samples / trial.whole.samples - 1) and trial.gain > 0.05
    assert f"rollout.segment_tokens=256: {trial.gain:+.0%} samples/s" in list(load_lines(tail, costs))[-1]
    other = simulated(TAIL, "rollout.kv_tokens=65536", "rollout.segment_tokens=512")
    assert segment_trial(other, costs, generation_load(other, costs)) is None
    even = simulated((100.0, 101.0), "rollout.kv_tokens=65536")
    assert segment_trial(even, costs, generation_load(even, costs)) is None
