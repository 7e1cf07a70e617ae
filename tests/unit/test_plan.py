"""The plan: bytes of moves and weights by hand, models by role, and parameter shapes as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_runs import TINY, plan_of, spec_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from flexrlhf.config.model_families import Families
from flexrlhf.config.model_settings import Head, ModelSpec
from flexrlhf.engines.router_biases import router_biases
from flexrlhf.errors import UserError
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Move, Sync
from flexrlhf.weights.families import decoder_shapes
from flexrlhf.weights.shapes import model_shape
from flexrlhf.weights.shards import make_buckets

TINY_ACTOR_PARAMETERS = 2 * 32 * 8 + 8 + 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8
"""Embedding and head, final norm, q k v o, gate up down, two norms."""
TINY_CRITIC_PARAMETERS = TINY_ACTOR_PARAMETERS - 32 * 8 + 8


# --- bytes


def test_bytes_of_the_moves_of_interleaving() -> None:
    """4 prompts x 2 samples; 4 + 8 tokens a row: int32 ids and a byte of mask; float32 log-probs and a score."""
    plan = plan_of([1, 1, 0.5, 0.5], 2, "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2")
    out, back = [x for x in plan.schedule.instructions if isinstance(x, Move)]
    assert out.columns == ("tokens", "attention_mask")
    assert plan.traffic.move_bytes(out) == (4 + 4) * 12 * (4 + 1)
    assert back.columns == ("ref_logprobs", "scores")
    assert plan.traffic.move_bytes(back) == 4 * (8 * 4) + 4 * 4


def test_a_column_with_a_value_after_the_text_is_one_wider() -> None:
    plan = plan_of([0.5] * 4, 2, "algorithm.prompts_per_step=4")
    back = next(x for x in plan.schedule.instructions if isinstance(x, Move) and "values" in x.columns)
    assert back.columns == ("scores", "values")
    assert plan.traffic.move_bytes(back) == 4 * 4 + 4 * (8 + 1) * 4


def weight_bytes(plan: Plan, rank: int) -> dict[str, int | None]:
    states = {model.name: plan.state(model, rank) for model in plan.placement.on_rank(rank)}
    return {name: state and state.weights for name, state in states.items()}


def test_weights_held_by_each_rank() -> None:
    plan = plan_of([1, 1, 0.5, 0.5], 2)
    actor, critic = TINY_ACTOR_PARAMETERS * 4, TINY_CRITIC_PARAMETERS * 4
    assert weight_bytes(plan, 0) == {"actor": actor, "critic": critic, "ref": actor}
    assert weight_bytes(plan, 1) == {"actor": actor, "critic": critic, "reward": critic}


@pytest.mark.parametrize(
    ("sizes", "limit", "buckets"),
    [
        ((), 10, []),
        ((4, 4, 4), 8, [range(0, 2), range(2, 3)]),
        ((4, 4, 4), 100, [range(0, 3)]),
        ((40, 4, 4), 8, [range(0, 1), range(1, 3)]),
        ((4, 40, 4), 8, [range(0, 1), range(1, 2), range(2, 3)]),
    ],
)
def test_buckets_are_whole_tensors_within_the_limit(sizes: tuple[int, ...], limit: int, buckets: list[range]) -> None:
    assert make_buckets(sizes, limit) == buckets


# --- models by role


def test_the_critic_starts_from_the_reward_and_the_reference_from_the_actor() -> None:
    spec = plan_of(None, 1, "models.actor.init.vocab_size=64", "models.critic.optimizer.learning_rate=0.5").spec
    actor, critic, ref, reward = spec.models.actor, spec.models.critic, spec.models.ref, spec.models.reward
    assert actor and critic and ref and reward
    assert ref.init == actor.init != reward.init
    assert critic.init == reward.init
    assert critic.optimizer.learning_rate == 0.5 != reward.optimizer.learning_rate


@pytest.mark.parametrize(
    ("overrides", "rate"),
    [
        ((), 9e-6),
        (("models.critic.optimizer={eps: 1e-7}",), 9e-6),
        (("models.critic.optimizer.learning_rate=1e-6",), 1e-6),
        (("algorithm.like=verl",), 1e-5),
    ],
)
def test_a_critic_has_a_learning_rate_of_its_own(overrides: tuple[str, ...], rate: float) -> None:
    models = plan_of(None, 1, *overrides).spec.models
    assert models.critic is not None and models.actor is not None
    assert models.critic.optimizer.learning_rate == rate
    assert models.actor.optimizer.learning_rate == 1e-6


def test_a_written_critic_keeps_its_own_weights() -> None:
    plan = plan_of(None, 1, "models.critic.init={model_type: llama, vocab_size: 7}")
    assert plan.spec.models.critic is not None
    assert plan.spec.models.critic.init == {"model_type": "llama", "vocab_size": 7}


def test_a_model_that_an_earlier_run_will_write_need_not_exist() -> None:
    spec = spec_of(None, 1, "models.actor={path: runs/first/actor}")
    with pytest.raises(UserError, match="models.actor.path runs/first/actor: no such directory"):
        make_plan(spec)
    plan = make_plan(spec, {Path("runs/first/actor").resolve(): ModelSpec(init=TINY)})
    assert plan.shapes["actor"].num_parameters == plan.shapes["ref"].num_parameters == TINY_ACTOR_PARAMETERS


def test_an_unknown_architecture_has_no_shape_before_it_is_loaded() -> None:
    plan = plan_of([0.5] * 6, 2, "models.actor.init={model_type: gpt2}")
    sync = next(x for x in plan.schedule.instructions if isinstance(x, Sync))
    assert plan.traffic.sync_bytes(sync) is None
    assert weight_bytes(plan, 0)["actor"] is None


# --- shapes


SMALL = TINY | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHARED = {
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 7,
    "n_group": 3,
    "topk_group": 2,
}
LATENT_SIZES = {"kv_lora_rank": 3, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 5}
FAMILIES = [SMALL | {"model_type": kind, "head_dim": 6} for kind in ("llama", "mistral", "qwen3")] + [
    SMALL | {"model_type": "qwen2"},
    SMALL | {"model_type": "llama", "attention_bias": True},
    SMALL | {"model_type": "qwen3", "attention_bias": True, "head_dim": 6},
    SMALL | {"model_type": "mistral", "attention_bias": True},
    SMALL | {"model_type": "llama", "mlp_bias": True},
    TINY,
    SMALL | {"model_type": "mixtral", "num_local_experts": 4},
    SMALL | {"model_type": "qwen2_moe", "num_experts": 6, "moe_intermediate_size": 6, "mlp_only_layers": [1]},
    SMALL | {"model_type": "qwen3_moe", "num_local_experts": 9, "moe_intermediate_size": 6, "decoder_sparse_step": 2},
    SMALL | {"model_type": "olmoe", "num_experts": 8, "attention_bias": True},
    *(
        SMALL | {"model_type": "gpt_oss", "num_experts": 6, "head_dim": 6, "attention_bias": biased}
        for biased in (True, False)
    ),
    *(
        SMALL | SHARED | {"model_type": "glm4_moe", "use_qk_norm": normed, "attention_bias": normed, "head_dim": 6}
        for normed in (False, True)
    ),
    SMALL | SHARED | LATENT_SIZES | {"model_type": "deepseek_v2", "q_lora_rank": None, "mlp_bias": True},
    SMALL | SHARED | LATENT_SIZES | {"model_type": "deepseek_v3", "q_lora_rank": 5, "attention_bias": True},
]


def real_shapes(config: dict[str, Any], auto: Any, **extra: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.for_model(**config, **extra))
    stored = {**dict(model.named_parameters()), **router_biases(model)}
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config["model_type"])
def test_shapes_equal_transformers(config: dict[str, Any], tied: bool) -> None:
    config = config | {"tie_word_embeddings": tied}
    assert decoder_shapes(config) == real_shapes(config, AutoModelForCausalLM)


@pytest.mark.parametrize("kind", Families.KNOWN)
def test_values_that_a_config_leaves_out_are_as_in_transformers(kind: str) -> None:
    config = {"model_type": kind, "num_hidden_layers": 1, "num_experts_per_tok": 2}
    assert decoder_shapes(config) == real_shapes(config, AutoModelForCausalLM)


@pytest.mark.parametrize("role", ["critic", "reward"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in Families.KNOWN if kind not in ("olmoe", "glm4_moe")])
def test_a_scalar_head_replaces_that_of_the_vocabulary(kind: str, tied: bool, role: str) -> None:
    config = SMALL | {"model_type": kind, "tie_word_embeddings": tied}
    config |= {"num_experts_per_tok": 2, "num_key_value_heads": 4} if kind in Families.LATENT else {}
    shape = model_shape(role, ModelSpec(init=config), "scalar")
    assert shape is not None
    assert dict(shape.parameters) == real_shapes(config, AutoModelForSequenceClassification, num_labels=1)


def write_model(directory: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> ModelSpec:
    """Two files, as large models have."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    names = sorted(shapes)
    files = {"model-0.safetensors": names[::2], "model-1.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: torch.zeros(shapes[name]) for name in part}, directory / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return ModelSpec(path=str(directory))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_shared_trunk_has_a_scalar_head_and_a_language_head(kind: str, tied: bool) -> None:
    config = SMALL | {"model_type": kind, "tie_word_embeddings": tied}
    shape = model_shape("actor", ModelSpec(init=config), "both")
    assert shape is not None and shape.trained == shape.parameters
    assert dict(shape.parameters) == real_shapes(config, AutoModelForCausalLM) | {"score.weight": (1, 8)}


@pytest.mark.parametrize("head", ["causal", "scalar", "both"])
def test_shapes_from_files_equal_those_from_the_config(head: Head, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", SMALL, decoder_shapes(SMALL))
    assert model_shape("actor", model, head) == model_shape("actor", ModelSpec(init=SMALL), head)


def test_files_tell_the_shapes_of_any_architecture(tmp_path: Path) -> None:
    shapes = {"transformer.wte.weight": (10, 4), "lm_head.weight": (10, 4)}
    model = write_model(tmp_path / "model", {"model_type": "gpt2", "n_embd": 4}, shapes)
    actor, critic = model_shape("actor", model), model_shape("critic", model, "scalar")
    assert actor is not None and dict(actor.parameters) == shapes
    assert critic is not None
    assert dict(critic.parameters) == {"transformer.wte.weight": (10, 4), "score.weight": (1, 4)}


def test_tied_weights_in_a_file_are_counted_once(tmp_path: Path) -> None:
    tied = SMALL | {"tie_word_embeddings": True}
    shapes = decoder_shapes(SMALL)
    model = write_model(tmp_path / "model", tied, shapes)
    assert model_shape("actor", model) == model_shape("actor", ModelSpec(init=tied))
