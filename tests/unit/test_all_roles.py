"""``models.all``: the roles that take its settings, precedence, and the way back to YAML."""

from __future__ import annotations

import pytest
from small_runs import plan_of, spec_of

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.plan.models import CRITIC_RATE
from flexrlhf.plan.pipeline import ResolvedSpec

ROLES = ("actor", "critic", "ref", "reward")
TRAINING = (
    "{zero: 3, activation_checkpointing: true, offload_activations: true, optimizer: {learning_rate: 0.5}, "
    "lora: {rank: 4}, shadow: {}}"
)


def model_of(spec: Spec, role: str) -> ModelSpec:
    model = spec.models.of(role)
    assert model is not None
    return model


def planned(*overrides: str) -> Spec:
    return plan_of(None, 2, *overrides).spec


def test_every_role_has_the_settings_of_all_but_for_its_own() -> None:
    spec = planned("models.all={zero: 3, dtype: bfloat16}", "models.reward.dtype=float32")
    assert [model_of(spec, role).zero for role in ROLES] == [3, 3, 3, 3]
    assert [model_of(spec, role).dtype for role in ROLES] == ["bfloat16", "bfloat16", "bfloat16", "float32"]
    assert spec.models.all is None


def test_all_is_no_role() -> None:
    models = spec_of(None, 2, "models.all.zero=3").models
    assert "all" not in dict(models) and models.of("all") is None
    assert model_of(spec_of(None, 2, "models.all.zero=3"), "actor").zero == 3


@pytest.mark.parametrize("role", ["actor", "reward"])
def test_a_default_that_a_role_writes_is_its_own(role: str) -> None:
    spec = planned("models.all.zero=3", f"models.{role}.zero=0")
    assert [model_of(spec, each).zero for each in ROLES] == [0 if each == role else 3 for each in ROLES]


def test_sections_are_merged_key_by_key_and_other_mappings_are_not() -> None:
    shared = (
        "models.all={engine: deepspeed, optimizer: {schedule: linear, eps: 0.5}, lora: {rank: 4, alpha: 3}, "
        "shadow: {zero: 3}, config: {steps_per_print: 1}}"
    )
    own = "{optimizer: {eps: 0.25}, lora: {rank: 2}, shadow: {tp: 1}, config: {wall_clock_breakdown: true}}"
    actor = model_of(spec_of(None, 2, shared, *(f"models.actor.{k}={v}" for k, v in read_yaml(own).items())), "actor")
    assert (actor.optimizer.schedule, actor.optimizer.eps) == ("linear", 0.25)
    assert actor.lora is not None and (actor.lora.rank, actor.lora.alpha) == (2, 3)
    assert actor.shadow is not None and (actor.shadow.zero, actor.shadow.tp) == (3, 1)
    assert actor.config == {"wall_clock_breakdown": True}
    assert model_of(spec_of(None, 2, shared, "models.actor.lora=null"), "actor").lora is None


def test_only_trained_roles_take_settings_of_training() -> None:
    spec = planned(f"models.all={TRAINING}", "models.ref={}")
    for role in ROLES:
        model, plain = model_of(spec, role), ModelSpec()
        assert model.zero == 3
        taken = {name for name in ModelSpec.OF_TRAINING if getattr(model, name) != getattr(plain, name)}
        # dense models have no routers
        given = set(ModelSpec.OF_TRAINING) - {"offload_optimizer", *ModelSpec.OF_ROUTERS}
        assert taken == (given if role in ("actor", "critic") else set())


def test_a_role_that_shares_weights_takes_nothing() -> None:
    spec = planned(f"models.all={TRAINING}", "models.ref.share=actor")
    assert model_of(spec, "ref") == ModelSpec(share="actor")


def test_a_learning_rate_of_all_is_that_of_critics_too() -> None:
    assert model_of(planned("models.all.optimizer.learning_rate=0.5"), "critic").optimizer.learning_rate == 0.5
    assert model_of(planned("models.all.optimizer.eps=0.5"), "critic").optimizer.learning_rate == CRITIC_RATE


def test_a_preset_fills_in_what_neither_the_role_nor_all_has() -> None:
    preset = spec_of(None, 2, "algorithm.like=verl")
    spec = spec_of(
        None, 2, "algorithm.like=verl", "models.all.optimizer.learning_rate=0.5", "models.actor.optimizer.eps=0.25"
    )
    for role in ("actor", "critic"):
        assert model_of(spec, role).optimizer.learning_rate == 0.5
        assert model_of(spec, role).optimizer.betas == model_of(preset, role).optimizer.betas
    assert model_of(spec, "actor").optimizer.eps == 0.25


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("like", ["null", "verl"])
def test_a_dumped_spec_loads_as_the_same_spec(short: bool, like: str) -> None:
    overrides = (f"models.all={TRAINING}", "models.all.dtype=float32", "models.ref.share=actor", "models.actor.zero=0")
    spec = spec_of(None, 2, f"algorithm.like={like}", *overrides, "models.actor.optimizer.eps=0.25")
    assert Spec.parse(read_yaml(spec.dump(short))) == spec
    resolved = planned(*overrides)
    loaded = Spec.parse(read_yaml(resolved.dump(short)))
    # the short form lacks the chosen settings
    assert (ResolvedSpec.of(loaded).spec if short else loaded) == resolved


def test_a_dumped_role_has_what_differs_from_all() -> None:
    spec = spec_of(None, 2, "models.all={zero: 3, dtype: float32}", "models.reward.zero=0", "models.critic={}")
    models = read_yaml(spec.dump(short=True))["models"]
    assert models["all"] == {"zero": 3, "dtype": "float32"}
    assert set(models["actor"]) == {"init"} and set(models["reward"]) == {"init", "zero"} and models["critic"] == {}
