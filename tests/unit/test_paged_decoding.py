"""Rows that outgrow the pages of a cache: predicted against the scheduling of vLLM, token by token."""

from __future__ import annotations

import random
from collections import deque

import pytest

from flexrlhf.guideline.costs.cost_model import Call, Links, Mesh, Pages, Transformer
from flexrlhf.guideline.costs.decode_phases import DecodeSteps, decoding
from flexrlhf.guideline.costs.generation import generate_cost
from flexrlhf.guideline.costs.profiles import DECODERS
from flexrlhf.guideline.simulation.inputs import truncated_exponential
from flexrlhf.placement.devices import DeviceClass

SEVEN = Transformer(28, 3584, 18944, 28, 4, 128, 152064)
BLOCK, PROMPT = 4, 128


def scheduled(lengths: list[int], blocks: int, most: int, kept_free: float) -> tuple[int, int]:
    """Return the steps, and the tokens that are computed again: rows enter in order; without a free block the row that
    entered last is put back in front."""
    waiting, running = deque((row, 0) for row in range(len(lengths))), dict[int, int]()
    steps = again = 0

    def used(tokens: int) -> int:
        return -(-(PROMPT + tokens) // BLOCK)

    def free() -> int:
        return blocks - sum(map(used, running.values()))

    while waiting or running:
        steps += 1
        is_full = False
        while sum(used(tokens + 1) for tokens in running.values()) > blocks:
            waiting.appendleft(running.popitem())
            is_full = True
        while not is_full and waiting and len(running) < most:
            row, tokens = waiting[0]
            if running and used(tokens + 1) + int(kept_free * blocks) > free():
                break
            waiting.popleft()
            running[row] = tokens
            again += PROMPT + tokens if tokens else 0
        running = {row: tokens + 1 for row, tokens in running.items() if tokens + 1 < lengths[row]}
    return steps, again


def call(rows: int, responses: tuple[float, ...], pages: Pages) -> Call:
    return Call("generate", SEVEN, "vllm", rows, PROMPT, responses, PROMPT + max(responses), pages=pages)


def steps_of(found: DecodeSteps) -> float:
    return sum(phase.steps for phase in found.phases)


@pytest.mark.parametrize(
    ("rows", "longest", "mean", "whole_rows"),
    # all of one length, in one batch and in several; of any lengths; with a cache for one row
    [
        (48, 512, 512, 32),
        (256, 512, 512, 32),
        (256, 512, 256, 32),
        (200, 1024, 375, 24),
        (100, 1024, 375, 24),
        (20, 256, 256, 1),
    ],
)
def test_steps_and_repeated_tokens_are_as_scheduled(rows: int, longest: int, mean: int, whole_rows: int) -> None:
    responses = truncated_exponential(mean, longest) if mean < longest else (float(longest),)
    lengths = [max(1, int(responses[row * len(responses) // rows])) for row in range(rows)]
    random.Random(1).shuffle(lengths)
    tokens = whole_rows * (PROMPT + longest)
    most = max(1, tokens // (PROMPT + longest // 16))
    pages = Pages(tokens, most, 0.05, BLOCK / 2)
    steps, again = scheduled(lengths, tokens // BLOCK, most, pages.kept_free)
    found = decoding(call(rows, responses, pages), "refill")
    assert steps_of(found) == pytest.approx(steps, rel=0.1)
    # the order in which long rows come decides how many are put back
    assert found.repeated / sum(lengths) == pytest.approx(again / sum(lengths), rel=0.3, abs=0.1)


def test_no_row_is_put_back_where_all_have_room() -> None:
    roomy = decoding(call(64, (256.0,), Pages(64 * (PROMPT + 256), 64, 0.05)), "refill")
    assert (steps_of(roomy), roomy.repeated) == (255, 0)
    tight = decoding(call(64, (256.0,), Pages(48 * (PROMPT + 256), 64, 0.05)), "refill")
    assert 255 < steps_of(tight) < 2 * 255 and tight.repeated > 0


def test_a_larger_cache_generates_faster() -> None:
    mesh = Mesh(DeviceClass.KNOWN["H100-80G"], Links(450, 50), per_node=8)
    responses = truncated_exponential(1000, 4096)

    def seconds(whole_rows: int) -> float:
        tokens = whole_rows * (PROMPT + 4096)
        return generate_cost(call(256, responses, Pages(tokens, 256, 0.05)), mesh, DECODERS["vllm"]).seconds

    times = [seconds(rows) for rows in (8, 16, 32, 64, 128)]
    assert times == sorted(times, reverse=True)
    cost = generate_cost(call(256, responses, Pages(8 * (PROMPT + 4096), 256, 0.05)), mesh, DECODERS["vllm"])
    assert 0 < cost.parts["recomputation"] < 0.1 * cost.seconds
