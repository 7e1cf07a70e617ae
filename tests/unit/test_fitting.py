"""Settings that a YAML leaves out are chosen so that the run fits; what it says stays."""

from __future__ import annotations

import pytest
from small_runs import plan_of, spec_of

from flexrlhf.config.spec_file import dump_spec, parse_spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.plan.fitting import fitted
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.suggestions import check_fits

QWEN = (
    "models.actor={init: qwen2.5-7b}",
    "models.reward={init: qwen2.5-7b}",
    "data={path: rows.jsonl, max_prompt_tokens: 1024, max_response_tokens: 1024}",
    "cluster={nodes: [{devices: 8, class: A100-80G}]}",
)


def chosen(*settings: str, placement: object = None) -> tuple[Plan, str]:
    spec = spec_of(placement, 8, *QWEN, *settings)
    return fitted(spec, make_plan(spec))


def test_what_is_left_out_is_chosen_so_that_the_run_fits() -> None:
    plan, sentence = chosen()
    check_fits(plan)
    assert "models.actor.zero=3" in sentence and "; else rank 0 needs" in sentence
    # numbers stay, and the YAML of the run has what is chosen
    assert plan.model("actor").lora is None and plan.model("critic").dtype == "bfloat16"
    assert make_plan(parse_spec(read_yaml(dump_spec(plan.spec)))).spec == plan.spec


def test_calls_that_lack_memory_in_turn_are_mended_one_after_the_other() -> None:
    """First training, and then generation, which needs another setting."""
    nodes = "cluster={nodes: [{count: 8, devices: 8, class: A100-80G}]}"
    data = "data={path: rows.jsonl, max_prompt_tokens: 1024, max_response_tokens: 4096}"
    settings = ("algorithm={name: grpo, prompts_per_step: 64, kl: null}", "models.critic=null", "models.ref=null")
    spec = spec_of(None, 8, *QWEN, *settings, nodes, data, "models.actor.init=qwen2.5-32b", "models.reward.zero=3")
    plan, sentence = fitted(spec, make_plan(spec))
    check_fits(plan)
    assert "models.actor.zero=3" in sentence and "rollout.tp=2" in sentence


@pytest.mark.parametrize("setting", ["models.actor.zero=0", "models.actor.micro_batch_tokens=8192"])
def test_what_is_written_stays(setting: str) -> None:
    plan, sentence = chosen(setting)
    name, _, value = setting.removeprefix("models.actor.").partition("=")
    assert str(getattr(plan.model("actor"), name)) == value
    assert f"models.actor.{name}" not in sentence
    # also of roles that are filled in
    assert ".zero=" not in chosen("models.all.zero=2")[1]


def test_what_cannot_fit_and_devices_of_no_class_stay_as_they_are() -> None:
    for settings in (
        ("models.actor.init=qwen2.5-72b",),
        ("models.all.zero=0", "models.all.tp=1"),
        ("cluster={devices: 8, memory_gb: 75}",),
        ("cluster={devices: 8, device: cpu}",),
    ):
        spec = spec_of(None, 8, *QWEN, *settings)
        plan = make_plan(spec)
        assert fitted(spec, plan) == (plan, "")


def test_a_run_that_fits_is_left_alone() -> None:
    spec = spec_of(None, 8, "cluster={nodes: [{devices: 8, class: A100-80G}]}")
    plan = plan_of(None, 8, "cluster={nodes: [{devices: 8, class: A100-80G}]}")
    assert fitted(spec, plan) == (plan, "")
