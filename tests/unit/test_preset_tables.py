"""Presets: the form of their files, and filling in. Each value is in the run, nothing else is set; the YAML wins."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from small_runs import spec_of
from yaml import YAMLError

from flexrlhf.config.algorithms import ALGORITHMS
from flexrlhf.config.algorithms.policy_sections import KlSpec
from flexrlhf.config.presets import table
from flexrlhf.config.presets.filling import PEERS, trainer_of
from flexrlhf.config.presets.table import Cell, MiniBatchesOf, PeerTrainer, WarmUp, read_peer
from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import UserError
from flexrlhf.plan.preset_text import preset_lines

KEY = "router_aux_loss_coef"
FILE = """
title: A 1.0
files: [&arguments a/arguments.py, &code a/code.py]
shared:
- &both
  - {file: *arguments, settings: {num_mini_batches: [{size: 8, unit: prompts}, batch], kl: [{place: loss}, beta]}}
  - {file: *code, section: models.actor.optimizer, settings: {betas: [[0.9, 0.99], "adam: betas"]}}
trainers:
  ppo:
    settings: [*both, {file: *code, settings: {top_k: [0, none]}}]
    differs: [it differs]
    routers: {file: *code, section: models.actor, settings: {router_aux_loss_coef: [{mixtral: 0.1}, routers]}}
"""
TRAINERS = [(like, algorithm) for like, peer in PEERS.items() for algorithm in peer.trainers]


def raw_of(like: str | None, algorithm: str, **written: Any) -> dict[str, Any]:
    """A YAML with as little written as can be."""
    preset = {} if like is None else {"like": like}
    models = {role: {"path": role} for role in ("actor", "reward", "cost")}
    return {"name": "a", "algorithm": {"name": algorithm, **preset, **written}, "models": models, "data": {"path": "d"}}


def test_a_file_is_read_with_its_shared_parts(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(FILE)
    peer = read_peer(tmp_path / "a.yaml")
    cells = (
        Cell("algorithm.num_mini_batches", MiniBatchesOf(8), "a/arguments.py: batch"),
        Cell("algorithm.kl", {"place": "loss"}, "a/arguments.py: beta"),
        Cell("models.actor.optimizer.betas", (0.9, 0.99), "a/code.py: adam: betas"),
        Cell("algorithm.top_k", 0, "a/code.py: none"),
    )
    routers = Cell("models.actor.router_aux_loss_coef", {"mixtral": 0.1}, "a/code.py: routers")
    assert (peer.title, dict(peer.trainers)) == ("A 1.0", {"ppo": PeerTrainer(cells, {}, ("it differs",), routers)})


@pytest.mark.parametrize(
    ("part", "other", "sentence"),
    [
        ("differs:", "difers:", "unknown key 'difers'"),
        ("[0, none]", "[0]", r"top_k.1\n  Field required"),
        ("[0, none]", '[0, ""]', r"top_k.1\n  String should have at least 1 character"),
        ("[it differs]", "[it: differs]", "Input should be a valid string"),
        ("unit: prompts", "unit: rows", "Input should be 'prompts' or 'responses'"),
        ("unit: prompts", "of: prompts", r"of\n  Unexpected keyword argument"),
        ("models.actor.optimizer", "models.actor.optimiser", "section\n  String should match pattern"),
        ("top_k:", "kl:", "given twice: algorithm.kl"),
        ("{file: *code, settings: {top_k", "{file: code, settings: {top_k", "file\n  String should match pattern"),
        ("[*both,", "[*all,", "undefined alias 'all'"),
        ("top_k: [0, none]", "top_k: [0, none], top_k: [1, none]", "'top_k' is given twice"),
    ],
)
def test_a_file_without_the_form_is_refused(tmp_path: Path, part: str, other: str, sentence: str) -> None:
    assert FILE.count(part) == 1
    (tmp_path / "a.yaml").write_text(FILE.replace(part, other))
    with pytest.raises((ValueError, YAMLError), match=sentence):
        read_peer(tmp_path / "a.yaml")


def test_every_file_has_a_name_and_is_read_once() -> None:
    assert {path.stem for path in Path(table.__file__).parent.glob("*.yaml")} == set(PEERS)
    assert all(PEERS[like] is PEERS[like] for like in PEERS)


@cache
def spec_like(like: str | None, algorithm: str) -> Spec:
    return Spec.parse(raw_of(like, algorithm), "a")


@cache
def values_like(like: str, algorithm: str) -> dict[str, Any]:
    return spec_like(like, algorithm).model_dump(mode="json")


def value_of(spec: Spec | dict[str, Any], key: str) -> Any:
    value: Any = spec.model_dump(mode="json") if isinstance(spec, Spec) else spec
    for name in key.split("."):
        value = value[name]
    return value


@pytest.mark.parametrize(("like", "algorithm"), TRAINERS)
def test_a_run_that_writes_nothing_has_every_value_of_the_peer(like: str, algorithm: str) -> None:
    """Numbers that follow from others have tests with values of their own."""
    for cell in trainer_of(like, algorithm).cells:
        value = value_of(values_like(like, algorithm), cell.key)
        if isinstance(cell.value, dict):
            assert {name: value[name] for name in cell.value} == cell.value, cell.key
        elif not isinstance(cell.value, MiniBatchesOf | WarmUp):
            assert value == (list(cell.value) if isinstance(cell.value, tuple) else cell.value), cell.key


@pytest.mark.parametrize(("like", "algorithm"), TRAINERS)
def test_nothing_else_is_set(like: str, algorithm: str) -> None:
    """A setting without a cell is the algorithm's own default: nothing of another trainer is in it."""
    found, plain = spec_like(like, algorithm), spec_like(None, algorithm)
    keys = {cell.key for cell in trainer_of(like, algorithm).cells} | {"algorithm.like"}
    for name in type(found.algorithm).model_fields:
        if f"algorithm.{name}" not in keys:
            assert getattr(found.algorithm, name) == getattr(plain.algorithm, name), name
    for role in ("ref", "cost") + (("reward",) if algorithm != "reward" else ()):
        assert found.models.of(role) == plain.models.of(role), role


