"""From ratios to ranks: the worked examples, the readings of a training side, nodes, classes, and what is refused."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest
import yaml
from small_runs import spec_of

from flexrlhf.config.model_settings import Head
from flexrlhf.config.placement_settings import ClusterSpec
from flexrlhf.errors import UserError
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.place import place
from flexrlhf.placement.placement import Placement
from flexrlhf.placement.ratios import DeviceRequest, Roles, pack

Ranks = tuple[int, ...]
FOUR = ("actor", "critic", "ref", "reward")
SIX = ("actor.shadow", "critic.shadow", *FOUR)
HEADS: dict[str, Head] = {"actor": "causal", "critic": "scalar", "ref": "causal", "reward": "scalar"}
ROLES = Roles(FOUR, ("actor", "critic"), HEADS, generating="actor")
ALL = tuple(range(8))
MIXED = "[{devices: 2, class: A100-80G}, {devices: 2, class: V100-32G}]"


def placed(placement: object, devices: int = 8, nodes: str = "", *overrides: str) -> Placement:
    """Place without planning further; ``nodes`` as in the YAML."""
    if nodes:
        overrides = (f"cluster={{nodes: {nodes}}}", *overrides)
    spec = spec_of(placement, devices, *overrides)
    return place(spec, ROLES, True, Cluster.of(spec.cluster))


def ranks_of(placement: Placement) -> dict[str, Ranks]:
    return {model.name: model.ranks for model in placement.models}


def refused(placement: object, devices: int = 8, nodes: str = "", *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        placed(placement, devices, nodes, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def same(ratio: object, names: tuple[str, ...] = FOUR, **others: object) -> dict[str, object]:
    return dict.fromkeys(names, ratio) | {name.replace("_shadow", ".shadow"): value for name, value in others.items()}


# --- without shadows


@pytest.mark.parametrize(
    ("vector", "devices", "expected"),
    [
        ([1, 1, 1, 1], 8, (ALL, ALL, ALL, ALL)),
        ([1, 1, 0.5, 0.5], 8, (ALL, ALL, ALL[:4], ALL[4:])),
        ([0.5, 0.5, 0.5, 0.5], 8, (ALL[:4], ALL[4:], ALL[:4], ALL[4:])),
        ([1, 1, 0.5, 0.5], 2, ((0, 1), (0, 1), (0,), (1,))),
        ([0.25, 0.5, 0.25, 1], 8, ((0, 1), (2, 3, 4, 5), (6, 7), ALL)),
        ([0.75, 0.5, 0.25, 0.5], 8, (ALL[:6], ALL[:4], (6, 7), ALL[4:])),
        (["1/3", "2/3", "1/3", 1], 3, ((0,), (1, 2), (0,), (0, 1, 2))),
    ],
)
def test_models_lie_in_lanes_first_fit_in_vector_order(
    vector: list[object], devices: int, expected: tuple[Ranks, ...]
) -> None:
    assert ranks_of(placed(vector, devices)) == dict(zip(FOUR, expected, strict=True))


def test_no_placement_is_every_model_on_all_devices() -> None:
    assert ranks_of(placed(None)) == dict.fromkeys(FOUR, ALL)


def test_the_mapping_form_says_the_same_in_any_order() -> None:
    mapping = {"reward": 0.5, "ref": 0.5, "critic": 1, "actor": {"ratio": 1}}
    assert placed(mapping) == placed([1, 1, 0.5, 0.5])


def test_idle_ranks_are_known() -> None:
    assert placed([0.5, 0.5, 0.5, 0.5], 4).idle_ranks == ()
    assert placed([0.5, 0.25, 0.5, 0.5], 4).idle_ranks == ()
    assert placed({name: {"ranks": [1]} for name in FOUR}, 3).idle_ranks == (0, 2)


def test_the_trained_copies_are_those_of_the_trained_roles() -> None:
    placement = placed(same(0.5, SIX), 4)
    assert [model.name for model in placement.models if model.trained] == ["actor", "critic"]
    assert [model.name for model in placement.shadows] == ["actor.shadow", "critic.shadow"]
    assert placement.inference_copy("actor").name == "actor.shadow"
    assert placement.inference_copy("ref").name == "ref"


# --- with shadows


def test_six_halves_share_their_sides() -> None:
    placement = placed([0.5] * 6, 4)
    assert ranks_of(placement) == dict.fromkeys(SIX, (2, 3)) | {"actor": (0, 1), "critic": (0, 1)}


def test_sharing_the_training_side_is_taken_when_it_has_fewer_pairs() -> None:
    placement = placed([0.375, 0.125, 0.25, 0.25, 0.125, 0.125], 8)
    expected = ((2, 3, 4), (5,), (0, 1), (0, 1), (6,), (7,))
    assert ranks_of(placement) == dict(zip(SIX, expected, strict=True))
    assert placement.co_located_pairs() == [("actor", "critic")]


def test_side_by_side_is_taken_when_it_has_fewer_pairs() -> None:
    placement = placed([0.5, 0.5, 0.25, 0.25, 0.5, 0.5], 4)
    assert ranks_of(placement)["actor"] == (0,)
    assert ranks_of(placement)["critic"] == (1,)


def test_a_tie_goes_to_side_by_side() -> None:
    """Quarters on 4 devices: both readings have two pairs."""
    side_by_side, shared = placed(same(0.25, SIX), 4), placed(same(0.25, SIX, train_share=0.25), 4)
    assert len(side_by_side.co_located_pairs()) == len(shared.co_located_pairs()) == 2
    assert ranks_of(side_by_side)["critic"] == (1,)
    assert ranks_of(shared)["critic"] == (0,)
    assert placed([0.25] * 6, 4) == side_by_side


def test_train_share_overrides_the_reading() -> None:
    placement = placed(same(0.25, SIX, train_share=0.75), 4)
    assert [ranks_of(placement)[name] for name in SIX] == [(3,), (3,), (0,), (1,), (3,), (3,)]
    assert placement.idle_ranks == (2,)


@pytest.mark.parametrize(
    ("vector", "devices"),
    [
        ([0.5, 0.5, 1, 0.5, 0.5, 0.5], 4),
        ([1, 1, 1, 1, 1, 1], 4),
        ([0.5, 0.5, 0.75, 0.5, 0.5, 0.5], 4),
        ([0.75, 0.25, 0.5, 0.25, 0.25, 0.25], 8),
        ([1, 0.5, 0.5, 0.5, 0.5, 1], 2),
        (["2/3", "2/3", "2/3", "1/3", "1/3", "1/3"], 3),
    ],
)
def test_a_vector_that_fits_no_reading_is_refused_with_the_nearest(vector: list[object], devices: int) -> None:
    message = refused(vector, devices)
    assert f"fits no split of {devices} devices" in message
    suggested = re.search(r"the nearest that does is (\[.*?\])", message)
    assert suggested is not None
    accepted = placed(yaml.safe_load(suggested[1]), devices)
    assert not set(accepted["actor"].ranks) & set(accepted["actor.shadow"].ranks)


@pytest.mark.parametrize(
    ("vector", "roles", "ending"),
    [
        ([1, 1, 1], ("actor", "ref"), "inference side; without shadows 2 entries are enough, [actor, ref]"),
        ([1, 1], ("actor",), "inference side; without shadows 1 entry is enough, [actor]"),
        (
            [0.75, 0.75, 0.5],
            ("actor", "reward"),
            "the nearest that does is [0.75,0.25,0.5]; without shadows 2 entries are enough, [actor, reward]",
        ),
    ],
)
def test_a_vector_with_an_entry_too_many_names_its_models(
    vector: list[float], roles: tuple[str, ...], ending: str
) -> None:
    """As after a reward model is replaced by a rule: the advice is not to split the devices."""
    spec = spec_of(vector, 8)
    with pytest.raises(UserError) as caught:
        place(spec, Roles(roles, ("actor",), HEADS, "actor", "actor"), True, Cluster.of(spec.cluster))
    assert f" is read as [actor.rollout, {', '.join(roles)}] and " in str(caught.value)
    assert str(caught.value).endswith(ending)


def test_explicit_ranks_that_keep_the_sides_apart() -> None:
    fine = placed(same({"ranks": [3]}, SIX, actor={"ranks": [0]}, critic={"ranks": [1, 2]}), 4)
    assert ranks_of(fine)["critic"] == (1, 2)


def test_a_frozen_model_may_be_on_either_side() -> None:
    halves = {"actor.shadow": {"ranks": "2-3"}, **{name: {"ranks": "0-1"} for name in ("actor", "critic", "reward")}}
    fine = placed(halves | {"ref": {"ranks": [1]}}, 4)
    assert (ranks_of(fine)["ref"], ranks_of(fine)["reward"]) == ((1,), (0, 1))


# --- refused ratios and names


@pytest.mark.parametrize(
    ("ratio", "devices", "words"),
    [
        (0.3, 8, ("ratio 0.3 of ref", "2.4 of 8 devices", "0.25 (2 of 8)", "0.375 (3 of 8)")),
        ("1/3", 8, ("ratio 1/3 of ref", "8/3 of 8 devices", "0.25 (2 of 8)", "0.375 (3 of 8)")),
        (0.05, 8, ("0.4 of 8", "0.125 (1 of 8)")),
        (0.99, 8, ("0.875 (7 of 8)", "1 (8 of 8)")),
        (0.5, 3, ("1.5 of 3", "1/3 (1 of 3)", "2/3 (2 of 3)")),
        (0.5, 1, ("0.5 of 1", "1 (1 of 1)")),
    ],
)
def test_a_ratio_that_is_not_whole_devices_is_refused_with_the_nearest_that_work(
    ratio: object, devices: int, words: tuple[str, ...]
) -> None:
    message = refused([1, 1, ratio, 1], devices)
    assert all(word in message for word in words), message
    for near in re.findall(r"(\S+) \(\d+ of \d+\)", message):
        assert placed([1, 1, near, 1], devices)


# --- nodes and classes

NODES = [
    ("skips to the boundary", [0.375, 0.375, 0.25, 0.25], ((0, 1, 2), (4, 5, 6), (0, 1), (2, 3)), ()),
    ("straddles when it fits no other way", [0.375, 0.625, 1, 1], ((0, 1, 2), (3, 4, 5, 6, 7), ALL, ALL), ("critic",)),
    ("starts at a boundary and is larger than a node", [1, 0.75, 0.25, 1], (ALL, ALL[:6], (6, 7), ALL), ()),
]


@pytest.mark.parametrize(("vector", "expected", "warned"), [n[1:] for n in NODES], ids=[n[0] for n in NODES])
def test_lanes_follow_node_boundaries(
    vector: list[float], expected: tuple[Ranks, ...], warned: tuple[str, ...]
) -> None:
    placement = placed(vector, 8, "[{count: 2, devices: 4}]")
    assert ranks_of(placement) == dict(zip(FOUR, expected, strict=True))
    assert len(placement.warnings) == len(warned)
    for name, warning in zip(warned, placement.warnings, strict=True):
        assert all(word in warning for word in (name, "straddles", "0", "1"))


def test_a_skipped_device_is_idle() -> None:
    assert placed([0.375, 0.375, 0.25, 0.25], 8, "[{count: 2, devices: 4}]").idle_ranks == (7,)


def test_a_pinned_model_counts_its_class_and_the_others_the_rest() -> None:
    pinned = same({"ratio": 1, "on": "V100"}, ("ref", "reward")) | same(1, ("actor", "critic"))
    ranks = ranks_of(placed(pinned, 4, MIXED))
    assert ranks == {"actor": (0, 1), "critic": (0, 1), "ref": (2, 3), "reward": (2, 3)}
    half = pinned | {"reward": {"ratio": 0.5, "on": "V100-32G"}}
    assert ranks_of(placed(half, 4, MIXED))["reward"] == (2,)


def test_a_pinned_training_side_leaves_the_rest_to_inference() -> None:
    pinned = same(1, SIX) | same({"ratio": 1, "on": "V100"}, ("actor", "critic"))
    assert ranks_of(placed(pinned, 4, MIXED)) == dict.fromkeys(SIX, (0, 1)) | {"actor": (2, 3), "critic": (2, 3)}


def test_a_vector_that_fits_no_class_is_refused_with_a_mapping_that_works() -> None:
    message = refused([1, 1, 0.5, 0.75], 4, MIXED)
    assert "actor would span the device classes A100-80G, V100-32G" in message
    assert "such as {actor: {ratio: 1, on: A100-80G}, ...}" in message
    suggested = re.search(r"or allows it: (\{.*\})$", message)
    assert suggested is not None
    assert placed(yaml.safe_load(suggested[1]), 4, MIXED)["actor"].ranks == (0, 1, 2, 3)


def test_a_model_may_span_classes_when_asked_and_shares_rows_by_speed() -> None:
    placement = placed(same(1, span_classes=True), 4, MIXED)
    assert placement["ref"].layout.row_shares == (312, 312, 125, 125)
    given = placed(same(1, span_classes=True, ref={"ratio": 1, "row_shares": [2, 2, 1, 1]}), 4, MIXED)
    assert given["ref"].layout.row_shares == (2, 2, 1, 1)


def test_measured_speeds_take_the_place_of_those_of_the_classes() -> None:
    nodes = "[{devices: 2, class: A100-80G, speed: 1}, {devices: 2, class: V100-32G, speed: 0.3}]"
    shares = placed(same(1, span_classes=True), 4, nodes)["ref"].layout.row_shares
    assert shares == (1, 1, Fraction(3, 10), Fraction(3, 10))


def test_explicit_ranks_may_span_classes_and_share_rows_by_speed() -> None:
    explicit = same({"ranks": [0, 1]}, ref={"ranks": [3, 1]})
    layout = placed(explicit, 4, MIXED)["ref"].layout
    assert dict(zip(layout.ranks, layout.row_shares, strict=True)) == {1: 312, 3: 125}


def test_row_shares_follow_the_ranks_as_written() -> None:
    explicit = same({"ranks": [0, 1]}, ref={"ranks": [3, 1], "row_shares": [2, 1]})
    layout = placed(explicit, 4)["ref"].layout
    assert dict(zip(layout.ranks, layout.row_shares, strict=True)) == {3: 2, 1: 1}


def test_equal_devices_share_rows_equally() -> None:
    assert all(model.layout.row_shares == () for model in placed([1, 1, 0.5, 0.5]).models)


# --- tensor parallel


def test_tensor_parallel_ranks_make_one_replica() -> None:
    layout = placed(None, 8, "", "models.actor.tp=4")["actor"].layout
    assert (layout.ranks, layout.dims.tp, layout.dp, layout.row_shares) == (ALL, 4, 2, ())


def test_a_shadow_has_its_own_tensor_parallel_ranks() -> None:
    placement = placed(same(0.5, SIX), 8, "", "models.actor.tp=2", "models.actor.shadow.tp=4")
    assert (placement["actor"].layout.dp, placement["actor.shadow"].layout.dp) == (2, 1)
    assert placement["actor"].settings.tp == 2
    assert placement["actor.shadow"].settings.tp == 4


def test_a_replica_on_one_class_is_as_fast_as_that_class() -> None:
    placement = placed(same(1, span_classes=True), 4, MIXED, "models.ref.tp=2")
    assert placement["ref"].layout.row_shares == (312, 125)
    assert placement["reward"].layout.row_shares == (312, 312, 125, 125)


def test_a_replica_without_rows_is_named() -> None:
    """A share of 0 is valid: the rows are those of the other replicas."""
    plan = placed(same(1, ref={"ratio": 1, "row_shares": [0, 3, 1, 1]}), 4)
    assert [text.partition(" by")[0] for text in plan.warnings] == ["ref: replica 0 of 4 has no rows"]
    assert not placed(same(1, ref={"ratio": 1, "row_shares": [1, 3, 1, 1]}), 4).warnings


def test_row_shares_are_of_replicas() -> None:
    entry = {"ratio": 1, "row_shares": [2, 1]}
    assert placed(same(1, ref=entry), 4, "", "models.ref.tp=2")["ref"].layout.row_shares == (2, 1)


def test_replicas_are_cut_from_ranks_in_ascending_order() -> None:
    explicit = same({"ranks": [0, 1]}, ref={"ranks": [7, 2, 5, 3]})
    layout = placed(explicit, 8, "", "models.ref.tp=2")["ref"].layout
    assert layout.sets("tp") == ((2, 3), (5, 7))


# --- properties


def random_cluster(draw: random.Random) -> Cluster:
    nodes = tuple({"count": draw.randint(1, 2), "devices": draw.randint(1, 4)} for _ in range(draw.randint(1, 3)))
    return Cluster.of(ClusterSpec.model_validate({"nodes": nodes}))


def test_packing_never_overlaps_models_of_one_lane() -> None:
    """First fit, so a model lies in the first lane that had room when its turn came."""
    draw = random.Random(0)
    for _ in range(500):
        cluster = random_cluster(draw)
        size = len(cluster.ranks)
        requests = [DeviceRequest(f"m{i}", draw.randint(1, size)) for i in range(draw.randint(1, 6))]
        packing = pack(requests, cluster.ranks, cluster)
        ends = [0]
        for request in requests:
            ranks = packing.ranks[request.name]
            assert len(ranks) == request.count
            assert ranks == tuple(range(ranks[0], ranks[0] + request.count))
            lane = next((i for i, end in enumerate(ends) if end + request.count <= size), len(ends))
            ends += [0] * (lane == len(ends))
            assert ranks[0] >= ends[lane], f"{request} overlaps its neighbour"
            ends[lane] = ranks[-1] + 1


def test_models_that_fit_together_are_disjoint() -> None:
    draw = random.Random(1)
    for _ in range(200):
        counts = [draw.randint(1, 3) for _ in range(4)]
        placement = placed([Fraction(count, 12) for count in counts], 12)
        assert placement.co_located_pairs() == []


def test_training_and_inference_are_disjoint_and_cover() -> None:
    draw = random.Random(2)
    accepted = 0
    for _ in range(500):
        size = draw.randint(2, 8)
        vector = [Fraction(draw.randint(1, size), size) for _ in SIX]
        try:
            placement = placed(vector, size)
        except UserError as error:
            suggested = re.search(r"the nearest that does is (\[.*?\])", str(error))
            assert suggested is not None
            placement = placed(yaml.safe_load(suggested[1]), size)
        accepted += 1
        training = {rank for name in ("actor", "critic") for rank in placement[name].ranks}
        inference = {rank for name in SIX if name not in ("actor", "critic") for rank in placement[name].ranks}
        assert max(training) < min(inference)
        assert training | inference | set(placement.idle_ranks) == set(range(size))
    assert accepted == 500
