"""Routes: from two layouts to transfers and the primitive that carries them; HybridFlow's protocols as instances."""

from __future__ import annotations

import random
from collections import defaultdict
from fractions import Fraction

import pytest

from flexrlhf.config.axes import ParallelDims
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.transfer import Primitive, Transfer
from flexrlhf.strategies.routes import PromptsByRank, primitive_of, route


def holdings(layout: Layout, shape: BatchShape, ranks: tuple[int, ...] | None = None) -> PromptsByRank:
    """The prompts on each rank of ``layout``, or on ``ranks`` of it alone."""
    chosen = layout.ranks if ranks is None else ranks
    return {rank: set(shape.prompts_on(layout, rank, shape.mini_batches)) for rank in chosen}


def planned(source: PromptsByRank, needed: PromptsByRank) -> tuple[list[Transfer], Primitive]:
    transfers = route("scores", source, source, needed)
    ranks = tuple(sorted({rank for t in transfers for rank in (t.source, t.destination)}))
    held = {rank: set(source.get(rank, set())) for rank in ranks}
    for transfer in transfers:
        held[transfer.destination].update(transfer.prompts)
    everything = set().union(*source.values())
    return transfers, primitive_of(transfers, ranks, all(held[rank] == everything for rank in ranks))


def arrived(transfers: list[Transfer], held: PromptsByRank) -> PromptsByRank:
    out: PromptsByRank = defaultdict(set, {rank: set(prompts) for rank, prompts in held.items()})
    for transfer in transfers:
        assert set(transfer.prompts) <= held[transfer.source], "a rank sends what it does not hold"
        out[transfer.destination] |= set(transfer.prompts)
    return out


def shares(*values: int) -> tuple[Fraction, ...]:
    return tuple(Fraction(value) for value in values)


# --- the four primitives

PRIMITIVES = [
    ("the same layout", Layout((0, 1)), Layout((0, 1)), "none"),
    ("a part of the ranks that hold all", Layout((0, 1), ParallelDims(tp=2)), Layout((1,)), "none"),
    ("every rank wants all", Layout((0, 1)), Layout((0, 1), ParallelDims(tp=2)), "all_gather"),
    ("two sides", Layout((0, 1)), Layout((2, 3)), "point_to_point"),
    ("to fewer ranks of the same", Layout((0, 1)), Layout((0,)), "point_to_point"),
    ("to more ranks of the same", Layout((0, 1)), Layout((0, 1, 2, 3)), "all_to_all"),
    ("other row shares", Layout((0, 1)), Layout((0, 1), row_shares=shares(3, 1)), "point_to_point"),
    ("ranks in another order", Layout((0, 1, 2)), Layout((1, 2, 0)), "all_to_all"),
    ("two ranks that swap, each ends with all", Layout((0, 1)), Layout((1, 0)), "all_gather"),
    (
        "unequal parts that all want",
        Layout((0, 1), row_shares=shares(3, 1)),
        Layout((0, 1), ParallelDims(tp=2)),
        "all_to_all",
    ),
]


@pytest.mark.parametrize(
    ("source", "destination", "expected"), [p[1:] for p in PRIMITIVES], ids=[p[0] for p in PRIMITIVES]
)
def test_the_first_primitive_that_matches_is_taken(source: Layout, destination: Layout, expected: Primitive) -> None:
    shape = BatchShape(8)
    needed = holdings(destination, shape)
    transfers, primitive = planned(holdings(source, shape), needed)
    assert primitive == expected
    after = arrived(transfers, holdings(source, shape))
    assert all(prompts <= after[rank] for rank, prompts in needed.items())


def test_uneven_prompts_make_an_all_gather_an_all_to_all() -> None:
    for num_prompts, expected in ((8, "all_gather"), (9, "all_to_all")):
        shape = BatchShape(num_prompts)
        _, primitive = planned(holdings(Layout((0, 1)), shape), holdings(Layout((0, 1), ParallelDims(tp=2)), shape))
        assert primitive == expected


def test_two_columns_gather_together_only_when_both_are_gathered() -> None:
    shape = BatchShape(4)
    source, everything = holdings(Layout((0, 1)), shape), holdings(Layout((0, 1), ParallelDims(tp=2)), shape)
    both = [*route("tokens", source, source, everything), *route("scores", source, source, everything)]
    assert primitive_of(both, (0, 1), True) == "all_gather"
    assert primitive_of(both[:-1], (0, 1), True) == "all_to_all"


def test_an_exchange_of_a_part_of_the_rows_is_no_all_gather() -> None:
    """Equal shares go both ways, but neither rank ends with every row."""
    source = {0: {0, 1, 2}, 1: {3, 4, 5}}
    assert planned(source, {0: {0, 3}, 1: {2, 4}})[1] == "all_to_all"


def test_a_rank_outside_the_collective_spoils_an_all_gather() -> None:
    shape = BatchShape(4)
    transfers, _ = planned(holdings(Layout((0, 1)), shape), holdings(Layout((0, 1), ParallelDims(tp=2)), shape))
    assert primitive_of(transfers, (0, 1, 2), True) == "all_to_all"


def test_receivers_take_turns_among_the_ranks_that_hold_the_same_rows() -> None:
    shape = BatchShape(4)
    source = holdings(Layout((0, 1), ParallelDims(tp=2)), shape)
    transfers, _ = planned(source, holdings(Layout((2, 3), ParallelDims(tp=2)), shape))
    assert [(t.source, t.destination) for t in transfers] == [(0, 2), (1, 3)]