@pytest.mark.parametrize("like", list(PEERS))
def test_algorithms_without_a_trainer_are_refused_with_those_that_there_are(like: str) -> None:
    trainers = PEERS[like].trainers
    known = ", ".join(trainers)
    for algorithm in ALGORITHMS:
        if algorithm not in trainers:
            with pytest.raises(UserError) as caught:
                Spec.parse(raw_of(like, algorithm), "a")
            assert str(caught.value) == f"a: algorithm: like: {like} has no trainer for {algorithm}; it has {known}"


@pytest.mark.parametrize(("like", "algorithm"), TRAINERS)
@pytest.mark.parametrize("short", [False, True])
def test_a_preset_is_recorded_in_full(like: str, algorithm: str, short: bool) -> None:
    """The YAML of a run has every value, so that it stays the same under other presets of the same name."""
    spec = spec_like(like, algorithm)
    raw = read_yaml(spec.dump(short))
    assert Spec.parse(raw, "a") == spec
    for cell in trainer_of(like, algorithm).cells:
        section, _, name = cell.key.rpartition(".")
        assert name in value_of(raw, section), cell.key


@pytest.mark.parametrize(("like", "algorithm"), TRAINERS)
def test_all_that_is_written_wins(like: str, algorithm: str) -> None:
    """Every setting of a run without the preset, written next to it: the same run."""
    plain = spec_like(None, algorithm)
    raw = read_yaml(plain.dump())
    raw["algorithm"]["like"] = like
    for role in ("critic", "cost_critic"):
        if any(cell.key.startswith(f"models.{role}.") for cell in trainer_of(like, algorithm).cells):
            raw["models"][role] = {"optimizer": plain.models.actor.optimizer.model_dump(mode="json")}  # type: ignore[union-attr]
    found = Spec.parse(raw, "a")
    assert found.algorithm.model_copy(update={"like": None}) == plain.algorithm
    assert (found.models.actor, found.models.reward) == (plain.models.actor, plain.models.reward)


def test_parts_of_mappings_win_too() -> None:
    raw = raw_of("safe-rlhf", "safe-rlhf", lagrange={"limit": 0.5}, kl={"coefficient": 0.1})
    raw["models"]["actor"]["optimizer"] = {"learning_rate": 3e-6, "schedule": "constant"}
    spec = Spec.parse(raw, "a")
    assert value_of(spec, "algorithm.lagrange") == {
        "limit": 0.5,
        "initial": 1.0,
        "learning_rate": 0.1,
        "maximum": None,
    }
    actor, critic = (value_of(spec, f"models.{role}.optimizer") for role in ("actor", "critic"))
    assert (actor["learning_rate"], actor["schedule"], actor["max_grad_norm"]) == (3e-6, "constant", 1.0)
    assert (critic["learning_rate"], critic["schedule"]) == (5e-6, "cosine")
    assert value_of(spec, "algorithm.kl.coefficient") == 0.1


def test_a_model_that_is_missing_stays_missing() -> None:
    raw = raw_of("verl", "ppo")
    del raw["models"]["actor"]
    spec = Spec.parse(raw, "a")
    assert spec.models.actor is None and spec.models.critic is not None


