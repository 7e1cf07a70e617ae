"""Settings that a YAML leaves out are chosen so that the run fits; written ones stay."""

from __future__ import annotations

import itertools
import time
from fractions import Fraction
from pathlib import Path

import pytest
from small_runs import plan_of, spec_of

from flexrlhf.config.placement_settings import ClusterSpec
from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import UserError
from flexrlhf.guideline.advice import advise as advise_module
from flexrlhf.guideline.advice.advise import advise
from flexrlhf.guideline.advice.settings_text import placement_text
from flexrlhf.guideline.advice.space import make_space
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.search import branch_and_bound, result
from flexrlhf.guideline.search.branch_and_bound import search
from flexrlhf.plan.choice import planned
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.suggestions import check_fits, fitted

QWEN = (
    "models.actor={init: qwen2.5-7b}",
    "models.reward={init: qwen2.5-7b}",
    "data={path: rows.jsonl, max_prompt_tokens: 1024, max_response_tokens: 1024}",
    "cluster={nodes: [{devices: 8, class: A100-80G}]}",
)


def chosen(*settings: str, placement: object = None) -> tuple[Plan, str]:
    spec = spec_of(placement, 8, *QWEN, *settings)
    return fitted(spec, make_plan(spec))


def test_settings_that_are_left_out_are_chosen_so_that_the_run_fits() -> None:
    plan, sentence = chosen()
    check_fits(plan)
    assert "models.actor.zero=3" in sentence and "; else rank 0 needs" in sentence
    # results stay, and the YAML of the run has the chosen settings
    assert plan.model("actor").lora is None and plan.model("critic").dtype == "bfloat16"
    assert make_plan(Spec.parse(read_yaml(plan.spec.dump()))).spec == plan.spec


def test_calls_that_lack_memory_in_turn_are_mended_one_after_the_other() -> None:
    """First training, and then generation, which needs another setting."""
    nodes = "cluster={nodes: [{count: 8, devices: 8, class: A100-80G}]}"
    data = "data={path: rows.jsonl, max_prompt_tokens: 1024, max_response_tokens: 32768}"
    settings = ("algorithm={name: grpo, prompts_per_step: 64, kl: null}", "models.critic=null", "models.ref=null")
    spec = spec_of(None, 8, *QWEN, *settings, nodes, data, "models.actor.init=qwen2.5-32b", "models.reward.zero=3")
    plan, sentence = fitted(spec, make_plan(spec))
    check_fits(plan)
    assert "models.actor.zero=3" in sentence and "rollout.tp=2" in sentence


@pytest.mark.parametrize("setting", ["models.actor.zero=0", "models.actor.micro_batch_tokens=8192"])
def test_written_settings_stay(setting: str) -> None:
    plan, sentence = chosen(setting)
    name, _, value = setting.removeprefix("models.actor.").partition("=")
    assert str(getattr(plan.model("actor"), name)) == value
    assert f"models.actor.{name}" not in sentence
    # also of roles that are filled in
    assert ".zero=" not in chosen("models.all.zero=2")[1]


