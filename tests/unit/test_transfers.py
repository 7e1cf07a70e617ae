"""Transfers between two layouts: everything arrives once, nothing is sent that is there, buffers stay small."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import pytest

from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import RolloutSpec, SyncSpec
from flexrlhf.placement.layout import Layout, generation_layout, received_share
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.weights.boxes import Box, box_elements, boxes_of, intersection, slabs
from flexrlhf.weights.decoder_sizes import Sizes
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.shards import Part
from flexrlhf.weights.transfer_plan import Regions, TransferPlan, Way, chains_to
from flexrlhf.weights.transfers import Holdings, NodeOf, plan_transfers

PAIRS = 5000
SPLITS = (("torch", 0), ("torch", 3), ("deepspeed", 3))
"""Engine and ZeRO stage: whole, by rows, flat."""
LAYERS = 4


def holdings(
    layout: Layout, shape: ModelShape, engine: str = "torch", zero: int = 0, rollout: bool = False, over: int = 0
) -> Holdings:
    settings, engine_of_rollout = ModelSpec(engine=engine, zero=zero), RolloutSpec(engine="vllm") if rollout else None
    model = PlacedModel(ModelName("actor"), layout, True, settings, engine_of_rollout, sharded_over=over)
    return {rank: shape.parts_on(model, rank) for rank in layout.ranks}


def drawn_shape(draw: random.Random) -> ModelShape:
    """Four layers of small tensors, which tensor parallelism of 1, 2 and 4 divides, keys of fewer heads than ranks, and
    others of any size."""
    heads = draw.choice((1, 2, 4))
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (draw.randint(1, 9), draw.randint(1, 3)),
        "model.norm.weight": (draw.randint(1, 5),),
    }
    if draw.random() < 0.5:
        sizes["lm_head.weight"] = (draw.randint(1, 9), draw.randint(1, 3))
    for layer in range(LAYERS):
        sizes[f"model.layers.{layer}.mlp.up_proj.weight"] = (4 * draw.randint(1, 2), draw.randint(1, 3))
        sizes[f"model.layers.{layer}.mlp.down_proj.weight"] = (draw.randint(1, 3), 4)
        sizes[f"model.layers.{layer}.self_attn.k_proj.weight"] = (2 * heads, draw.randint(1, 3))
    decoder = Sizes(LAYERS, 1, 1, 4, heads, 2, 1, family="any")
    return ModelShape(tuple(sorted(sizes.items())), sizes=decoder, is_tied="lm_head.weight" not in sizes)


def drawn_holdings(draw: random.Random, shape: ModelShape) -> Holdings:
    """Any of the layouts on some of eight ranks, in any order."""
    tp, pp = draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2, 4))
    dp = draw.randint(1, max(1, 8 // (tp * pp)))
    ranks = tuple(draw.sample(range(max(8, tp * pp * dp)), tp * pp * dp))
    engine, zero = draw.choice(SPLITS) if pp == 1 and (tp == 1 or dp == 1) else ("torch", draw.choice((0, 3)))
    over = draw.choice([0, *(number for number in range(2, dp) if dp % number == 0)])
    return holdings(Layout(ranks, ParallelDims(tp, pp)), shape, engine, zero, rollout=draw.random() < 0.2, over=over)


class Counts:
    """How often each element of each tensor is somewhere."""

    def __init__(self, shape: ModelShape) -> None:
        self.of = {name: np.zeros(size, dtype=np.int64) for name, size in shape.parameters}

    def add(self, name: str, box: Box) -> None:
        self.of[name][tuple(slice(side.start, side.stop) for side in box)] += 1

    def add_all(self, regions: Regions) -> None:
        for region in regions:
            self.add(region.name, region.box)

    def unite(self, other: Counts) -> None:
        self.of = {name: np.maximum(counts, other.of[name]) for name, counts in self.of.items()}

    def remove(self, other: Counts) -> None:
        self.of = {name: counts * (other.of[name] == 0) for name, counts in self.of.items()}

    @property
    def number(self) -> int:
        return sum(int(counts.sum()) for counts in self.of.values())

    @classmethod
    def stored(cls, shape: ModelShape, parts: Mapping[str, Part]) -> Counts:
        found = cls(shape)
        for name, part in parts.items():
            for box in boxes_of(part):
                found.add(name, box)
        return found

    def __le__(self, other: Counts) -> bool:
        return all((counts <= other.of[name]).all() for name, counts in self.of.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counts) and self <= other <= self

    def overlaps(self, other: Counts) -> bool:
        return any((counts * other.of[name]).any() for name, counts in self.of.items())


def check(plan: TransferPlan, shape: ModelShape, source: Holdings, destination: Holdings) -> None:
    """Every element arrives once, from a rank that has it by then, unless the destination has it itself."""
    own = {rank: Counts.stored(shape, source.get(rank, {})) for rank in range(64)}
    arrived = {rank: Counts(shape) for rank in destination}
    # what has been stored of earlier buckets when one is packed
    stored, arriving = {rank: Counts(shape) for rank in destination}, deque[list[tuple[int, Regions]]]()
    for bucket in plan.buckets:
        if len(arriving) == SyncSpec.NUM_BUCKETS - 1:
            for rank, regions in arriving.popleft():
                stored[rank].add_all(regions)
        arriving.append([])
        for rank, regions in bucket.stays.items():
            kept = Counts(shape)
            kept.add_all(regions)
            arrived[rank].add_all(regions)
            assert kept <= own[rank]
        for message in bucket.messages:
            assert message.regions and message.destinations and message.source not in message.destinations
            sent = Counts(shape)
            sent.add_all(message.regions)
            has = stored if message.is_sent_on else own
            assert sent <= has[message.source], "sent by a rank that has it not"
            for rank in message.destinations:
                arrived[rank].add_all(message.regions)
                arriving[-1].append((rank, message.regions))
                assert not sent.overlaps(own[rank]), "sent to a rank that has it"
    for rank, parts in destination.items():
        assert arrived[rank] == Counts.stored(shape, parts), f"rank {rank}"


def crossing(plan: TransferPlan, node_of: NodeOf) -> dict[int, int]:
    """Elements that arrive on each node from others."""
    found: dict[int, int] = defaultdict(int)
    for (source, destination), elements in plan.links.items():
        if node_of(source) != node_of(destination):
            found[node_of(destination)] += elements
    return dict(found)


def least_crossing(shape: ModelShape, source: Holdings, destination: Holdings, node_of: NodeOf) -> dict[int, int]:
    """Elements that some rank of a node stores as destination, and none as source."""
    needed = {node: Counts(shape) for node in map(node_of, destination)}
    for rank, parts in destination.items():
        needed[node_of(rank)].unite(Counts.stored(shape, parts))
    for rank, parts in source.items():
        if node_of(rank) in needed:
            needed[node_of(rank)].remove(Counts.stored(shape, parts))
    return {node: size for node, counts in needed.items() if (size := counts.number)}


@pytest.mark.parametrize("lot", [0, *(pytest.param(lot, marks=pytest.mark.full) for lot in range(1, 10))])
def test_any_two_layouts(lot: int) -> None:
    """With buffers that hold all, and with small ones; on one node, two or eight. An element crosses to a node once."""
    for seed in range(lot * PAIRS // 10, (lot + 1) * PAIRS // 10):
        draw = random.Random(seed)
        shape = drawn_shape(draw)
        source, destination = drawn_holdings(draw, shape), drawn_holdings(draw, shape)
        most, node = draw.choice((16, 40, 10_000)), draw.choice((1, 4, 8))
        node_of: NodeOf = lambda rank, node=node: rank // node  # type: ignore[misc]  # noqa: E731
        plan = plan_transfers(source, destination, most, node_of, in_background=draw.random() < 0.3)
        assert plan.largest_buffers <= most, seed
        check(plan, shape, source, destination)
        assert crossing(plan, node_of) == least_crossing(shape, source, destination, node_of), seed


# --- boxes


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (1, 5), (4, 1)])
def test_any_flat_range_is_few_boxes(shape: tuple[int, ...]) -> None:
    order = np.arange(np.prod(shape)).reshape(shape)
    whole = tuple(map(range, shape))
    for start, stop in product(range(order.size + 1), repeat=2):
        if start > stop:
            continue
        boxes = boxes_of(Part(shape, whole, range(start, stop)))
        found = [order[tuple(slice(side.start, side.stop) for side in box)].ravel() for box in boxes]
        assert np.concatenate([np.zeros(0, int), *found]).tolist() == list(range(start, stop))
        assert len(boxes) <= 2 * len(shape) - 1


def test_a_flat_range_of_a_box() -> None:
    """Elements 1 to 4 of the columns 2 and 3."""
    part = Part((4, 4), (range(4), range(2, 4)), range(1, 5))
    assert boxes_of(part) == ((range(1), range(3, 4)), (range(1, 2), range(2, 4)), (range(2, 3), range(2, 3)))


def test_an_intersection_by_hand() -> None:
    assert intersection((range(4), range(2, 6)), (range(3, 9), range(4))) == (range(3, 4), range(2, 4))
    assert intersection((range(4), range(2)), (range(4), range(2, 3))) is None


@pytest.mark.parametrize(("shape", "most"), [((7, 3), 6), ((7, 3), 2), ((5,), 2), ((2, 3, 4), 5), ((2, 3), 100)])
def test_slabs_cover_a_tensor(shape: tuple[int, ...], most: int) -> None:
    counts = np.zeros(shape, int)
    for box in slabs(tuple(map(range, shape)), most):
        assert 0 < box_elements(box) <= most
        counts[tuple(slice(side.start, side.stop) for side in box)] += 1
    assert (counts == 1).all()


# --- by hand

MATRICES = ModelShape(
    tuple((f"model.layers.{layer}.mlp.{kind}_proj.weight", (8, 8)) for layer in range(8) for kind in ("down", "up"))
)
ALL = 16 * 64


def test_what_is_there_stays() -> None:
    """The same layout on the same ranks moves nothing; with ranks exchanged, all."""
    source = holdings(Layout((0, 1), ParallelDims(tp=2)), MATRICES)
    assert not list(plan_transfers(source, source, 100).messages)
    exchanged = holdings(Layout((1, 0), ParallelDims(tp=2)), MATRICES)
    assert plan_transfers(source, exchanged, 100).links == {(0, 1): ALL // 2, (1, 0): ALL // 2}


def test_only_what_is_missing_is_sent() -> None:
    """Two tensor-parallel ranks to two others that store rows: each sends each the quarter that it has of it."""
    source = holdings(Layout((0, 1), ParallelDims(tp=2)), MATRICES)
    rows = holdings(Layout((2, 3)), MATRICES, "torch", 3)
    up, down = ALL // 2, ALL // 2
    assert plan_transfers(source, rows, 10_000).links == {
        (0, 2): up // 2 + down // 4,
        (1, 2): down // 4,
        (0, 3): down // 4,
        (1, 3): up // 2 + down // 4,
    }


def test_replicas_of_the_source_take_turns() -> None:
    source = holdings(Layout((0, 1)), MATRICES)
    plan = plan_transfers(source, holdings(Layout((2, 3)), MATRICES), 2 * 64)
    assert plan.links == {(source, destination): ALL // 2 for source in (0, 1) for destination in (2, 3)}


def test_a_replica_on_the_same_node_sends() -> None:
    source = holdings(Layout((0, 2)), MATRICES)
    plan = plan_transfers(source, holdings(Layout((1, 3)), MATRICES), 10_000, lambda rank: rank // 2)
    assert plan.links == {(0, 1): ALL, (2, 3): ALL}


def test_ranks_with_the_same_parts_share_a_buffer() -> None:
    plan = plan_transfers(holdings(Layout((0,)), MATRICES), holdings(Layout((1, 2, 3)), MATRICES), 10_000)
    (message,) = plan.messages
    assert (message.destinations, plan.largest_buffers) == ((1, 2, 3), ALL)


def test_a_tensor_that_the_source_lacks_is_named() -> None:
    source = holdings(Layout((0,)), ModelShape(MATRICES.parameters[1:]))
    with pytest.raises(KeyError, match=r"no rank of the source stores model\.layers\.0\.mlp\.down_proj\.weight"):
        plan_transfers(source, holdings(Layout((1,)), MATRICES), 100)


# --- HybridFlow

COMBINATIONS = [
    (1, 8, 2, 1, 2),
    (1, 4, 2, 1, 2),
    (2, 4, 1, 1, 4),
    (2, 4, 2, 1, 2),
    (4, 8, 1, 1, 8),
    (4, 4, 2, 2, 2),
    (8, 2, 1, 2, 1),
    (1, 2, 4, 1, 1),
    (2, 2, 2, 2, 2),
    (4, 2, 1, 1, 1),
    (1, 8, 1, 1, 4),
    (2, 8, 2, 1, 4),
]
"""p, t, d of training; p_g, t_g of generation."""


@pytest.mark.parametrize(("p", "t", "d", "p_g", "t_g"), COMBINATIONS)
def test_volumes_are_the_published_ones(p: int, t: int, d: int, p_g: int, t_g: int) -> None:
    """Bytes that a GPU receives, of M: HybridFlow (tp - t_g p_g) / (t_g p_g t p), HybridFlow-V (tp - 1) / (tp) and
    DeepSpeed-Chat (tpd - 1) / (tpd), of Sheng et al. 2024, table 2."""
    training = Layout(tuple(range(p * t * d)), ParallelDims(t, p))
    everything = holdings(Layout(training.ranks), MATRICES)

    def received(source: Holdings, destination: Holdings) -> set[int]:
        plan = plan_transfers(source, destination, 10_000)
        return {plan.received.get(rank, 0) for rank in training.ranks}

    trained, order = holdings(training, MATRICES), generation_layout(training, ParallelDims(t_g, p_g))
    assert received(trained, holdings(order, MATRICES)) == {int(ALL * received_share(training, ParallelDims(t_g, p_g)))}
    assert received(trained, everything) == {ALL * (t * p - 1) // (t * p)}
    assert received(holdings(Layout(training.ranks), MATRICES, "deepspeed", 3), everything) == {
        ALL * (t * p * d - 1) // (t * p * d)
    }


@pytest.mark.parametrize(("p", "t", "d", "p_g", "t_g"), COMBINATIONS)
def test_generation_keeps_the_trained_part(p: int, t: int, d: int, p_g: int, t_g: int) -> None:
    """No redundant memory: what a rank trains is within what it generates with."""
    training = Layout(tuple(range(p * t * d)), ParallelDims(t, p))
    trained, generating = (
        holdings(each, MATRICES) for each in (training, generation_layout(training, ParallelDims(t_g, p_g)))
    )
    for rank in training.ranks:
        assert Counts.stored(MATRICES, trained[rank]) <= Counts.stored(MATRICES, generating[rank])


def test_the_order_of_the_paper() -> None:
    """Training groups of four, generation groups of two: G1 G3 and G2 G4 (figure 8)."""
    assert generation_layout(Layout(tuple(range(8)), ParallelDims(tp=4)), ParallelDims(2)).sets("tp") == (
        (0, 2),
        (1, 3),
        (4, 6),
        (5, 7),
    )


def test_degrees_that_do_not_divide_have_no_such_order() -> None:
    with pytest.raises(ValueError, match="generation with tp 4 and pp 1 keeps no training part whole"):
        generation_layout(Layout(tuple(range(8)), ParallelDims(tp=2)), ParallelDims(4))


# --- the way between nodes


def nodes(number: int, ranks: int = 8, first: int = 0) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(first + ranks * node, first + ranks * (node + 1))) for node in range(number))


def way_to(
    sources: Sequence[tuple[int, ...]], receivers: Sequence[tuple[int, ...]], num_lots: int | None, pieces: range
) -> Way:
    return tuple(hop for chain in chains_to(sources, receivers, num_lots, pieces) for hop in chain.hops)


def pieces_sent(way: Way, from_node: int, node_of: NodeOf) -> float:
    """Pieces that a node sends to others, over the turns of the source's ranks."""
    return sum(
        sum(node_of(sender) == from_node for sender in hop.senders) / len(hop.senders)
        for hop in way
        for receiver in hop.receivers
        if node_of(receiver) != from_node
    )


