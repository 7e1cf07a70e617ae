"""Times of layers from those of models with one and three of them, on given numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexrlhf.guideline.costs.measurements import DecodeTimes, PartTimes, Point, Points
from flexrlhf.measure.layer_split import REPEATS, SlimTimes, layer_times, update_times

TOKENS = (32, 64, 128)


def points(start: float, each: float) -> Points:
    return tuple(Point(rows=tokens // 16, tokens=tokens, seconds=start + each * tokens) for tokens in TOKENS)


def steps(layers: int, cache: float) -> DecodeTimes:
    found = tuple(Point(rows=rows, seconds=0.1 + layers * (0.05 + 1e-4 * cache * rows)) for rows in (1, 4))
    return DecodeTimes(cache=cache, points=found)


def parameters(layers: int, tp: int) -> int:
    return 4 * (1000 + layers * 4000 // tp)


def update(layers: int, tp: int) -> float:
    return 0.2 + 0.1 * layers + 1e-5 * parameters(layers, tp)


def slim(layers: int, tp: int = 1) -> SlimTimes:
    """A layer's pass takes 0.3 s and 1/tp ms a token, forwards a third of that; the embedding 0.1 ms a token."""
    once = points(0.5 + 0.3 * layers + update(layers, tp), 2e-3 + 1e-3 * layers / tp)
    again = 0.5 + 0.3 * layers + TOKENS[0] * (2e-3 + 1e-3 * layers / tp)
    least = once[0]
    return SlimTimes(
        layers=layers,
        trained=parameters(layers, tp),
        forward=points(0.5 / 3 + 0.1 * layers, (2e-3 + 1e-3 * layers / tp) / 3),
        train=once,
        repeated=(least.model_copy(update={"seconds": least.seconds + (REPEATS - 1) * again}),),
        replicas={2: (least.model_copy(update={"seconds": least.seconds + 0.4}),)} if tp == 1 else {},
        prefill=points(0.1 + 0.1 * layers, 1e-3 * layers),
        step=(steps(layers, 16), steps(layers, 32)),
    )


def test_layers_are_what_models_of_one_and_three_differ_by() -> None:
    shallow, deep = slim(1), slim(3)
    updates = update_times([shallow, deep, slim(1, 2), slim(3, 2)])
    for layers, tp in ((1, 1), (3, 2), (12, 1)):
        predicted = updates[1].seconds(parameters(layers, tp), layers)
        assert predicted == pytest.approx(update(layers, tp))
    assert updates[2].seconds(parameters(3, 1), 3) == pytest.approx(update(3, 1) + 0.4)
    embedding = PartTimes(forward=points(0.0, 1e-4), train=points(0.0, 1e-4))
    found = layer_times(shallow, deep, embedding, updates)
    assert found.embedding == embedding
    for tokens, block, head in zip(TOKENS, found.block.train, found.head.train, strict=True):
        assert block.seconds == pytest.approx(0.3 + 1e-3 * tokens) and block.tokens == tokens
        assert head.seconds == pytest.approx(0.5 + (2e-3 - 1e-4) * tokens)
    for tokens, block, head in zip(TOKENS, found.block.forward, found.head.forward, strict=True):
        assert block.seconds == pytest.approx((0.3 + 1e-3 * tokens) / 3)
        assert head.seconds == pytest.approx((0.5 + 2e-3 * tokens) / 3 - 1e-4 * tokens)
    assert [each.seconds for each in found.block.prefill] == pytest.approx([0.1 + 1e-3 * tokens for tokens in TOKENS])
    short, long = found.block.step
    assert (short.cache, long.cache) == (16, 32)
    assert [each.seconds for each in long.points] == pytest.approx([0.05 + 32e-4, 0.05 + 4 * 32e-4])
    assert [each.seconds for each in found.head.step[0].points] == pytest.approx([0.1, 0.1])


def test_a_call_of_several_passes_counts_for_each() -> None:
    shallow, deep = (replace(slim(layers), passes=2, train=(), repeated=(), replicas={}) for layers in (1, 3))
    assert update_times([shallow, deep]) == {}
    found = layer_times(shallow, deep, PartTimes(), {})
    assert found.block.forward[0].seconds == pytest.approx((0.3 + 1e-3 * TOKENS[0]) / 3 / 2)
    assert not found.block.train


def test_noise_makes_no_time_negative() -> None:
    shallow, deep = slim(3), replace(slim(1), layers=4)
    found = layer_times(shallow, deep, PartTimes(), update_times([shallow, deep]))
    times = [each.seconds for part in (found.block, found.head) for each in part.forward + part.train + part.prefill]
    assert min(times) == 0.0
