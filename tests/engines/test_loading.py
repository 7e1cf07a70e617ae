"""Models in files: parts of tensors are read as they are in whole ones, and engines read only the part of a rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_ranks
from loading_models import CASES, MODELS, write_models
from safetensors.torch import save_file
from small_models import TINY, engine_for, placed
from torch import Tensor

from flexrlhf.engines import weight_files
from flexrlhf.engines.models import load_model
from flexrlhf.engines.weight_files import PartReader
from flexrlhf.errors import UserError
from flexrlhf.runs.tensor_files import cut
from flexrlhf.weights.expert_files import file_pieces
from flexrlhf.weights.shards import Part
from flexrlhf.weights.stored_model import StoredModel

Found = dict[str, dict[str, Any]]
TENSORS = {
    "vector": torch.arange(7, dtype=torch.float32),
    "matrix": torch.randn(6, 5).bfloat16(),
    "cube": torch.randn(3, 4, 5).half(),
    "scalar": torch.tensor(2.5),
    "double": torch.randn(4, 4).double(),
}
PARTS = {
    "vector": [Part((7,), (range(2, 5),)), Part((7,), (range(7),), range(6, 7)), Part((7,), (range(7, 7),))],
    "matrix": [
        Part((6, 5), (range(2, 4), range(5))),
        Part((6, 5), (range(6), range(3, 5))),
        Part((6, 5), (range(3, 6), range(0, 2))),
        Part((6, 5), (range(6), range(5)), range(7, 19)),
    ],
    "cube": [Part((3, 4, 5), (range(1, 3), range(4), range(5))), Part((3, 4, 5), (range(3), range(2, 3), range(1, 4)))],
    "scalar": [],
    "double": [],
}


@pytest.mark.parametrize("block", [1, 24, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_read_as_it_is_cut_from_the_whole_tensor(
    block: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "BLOCK_BYTES", block)
    save_file(TENSORS, tmp_path / "model.safetensors")
    stored = StoredModel(str(tmp_path)).tensors
    for name, tensor in TENSORS.items():
        for part in [Part.whole(tuple(tensor.shape)), *PARTS[name]]:
            target = torch.full((part.num_elements,), torch.nan, dtype=dtype)
            read = PartReader().read(stored[name], part, target)
            expected = tensor.to(dtype) if part.box == () else cut(tensor, part).to(dtype)
            assert torch.equal(target, expected.view(-1)), (name, part)
            is_some_columns = any(side != range(size) for side, size in zip(part.box[1:], part.shape[1:], strict=True))
            if not is_some_columns:
                assert read == part.num_elements * tensor.itemsize, (name, part)


@pytest.mark.parametrize(
    ("end", "parts"),
    [
        ("gate_up_proj", [Part.whole((3, 8, 5)), Part((3, 8, 5), (range(1, 3), range(8), range(5)))]),
        ("gate_up_proj", [Part((3, 8, 5), (range(1, 3), range(8), range(5)), range(start, 71)) for start in range(7)]),
        (
            "gate_up_proj",
            [Part((3, 8, 5), Part.whole((3, 8, 5)).box, flat) for flat in (range(22, 24), range(35, 115))],
        ),
        ("down_proj", [Part.whole((3, 5, 4)), Part((3, 5, 4), Part.whole((3, 5, 4)).box, range(13, 47))]),
    ],
)
def test_parts_of_experts_are_read_from_a_tensor_for_each_expert(end: str, parts: list[Part], tmp_path: Path) -> None:
    shape = parts[0].shape
    tensor, name = torch.randn(shape), f"model.layers.0.mlp.experts.{end}"
    pieces = list(file_pieces("mixtral", name, shape))
    found = {each.name: cut(tensor, Part(shape, each.box)).view(each.shape) for each in pieces}
    save_file(found, tmp_path / "model.safetensors")
    stored = StoredModel(str(tmp_path)).tensors
    for part in parts:
        target = torch.full((part.num_elements,), torch.nan)
        PartReader().read_pieces([(each, stored[each.name]) for each in pieces], part, target)
        assert torch.equal(target, cut(tensor, part)), part


def test_a_file_that_shrinks_after_its_header_was_read_is_one_sentence(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    stored = StoredModel(str(tmp_path)).tensors
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(stored["matrix"].start + 3)
    with pytest.raises(UserError, match="ends before its last tensor"):
        PartReader().read(stored["matrix"], Part.whole((6, 5)), torch.empty(30))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read \(No such file"):
        PartReader().read(stored["matrix"], Part.whole((6, 5)), torch.empty(30))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    write_models(made)
    return made


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_has_the_weights_buffers_and_config_of_transformers(model: str, directory: Path) -> None:
    for role in ["actor", "ref"] if MODELS[model].head == "causal" else ["critic"]:
        for dtype in ("float32", "bfloat16"):
            settings = placed(role, MODELS[model].head, path=str(directory / model), dtype=dtype)
            engine, plain = engine_for(settings), load_model(settings, 3)
            weights = engine.weights()
            for name, parameter in plain.named_parameters():
                assert torch.equal(weights[name], parameter.to(weights[name].dtype)), (name, role, dtype)
            buffers = dict(engine._model.named_buffers())
            assert list(buffers) == [name for name, _ in plain.named_buffers()]
            assert all(torch.equal(buffers[name], buffer) for name, buffer in plain.named_buffers())
            assert engine.config.to_dict() == plain.config.to_dict()


def test_adapters_are_loaded_merged_and_what_cannot_be_read_in_parts_whole(directory: Path, tmp_path: Path) -> None:
    """Weights under adapters differ from the files'; GPT-2 stores its matrices transposed."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(directory / "llama", dtype=torch.float32)
    changed = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    changed.save_pretrained(tmp_path / "adapters")
    expected = dict(changed.merge_and_unload().named_parameters())
    found = engine_for(placed(path=str(tmp_path / "adapters"))).weights()
    assert all(torch.equal(found[name], parameter) for name, parameter in expected.items())
    other = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1, "vocab_size": 32}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**other))
    plain.save_pretrained(tmp_path / "gpt2")
    found = engine_for(placed(path=str(tmp_path / "gpt2"))).weights()
    assert all(torch.equal(found[name], parameter) for name, parameter in plain.named_parameters())


