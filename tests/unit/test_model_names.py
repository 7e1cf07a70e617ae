"""Models by name: their published numbers of parameters, and the errors for unknown ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexrlhf.config.model_names import MODELS, FoundModel
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.errors import UserError
from flexrlhf.weights.families import attention_window
from flexrlhf.weights.shapes import model_shape

BILLIONS = {
    "llama-7b": 6.738,
    "llama-13b": 13.016,
    "llama-33b": 32.529,
    "llama-65b": 65.286,
    "llama-2-70b": 68.977,
    "llama-3-8b": 8.030,
    "llama-3.1-70b": 70.554,
    "llama-3.1-405b": 405.853,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213,
    "mistral-7b": 7.248,
    "mistral-7b-v0.1": 7.242,
    "deepseek-llm-7b": 6.910,
    "smollm2-1.7b": 1.711,
    "r1-distill-qwen-1.5b": 1.777,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-7b": 7.616,
    "qwen2.5-32b": 32.764,
    "qwen2.5-72b": 72.706,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.768,
    "qwen3-32b": 32.762,
    "qwen3-30b-a3b": 30.532,
    "qwen3-235b-a22b": 235.094,
    "qwen1.5-moe-a2.7b": 14.316,
    "olmoe-1b-7b": 6.919,
    "glm-4.5-air": 106.852,
    "deepseek-v2-lite": 15.706,
    "deepseek-v3": 671.026,
    "mixtral-8x7b": 46.703,
    "gpt-oss-20b": 20.915,
    "gpt-oss-120b": 116.829,
    "mixtral-8x22b": 140.630,
}
"""As on the models' cards, or by their safetensors index."""


@pytest.mark.parametrize("name", BILLIONS)
def test_a_name_has_its_parameters(name: str) -> None:
    shape = model_shape("actor", ModelSpec(init=FoundModel.find(name).config))
    assert shape is not None
    assert shape.num_parameters / 1e9 == pytest.approx(BILLIONS[name], abs=6e-4)


def test_no_named_model_has_a_window_but_the_two_that_were_published_with_one() -> None:
    """Mistral's first release, and half of the layers of gpt-oss; later ones of Mistral are written without."""
    windows = {name: attention_window(config) for name, config in MODELS.items()}
    found = {name: window for name, window in windows.items() if window is not None}
    assert found == {"mistral-7b-v0.1": 4096, "gpt-oss-20b": 128, "gpt-oss-120b": 128}


HUB = {
    "Qwen/Qwen2.5-Math-7B-Instruct": "qwen2.5-7b",
    "~/models/Qwen3-4B-Instruct-2507": "qwen3-4b",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "llama-3.1-8b",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "r1-distill-qwen-1.5b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "someone/Llama-3.2-3B-rm": "llama-3.2-3b",
    "mistralai/Mistral-7B-Instruct-v0.1": "mistral-7b-v0.1",
    "mistralai/Mistral-7B-Instruct-v0.2": "mistral-7b-v0.2",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "unsloth/gpt-oss-20b-BF16": "gpt-oss-20b",
    "deepseek-ai/DeepSeek-R1-0528": "deepseek-v3",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": None,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": None,
    "Qwen/Qwen2.5-VL-7B-Instruct": None,
    "Qwen/Qwen3.5-4B": None,
    "nvidia/Llama-3.1-Nemotron-Nano-8B-v1": None,
    "EleutherAI/pythia-1b": None,
}


@pytest.mark.parametrize("name", HUB)
def test_a_name_on_the_hub_has_the_sizes_of_its_family(name: str) -> None:
    assert FoundModel.named(name) == HUB[name]


def test_names_are_found_in_any_case() -> None:
    assert FoundModel.find("Llama-33B").config == MODELS["llama-33b"]
    assert FoundModel.find("Llama-2-7b-hf").config == MODELS["llama-2-7b"]


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'llama-33b'"):
        FoundModel.find("lama-33b")


def test_an_unknown_name_is_refused_under_its_option() -> None:
    with pytest.raises(UserError, match="^--critic lama-33b: "):
        FoundModel.find("lama-33b", "--critic")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; expected a whole number above 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"intermediate_size": 1.5}, "intermediate_size is 1.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers is true"),
        ({"num_hidden_layers": None}, "no num_hidden_layers in it, such as 32 of llama-7b"),
        ({"hidden_size": None, "hiden_size": 64}, r"no hidden_size in it \(did you mean 'hiden_size'"),
    ],
)
def test_a_size_that_is_missing_or_wrong_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**MODELS["qwen3-8b"], **changes}))
    with pytest.raises(UserError, match=message):
        FoundModel.find(str(file))


def test_a_config_without_sizes_is_not_taken_for_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="no hidden_size in it, such as 4096 of llama-7b"):
        FoundModel.find(str(tmp_path))


def test_a_config_may_leave_out_what_follows_from_the_others(tmp_path: Path) -> None:
    config = {key: value for key, value in MODELS["llama-7b"].items() if key != "num_key_value_heads"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert FoundModel.find(str(tmp_path)).config == config


def test_a_config_of_any_size_is_read(tmp_path: Path) -> None:
    config = {**MODELS["qwen3-8b"], "num_hidden_layers": 17}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert FoundModel.find(str(tmp_path)).config == FoundModel.find(str(tmp_path / "config.json")).config == config


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "has no model_type"), ("{", "not a JSON config"), ('{"model_type": "mamba"}', "known families: llama")],
)
def test_a_config_without_a_known_family_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        FoundModel.find(str(tmp_path))


def test_a_yaml_names_models_too(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["qwen3-8b"]))
    assert ModelSpec(init="Qwen2.5-7B").init == MODELS["qwen2.5-7b"]
    assert ModelSpec(init=str(file)).init == MODELS["qwen3-8b"]
