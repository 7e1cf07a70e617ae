"""Model directories that no run could use: each is one sentence, before a rank starts."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import TINY, spec_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.engines.models import load_model
from flexrlhf.errors import UserError
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.input_checks import check_architecture
from flexrlhf.plan.models import model_shapes, resolve_models
from flexrlhf.weights.expert_files import file_shapes
from flexrlhf.weights.families import decoder_shapes
from flexrlhf.weights.shapes import model_shape

GPT2 = {"model_type": "gpt2", "vocab_size": 32, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
NORM = "model.norm.weight"


def write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / file, metadata={"format": "pt"})
    return directory


def tiny(**changes: Any) -> dict[str, Tensor]:
    return {name: torch.ones(shape) for name, shape in decoder_shapes(TINY | changes).items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", TINY, tiny())


def refusal(directory: Path, head: Any = "causal", new_head: bool = False, role: str = "actor") -> str:
    with pytest.raises(UserError) as error:
        model_shape(role, ModelSpec(path=str(directory)), head, new_head)
    message = str(error.value)
    assert message.startswith(f"models.{role}") and "\n" not in message
    return message


def test_a_whole_model_is_accepted(model: Path) -> None:
    for head, new_head in (("causal", False), ("scalar", True), ("both", True)):
        assert model_shape("actor", ModelSpec(path=str(model)), head, new_head) is not None  # type: ignore[arg-type]


# --- files


def header(entries: object) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def second(start: int) -> dict[str, Any]:
    return {"b": {"dtype": "F32", "shape": [2], "data_offsets": [start, start + 8]}}


def third(start: int) -> dict[str, Any]:
    return {"c": {"dtype": "U8", "shape": [4], "data_offsets": [start, start + 4]}}


FILES: list[tuple[str, bytes, str]] = [
    ("empty", b"", "is empty; copy it again"),
    ("a few bytes", b"abc", "is cut: 3 bytes"),
    ("pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "a git-LFS pointer"),
    ("header longer than memory", struct.pack("<Q", 2**63) + b"{}", "is cut or no safetensors file"),
    ("header cut", header(entry())[:20], "is cut or no safetensors file"),
    ("text", b"<html>this is a page with an error</html>", "is cut or no safetensors file"),
    ("not JSON", header(b"{not JSON at all}") + bytes(8), "has a broken header"),
    ("not text", header(bytes(range(128, 160))) + bytes(8), "has a broken header"),
    ("nested", header(b"[" * 100_000), "has a broken header"),
    ("a list", header([1, 2]), "has a broken header"),
    ("entry without a type", header({"a": {"shape": [2], "data_offsets": [0, 8]}}) + bytes(8), "has a broken header"),
    ("negative size", header(entry(shape=[-2])) + bytes(8), "has a broken header"),
    ("size that is a text", header(entry(shape="2")) + bytes(8), "has a broken header"),
    ("bytes for another shape", header(entry(shape=[3])) + bytes(8), "has a broken header"),
    ("one offset", header(entry(data_offsets=[8])) + bytes(8), "has a broken header"),
    ("cut weights", header(entry()) + bytes(5), "is cut: 5 bytes of weights, and its header names 8"),
    ("weights that overlap", header(entry() | second(4) | third(12)) + bytes(16), "weights of a and b overlap"),
    ("weights with a gap", header(entry() | second(9)) + bytes(17), "a and b have bytes between them"),
    ("longer weights", header(entry()) + bytes(9), "has bytes after its last tensor"),
]


@pytest.mark.parametrize(("content", "words"), [case[1:] for case in FILES], ids=[case[0] for case in FILES])
def test_a_broken_file_is_named(content: bytes, words: str, model: Path) -> None:
    (model / "model.safetensors").write_bytes(content)
    message = refusal(model)
    assert words in message and f"{model}: model.safetensors" in message


def test_a_file_that_cannot_be_read_is_named(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(model / "nowhere")
    assert "model.safetensors cannot be read (No such file or directory)" in refusal(model)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").mkdir()
    assert "model.safetensors cannot be read (Is a directory)" in refusal(model)


INDEXES: list[tuple[str, str, str]] = [
    ("missing files", '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}', "1.safetensors, 2.safetensors"),
    ("not JSON", "{", "is no index of weights"),
    ("no map", "{}", "is no index of weights"),
    ("no file", '{"weight_map": {}}', "names no file"),
    *(
        ("outside", f'{{"weight_map": {{"a": "{name}"}}}}', "not in the directory")
        for name in ("../1", "/tmp/1", "..", "")
    ),
    ("no names", '{"weight_map": {"a": 1}}', "is no index of weights"),
]


@pytest.mark.parametrize(("text", "words"), [case[1:] for case in INDEXES], ids=[case[0] for case in INDEXES])
def test_an_index_that_leads_nowhere_is_refused(text: str, words: str, model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(text)
    assert words in refusal(model)


def test_files_that_nothing_names_are_refused(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    assert "has model-00001-of-00002.safetensors, but neither model.safetensors nor" in refusal(model)


def test_an_original_next_to_the_weights_is_not_counted(model: Path) -> None:
    """As in published directories that have both forms."""
    save_file({"tok_embeddings.weight": torch.ones(32, 8)}, model / "consolidated.safetensors")
    assert model_shape("actor", ModelSpec(path=str(model))) == model_shape("actor", ModelSpec(init=TINY))


# --- tensors

without = [
    ("a layer", "model.layers.0", "lack model.layers.0.input_layernorm.weight, model.layers.0.mlp.down_proj.weight, "),
    ("a norm", NORM, f"its files lack {NORM}, which would be random"),
    ("the head", "lm_head", "its files lack lm_head.weight"),
]


@pytest.mark.parametrize(("prefix", "words"), [case[1:] for case in without], ids=[case[0] for case in without])
def test_weights_that_files_lack_are_named(prefix: str, words: str, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in tiny().items() if not name.startswith(prefix)}
    message = refusal(write(tmp_path / "model", TINY, tensors))
    assert words in message
    assert ("and 6 more" in message) == (prefix == "model.layers.0")


def test_weights_that_do_not_match_the_config_are_refused(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "model", TINY | {"vocab_size": 40}, tiny()))
    assert "lm_head.weight is [32, 8] in its files and [40, 8] by its config.json" in message
    message = refusal(write(tmp_path / "model", TINY | {"num_hidden_layers": 2}, tiny()))
    assert "its files lack model.layers.1." in message


EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4, "num_key_value_heads": 2}
SURPLUS: list[tuple[str, dict[str, Any], str, str]] = [
    ("a layer", {}, "model.layers.1.mlp.up_proj.weight", "have weights of layer 1, which the config does not have"),
    ("a layer of a base model", {}, "layers.3.mlp.up_proj.weight", "the files have weights of layer 3, which"),
    (
        "a bias",
        {},
        "model.layers.0.self_attn.q_proj.bias",
        "have model.layers.0.self_attn.q_proj.bias, which the model",
    ),
    (
        "a bias of the head",
        {},
        "lm_head.bias",
        "its files have lm_head.bias, which the model of its config.json has not",
    ),
    ("a norm", {}, "model.layers.0.self_attn.q_norm.weight", "have model.layers.0.self_attn.q_norm.weight, which"),
    ("an expert", EXPERTS, "model.layers.0.mlp.experts.2.up_proj.weight", "have model.layers.0.mlp.experts.2.up_proj"),
    ("a shared expert", EXPERTS, "model.layers.0.mlp.shared_expert.up_proj.weight", "mlp.shared_expert.up_proj.weight"),
    ("a layer behind", {"num_nextn_predict_layers": 1}, "model.layers.2.eh_proj.weight", "have weights of layer 2"),
]


@pytest.mark.parametrize(
    ("changes", "name", "words"), [case[1:] for case in SURPLUS], ids=[case[0] for case in SURPLUS]
)
def test_weights_that_the_config_does_not_have_are_named(
    changes: dict[str, Any], name: str, words: str, tmp_path: Path
) -> None:
    config = TINY | changes | ({"model_type": "qwen3_moe"} if "num_experts" in changes else {})
    shapes = file_shapes(config["model_type"], decoder_shapes(config))
    tensors = {each: torch.ones(shape) for each, shape in shapes.items()} | {name: torch.ones(2)}
    message = refusal(write(tmp_path / "model", config, tensors))
    assert words in message


def test_layers_of_a_family_without_known_shapes_are_counted(tmp_path: Path) -> None:
    directory = tmp_path / "gpt2"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2)).save_pretrained(directory)
    check_architecture("actor", ModelSpec(path=str(directory)), "causal", False)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"n_layer": 1}))
    with pytest.raises(UserError, match="the files have weights of layer 1, which the config does not have"):
        check_architecture("actor", ModelSpec(path=str(directory)), "causal", False)


def test_layers_that_predict_further_tokens_and_buffers_are_left_alone(tmp_path: Path) -> None:
    names = ("model.layers.1.eh_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "foo.bar", "score.weight")
    tensors = tiny() | {name: torch.ones(2) for name in names[:3]} | {names[3]: torch.ones(1, 8)}
    directory = write(tmp_path / "model", TINY | {"num_nextn_predict_layers": 1}, tensors)
    assert model_shape("actor", ModelSpec(path=str(directory))) == model_shape("actor", ModelSpec(init=TINY))


def test_a_tensor_in_two_files_is_refused(model: Path) -> None:
    (model / "model.safetensors").rename(model / "1.safetensors")
    save_file({NORM: torch.zeros(8)}, model / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", NORM: "2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{NORM} is in 1.safetensors and in 2.safetensors" in refusal(model)


def test_weights_of_another_type_are_refused(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "model", TINY, tiny() | {NORM: torch.ones(8, dtype=torch.int8)}))
    assert f"{NORM} is of type I8 in its files; save the model as F32, F16, BF16" in message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_of_any_width_are_accepted(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in tiny().items()}
    assert model_shape("actor", ModelSpec(path=str(write(tmp_path / "model", TINY, tensors)))) is not None


def test_tied_heads_base_models_and_buffers_are_no_gaps(tmp_path: Path) -> None:
    tied = TINY | {"tie_word_embeddings": True}
    base = {name.removeprefix("model."): tensor for name, tensor in tiny(tie_word_embeddings=True).items()}
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    for number, tensors in enumerate((tiny(), tiny(tie_word_embeddings=True), base, tiny() | buffers)):
        directory = write(tmp_path / str(number), tied, tensors)
        assert model_shape("actor", ModelSpec(path=str(directory))) == model_shape("actor", ModelSpec(init=tied))


# --- heads


def test_a_causal_model_gives_no_scores_unless_a_new_head_is_requested(model: Path) -> None:
    message = refusal(model, "scalar", role="reward")
    assert message == (
        f"models.reward.path {model}: has no scalar head (score.weight), so its scores would be random; give a reward "
        f"model, or models.reward.new_head: true"
    )
    assert model_shape("reward", ModelSpec(path=str(model)), "scalar", new_head=True) is not None


def shapes(*overrides: str) -> None:
    spec = spec_of(None, 1, *overrides)
    graph = make_graph(spec)
    model_shapes(resolve_models(spec, graph), graph, {})


def test_a_new_head_is_for_trained_models_and_where_it_is_requested(model: Path) -> None:
    with pytest.raises(UserError, match="models.reward.path .*: has no scalar head"):
        shapes(f"models.reward={{path: {model}}}")
    shapes(f"models.reward={{path: {model}, new_head: true}}")
    shapes(f"models.critic={{path: {model}}}")


def test_a_classifier_of_two_labels_is_no_reward_model(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in tiny().items() if name != "lm_head.weight"}
    directory = write(tmp_path / "model", TINY, tensors | {"score.weight": torch.ones(2, 8)})
    for new_head in (False, True):
        assert "its head has 2 labels (shape [2, 8])" in refusal(directory, "scalar", new_head)
    directory = write(tmp_path / "gpt2", GPT2, {"score.weight": torch.ones(2, 8)})
    assert "its head has 2 labels (shape [2, 8])" in refusal(directory, "scalar")


# --- families


def test_a_recurrent_model_may_score_and_sample_where_its_difference_is_only_warned_of() -> None:
    shapes("models.actor={init: {model_type: mamba}}", "guards.sampled_logprobs=warn")
    shapes("models.reward={init: {model_type: mamba}}", "models.critic={init: {model_type: mamba}}")


# --- what only transformers can tell


def checked(directory: Path, head: Any = "causal", role: str = "actor", **settings: Any) -> Any:
    return check_architecture(role, ModelSpec(path=str(directory), **settings), head, False)


def test_a_model_of_another_family_is_compared_with_its_class(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2))
    whole.save_pretrained(tmp_path / "model")
    assert checked(tmp_path / "model").model_type == "gpt2"
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    base = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    checked(write(tmp_path / "model", GPT2, base))
    write(tmp_path / "model", GPT2, {name: tensor for name, tensor in tensors.items() if ".h.1.mlp" not in name})
    for check in (checked, loaded):
        with pytest.raises(UserError, match="its files lack transformer.h.1.mlp.c_fc.bias"):
            check(tmp_path / "model")
    write(tmp_path / "model", GPT2 | {"n_positions": 20}, tensors)
    for check in (checked, loaded):
        with pytest.raises(UserError, match=r"transformer.wpe.weight is \[16, 8\] in its files and \[20, 8\] by"):
            check(tmp_path / "model")


def loaded(directory: Path, head: Any = "causal", trained: bool = False, **settings: Any) -> Any:
    """As a rank loads it."""
    settings = settings or {"path": str(directory)}
    return load_model(PlacedModel(ModelName("actor"), Layout((0,)), trained, ModelSpec(**settings), head=head), 0)


def test_a_rank_draws_no_head_that_is_not_requested(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2)).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match="has no scalar head"):
        loaded(tmp_path / "model", "scalar")
    assert loaded(tmp_path / "model", "scalar", trained=True).score.weight.shape == (1, 8)
    path = str(tmp_path / "model")
    assert loaded(tmp_path / "model", "scalar", path=path, new_head=True).score.weight.shape == (1, 8)
    AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**GPT2, num_labels=1)).save_pretrained(path)
    assert loaded(tmp_path / "model", "scalar").score.weight.shape == (1, 8)


def test_code_in_a_directory_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    code = {"auto_map": {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}}
    directory = write(tmp_path / "model", {"model_type": "mine"} | code, {"a": torch.ones(1)})
    (directory / "mine.py").write_text("raise ImportError('this code was run')")
    for check in (checked, loaded):
        with pytest.raises(UserError) as error:
            check(directory)
        assert str(error.value) == (
            f"models.actor.path {directory}: needs Python code from its own directory (mine.MyConfig, mine.MyModel), "
            f"which is run only with models.actor.trust_remote_code: true"
        )
    with pytest.raises(UserError, match="this code was run"):
        checked(directory, trust_remote_code=True)
    # of a family that transformers has, its own class is loaded
    write(directory, TINY | code, tiny())
    assert checked(directory).model_type == "llama"
    assert type(loaded(directory)).__name__ == "LlamaForCausalLM"


def test_a_family_that_transformers_lacks_is_refused_by_name(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", {"model_type": "llamma"}, {"a": torch.ones(1)})
    for check in (checked, loaded):
        with pytest.raises(UserError) as error:
            check(directory)
        for words in ("no model_type 'llamma' (did you mean 'llama'?)", "what a script registers is not in them"):
            assert words in str(error.value)


BUILDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("no scalar head", {"model_type": "mamba"}, "scalar", "transformers has no mamba model with a scalar head"),
    ("no language head", {"model_type": "clip"}, "causal", "transformers has no clip model with a language head"),
    ("another head", {"model_type": "ctrl", "n_layer": 1}, "scalar", "the head of ctrl is no score.weight"),
    ("a text", TINY | {"hidden_size": "wide"}, "causal", "transformers cannot load it (Validation error"),
    ("heads that do not divide", GPT2 | {"n_head": 3}, "causal", "transformers cannot load it ("),
]


@pytest.mark.parametrize(("config", "head", "words"), [case[1:] for case in BUILDS], ids=[case[0] for case in BUILDS])
def test_a_config_that_makes_no_model_is_refused(config: dict[str, Any], head: Any, words: str) -> None:
    with pytest.raises(UserError) as error:
        check_architecture("actor", ModelSpec(init=config), head, True)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gpt2", "opt", "gpt_neox", "bloom", "gemma2"])
@pytest.mark.parametrize("head", ["causal", "scalar"])
def test_what_transformers_saves_is_accepted(kind: str, head: Any, tmp_path: Path) -> None:
    sizes = TINY | {"model_type": kind, "num_key_value_heads": 2, "head_dim": 4, "num_labels": 1, "ffn_dim": 16}
    auto: Callable[..., Any] = (
        AutoModelForCausalLM.from_config if head == "causal" else AutoModelForSequenceClassification.from_config
    )
    config = AutoConfig.for_model(**sizes)
    if kind == "opt":
        config.word_embed_proj_dim = 8
    auto(config).save_pretrained(tmp_path / "model")
    assert model_shape("reward", ModelSpec(path=str(tmp_path / "model")), head, new_head=False) is not None
    checked(tmp_path / "model", head)
    loaded(tmp_path / "model", head)


# --- numbers of a config with which a model computes nothing


NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps NaN: expected a finite number, at least 0"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps -1e-06: expected"),
    ({"initializer_range": float("inf")}, "initializer_range Infinity: expected"),
    ({"rope_theta": -1e4}, "rope_theta -10000.0: expected a finite number above 0"),
    ({"rope_theta": 0}, "rope_theta 0: expected"),
    ({"rope_scaling": {"beta_fast": 1, "beta_slow": 32}}, "rope_scaling.beta_slow 32: expected less than beta_fast, 1"),
    ({"rope_scaling": {"short_factor": [1.0]}}, "rope_scaling.short_factor of 1 numbers: expected 2"),
    ({"attention_dropout": 2.0}, "attention_dropout 2.0: expected a number from 0 on, below 1"),
    ({"max_position_embeddings": -1}, "max_position_embeddings -1: expected"),
    ({"sliding_window": 0}, "sliding_window 0: expected at least 1"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "rope_parameters.rope_theta NaN"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": -4.0}},
        "rope_scaling.factor -4.0: expected a finite number above",
    ),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor 0: expected"),
    (
        {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0, -2.0]}},
        "rope_scaling.long_factor -2.0: expected",
    ),
    (
        {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4, "high_freq_factor": 4}},
        "rope_scaling.low_freq_factor 4: expected less than high_freq_factor, 4",
    ),
    ({"rope_parameters": {"full_attention": {"rope_theta": 0.0}}}, "rope_parameters.full_attention.rope_theta 0.0"),
    ({"text_config": {"rms_norm_eps": float("nan")}}, "rms_norm_eps NaN"),
]


@pytest.mark.parametrize(("changes", "words"), NUMBERS, ids=[case[1] for case in NUMBERS])
def test_numbers_that_no_model_computes_with_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert f": its config.json has {words}" in refusal(write(tmp_path / "model", TINY | changes, tiny()))
    with pytest.raises(UserError, match=f"^models.actor.init has {re.escape(words)}"):
        model_shape("actor", ModelSpec(init=TINY | changes))


def test_a_window_that_is_off_may_have_any_size() -> None:
    config = TINY | {"model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 0, "use_sliding_window": False}
    assert model_shape("actor", ModelSpec(init=config)) is not None
