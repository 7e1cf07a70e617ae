"""A model whose path has adapters: training goes on with them, or they are merged and new ones are trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import TINY, placed_model, plan_of, spec_of
from torch import Tensor

from flexrlhf.config.model_settings import LoraSpec, ModelSpec
from flexrlhf.engines.models import load_model
from flexrlhf.errors import UserError, shown
from flexrlhf.plan.input_checks import check_architecture
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.weights.model_shape import ModelShape

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
    adapted = shape.with_adapters("actor", lora)
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


@pytest.mark.parametrize(
    "config", [{"use_dora": True}, {"peft_type": "LOHA"}, {"init_lora_weights": "pissa"}, {"lora_alpha": 0.5}]
)
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


# --- files that do not fit: one sentence before a rank starts, and the same one of a rank

Tensors = dict[str, Tensor]
Q = "base_model.model.model.layers.0.self_attn.q_proj"
FEW = LoraSpec(rank=2, alpha=4, targets=("q_proj", "up_proj"))


def tensors(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        file = directory / "adapter_model.safetensors"
        save_file({name: each.contiguous() for name, each in change(load_file(file)).items()}, file)

    return damage


def config(**changes: Any) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        file = directory / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return damage


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return tensors(lambda found: {name.replace(old, new): each for name, each in found.items()})


def filled(part: str, value: float) -> Callable[[Path], None]:
    return tensors(lambda found: {name: each + value if part in name else each for name, each in found.items()})


def whole_model_too(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(TINY))
    save_file({"lm_head.weight": torch.zeros(32, 8)}, directory / "model.safetensors")


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    (
        "a matrix is missing",
        tensors(lambda t: {k: v for k, v in t.items() if k != f"{Q}.lora_A.weight"}),
        f"lack {Q}.l",
    ),
    ("no lora_B", tensors(lambda t: {k: v for k, v in t.items() if "lora_A" in k}), "its files lack base_model.model"),
    (
        "no prefix",
        renamed("base_model.model.", ""),
        "none of its tensors is of this model: expected base_model.model.mo",
    ),
    ("names of a model in memory", renamed(".weight", ".default.weight"), "none of its tensors is of this model"),
    ("no tensors", tensors(lambda t: {}), "none of its tensors is of this model"),
    ("a further tensor", tensors(lambda t: {**t, "foo": torch.ones(2)}), "its files have foo, which adapters of"),
    (
        "a layer more",
        tensors(lambda t: {**t, Q.replace("0", "7"): torch.ones(2)}),
        "have base_model.model.model.layers.7",
    ),
    (
        "vectors of DoRA",
        tensors(lambda t: {**t, f"{Q}.lora_magnitude_vector": torch.ones(8)}),
        "magnitude_vector, which",
    ),
    (
        "a bias",
        tensors(lambda t: {**t, f"{Q}.base_layer.bias": torch.ones(8)}),
        "q_proj.base_layer.bias, which adapters",
    ),
    (
        "an embedding's adapter",
        tensors(lambda t: {**t, f"{Q}.lora_embedding_A": torch.ones(2, 8)}),
        "lora_embedding_A, w",
    ),
    (
        "another embedding",
        tensors(lambda t: {**t, "base_model.model.model.embed_tokens.weight": torch.ones(9, 8)}),
        "is [9, 8] in its",
    ),
    ("integers", tensors(lambda t: {k: v.to(torch.int8) for k, v in t.items()}), "is of type I8 in its files"),
    ("NaN", filled("0.mlp.up_proj.lora_B", float("nan")), "up_proj.lora_B.weight has a value that is not finite"),
    (
        "infinite",
        filled("self_attn.q_proj.lora_A", float("inf")),
        "q_proj.lora_A.weight has a value that is not finite",
    ),
    ("another rank", config(r=8), "up_proj.lora_A.weight is [2, 8] in its files and [8, 8] by adapter_config.json"),
    ("another rank of some", config(rank_pattern={"q_proj": 1}), "is [2, 8] in its files and [1, 8] by adapter_config"),
    *((f"r {each}", config(r=each), "has r ") for each in (0, -4, "4", 2.5, True, None, 10**9)),
    *((f"alpha {each}", config(lora_alpha=each), "has lora_alpha ") for each in (0, "8", float("nan"), float("inf"))),
    ("ranks", config(rank_pattern=[1]), "has rank_pattern [1]: expected expressions"),
    ("alphas", config(alpha_pattern={"(": 2}), "has alpha_pattern"),
    (
        "alpha of some",
        config(alpha_pattern={"q_proj": float("nan")}),
        "has alpha_pattern.q_proj NaN: expected a finite",
    ),
    *(
        (str(each), config(peft_type=each), f"has peft_type {shown(each)}, and LORA, LOHA, LOKR, IA3 are read here")
        for each in ("PREFIX_TUNING", "lora", "NONSENSE", None, 3, ["LORA"])
    ),
    ("IA3", config(peft_type="IA3"), "none of its tensors is of this model: expected"),
    ("no such module", config(target_modules=["nope"]), "peft cannot load it (Target modules {'nope'} not found"),
    ("fewer modules", config(target_modules=["up_proj"]), "self_attn.q_proj.lora_B.weight, which adapters of"),
    ("an expression", config(target_modules="("), "peft cannot load it (missing ), unterminated subpattern"),
    ("saved modules", config(modules_to_save=["lm_head"]), "lack base_model.model.lm_head.weight"),
    ("DoRA", config(use_dora=True), "lora_magnitude_vector"),
    ("biases", config(bias="x"), "peft cannot load it"),
    ("biases of adapters", config(lora_bias=True), "its files lack"),
    ("one layer", config(layers_to_transform=[7]), "peft cannot load it"),
    ("layers twice", config(layer_replication=[[0, 1], [0, 1]]), "has layer_replication [[0, 1], [0, 1]], with which"),
    ("a way to begin", config(init_lora_weights="nope"), "peft cannot load it (Unknown initialization"),
    ("a whole model, too", whole_model_too, "has a whole model and adapter_config.json; remove one of them"),
    ("a list", lambda directory: (directory / "adapter_config.json").write_text("[1]") and None, "list, not a mapping"),
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, shape: ModelShape) -> Path:
    directory = tmp_path_factory.mktemp("weights")
    (directory / "config.json").write_text(json.dumps(TINY))
    values = {name: torch.randn(size) for name, size in shape.parameters}
    save_file(values, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(("damage", "words"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_adapters_that_do_not_fit_are_one_sentence(
    damage: Callable[[Path], None], words: str, tmp_path: Path, weights: Path, shape: ModelShape
) -> None:
    path = write(tmp_path / "adapters", weights, shape, FEW, target_modules=["q_proj", "up_proj"])
    damage(tmp_path / "adapters")
    with pytest.raises(UserError) as caught:
        check_architecture("actor", ModelSpec(path=path), "causal", False)
    message = str(caught.value)
    assert message.startswith(f"models.actor.path {path}") and words in message and "\n" not in message


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": -3}}, {"lora_alpha": 0.5}])
def test_a_rank_loads_adapters_that_fit(
    changes: dict[str, Any], tmp_path: Path, weights: Path, shape: ModelShape
) -> None:
    path = write(tmp_path / "adapters", weights, shape, FEW, target_modules=["q_proj", "up_proj"], **changes)
    file = tmp_path / "adapters" / "adapter_model.safetensors"
    found = {name: torch.randn_like(each) for name, each in load_file(file).items()}
    save_file(found, file)
    check_architecture("actor", ModelSpec(path=path), "causal", False)
    merged = load_model(placed_model("actor", (0,), path=path), 0).get_parameter(
        "model.layers.0.self_attn.q_proj.weight"
    )
    alpha = changes.get("alpha_pattern", {}).get("q_proj", changes.get("lora_alpha", 4))
    scale = alpha / 2 ** (0.5 if changes.get("use_rslora") else 1)
    plain = load_file(weights / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(merged, plain + scale * found[f"{Q}.lora_B.weight"] @ found[f"{Q}.lora_A.weight"])


def test_a_rank_refuses_adapters_that_planning_has_not_seen(tmp_path: Path, weights: Path, shape: ModelShape) -> None:
    path = write(tmp_path / "adapters", weights, shape, FEW, target_modules=["q_proj", "up_proj"])
    renamed("base_model.model.", "")(tmp_path / "adapters")
    with pytest.raises(UserError, match="none of its tensors is of this model"):
        load_model(placed_model("actor", (0,), path=path), 0)


def test_a_config_of_the_base_model_next_to_adapters_is_not_read(tmp_path: Path, base: Path, shape: ModelShape) -> None:
    path = write(tmp_path / "adapters", base, shape)
    (tmp_path / "adapters" / "config.json").write_text("{}")
    assert plan_from(path, "{}").model("actor").lora == STORED