def test_a_tied_head_that_is_stored_too_is_as_transformers_decides(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**TINY, "tie_word_embeddings": True})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    tensors: dict[str, Tensor] = {name: each.detach().clone() for name, each in model.state_dict().items()}
    save_file({**tensors, "lm_head.weight": torch.randn(32, 16)}, tmp_path / "model.safetensors", {"format": "pt"})
    settings = placed(path=str(tmp_path))
    weights, plain = engine_for(settings).weights(), load_model(settings, 3)
    assert list(weights) == [name for name, _ in plain.named_parameters()]
    assert all(torch.equal(weights[name], parameter) for name, parameter in plain.named_parameters())


def start_ranks(directory: Path, number: int) -> list[Found]:
    run_ranks("loading_ranks", directory, number=number)
    return [json.loads((directory / f"{number}-{rank}.json").read_text()) for rank in range(number)]


@pytest.fixture(scope="module")
def loaded(directory: Path) -> Callable[[int], list[Found]]:
    started: dict[int, list[Found]] = {}

    def of_ranks(number: int) -> list[Found]:
        if number not in started:
            started[number] = start_ranks(directory, number)
        return started[number]

    return of_ranks


NUMBERS = [pytest.param(1, marks=pytest.mark.full), 2]


@pytest.mark.parametrize("number", NUMBERS)
def test_ranks_have_the_weights_of_the_whole_model(number: int, loaded: Callable[[int], list[Found]]) -> None:
    """Equal to the last bit: weights in the type of the passes, and the optimizer's float32 weights."""
    for found in loaded(number):
        assert {name: each["differing"] for name, each in found.items() if each["differing"]} == {}
        assert number == 1 or list(found) == list(CASES)


def test_a_rank_reads_its_part(directory: Path, loaded: Callable[[int], list[Found]]) -> None:
    """Copies read all, of experts their part; shards half; a tensor-parallel rank reads rows of which it keeps some
    columns."""
    files = {name: sum(file.stat().st_size for file in (directory / name).glob("*.safetensors")) for name in MODELS}
    for name, case in CASES.items():
        first, second = (found[name]["read"] for found in loaded(2))
        is_shared = case.get("zero", 0) == 3 or (case.get("zero") == 2 and case.get("engine") is None)
        if is_shared:
            assert first + second <= files[case["model"]] and min(first, second) > 0.4 * (first + second), name
        elif "tp" not in case:
            assert first == second <= files[case["model"]] * (0.8 if "ep" in case else 1), name


def test_a_rank_allocates_its_part_and_one_tensor(loaded: Callable[[int], list[Found]]) -> None:
    """With DeepSpeed, a trained model also allocates buffers and gradients."""
    for found in loaded(2):
        for name, case in CASES.items():
            if case.get("engine") is None or case.get("role") == "ref":
                each = found[name]
                # rotary frequencies, adapters as they are made, losses of evenness
                assert each["peak"] <= each["state"] + 2 * each["largest"] + 2048, (name, each)
