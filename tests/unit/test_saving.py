"""Files of a model that is written as its weights arrive: those of safetensors, in shards that transformers loads."""

from __future__ import annotations

import errno
import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flexrlhf.runs.model_directory import ModelDirectory, ModelFiles
from flexrlhf.weights.saving import SavedFile
from flexrlhf.weights.stored_model import StoredModel

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {f"layer.{index}.weight": torch.randn(index + 1, 3, dtype=dtype) for index in range(5)}
    return {**made, "naïve": torch.randn(7, dtype=dtype), "number": torch.tensor(1.0, dtype=dtype)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_small_model_is_the_file_that_safetensors_writes(dtype: torch.dtype, tmp_path: Path) -> None:
    """To the byte; tensors may arrive in any layout and from views."""
    weights = tensors(dtype)
    files = ModelFiles(tmp_path, weights)
    for name in sorted(weights):
        files.write({name: weights[name].t().contiguous().t() if weights[name].ndim == 2 else weights[name]})
    files.close()
    save_file(weights, tmp_path / "other.safetensors", {"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()
    assert not list(tmp_path.glob("*.json"))


def test_weights_can_be_offloaded_after_they_were_written(tmp_path: Path) -> None:
    """numpy keeps the memory of a tensor that it has a view of from being freed."""
    weights = tensors()
    ModelFiles(tmp_path, weights).write(weights)
    assert all(weight.untyped_storage().resizable() for weight in weights.values())


def test_shards_have_at_most_their_size_and_an_index(tmp_path: Path) -> None:
    weights = tensors()
    files = ModelFiles(tmp_path, weights, shard_bytes=50)
    files.write({name: weights[name] for name in sorted(weights)[:3]})
    files.write({name: weights[name] for name in sorted(weights)[3:]})
    files.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found: dict[str, Tensor] = {}
    for path in sorted(tmp_path.glob("model-*-of-*.safetensors")):
        shard = load_file(path)
        assert all(index["weight_map"][name] == path.name for name in shard)
        assert len(shard) == 1 or sum(each.nbytes for each in shard.values()) <= 50
        found |= shard
    assert found.keys() == weights.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in weights.values())
    assert {name: each.shape for name, each in StoredModel(str(tmp_path)).tensors.items()} == {
        name: tuple(each.shape) for name, each in weights.items()
    }


def test_a_tensor_larger_than_a_shard_is_alone() -> None:
    first, second, third = SavedFile.split({"a": 4, "b": 36, "c": 4, "d": 4}, 12).values()
    assert (first, second, third) == (["a"], ["b"], ["c", "d"])


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "gpt_oss"])
def test_transformers_loads_shards(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    # sizes of experts are not all of them read by each family
    experts = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    experts |= {"kv_lora_rank": 4, "qk_rope_head_dim": 2, "first_k_dense_replace": 1} if family == "deepseek_v2" else {}
    config = AutoConfig.for_model(**CONFIG | {"model_type": family} | (experts if family != "llama" else {}))
    plain = AutoModelForCausalLM.from_config(config)
    weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    with ModelDirectory(tmp_path / "actor").writer(weights, plain.config, shard_bytes=4000) as files:
        # as they are gathered: a few experts of a large layer at a time
        for name, part, experts in gathered(family, weights):
            files.write(part, experts, name)
    assert len(list((tmp_path / "actor").glob("*.safetensors"))) > 3
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "actor", output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in again.named_parameters())