def test_a_row_without_a_producer_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="no rank produced prompt 1"):
        route("scores", {0: {0}}, {0: {0}}, {1: {0, 1}})


def test_random_layouts_get_every_row_once_and_nothing_else() -> None:
    draw = random.Random(1)
    for _ in range(300):
        layouts = []
        for _ in range(2):
            tp, pp, dp = draw.choice([1, 2]), draw.choice([1, 2]), draw.randint(1, 3)
            layouts.append(Layout(tuple(draw.sample(range(14), tp * pp * dp)), ParallelDims(tp, pp)))
        shape = BatchShape(draw.randint(1, 9), num_mini_batches=1)
        source, needed = (holdings(layout, shape) for layout in layouts)
        transfers, _ = planned(source, needed)
        received = [(t.destination, prompt) for t in transfers for prompt in t.prompts]
        missing = [(rank, p) for rank, prompts in needed.items() for p in prompts - source.get(rank, set())]
        assert sorted(received) == sorted(missing)
        assert arrived(transfers, source)


# --- HybridFlow's transfer protocols

TRAIN = Layout(tuple(range(8)), ParallelDims(tp=2, pp=2))
"""dp 2: replica 0 on ranks 0, 1 (stage 0) and 4, 5 (stage 1); replica 1 on 2, 3 and 6, 7."""
GENERATION = Layout((0, 1, 4, 5, 2, 3, 6, 7), ParallelDims(tp=2))
"""The same ranks with pp 1 and dp 4: two micro data parallel groups inside each replica of TRAIN."""
DATA = Layout(tuple(range(8)))
EVERYWHERE = Layout(tuple(range(8)), ParallelDims(tp=8))
CONTROLLER = Layout((8,))

PROTOCOLS: list[tuple[str, Layout, tuple[int, ...] | None, Layout, Primitive]] = [
    ("ONE_TO_ALL distribute", CONTROLLER, None, EVERYWHERE, "point_to_point"),
    ("ONE_TO_ALL collect", DATA, None, CONTROLLER, "point_to_point"),
    ("3D_PROTO distribute", CONTROLLER, None, TRAIN, "point_to_point"),
    ("3D_PROTO collect", TRAIN, (4, 6), CONTROLLER, "point_to_point"),
    ("3D_ALL_MICRO_DP distribute", CONTROLLER, None, GENERATION, "point_to_point"),
    ("3D_ALL_MICRO_DP collect", GENERATION, (0, 4, 2, 6), CONTROLLER, "point_to_point"),
    ("3D_PP_ONLY distribute", CONTROLLER, None, EVERYWHERE, "point_to_point"),
    ("3D_PP_ONLY collect", Layout((0, 4)), None, CONTROLLER, "point_to_point"),
    ("DP_PROTO distribute", CONTROLLER, None, DATA, "point_to_point"),
    ("DP_PROTO collect", DATA, None, CONTROLLER, "point_to_point"),
    ("ALL_TO_ALL distribute", TRAIN, None, TRAIN, "none"),
    ("ALL_TO_ALL collect", DATA, None, CONTROLLER, "point_to_point"),
    ("DP_PROTO to ONE_TO_ALL", DATA, None, EVERYWHERE, "all_gather"),
    ("DP_PROTO to 3D_PROTO", DATA, None, TRAIN, "all_to_all"),
    ("3D_PROTO to 3D_ALL_MICRO_DP", TRAIN, None, GENERATION, "none"),
    ("3D_ALL_MICRO_DP to 3D_PROTO", GENERATION, None, TRAIN, "all_to_all"),
    ("3D_PROTO to DP_PROTO elsewhere", TRAIN, (4, 6), Layout((8, 9)), "point_to_point"),
]


@pytest.mark.parametrize(
    ("source", "producers", "destination", "expected"), [p[1:] for p in PROTOCOLS], ids=[p[0] for p in PROTOCOLS]
)
def test_the_protocols_of_hybridflow_are_pairs_of_layouts(
    source: Layout, producers: tuple[int, ...] | None, destination: Layout, expected: Primitive
) -> None:
    """HybridFlow (Sheng et al. 2025, table 3); ``producers``: the ranks that results are collected from.

    ================  ==========================================  ===========================================
    protocol          distribute                                  collect
    ================  ==========================================  ===========================================
    ONE_TO_ALL        all rows to all ranks                       from all ranks
    3D_PROTO          split over dp, the same within tp and pp    from tp 0 of the last stage, of every dp
    3D_ALL_MICRO_DP   split over the dp of the generation layout  from the first rank of every micro dp group
    3D_PP_ONLY        all rows to all ranks                       from tp 0, dp 0 of every stage
    DP_PROTO          split over dp                               from all dp ranks
    ALL_TO_ALL        rows stay where they are                    from all ranks
    ================  ==========================================  ===========================================

    HybridFlow's controller is rank 8 here; flexrlhf has none, and the rows "A to B" are what it does instead.
    """
    shape = BatchShape(16)
    held, needed = holdings(source, shape, producers), holdings(destination, shape)
    transfers, primitive = planned(held, needed)
    assert primitive == expected
    after = arrived(transfers, held)
    assert all(prompts <= after[rank] for rank, prompts in needed.items())


def test_results_are_collected_from_the_last_stage_alone() -> None:
    shape = BatchShape(8)
    transfers, _ = planned(holdings(TRAIN, shape, (4, 6)), holdings(CONTROLLER, shape))
    assert [(t.source, t.prompts) for t in transfers] == [(4, (0, 1, 2, 3)), (6, (4, 5, 6, 7))]
