"""Which rows a rank holds: exact splits, whatever the sizes and the shares."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from flexrlhf.config.axes import ParallelDims
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.trainer.evaluation_batches import evaluation_shape

SHARES = [(), (2, 1), (1, 0, 1), (312, 125, 125), (1, 1, 1, 1, 1), (Fraction(1, 3), Fraction(1, 7))]


def layout_of(shares: tuple[int | Fraction, ...]) -> Layout:
    return Layout(tuple(range(len(shares) or 3)), row_shares=tuple(Fraction(share) for share in shares))


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 100])
def test_slices_are_disjoint_and_cover(shares: tuple[int | Fraction, ...], size: int) -> None:
    layout, items = layout_of(shares), range(5, 5 + size)
    for turn in range(layout.dp + 1):
        slices = [layout.slice(items, replica, turn) for replica in range(layout.dp)]
        assert [item for part in slices for item in part] == list(items)


def test_what_does_not_divide_goes_round() -> None:
    """Two prompts in each of four mini-batches, four replicas: all have the same work in the end."""
    layout, batch = Layout((0, 1, 2, 3)), BatchShape(num_prompts=8, num_mini_batches=4)
    assert [len(batch.prompts_on(layout, rank, batch.mini_batches)) for rank in range(4)] == [2, 2, 2, 2]


@pytest.mark.parametrize("shares", SHARES)
def test_a_slice_is_its_share_up_to_one_row(shares: tuple[int | Fraction, ...]) -> None:
    layout = layout_of(shares)
    weights = layout.row_shares or (Fraction(1),) * layout.dp
    for replica, weight in enumerate(weights):
        assert abs(len(layout.slice(range(1000), replica)) - 1000 * weight / sum(weights)) <= 1


def test_shares_of_two_to_one() -> None:
    layout = layout_of((2, 1))
    assert [len(layout.slice(range(9), replica)) for replica in range(2)] == [6, 3]


def test_a_share_of_zero_holds_nothing() -> None:
    layout = layout_of((1, 0, 1))
    assert [len(layout.slice(range(8), replica)) for replica in range(3)] == [4, 0, 4]


def test_tensor_and_pipeline_ranks_of_a_replica_hold_the_same_rows() -> None:
    """Ranks 0-7 as Megatron lays them: tp fastest, then dp, then pp."""
    layout = Layout(tuple(range(8)), ParallelDims(tp=2, pp=2))
    assert layout.dp == 2
    assert [layout.replica(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_ranks_of_a_replica_hold_its_parts_and_those_of_other_replicas_the_same() -> None:
    layout = Layout((1, 3, 4, 6, 8, 9), ParallelDims(tp=2))
    assert [layout.index("tp", rank) for rank in layout.ranks] == [0, 1, 0, 1, 0, 1]
    assert layout.sets("tp") == ((1, 3), (4, 6), (8, 9))
    assert [layout.dp_set(rank) for rank in layout.ranks] == [(1, 4, 8), (3, 6, 9)] * 3


def test_context_parallel_ranks_have_one_replica_s_rows_and_are_replicas_of_the_weights() -> None:
    """Ranks 10-17: tp fastest, then cp, then dp."""
    layout = Layout(tuple(range(10, 18)), ParallelDims(tp=2, cp=2))
    assert (layout.dp, layout.replica_sets) == (2, ((10, 11, 12, 13), (14, 15, 16, 17)))
    assert [layout.index("cp", rank) for rank in layout.ranks] == [0, 0, 1, 1] * 2
    assert [layout.replica(rank) for rank in layout.ranks] == [0] * 4 + [1] * 4
    assert layout.along("cp", 13) == (11, 13) and layout.dp_set(13) == (13, 17)
    assert [rank for rank in layout.ranks if layout.is_first_of_replica(rank)] == [10, 14]
    weights = layout.of_weights
    assert (weights.dp, weights.dp_set(13)) == (4, (11, 13, 15, 17))
    assert weights.replica_sets == ((10, 11), (12, 13), (14, 15), (16, 17))


def test_stages_of_context_parallel_ranks_are_behind_all_replicas() -> None:
    layout = Layout(tuple(range(8)), ParallelDims(pp=2, cp=2))
    assert layout.replica_sets == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert [layout.index("pp", rank) for rank in layout.ranks] == [0] * 4 + [1] * 4
    assert layout.along("pp", 6) == (2, 6) and layout.along("cp", 6) == (6, 7) and layout.dp_set(6) == (4, 6)


def test_without_tensor_parallel_every_rank_is_a_replica() -> None:
    layout = Layout((2, 5))
    assert layout.sets("tp") == ((2,), (5,))
    assert [layout.index("tp", rank) for rank in (2, 5)] == [0, 0]
    assert layout.dp_set(5) == (2, 5)


@pytest.mark.parametrize(("prompts", "mini_batches"), [(8, 2), (7, 3), (10, 4), (5, 5), (64, 1)])
def test_mini_batches_are_contiguous_cover_and_are_even(prompts: int, mini_batches: int) -> None:
    shape = BatchShape(prompts, 2, mini_batches)
    parts = [shape.prompts(m) for m in shape.mini_batches]
    assert [prompt for part in parts for prompt in part] == list(range(prompts))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 6])
def test_chunks_are_consecutive_whole_mini_batches(num_chunks: int) -> None:
    shape = BatchShape(13, 1, 6, num_chunks)
    assert [m for index in range(num_chunks) for m in shape.chunk(index)] == list(range(6))


def test_every_row_has_one_replica_and_chunks_change_none() -> None:
    """With samples of one prompt, which never part."""
    draw = random.Random(0)
    for _ in range(300):
        shares = draw.choice((*SHARES, tuple(Fraction(draw.randint(0, 9), draw.randint(1, 5)) for _ in range(5)), ()))
        layout = layout_of(shares if sum(shares) else ())
        mini_batches, chunks = draw.choice(((1, 1), (3, 1), (4, 1), (4, 2), (4, 4)))
        shape = BatchShape(draw.randint(mini_batches, 40), draw.randint(1, 3), mini_batches, chunks)
        whole = {rank: shape.prompts_on(layout, rank, shape.mini_batches) for rank in layout.ranks}
        assert sorted(prompt for held in whole.values() for prompt in held) == list(range(shape.num_prompts))
        assert sorted(row for held in whole.values() for row in shape.rows(held)) == list(range(shape.num_rows))
        for rank in layout.ranks:
            pieces = [shape.prompts_on(layout, rank, shape.chunk(chunk)) for chunk in range(chunks)]
            assert tuple(prompt for piece in pieces for prompt in piece) == whole[rank]


def test_replicas_take_whole_blocks_if_their_number_divides_them() -> None:
    """Blocks are the same prompts under every layout, which cuts them only if it has another number of replicas."""
    draw = random.Random(1)
    for _ in range(200):
        blocks, mini_batches = draw.choice((1, 2, 4, 6, 8)), draw.randint(1, 5)
        shape = BatchShape(draw.randint(mini_batches, 40), 2, mini_batches, num_blocks=blocks)
        # an evaluation has its prompts in batches, of which the last may not be full
        places = BatchShape(draw.randint(1, 9), 2, num_blocks=blocks)
        for each in (shape, evaluation_shape(shape.num_prompts, places)):
            whole = blocks_by_rank(each, Layout((0,)))
            assert max(map(len, whole)) * 2 <= each.block_rows
            for size in range(1, 9):
                layout = Layout(tuple(range(size)))
                parts = blocks_by_rank(each, layout)
                assert sorted(sum(parts, ())) == list(range(each.num_prompts))
                assert all(any(set(part) <= set(block) for block in whole) for part in parts)
                if layout.takes_whole(blocks):
                    assert sorted(parts) == sorted(whole)
    shares = Layout((0, 1), row_shares=(Fraction(2), Fraction(1)))
    assert shares.takes_whole(6) and not shares.takes_whole(4)
    shape = BatchShape(12, num_blocks=6)
    assert blocks_by_rank(shape, shares) == blocks_by_rank(shape, Layout((0, 1, 2)))


def blocks_by_rank(shape: BatchShape, layout: Layout) -> list[tuple[int, ...]]:
    return [block for rank in layout.ranks for block in shape.blocks_on(layout, rank, shape.mini_batches)]


def random_layout(draw: random.Random) -> Layout:
    """Up to 5 replicas, of equal shares or others, on one rank or two each."""
    dp, tp = draw.randint(1, 5), draw.choice((1, 1, 2))
    shares = tuple(Fraction(draw.randint(0, 3)) for _ in range(dp))
    return Layout(
        tuple(range(dp * tp)), ParallelDims(tp), row_shares=shares if draw.random() < 0.5 and sum(shares) else ()
    )


def test_segments_of_one_prompt_never_part() -> None:
    """Places of one number have the same rank, mini-batch, chunk and block: those of the prompt in a plan without."""
    draw = random.Random(2)
    for _ in range(300):
        layout, mini_batches, segments = random_layout(draw), draw.choice((1, 2, 4)), draw.randint(1, 5)
        samples, blocks = draw.randint(1, 3), draw.choice((1, 2, 4))
        plain = BatchShape(draw.randint(mini_batches, 12), samples, mini_batches, mini_batches // 2 or 1, blocks)
        shape = replace(plain, num_prompts=plain.num_prompts * segments, segments=segments)
        parts = [range(m, m + 1) for m in plain.mini_batches] + [plain.chunk(c) for c in range(plain.num_chunks)]
        for part, rank in product(parts, layout.ranks):
            prompts, divided = (each.prompts_on(layout, rank, part) for each in (plain, shape))
            assert divided == places_of(prompts, segments)
            blocks_of = [places_of(block, segments) for block in plain.blocks_on(layout, rank, part)]
            assert list(shape.blocks_on(layout, rank, part)) == blocks_of
        mini_batches_of = [places_of(plain.prompts(m), segments) for m in plain.mini_batches]
        assert [tuple(shape.prompts(m)) for m in shape.mini_batches] == mini_batches_of
        assert (shape.num_new, shape.num_taken) == (plain.num_prompts, plain.num_rows)
        assert shape.block_rows == plain.block_rows * segments


def places_of(numbers: Iterable[int], segments: int) -> tuple[int, ...]:
    return tuple(number * segments + age for number in numbers for age in range(segments))


def test_rows_as_they_were_taken_and_places_are_inverse() -> None:
    for prompts, samples, segments in product((1, 5), (1, 3), (1, 2, 4)):
        shape = BatchShape(prompts * segments, samples, segments=segments)
        for step in range(segments, 2 * segments + 1):
            taken = [shape.as_taken(row, step) for row in range(shape.num_rows)]
            first = step - segments + 1
            assert sorted(taken) == list(product(range(first, step + 1), range(shape.num_taken)))
            assert [shape.place_of(*each) for each in taken] == list(range(shape.num_rows))
            new = [row for row, (each, _) in enumerate(taken) if each == step]
            assert tuple(new) == shape.rows(tuple(shape.new_prompts(step)))
            # in the next step a prompt has the same place, with all of its samples
            kept = [row for row, (each, _) in enumerate(taken) if each > first]
            assert all(shape.as_taken(row, step + 1) == taken[row] for row in kept)