@pytest.mark.parametrize(
    ("like", "algorithm", "written", "penalty"),
    [
        # verl: kl_ctrl.kl_coef and kl_loss_coef 0.001; low_var_kl to 10; counted per token
        ("verl", "ppo", {}, KlSpec(place="reward", coefficient=0.001, target_unit="token")),
        ("verl", "ppo", {"target": 0.1}, KlSpec(coefficient=0.001, target=0.1, target_unit="token", horizon=10000)),
        ("verl", "ppo", {"place": "loss"}, KlSpec(place="loss", coefficient=0.001, estimator="k3", value_clamp=10.0)),
        ("verl", "grpo", {}, KlSpec(place="loss", coefficient=0.001, estimator="k3", value_clamp=10.0)),
        ("verl", "grpo", {"coefficient": 0.2}, KlSpec(place="loss", coefficient=0.2, estimator="k3", value_clamp=10.0)),
        ("verl", "grpo", {"place": "reward"}, KlSpec(place="reward", coefficient=0.001, target_unit="token")),
        (
            "openrlhf",
            "rloo",
            {"target": 0.05},
            KlSpec(place="advantages", coefficient=0.01, value_clamp=10.0, target=0.05, target_unit="token"),
        ),
        (
            "openrlhf",
            "grpo",
            {"place": "loss"},
            KlSpec(place="loss", coefficient=0.01, estimator="k3", value_clamp=10.0, target_unit="token"),
        ),
        # TRL: k3 without a limit, times the ratio; a coefficient of its own it has not
        (
            "trl",
            "grpo",
            {"coefficient": 0.1},
            KlSpec(place="loss", coefficient=0.1, estimator="k3", value_clamp=None, corrected=True),
        ),
        ("trl", "rloo", {"coefficient": 0.1}, KlSpec(place="reward", coefficient=0.1, estimator="k1")),
        ("dapo", "grpo", {"coefficient": 0.1}, KlSpec(place="loss", coefficient=0.1, estimator="k3", value_clamp=10.0)),
    ],
)
def test_a_penalty_that_is_written_in_part_has_the_peers_rest(
    like: str, algorithm: str, written: dict[str, Any], penalty: KlSpec
) -> None:
    assert Spec.parse(raw_of(like, algorithm, kl=written), "a").algorithm.kl == penalty  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("like", "algorithm", "written", "number"),
    [
        ("verl", "ppo", {"prompts_per_step": 8}, 1),
        ("verl", "ppo", {"prompts_per_step": 600}, 3),
        ("verl", "ppo", {"prompts_per_step": 600, "num_mini_batches": 5}, 5),
        ("openrlhf", "rloo", {"prompts_per_step": 64, "samples_per_prompt": 16}, 8),
        # never more mini-batches than prompts
        ("openrlhf", "grpo", {"prompts_per_step": 2, "samples_per_prompt": 1000}, 2),
        ("dapo", "grpo", {"prompts_per_step": 64}, 2),
    ],
)
def test_mini_batches_follow_from_their_size(like: str, algorithm: str, written: dict[str, Any], number: int) -> None:
    assert Spec.parse(raw_of(like, algorithm, **written), "a").algorithm.num_mini_batches == number


@pytest.mark.parametrize(
    ("like", "steps", "warmup"),
    # 8 mini-batches: 3 % of 80 rounded up, 3 % of 8; 10 steps of 16 mini-batches
    [("openrlhf", 10, 3), ("openrlhf", 1, 1), ("dapo", 10, 160)],
)
def test_the_warm_up_follows_from_the_length_of_the_run(like: str, steps: int, warmup: int) -> None:
    raw = raw_of(like, "grpo" if like == "dapo" else "ppo") | {"steps": steps}
    assert value_of(Spec.parse(raw, "a"), "models.actor.optimizer.warmup_steps") == warmup


@pytest.mark.parametrize(
    ("init", "written", "factor"),
    [("mixtral-8x7b", {}, 0.001), ("olmoe-1b-7b", {}, 0.01), ("mixtral-8x7b", {KEY: 0.5}, 0.5), ("llama-7b", {}, 0.0)],
)
def test_the_loss_of_routers_follows_from_the_family(init: str, written: dict[str, Any], factor: float) -> None:
    raw = raw_of("trl", "sft")
    raw["models"]["actor"] = {"init": init, **written}
    assert value_of(Spec.parse(raw, "a"), f"models.actor.{KEY}") == factor


def test_counts_are_named_as_the_peer_counts() -> None:
    assert str(MiniBatchesOf(128, "responses")) == "mini-batches of 128 responses"
    assert (str(WarmUp(share=0.03)), str(WarmUp(steps=10))) == ("3% of the optimizer steps", "10 training steps")


def test_a_plan_prints_what_is_set_what_is_written_and_what_differs() -> None:
    lines = preset_lines(Spec.parse(raw_of("openrlhf", "rloo", prompts_per_step=64, kl={"coefficient": 0.2}), "a"))
    text = "\n".join(lines)
    assert lines[0] == "set as in OpenRLHF 0.11.2, its trainer for rloo:"
    assert "num_mini_batches 2" in text and "baseline 'others'" in text and "warmup_steps 6" in text
    assert "- algorithm.prompts_per_step 64, there 1024" in lines
    assert any(line.startswith("- algorithm.kl {") and '"coefficient": 0.2' in line for line in lines)
    assert lines.index("written otherwise:") < lines.index("not expressed here:")
    assert "- it clips a score to [-10, 10] once the baseline is subtracted, here reward_clip is" in text
    assert "critic" not in text and all(len(line) <= 118 for line in lines)
    assert preset_lines(spec_like(None, "rloo")) == []


def test_a_plan_without_a_preset_is_as_before() -> None:
    assert spec_of(None, 1).algorithm.like is None
