"""Low-rank adapters on paper equal those that peft makes: names, shapes, and what is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import HEADS, TINY, placed_model, plan_of
from transformers import PreTrainedModel

from flexrlhf.config.model_settings import LoraSpec, ModelSpec
from flexrlhf.errors import UserError
from flexrlhf.strategies.instructions import Sync
from flexrlhf.weights.model_shape import (
    ModelShape,
)
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.shapes import model_shape

SMALL = TINY | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = [SMALL, SMALL | {"model_type": "qwen2"}, SMALL | {"attention_bias": True, "mlp_bias": True}]
LINEAR = ["down_proj", "gate_proj", "up_proj", "k_proj", "o_proj", "q_proj", "v_proj"]
PER_LAYER = 2 * (8 + 8) + 2 * (8 + 4) + 3 * (8 + 16)
"""Inputs and outputs of q and o, of k and v, of gate, up and down: so many numbers has a layer at rank 1."""


def plain(role: str, config: dict[str, Any]) -> ModelShape:
    shape = model_shape(role, ModelSpec(init=config), HEADS.get(role, "causal"))
    assert shape is not None
    return shape


def adapted(role: str, config: dict[str, Any], **lora: Any) -> ModelShape:
    return plain(role, config).with_adapters(role, LoraSpec(**lora))


def real_model(role: str, config: dict[str, Any], seed: int = 0, **lora: Any) -> PreTrainedModel:
    pytest.importorskip("peft")
    from flexrlhf.engines.models import load_model

    return load_model(placed_model(role, (0,), init=config, lora=LoraSpec(**lora)), seed)


# --- as peft makes them


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", FAMILIES, ids=["llama", "qwen2", "llama with biases"])
@pytest.mark.parametrize("lora", [{}, {"rank": 3}, {"rank": 2, "targets": ("q_proj", "down_proj")}], ids=str)
def test_names_shapes_and_what_is_trained_are_those_of_peft(
    lora: dict[str, Any], config: dict[str, Any], tied: bool, role: str
) -> None:
    config = config | {"tie_word_embeddings": tied}
    model, shape = real_model(role, config, **lora), adapted(role, config, **lora)
    real = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert dict(shape.parameters) == real
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert dict(shape.trained) == trained


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_of_a_model_with_experts_attention_alone_has_adapters(kind: str, role: str) -> None:
    """peft itself would adapt router and experts, and takes the names of a dense or shared MLP for theirs."""
    config = SMALL | {"model_type": kind, "num_experts": 4} | ({"mlp_only_layers": [0]} if kind == "qwen2_moe" else {})
    model, shape = real_model(role, config), adapted(role, config)
    assert dict(shape.parameters) == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name, _ in shape.trained} == trained
    assert all(".self_attn." in name for name in trained - {"score.weight"}) and len(trained) >= 2 * 4 * 2
    for target in ("gate_proj", "gate", "experts"):
        with pytest.raises(UserError, match=f"no module '{target}' in attention or experts.*: .*, down_proj"):
            adapted(role, config, targets=(target,))
    model, shape = (make(role, config, targets=("q_proj", "down_proj")) for make in (real_model, adapted))
    assert dict(shape.parameters) == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = dict(shape.trained)
    assert set(found) == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    experts = "model.layers.1.mlp.experts"
    inputs = dict(shape.parameters)[f"{experts}.down_proj"][2]
    assert found[f"{experts}.lora_A.default.down_proj"] == (config["num_experts"], 8, inputs)
    assert found[f"{experts}.lora_B.default.down_proj"] == (config["num_experts"], 8, 8)


def test_a_copy_that_is_not_trained_has_the_same_parameters() -> None:
    shape = adapted("actor", SMALL)
    pytest.importorskip("peft")
    from flexrlhf.engines.models import load_model

    model = load_model(placed_model("actor.shadow", (0,), init=SMALL, lora=LoraSpec()), 0)
    assert dict(shape.parameters) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_adapters_are_drawn_from_the_seed_alike_on_every_rank_and_copy(role: str) -> None:
    first, again, other = (real_model(role, SMALL, seed) for seed in (5, 5, 6))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())
    name = next(name for name in first.state_dict() if "lora_A" in name)
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])


# --- on paper


def test_names_are_sorted() -> None:
    names = [name for name, _ in adapted("critic", SMALL).parameters]
    assert names == sorted(names)


def test_an_adapter_stands_beside_the_weight_and_the_bias_that_it_leaves_alone() -> None:
    config = SMALL | {"model_type": "qwen2"}
    before = dict(plain("actor", config).parameters)
    after = dict(adapted("actor", config, rank=3, targets=("k_proj",)).parameters)
    path = "model.layers.0.self_attn.k_proj"
    assert after[f"{path}.base_layer.weight"] == before[f"{path}.weight"] == (4, 8)
    assert after[f"{path}.base_layer.bias"] == before[f"{path}.bias"] == (4,)
    assert after[f"{path}.lora_A.default.weight"] == (3, 8)
    assert after[f"{path}.lora_B.default.weight"] == (4, 3)
    assert f"{path}.weight" not in after
    assert "model.layers.0.self_attn.q_proj.weight" in after


@pytest.mark.parametrize(("rank", "role", "head"), [(1, "actor", 0), (8, "actor", 0), (3, "critic", 8)])
def test_the_number_of_trained_parameters(rank: int, role: str, head: int) -> None:
    """Two layers; a critic also trains its head of 8 numbers."""
    shape = adapted(role, SMALL, rank=rank)
    added = 2 * rank * PER_LAYER
    assert shape.num_trained == added + head
    assert shape.num_parameters == plain(role, SMALL).num_parameters + added


def test_candidates_are_the_linear_layers_without_embeddings_and_heads() -> None:
    for role in ("actor", "critic"):
        assert sorted(plain(role, SMALL).lora_candidates) == sorted(LINEAR)


@pytest.mark.parametrize(
    ("target", "hint"), [("q_prj", "did you mean 'q_proj'"), ("lm_head", ""), ("score", ""), ("zzz", "")]
)
def test_an_unknown_target_is_refused_with_the_candidates(target: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        adapted("critic", SMALL, targets=("q_proj", target))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"models.critic.lora.targets: no module {target!r}")
    assert hint in message
    assert all(name in message for name in LINEAR)


def test_no_target_at_all_is_refused_with_the_candidates() -> None:
    with pytest.raises(UserError, match="models.actor.lora.targets: names no module; candidates: down_proj, .*v_proj$"):
        adapted("actor", SMALL, targets=())


# --- in a plan


def test_only_adapters_and_the_scalar_head_travel_to_a_shadow() -> None:
    """One layer; 4 bytes a number."""
    plan = plan_of([0.5] * 6, 2, "models.actor.lora={rank: 2}", "models.critic.lora={rank: 3}")
    numbers = {"actor": 2 * (4 * (8 + 8) + 3 * (8 + 16)), "critic": 3 * (4 * (8 + 8) + 3 * (8 + 16)) + 8}
    syncs = [x for x in plan.schedule.instructions if isinstance(x, Sync)]
    assert {sync.source: plan.traffic.sync_bytes(sync) for sync in syncs} == {n: 4 * c for n, c in numbers.items()}
    for role, count in numbers.items():
        parts = plan.shapes[role].trained_parts(plan.placement[role], 0)
        assert sum(part.num_elements for part in parts.values()) == count
        assert set(parts) == plan.shapes[role].adapters


# --- merged, for an engine that has no place for adapters


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("config", FAMILIES, ids=["llama", "qwen2", "llama with biases"])
@pytest.mark.parametrize("lora", [{}, {"rank": 2, "targets": ("q_proj", "down_proj")}], ids=str)
def test_a_merged_model_has_the_parameters_of_the_plain_one(
    lora: dict[str, Any], config: dict[str, Any], role: str
) -> None:
    merged = adapted(role, config, **lora).merged
    assert merged.parameters == plain(role, config).parameters


def test_of_a_merged_model_the_weights_change_that_adapters_stand_beside() -> None:
    """Neither their biases, nor weights without an adapter."""
    shape = adapted("actor", SMALL | {"model_type": "qwen2"}, targets=("k_proj", "up_proj"))
    changed = [name for name, _ in shape.merged.trained]
    paths = [f"model.layers.{layer}.{path}" for layer in (0, 1) for path in ("mlp.up_proj", "self_attn.k_proj")]
    assert changed == [f"{path}.weight" for path in paths]


def test_a_merged_weight_is_computed_from_parameters_that_peft_has() -> None:
    shape = adapted("actor", SMALL, rank=3)
    merged, known = shape.merged, dict(shape.parameters)
    names = [name for name, _ in merged.trained]
    for name, (outputs, inputs) in merged.trained:
        assert [known[part] for part in ParameterName(name).merged_from] == [
            (outputs, inputs),
            (3, inputs),
            (outputs, 3),
        ]
    changing = {name for name, _ in shape.trained}
    bases = {part for name in names for part in ParameterName(name).merged_from} - changing
    assert {part for name in names for part in ParameterName(name).merged_from} >= changing and len(bases) == len(names)


def test_only_an_engine_that_generates_holds_them_merged() -> None:
    """A shadow that forwards keeps them apart, and so can the reference do without."""
    plan = plan_of([0.5] * 6, 2, "rollout.engine=vllm", "models.actor.lora={}", "models.critic.lora={}")
    actor, critic = plan.shapes["actor"], plan.shapes["critic"]
    assert actor.of_copy(plan.placement["actor.rollout"]) == actor.merged != actor
    assert actor.of_copy(plan.placement["actor"]) is actor
    assert critic.of_copy(plan.placement["critic.shadow"]) is critic
    bare = plan_of(None, 2, "rollout.engine=vllm")
    assert bare.shapes["actor"].of_copy(bare.placement["actor.rollout"]) is bare.shapes["actor"]


def test_only_the_weights_that_adapters_change_travel_to_an_engine() -> None:
    """One layer: q k v o of 8 x 8 and gate up down of 8 x 16, in 2 bytes; one bucket with a checksum of 8 bytes."""
    plan = plan_of([0.5] * 6, 2, "rollout={engine: vllm, dtype: bfloat16}", "models.actor.lora={rank: 2}")
    sync = next(x for x in plan.schedule.instructions if isinstance(x, Sync) and x.source == "actor")
    assert plan.traffic.sync_bytes(sync) == 2 * (4 * 8 * 8 + 3 * 8 * 16)


# --- apart, in an engine that adds them itself

SEPARATE = "rollout={engine: vllm, adapters: separate, dtype: bfloat16}"


def test_only_adapters_travel_to_an_engine_that_adds_them() -> None:
    """One layer, in 2 bytes; of the actor's value head nothing, which generation has no use for."""
    plan = plan_of([0.5] * 6, 2, SEPARATE, "models.actor.lora={rank: 2}")
    sync = next(x for x in plan.schedule.instructions if isinstance(x, Sync) and x.source == "actor")
    assert plan.traffic.sync_bytes(sync) == 2 * 2 * (4 * (8 + 8) + 3 * (8 + 16)) and not sync.gathers
    engine, shape = plan.placement["actor.rollout"], plan.shapes["actor"]
    assert shape.of_copy(engine) is shape and set(shape.trained_parts(engine, 1)) == shape.adapters


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallel_ranks_get_their_part_of_a_or_b(tp: int, zero: int) -> None:
    """A of q, k, v, gate and up, and B of o and down, are whole on each; nothing crosses where ranks train all."""
    plan = plan_of(None, 2, SEPARATE, f"rollout.tp={tp}", "models.actor.lora={rank: 2}", f"models.actor.zero={zero}")
    engine, shape = plan.placement["actor.rollout"], plan.shapes["actor"]
    whole, split = 2 * (5 * 8 + 2 * 8), 2 * (3 * 8 + 2 * 16 + 8 + 16)
    stored = [sum(p.num_elements for p in shape.trained_parts(engine, rank).values()) for rank in (0, 1)]
    assert stored == [whole + split // tp] * 2
    sync = next(x for x in plan.schedule.instructions if isinstance(x, Sync))
    assert (plan.traffic.sync_bytes(sync) == 0) == (zero == 0)
    # each rank lacks half of what it generates with
    assert zero == 0 or tp == 2 or plan.traffic.sync_bytes(sync) == 2 * (whole + split)


@pytest.mark.parametrize(
    ("lora", "allocated"),
    [
        ({}, LINEAR),
        ({"targets": ("q_proj", "down_proj")}, ["q_proj", "k_proj", "v_proj", "down_proj"]),
        ({"targets": ("up_proj", "gate_proj")}, ["up_proj", "gate_proj"]),
    ],
)
@pytest.mark.parametrize(("rank", "padded"), [(1, 1), (3, 8), (8, 8), (65, 128), (512, 512)])
def test_vllm_allocates_padded_ranks_and_whole_groups(
    lora: dict[str, Any], allocated: list[str], rank: int, padded: int
) -> None:
    shape = adapted("actor", SMALL, rank=rank, **lora)
    sizes = dict(shape.as_vllm_allocates("actor", LoraSpec(rank=rank, **lora)).parameters)
    matrices = {name: size for name, size in sizes.items() if ParameterName(name).without_adapter[1]}
    assert {name.split(".")[-4] for name in matrices} == set(allocated)
    assert {size[0 if "lora_A" in name else 1] for name, size in matrices.items()} == {padded}
    base = {name: size for name, size in sizes.items() if name not in matrices}
    assert {ParameterName(name).without_adapter[0]: size for name, size in base.items()} == dict(
        plain("actor", SMALL).parameters
    )


def test_a_rank_of_the_most_features_of_a_layer() -> None:
    assert plan_of(None, 1, "models.actor.lora={rank: 8}").model("actor").lora is not None