def gathered(family: str, weights: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor], range | None]]:
    """Buckets of files of 4,000 bytes: file, weights and experts of each."""
    for file in SavedFile.all_of(family, {name: tuple(each.shape) for name, each in weights.items()}, 4, 3000, 4000):
        for bucket in file.buckets:
            rows = ... if bucket.experts is None else slice(bucket.experts.start, bucket.experts.stop)
            part = {name: weights[name][rows] for name in bucket.names}
            assert bucket.size == sum(each.nbytes for each in part.values())
            yield file.name, part, bucket.experts


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_several_writers_write_the_bytes_of_one(tmp_path: Path, family: str) -> None:
    """Each its own files; of a parameter in several files no more than an expert is gathered twice."""
    from transformers import AutoConfig

    config, experts = AutoConfig.for_model(**CONFIG | {"model_type": family}), torch.randn(5, 24, 16)
    weights = tensors() | {f"layers.{index}.mlp.experts.gate_up_proj": experts + index for index in range(2)}
    alone, several = tmp_path / "alone", tmp_path / "several"
    with ModelDirectory(alone).writer(weights, config, shard_bytes=4000) as files:
        files.write(weights)
    place = partial(ModelDirectory(several).writer, weights, config, 4000, mark="-7")
    with place(writer=(0, 3)) as first:
        for number in range(3):
            with place(writer=(number, 3)) if number else nullcontext(first) as own:
                for name, part, rows in gathered(family, weights):
                    if sorted(files_of(alone)).index(name) % 3 == number:
                        own.write(part, rows, name)
    assert len(files_of(alone)) > 3 and contents(several) == contents(alone)
    sent = sum(each.nbytes for _, part, _ in gathered(family, weights) for each in part.values())
    assert sent <= sum(each.nbytes for each in weights.values()) + len(files_of(alone)) * experts[0].nbytes
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["alone", "several"]


def files_of(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("*.safetensors")]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("stays", [False, True])
def test_a_model_whose_other_writer_fails_replaces_none(tmp_path: Path, stays: bool) -> None:
    """The writer that fails removes all; where it was killed, its file lacks bytes."""
    from transformers import AutoConfig

    config, weights = AutoConfig.for_model(**CONFIG), tensors()
    files = SavedFile.split({name: weights[name].nbytes for name in sorted(weights)}, 50)
    ModelDirectory(tmp_path / "actor").save(weights, config)
    before = contents(tmp_path / "actor")
    place = partial(ModelDirectory(tmp_path / "actor").writer, weights, config, 50)
    with pytest.raises(OSError) as raised, place(writer=(0, 2)) as first:
        for number, (file, names) in enumerate(files.items()):
            if number % 2 == 0:
                first.write({name: weights[name] for name in names}, only=file)
        with suppress(KeyboardInterrupt), place(writer=(1, 2)) as other:
            name = next(name for index, names in enumerate(files.values()) if index % 2 for name in names)
            other.write({name: weights[name]})
            raise KeyboardInterrupt
        assert not (tmp_path / "actor.writing").exists()
        if stays:
            shutil.copytree(tmp_path / "actor", tmp_path / "actor.writing")
            for file in files:
                (tmp_path / "actor.writing" / file).write_bytes(b"")
    assert raised.value.errno == (errno.EIO if stays else errno.ENOENT)
    assert contents(tmp_path / "actor") == before and [each.name for each in tmp_path.iterdir()] == ["actor"]


def test_a_directory_is_replaced_only_by_a_whole_model(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config, weights = AutoConfig.for_model(**CONFIG), tensors()
    ModelDirectory(tmp_path / "actor", best={"step": 1}).save(weights, config)
    before = {path.name: path.read_bytes() for path in (tmp_path / "actor").iterdir()}
    with pytest.raises(KeyboardInterrupt), ModelDirectory(tmp_path / "actor").writer(weights, config) as files:
        files.write({name: weights[name] for name in sorted(weights)[:2]})
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "actor").iterdir()} == before
    ModelDirectory(tmp_path / "actor").save({"other": torch.ones(3)}, config)
    assert load_file(tmp_path / "actor" / "model.safetensors").keys() == {"other"}


def test_a_full_disk_is_the_error_of_the_system_with_the_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    files = ModelFiles(tmp_path, {"x": torch.zeros(10_000)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError) as raised:
            files.write({"x": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        files.close(is_complete=False)
    assert raised.value.filename == str(tmp_path / "model.safetensors")
