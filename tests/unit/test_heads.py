"""A model's head follows from its operators; if it has two, a rollout engine has one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from small_runs import TINY, placed_model, plan_of, spec_of

from flexrlhf.config.model_settings import Head, LoraSpec, ModelSpec
from flexrlhf.config.placement_settings import ClusterSpec
from flexrlhf.config.spec import RolloutSpec, SyncSpec
from flexrlhf.errors import UserError
from flexrlhf.guideline.costs.cost_model import transformer_of
from flexrlhf.guideline.simulation.pricing import synced_weights
from flexrlhf.memory.budget import Compute, SequenceLengths, Sizing
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import GENERATE, Graph, Operator
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.place import place
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.placement.placement import Placement
from flexrlhf.placement.ratios import Roles
from flexrlhf.plan.algorithm_graph import heads_of
from flexrlhf.plan.model_checks import check_models
from flexrlhf.weights.decoder_sizes import Sizes
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.shapes import model_shape
from flexrlhf.weights.sync_plan import SyncPlan

LOGPROBS = Operator("logprobs", "forward", "actor", TEXT, ("logprobs",))
VALUES = Operator("values", "forward", "actor", TEXT, ("values",))
TRAIN = Operator("train", "train", "actor", TEXT)
ADVANTAGES = Operator("advantages", "combine", "actor", ("values", "scores"), ("advantages",))


def graph(*operators: Operator, evaluation: tuple[Operator, ...] = ()) -> Graph:
    return Graph(operators, ("actor",), "prompts", ("prompts", "prompt_mask"), evaluation)


def writing(name: str) -> Operator:
    return Operator(name, "forward", "actor", TEXT, (name,))


# --- heads that an algorithm needs


@pytest.mark.parametrize(
    ("operators", "head"),
    [
        ((GENERATE,), "causal"),
        ((LOGPROBS,), "causal"),
        ((writing("ref_logprobs"),), "causal"),
        ((TRAIN,), "causal"),
        ((VALUES,), "scalar"),
        ((writing("scores"),), "scalar"),
        ((writing("scores.cost"),), "scalar"),
        ((writing("token_scores"),), "scalar"),
        ((replace(TRAIN, quantities=("values",)),), "scalar"),
        ((replace(TRAIN, quantities=("scores",)), VALUES, ADVANTAGES), "scalar"),
        ((GENERATE, VALUES), "both"),
        ((LOGPROBS, writing("scores")), "both"),
        ((TRAIN, VALUES), "both"),
        ((replace(TRAIN, quantities=("logprobs", "values")),), "both"),
        ((replace(LOGPROBS, writes=("logprobs", "values")),), "both"),
        # a combine reads nothing of the model on its ranks
        ((LOGPROBS, ADVANTAGES), "causal"),
        ((), "causal"),
    ],
)
def test_the_head_is_what_the_operators_compute(operators: tuple[Operator, ...], head: Head) -> None:
    assert heads_of(graph(*operators)) == {"actor": head}


def test_evaluations_count() -> None:
    assert heads_of(graph(VALUES, evaluation=(GENERATE,))) == {"actor": "both"}


def test_each_role_has_its_own() -> None:
    found = plan_of([0.5] * 4, 2)
    assert heads_of(found.graph) == {"actor": "causal", "critic": "scalar", "ref": "causal", "reward": "scalar"}
    assert {model.role: model.head for model in found.placement.models} == heads_of(found.graph)
    assert {role: ParameterName.SCALAR_HEAD in shape.names for role, shape in found.shapes.items()} == {
        role: head == "scalar" for role, head in heads_of(found.graph).items()
    }


@pytest.mark.parametrize("rollout", [False, True])
def test_a_shadow_has_both_heads_and_a_rollout_engine_one(rollout: bool) -> None:
    spec = spec_of([0.5] * 2, 2, *(["rollout.engine=vllm"] if rollout else []))
    roles = Roles(("actor",), ("actor",), {"actor": "both"}, "actor" if rollout else None)
    placement = place(spec, roles, True, Cluster.of(ClusterSpec(devices=2)))
    follower = "actor.rollout" if rollout else "actor.shadow"
    assert {model.name: model.head for model in placement.models} == {
        "actor": "both",
        follower: "causal" if rollout else "both",
    }


# --- transfer to a rollout engine


def trunk_shape(config: dict[str, Any] | None = None) -> ModelShape:
    shape = model_shape("actor", ModelSpec(init=config or TINY), "both")
    assert shape is not None
    return shape


def trunk(ranks: tuple[int, ...], name: str = "actor", **settings: Any) -> PlacedModel:
    return replace(placed_model(name, ranks, **settings), head="both")


ROLLOUT = PlacedModel(
    ModelName("actor.rollout"), Layout((2,)), False, ModelSpec(init=TINY, engine="vllm"), RolloutSpec(engine="vllm")
)
ADAPTED = trunk_shape().with_adapters("actor", LoraSpec(rank=2))


@pytest.mark.parametrize("shape", [trunk_shape(), ADAPTED], ids=["plain", "adapters"])
@pytest.mark.parametrize("settings", [{}, {"zero": 3}, {"zero": 3, "engine": "deepspeed"}], ids=str)
def test_nothing_of_the_second_head_is_sent_to_a_rollout_engine(settings: dict[str, Any], shape: ModelShape) -> None:
    source, shadow = trunk((0, 1), **settings), trunk((2,), "actor.shadow")
    names = set(shape.trained_parts(ROLLOUT, 2))
    plain = model_shape("actor", ModelSpec(init=TINY))
    assert plain is not None
    assert ParameterName.SCALAR_HEAD not in names and set(shape.parts_on(ROLLOUT, 2)) == plain.names
    assert ParameterName.SCALAR_HEAD in shape.trained_parts(shadow, 2)
    assert ParameterName.SCALAR_HEAD in shape.trained_parts(source, 0)
    # the same tensors are gathered as of a model without that head
    without = plain if shape is not ADAPTED else plain.with_adapters("actor", LoraSpec(rank=2))
    found, expected = (SyncPlan.bytes_by_link(source, ROLLOUT, each, 10**9) for each in (shape, without))
    assert found == expected


def test_a_shadow_is_sent_both_heads() -> None:
    """8 numbers more in float32."""
    source, shadow, plain = trunk((0,)), trunk((2,), "actor.shadow"), model_shape("actor", ModelSpec(init=TINY))
    assert plain is not None
    sent = [SyncPlan.all_bytes(source, shadow, shape) for shape in (plain, trunk_shape())]
    assert sent[1] - sent[0] == 4 * 8


def test_the_shape_of_a_copy_is_found_once() -> None:
    shape = trunk_shape()
    assert shape.of_copy(ROLLOUT) is shape.of_copy(ROLLOUT)
    assert shape.of_copy(trunk((0,))) is shape
    assert ADAPTED.of_copy(ROLLOUT).adapters == {
        name for name in ADAPTED.of_copy(ROLLOUT).names if name.endswith("_proj.weight")
    }
    assert ParameterName.SCALAR_HEAD in ADAPTED.adapters


def test_the_guideline_prices_the_sync_without_it() -> None:
    plain = model_shape("actor", ModelSpec(init=TINY))
    assert plain is not None
    spec = plan_of([0.5] * 4, 2).spec
    assert synced_weights(ROLLOUT, trunk_shape(), spec) == synced_weights(ROLLOUT, plain, spec)


# --- costs


def test_a_trunk_with_both_heads_costs_what_a_causal_model_does() -> None:
    plain = model_shape("actor", ModelSpec(init=TINY))
    assert plain is not None
    causal = transformer_of(plain, "causal", is_adapted=False)
    assert transformer_of(trunk_shape(), "both", is_adapted=False) == causal


KINDS: tuple[Literal["generate", "forward", "train"], ...] = ("generate", "forward", "train")
WIDE = TINY | {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 10_000}
"""Its logits need more than the gradients of a layer."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_the_second_head(dtype: str) -> None:
    """Weight, gradient, moments (and a master weight) of 64 numbers; of each token the gradient of its hidden state."""
    rows, item = 4, 4 if dtype == "float32" else 2
    phases, states = [], []
    heads: tuple[Head, ...] = ("causal", "both")
    for head in heads:
        model = replace(placed_model("actor", (0,), init=WIDE, dtype=dtype), head=head)
        shape = model_shape("actor", model.settings, head)
        assert shape is not None
        sizing = Sizing(Placement((model,), 1), {"actor": shape}, SequenceLengths(6, 10), SyncSpec())
        state = sizing.state(model, 0)
        assert state is not None
        states.append(state)
        phases.append([sizing.phases(Compute(kind, "actor", rows), 0) for kind in KINDS])
    causal, both = states
    assert (both.weights - causal.weights, both.gradients - causal.gradients) == (item * 64, 4 * 64)
    assert both.optimizer - causal.optimizer == (8 if item == 4 else 12) * 64
    first, second = phases
    assert second[:2] == first[:2]
    more = second[2][0].part_bytes - first[2][0].part_bytes
    assert more == rows * 16 * (item * 64 + 8)


# --- families


def test_other_families_are_refused() -> None:
    """Gemma's head scales and caps."""
    sizes = Sizes(1, 8, 16, 2, 2, 4, 32, family="gemma2")
    shape, cluster = replace(trunk_shape(), sizes=sizes), Cluster.of(ClusterSpec(devices=1))
    model = trunk((0,))
    check_models(Placement((model,), 1), {"actor": trunk_shape()}, cluster)
    check_models(Placement((replace(model, head="causal"),), 1), {"actor": shape}, cluster)
    with pytest.raises(UserError, match="^models.actor: only .* can share a trunk .* found gemma2; use one of"):
        check_models(Placement((model,), 1), {"actor": shape}, cluster)
    with pytest.raises(UserError, match="found an unknown family"):
        check_models(Placement((model,), 1), {}, cluster)


def test_a_reward_model_is_no_trunk(tmp_path: Any) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}')
    save_file({"model.norm.weight": torch.zeros(8), "score.weight": torch.zeros(1, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="a reward model without a language head"):
        model_shape("actor", ModelSpec(path=str(tmp_path)), "both")
