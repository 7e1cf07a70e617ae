"""A model of bfloat16 files is saved in bfloat16, in files of a limited size, and one that is there is not lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cases import Case, make_assets
from commands import start
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.config.output_settings import CheckpointSpec, SaveSpec

STEPS = 2
SHARD_GB = 2e-5
"""Limit of a file: smaller than the model, larger than most tensors."""


def weights(directory: Path) -> dict[str, Tensor]:
    """Tensors of all files of a model, which its index names."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(directory / name) for name in set(index.values())}
    assert len(files) > 2 and not (directory / "model.safetensors").exists()
    return {name: files[file][name] for name, file in index.items()}


def train(directory: Path, source: Path) -> Path:
    """Train two steps of SFT on two ranks from bfloat16 files; both write files of the models, which are kept."""
    assets = make_assets(source)
    plain = AutoModelForCausalLM.from_pretrained(assets.model("actor"), dtype=torch.bfloat16)
    plain.save_pretrained(directory / "rounded")
    spec = assets.spec(Case("sft", "all", 2))
    actor = spec.models.actor
    assert actor is not None, "SFT has an actor"
    changed = {"path": str(directory / "rounded"), "zero": 3}
    models = spec.models.model_copy(update={"actor": actor.model_copy(update=changed)})
    changes = {
        **{"name": "rounded", "runs": str(directory / "runs"), "steps": STEPS, "models": models, "eval": None},
        "save": SaveSpec(every=1, keep=True, shard_gb=SHARD_GB),
        "checkpoint": CheckpointSpec(every=1),
    }
    (directory / "rounded.yaml").write_text(spec.model_copy(update=changes).dump())
    process = start(["run", "rounded.yaml"], directory)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out[-3000:]
    return directory / "runs/rounded"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("rounded"), tmp_path_factory.mktemp("assets"))


def export(run: Path, output: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["export", str(run), "-o", str(output), *options])
    return done.exit_code, done.output


def test_a_model_of_16_bit_files_is_saved_in_16_bits_in_several_files(trained: Path) -> None:
    found = weights(trained / "actor")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert json.loads((trained / "actor/config.json").read_text())["dtype"] == "bfloat16"
    again, info = AutoModelForCausalLM.from_pretrained(trained / "actor", output_loading_info=True)
    assert not any(info.values()) and again.dtype == torch.bfloat16
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in found.items())


def test_models_of_earlier_steps_are_kept(trained: Path) -> None:
    names = sorted(path.name for path in trained.glob("actor*"))
    assert names == ["actor", "actor-step-000001"]
    first, last = weights(trained / "actor-step-000001"), weights(trained / "actor")
    assert first.keys() == last.keys() and any(not torch.equal(first[name], last[name]) for name in first)


def test_a_checkpoint_has_more_digits_than_the_saved_model(trained: Path, tmp_path: Path) -> None:
    """A checkpoint is not rounded; an export has the requested type, else the run's."""
    assert export(trained, tmp_path / "whole", "--dtype", "float32")[0] == 0
    whole, saved = load_file(tmp_path / "whole/model.safetensors"), weights(trained / "actor")
    assert all(torch.equal(whole[name].bfloat16(), tensor) for name, tensor in saved.items())
    assert any(not torch.equal(whole[name], tensor.float()) for name, tensor in saved.items())
    assert export(trained, tmp_path / "same")[0] == 0
    same = load_file(tmp_path / "same/model.safetensors")
    assert all(torch.equal(same[name], tensor) for name, tensor in saved.items())


def test_an_export_replaces_nothing_without_force(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    assert export(trained, output)[0] == 0
    before = load_file(output / "model.safetensors")
    code, printed = export(trained, output, "--dtype", "float32")
    assert (
        code != 0 and "has a model already; give a directory that does not exist, or --force to replace it" in printed
    )
    assert load_file(output / "model.safetensors").keys() == before.keys()
    assert export(trained, output, "--dtype", "float32", "--force")[0] == 0
    assert {tensor.dtype for tensor in load_file(output / "model.safetensors").values()} == {torch.float32}
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    code, printed = export(trained, other, "--force")
    assert code != 0 and "exists and is no model's directory" in printed and (other / "notes.txt").is_file()
