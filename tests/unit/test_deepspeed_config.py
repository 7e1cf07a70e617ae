"""DeepSpeed configuration: our settings under its keys, a user's merged with them, and no key set by both."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from small_runs import plan_of

from flexrlhf.config.model_settings import ModelSpec, OptimizerSpec
from flexrlhf.engines.deepspeed.config import OWNED, check_config, clips_itself, deepspeed_config
from flexrlhf.engines.deepspeed.engine import device_of_local_rank
from flexrlhf.errors import UserError

Raw = dict[str, Any]


def made(trained: bool = True, **settings: Any) -> Raw:
    return deepspeed_config(ModelSpec(engine="deepspeed", **settings), trained)


def leaves(config: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*above, key))
        else:
            yield *above, key


def nested(keys: tuple[str, ...], value: Any) -> Raw:
    for key in reversed(keys):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def at(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    for key in keys:
        config = config[key]
    return config


# --- ours


def test_stage_0_in_float32() -> None:
    assert made() == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 0,
            "stage3_param_persistence_threshold": 0,
            "overlap_comm": False,
            "reduce_bucket_size": 50_000_000,
        },
        "steps_per_print": 10**9,
    }


@pytest.mark.parametrize("zero", range(4))
def test_without_an_optimizer_only_stage_3_has_something_to_shard(zero: int) -> None:
    assert made(zero=zero)["zero_optimization"]["stage"] == zero
    assert made(trained=False, zero=zero)["zero_optimization"]["stage"] == (3 if zero == 3 else 0)


@pytest.mark.parametrize(("dtype", "section"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_16_bits_are_summed_and_sent_in_32(dtype: str, section: str) -> None:
    config = made(dtype=dtype)
    assert config[section] == {"enabled": True}
    assert {"bf16", "fp16"} & set(config) == {section}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["communication_data_type"] == "fp32"
    # a frozen model sums and sends no gradients
    assert set(made(trained=False, dtype=dtype)) == set(made()) | {section}


def test_float32_has_no_section_of_16_bits() -> None:
    assert not {"bf16", "fp16", "data_types", "communication_data_type"} & set(made(zero=3))


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_the_gradient_is_clipped_once(limit: float | None, dtype: Any, zero: Any) -> None:
    """By DeepSpeed, or by the engine where DeepSpeed's bare optimizer does not report the norm."""
    settings = ModelSpec(zero=zero, dtype=dtype, optimizer=OptimizerSpec(max_grad_norm=limit))
    assert clips_itself(settings) == (zero == 0 and dtype == "float32")
    assert deepspeed_config(settings, True)["gradient_clipping"] == (0.0 if clips_itself(settings) else limit or 0.0)


def test_offload_of_what_there_is() -> None:
    zero = made(zero=3, offload_optimizer=True, offload_parameters=True)["zero_optimization"]
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu"}
    frozen = made(trained=False, zero=3, offload_optimizer=True, offload_parameters=True)["zero_optimization"]
    assert "offload_optimizer" not in frozen
    assert frozen["offload_param"] == {"device": "cpu"}
    assert not {"offload_optimizer", "offload_param"} & set(made(zero=3)["zero_optimization"])


# --- a user's


def test_settings_of_a_user_are_merged_with_ours() -> None:
    config = {"zero_optimization": {"reduce_bucket_size": 10**6}, "wall_clock_breakdown": True}
    assert made(zero=2, config=config) == made(zero=2) | {
        "zero_optimization": made(zero=2)["zero_optimization"] | {"reduce_bucket_size": 10**6},
        "wall_clock_breakdown": True,
    }


def test_settings_of_a_user_are_not_changed() -> None:
    config = {"zero_optimization": {"reduce_bucket_size": 10**6}, "fp16": {"loss_scale_window": 100}}
    before = deepcopy(config)
    settings = ModelSpec(zero=3, dtype="float16", config=config)
    assert deepspeed_config(settings, True)["fp16"] == {"enabled": True, "loss_scale_window": 100}
    assert config == before == settings.config


def every_leaf() -> list[tuple[str, ...]]:
    """Every key that we give DeepSpeed under some settings."""
    found = {
        leaf: None
        for zero, dtype in product(range(4), ("float32", "bfloat16", "float16"))
        for leaf in leaves(made(zero=zero, dtype=dtype, offload_optimizer=True, offload_parameters=True))
    }
    return list(found)


@pytest.mark.parametrize("keys", every_leaf(), ids=".".join)
def test_what_a_user_sets_is_taken_or_refused(keys: tuple[str, ...]) -> None:
    """Ours wins nowhere silently."""
    config = nested(keys, "theirs")
    try:
        check_config("models.actor", config)
    except UserError as error:
        assert f"models.actor.config.{keys[0]}" in str(error)
    else:
        for zero, dtype in product(range(4), ("float32", "bfloat16", "float16")):
            assert at(made(zero=zero, dtype=dtype, config=config), keys) == "theirs"


@pytest.mark.parametrize(("name", "owner"), OWNED.items(), ids=OWNED)
def test_a_key_that_a_setting_of_ours_sets_is_refused(name: str, owner: str) -> None:
    models = f"{{engine: deepspeed, config: {nested(tuple(name.split('.')), 1)}}}"
    with pytest.raises(UserError) as caught:
        plan_of(None, 2, f"models.critic={models}")
    ours = owner if owner.startswith("algorithm.") else f"models.critic.{owner}"
    assert str(caught.value) == (
        f"models.critic.config.{name}: conflicts with {ours}, which sets it; remove it from config"
    )


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("bfloat16", "dtype"),
        ("amp", "dtype"),
        ("zero_optimization.cpu_offload", "offload_optimizer"),
        ("zero_optimization.cpu_offload_param", "offload_parameters"),
        ("zero_optimization.param_persistence_threshold", "zero"),
    ],
)
def test_other_names_of_the_same_are_refused_too(name: str, owner: str) -> None:
    """DeepSpeed still reads what a key was called before, and the names of its fields."""
    with pytest.raises(UserError, match=f"^models.actor.config.{name}: conflicts with models.actor.{owner}, "):
        check_config("models.actor", nested(tuple(name.split(".")), True))


@pytest.mark.parametrize("owner", sorted({owner for owner in OWNED.values() if not owner.startswith("algorithm.")}))
def test_the_key_that_sets_it_is_one_of_ours(owner: str) -> None:
    section, _, entry = owner.partition(".")
    assert section in ModelSpec.model_fields
    assert not entry or entry in OptimizerSpec.model_fields


def test_other_settings_pass() -> None:
    check_config("models.actor", {"zero_optimization": {"stage3_max_live_parameters": 1}, "comms_logger": {}})


def test_ranks_that_share_a_gpu_have_its_number_as_their_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    for device, number in (("cuda:1", "1"), ("cuda", "0"), ("cpu", "3")):
        with device_of_local_rank(torch.device(device)):
            assert os.environ["LOCAL_RANK"] == number
        assert os.environ["LOCAL_RANK"] == "3"