@pytest.mark.parametrize("sources", [1, 2, 3])
@pytest.mark.parametrize("receiving", [1, 2, 5, 15])
def test_no_node_sends_more_than_once_what_it_has(sources: int, receiving: int) -> None:
    """Every rank gets every piece once, and the pieces arrive on a node at different ranks."""
    receivers = nodes(receiving, first=8 * sources)
    way = way_to(nodes(sources), receivers, 1000, range(8))
    arrived = Counter((hop.piece, rank) for hop in way for rank in hop.receivers)
    assert arrived == Counter(product(range(8), [rank for ranks in receivers for rank in ranks]))
    for ranks in receivers:
        first = [rank for hop in way for rank in hop.receivers if rank in ranks and not {*hop.senders} & {*ranks}]
        assert sorted(first) == sorted(ranks)
    sent = [pieces_sent(way, node, lambda rank: rank // 8) for node in range(sources + receiving)]
    assert max(sent) <= 8 and sum(sent) == pytest.approx(8 * receiving)


@pytest.mark.parametrize(
    ("num_lots", "longest", "chains"), [(1000, 16, 1), (18, 16, 1), (4, 6, 3), (1, 3, 6), (None, 1, 16)]
)
def test_few_lots_go_through_shorter_chains(num_lots: int | None, longest: int, chains: int) -> None:
    """From one node to sixteen; in the background from one node to all."""
    way = way_to(nodes(1), nodes(16, first=8), num_lots, range(8))
    assert pieces_sent(way, 0, lambda rank: rank // 8) == 8 * chains
    assert max(hop.stage for hop in way) == longest