def test_runs_that_cannot_fit_or_have_devices_of_no_class_stay() -> None:
    two = "cluster={nodes: [{devices: 2, class: A100-80G}]}"
    for settings in (
        ("models.actor.init=qwen2.5-72b", two),
        ("models.all.zero=0", "models.all.tp=1", two),
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


PPO = (
    "models={actor: {init: qwen2.5-1.5b}, reward: {init: qwen2.5-1.5b}}",
    "data={path: rows.jsonl, max_prompt_tokens: 1024, max_response_tokens: 1024}",
    "algorithm={name: ppo, prompts_per_step: 64, num_mini_batches: 4}",
)
NODES = {
    "one class": "cluster={nodes: [{devices: 4, class: A100-80G}]}",
    "two classes": "cluster={nodes: [{devices: 2, class: A100-80G}, {devices: 2, class: V100-32G}]}",
}


def unwritten(*settings: str) -> Spec:
    """A spec that says nothing of a placement."""
    raw = read_yaml(spec_of(None, 2, *settings).dump(short=True))
    return Spec.parse({key: value for key, value in raw.items() if key != "placement"})


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_a_placement_that_is_not_written_is_that_of_advise(nodes: str) -> None:
    spec = unwritten(*PPO, nodes)
    ((plan, text),) = planned([spec])
    check_fits(plan)
    best = advise(spec, AnalyticCosts()).best
    assert (plan.placement, plan.schedule) == (best.plan.placement, best.plan.schedule)
    first, settings = text.splitlines()
    chosen = (
        f"placement, which is not written, is {placement_text(best)}, {best.candidate.strategy}, {best.seconds:.3g} s"
    )
    assert f"{chosen} a step by figures of the device classes" in first and settings.startswith("  with ")
    # the YAML of the run has it
    assert make_plan(Spec.parse(read_yaml(plan.spec.dump()))).placement == plan.placement


def test_a_placement_that_is_written_stays() -> None:
    for placement in (None, (1, 1, 1, 1)):
        spec = unwritten(*PPO, NODES["one class"]).model_copy(update={"placement": placement})
        ((plan, text),) = planned([spec])
        assert {model.ranks for model in plan.placement.models} == {(0, 1, 2, 3)}
        assert "placement" not in text


def test_settings_that_are_written_stay_in_a_search() -> None:
    spec = unwritten(*PPO, NODES["one class"], "models.actor.zero=3", "rollout={engine: vllm, tp: 2}")
    ((plan, text),) = planned([spec])
    assert (plan.model("actor").zero, plan.spec.rollout.tp) == (3, 2)
    assert "rollout.tp" not in text


def test_a_run_goes_on_with_models_that_an_earlier_one_writes(tmp_path: Path) -> None:
    run = f"runs={tmp_path}", NODES["one class"]
    first = unwritten("algorithm={name: sft}", "models={actor: {init: qwen2.5-1.5b}}", "name=sft", *run)
    second = unwritten(*PPO, *run, f"models.actor={{path: {tmp_path}/sft/actor}}")
    found = planned([first, second])
    assert all("placement, which is not written, is" in text for _, text in found)


def test_a_run_that_fits_nowhere_keeps_every_model_on_all_devices() -> None:
    ((plan, text),) = planned([unwritten(*PPO, "cluster={nodes: [{devices: 1, class: V100-16G, memory_gb: 4}]}")])
    assert "every model on all devices, since a search finds no placement that fits" in text
    with pytest.raises(UserError, match="memory: rank 0 needs"):
        check_fits(plan)


def test_optimizer_states_go_to_host_memory_where_nothing_fits_otherwise() -> None:
    settings = "algorithm={name: sft}", "models={actor: {init: qwen2.5-1.5b}}", PPO[1]
    card = "cluster={nodes: [{devices: 1, class: RTX4090-24G}]}"
    spec = unwritten(*settings, card)
    ((plan, text),) = planned([spec])
    check_fits(plan)
    assert (
        spec.models.actor is not None
        and plan.model("actor").engine == "deepspeed"
        and plan.model("actor").offload_optimizer
    )
    assert "engine: deepspeed of actor" in text
    own = spec.models.actor.model_copy(update={"engine": "torch"})
    ((plan, text),) = planned([spec.model_copy(update={"models": spec.models.model_copy(update={"actor": own})})])
    assert "since a search finds no placement that fits" in text and plan.model("actor").engine == "torch"


def test_settings_that_deepspeed_has_not_leave_the_refusal_as_it_is() -> None:
    two = "cluster={nodes: [{devices: 2, class: A100-80G}]}"
    spec = unwritten(*PPO, "models.actor.init=qwen2.5-72b", two, "models.actor.tp=2")
    ((_, text),) = planned([spec])
    assert "since a search finds no placement that fits: no placement of these models fits the devices" in text


def test_cpu_ranks_get_a_placement_and_models_keep_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eight lines of README without their placement."""
    tiny = ("algorithm.prompts_per_step=64", "algorithm.num_mini_batches=4", "cluster={devices: 2, device: cpu}")
    spec = unwritten(*tiny, "data={path: rows.jsonl, max_prompt_tokens: 16, max_response_tokens: 20}")
    ((plan, text),) = planned([spec])
    assert plan.spec.placement == (Fraction(1, 2),) * 4
    assert plan.spec.models == make_plan(spec).spec.models
    assert "by measurements of an ordinary CPU" in text.splitlines()[-1]
    # a search whose devices may be GPUs of no known class, and one of settings that are not measured
    monkeypatch.setattr(ClusterSpec, "NVIDIA_DRIVER", Path(__file__))
    apart = "cluster={nodes: [{count: 2, devices: 1}]}"
    for setting in ("cluster.device=auto", "models.actor.zero=3", "cluster.devices=1", apart):
        ((plan, text),) = planned([unwritten(*tiny, setting)])
        assert (text, plan.spec.placement) == ("", None)


def test_a_search_depends_on_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = unwritten(*PPO, NODES["one class"])
    own = planned([spec])
    ticks = itertools.count(step=1000)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    for module in (result, branch_and_bound, advise_module):
        monkeypatch.setattr(module, "perf_counter", time.perf_counter)
    assert planned([spec]) == own


def test_a_search_ends_at_its_work() -> None:
    space = make_space(unwritten(*PPO, NODES["one class"]), AnalyticCosts(), None)
    short, long = (search(space.problem, limit) for limit in (0.05, 5.0))
    assert 0.05 <= short.work < 0.1 < long.work and not short.is_finished and long.is_finished
    assert search(space.problem, 0.05).best == short.best
