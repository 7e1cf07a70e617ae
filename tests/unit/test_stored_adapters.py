"""A model whose path has adapters: training goes on with them, or they are merged and new ones are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_runs import TINY, plan_of, spec_of

from flexrlhf.config.model_settings import LoraSpec
from flexrlhf.errors import UserError
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.weights.lora import with_adapters
from flexrlhf.weights.shapes import ModelShape

STORED = LoraSpec(rank=3, alpha=5, targets=("q_proj", "up_proj"), new=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    (directory / "config.json").write_text(json.dumps(TINY))
    return directory


def write(directory: Path, base: Path, shape: ModelShape, lora: LoraSpec = STORED, **config: Any) -> str:
    """Write adapters as peft does."""
    directory.mkdir()
    known = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "bias": "none"}
    written = json.dumps({**known, "base_model_name_or_path": str(base), **config})
    (directory / "adapter_config.json").write_text(written)
    adapted = with_adapters("actor", shape, lora)
    names = {f"base_model.model.{name.replace('.default', '')}": size for name, size in adapted.trained}
    save_file({name: torch.zeros(size) for name, size in names.items()}, directory / "adapter_model.safetensors")
    return str(directory)


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return plan_of(None, 1).shapes["actor"]


def plan_from(path: str, lora: str, *further: str) -> Any:
    return plan_of(None, 1, f"models.actor={{path: {path}, lora: {lora}}}", *further)


@pytest.mark.parametrize(
    "lora", ["{}", "{rank: 3}", "{rank: 3, alpha: 5, targets: [up_proj, q_proj]}", "{new: false}", "{targets: null}"]
)
def test_training_goes_on_where_nothing_else_is_written(
    lora: str, tmp_path: Path, base: Path, shape: ModelShape
) -> None:
    path = write(tmp_path / "adapters", base, shape)
    plan = plan_from(path, lora)
    assert plan.model("actor").lora == STORED
    # the resolved YAML says so, too, and the reference is the policy that it starts from
    assert make_plan(plan.spec).shapes == plan.shapes
    start = {name for name in plan.shapes["actor"].names if ".start." in name}
    assert {name.replace(".start.", ".default.") for name in start} == plan.shapes["actor"].adapters
    text = format_plan(plan)
    assert f"goes on with the adapters in {path}" in text and "with the adapters that it starts from" in text
    # a reference of its own merges them
    apart = plan_from(path, lora, "models.ref={}")
    assert not any(".start." in name for name in apart.shapes["actor"].names)
    assert apart.shapes["ref"] == shape and apart.model("ref").path == path


@pytest.mark.parametrize("lora", ["{rank: 8}", "{alpha: 6}", "{targets: [q_proj]}", "{new: true}"])
def test_other_adapters_are_new_and_the_stored_ones_merged(
    lora: str, tmp_path: Path, base: Path, shape: ModelShape
) -> None:
    path = write(tmp_path / "adapters", base, shape)
    plan = plan_from(path, lora)
    chosen = plan.model("actor").lora
    assert chosen.new and not any(".start." in name for name in plan.shapes["actor"].names)
    assert f"merges the adapters in {path}, new ones of rank {chosen.rank}" in format_plan(plan)


@pytest.mark.parametrize("config", [{"use_dora": True}, {"peft_type": "LOHA"}, {"init_lora_weights": "pissa"}])
def test_adapters_of_another_form_are_merged(
    config: dict[str, Any], tmp_path: Path, base: Path, shape: ModelShape
) -> None:
    path = write(tmp_path / "adapters", base, shape, **config)
    assert plan_from(path, "{}").model("actor").lora.new
    with pytest.raises(UserError, match="^models.actor.lora.new: false goes on with the adapters in models.actor.path"):
        plan_from(path, "{new: false}")


def test_what_cannot_go_on_is_one_sentence(tmp_path: Path, base: Path, shape: ModelShape) -> None:
    path = write(tmp_path / "adapters", base, shape)
    with pytest.raises(UserError) as caught:
        plan_from(path, "{rank: 8, new: false}")
    assert str(caught.value) == (
        "models.actor.lora.rank: 8, and the adapters in its path have 3; remove it, or use models.actor.lora.new: "
        "true, which merges those and trains new ones"
    )
    with pytest.raises(UserError, match="lora.targets: q_proj, and the adapters in its path have q_proj, up_proj; re"):
        plan_from(path, "{targets: [q_proj], new: false}")
    with pytest.raises(UserError, match="^models.actor.lora.new: false goes on with .*path, which has none; remove it"):
        plan_from(str(base), "{new: false}")
    torn = write(tmp_path / "torn", base, shape, LoraSpec(rank=2, targets=STORED.targets), r=3, lora_alpha=5)
    with pytest.raises(UserError, match="lora_A.default.weight is .* in its files and .* by its base model; correct"):
        plan_from(torn, "{}")


def test_a_run_goes_on_with_adapters_that_an_earlier_one_of_the_command_will_write() -> None:
    first = spec_of(None, 1, "models.actor.lora={rank: 3}")
    pending = {path: make_plan(first).model(role) for path, role in make_plan(first).outputs.items()}
    path = next(path for path in pending if path.name == "actor")
    for lora, expected in (("{}", LoraSpec(rank=3, new=False)), ("{rank: 4}", LoraSpec(rank=4, new=True))):
        later = spec_of(None, 1, f"models.actor={{path: {path}, lora: {lora}}}", "name=later")
        plan = make_plan(later, pending)
        assert plan.model("actor").lora == expected
        assert any(".start." in name for name in plan.shapes["actor"].names) != expected.new
