"""The rows of the axes of parallelism agree with the degrees, the settings and the engines that name them."""

from __future__ import annotations

from flexrlhf.config.axes import AXES, INNER, OF_COPIES, OF_EXPERTS, OF_PARTS, OUTER, ParallelDims
from flexrlhf.config.engines import EngineFacts
from flexrlhf.config.model_settings import ModelSpec, ShadowSpec
from flexrlhf.config.placement_settings import OperatorPlacement
from flexrlhf.config.spec import RolloutSpec
from flexrlhf.placement.layout import Layout

NAMES = tuple(axis.name for axis in AXES)
DIMS = ParallelDims(tp=2, pp=3, cp=2, ep=4)


def test_every_axis_is_a_degree_and_a_setting_of_models() -> None:
    assert ParallelDims._fields == NAMES
    for section in (ModelSpec, ShadowSpec, OperatorPlacement):
        assert set(NAMES) <= set(section.model_fields)
    assert set(RolloutSpec.AXES) == {*NAMES} & set(RolloutSpec.model_fields)
    assert all(facts.axes <= {*NAMES} for facts in EngineFacts.all_engines())
    assert ModelSpec(tp=2, ep=4).dims == ParallelDims(tp=2, ep=4)
    assert RolloutSpec(engine="vllm", tp=2, pp=3).dims == ParallelDims(tp=2, pp=3)


def test_settings_that_an_axis_needs_are_settings_of_models() -> None:
    for axis in AXES:
        for name, value in axis.crosses_with:
            assert getattr(ModelSpec(**{name: value}), name) == value
        for name, values in axis.goes_with.items():
            assert [getattr(ModelSpec(**{name: value}), name) for value in values] == list(values)


def test_each_axis_is_of_one_kind() -> None:
    assert sorted(NAMES) == sorted(axis.name for axis in OF_PARTS + OF_COPIES + OF_EXPERTS)
    assert {*INNER, *OUTER} == {*OF_PARTS, *OF_COPIES}


def test_products_of_degrees() -> None:
    assert (DIMS.width, DIMS.replica, DIMS.parts, DIMS.row_parts, DIMS.expert_parts) == (4, 12, 6, 2, 4)
    assert DIMS.without(OF_COPIES) == ParallelDims(tp=2, pp=3, ep=4) and DIMS.text() == "tp 2, pp 3, cp 2, ep 4"


def test_ranks_along_all_axes_and_replicas_are_all_ranks() -> None:
    """Every rank has one place along each axis of a replica, and no other has all of them."""
    layout = Layout(tuple(range(100, 124)), DIMS)
    places = {
        (layout.replica(rank), *(layout.index(axis.name, rank) for axis in INNER + OUTER)) for rank in layout.ranks
    }
    assert len(places) == len(layout.ranks)
    for axis in AXES:
        sets = layout.sets(axis.name)
        assert sorted(sum(sets, ())) == list(layout.ranks) and {len(each) for each in sets} == {DIMS.of(axis)}
        for each in sets:
            assert [layout.index(axis.name, rank) for rank in each] == list(range(DIMS.of(axis)))


def test_a_copy_of_another_engine_has_the_degrees_that_all_engines_share() -> None:
    assert ModelSpec(tp=2, cp=2, ep=2).of_copy({"engine": "megatron"}).dims == ParallelDims(tp=2)
    assert ModelSpec(tp=2, cp=2, ep=2).of_copy({"engine": "megatron", "pp": 2}).dims == ParallelDims(tp=2, pp=2)
