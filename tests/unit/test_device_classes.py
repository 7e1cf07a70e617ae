"""Device classes and clusters that would turn a check off in silence are refused or reported; what they decide."""

from __future__ import annotations

import pytest
from small_runs import plan_of

from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan_text import format_plan


@pytest.mark.parametrize(
    "cluster",
    [
        "{nodes: [{devices: 2}]}",
        "{nodes: [{devices: 2, class: any}]}",
        "{nodes: [{devices: 2, class: mine, memory_gb: 12}]}",
        "{nodes: [{devices: 2, class: mine}], memory_gb: 12}",
        "{nodes: [{devices: 2, class: large}], device: cpu}",
        "{nodes: [{devices: 2, class: B300-288G, memory_gb: 288}]}",
    ],
)
def test_a_label_of_ones_own_has_memory_or_is_of_cpus(cluster: str) -> None:
    assert plan_of(None, 2, f"cluster={cluster}").placement.num_ranks == 2


def test_a_plan_without_a_cluster_says_so() -> None:
    line = "no cluster is given, so one device is planned: set cluster.devices, or use --devices"
    assert format_plan(plan_of(None, 1, "cluster={}")).splitlines()[1] == line
    for cluster in ("{devices: 1}", "{nodes: [{devices: 1}]}"):
        assert line not in format_plan(plan_of(None, 1, f"cluster={cluster}"))


@pytest.mark.parametrize(
    ("overrides", "types"),
    [
        (("cluster={nodes: [{devices: 2, class: A100-80G}]}",), ["bfloat16"] * 4),
        (("cluster={nodes: [{devices: 2, class: A100-80G}], device: cpu}",), ["float32"] * 4),
        (("cluster={nodes: [{devices: 2, class: any}]}",), ["float32"] * 4),
        (
            (
                "cluster={nodes: [{devices: 1, class: A100-80G}, {devices: 1, class: V100-32G}]}",
                "placement={actor: 1, critic: 1, ref: 1, reward: 1, span_classes: true}",
            ),
            ["float32"] * 4,
        ),
        (
            (
                "cluster={nodes: [{devices: 2, class: H100-80G}]}",
                "models.ref.dtype=float32",
                "models.critic.engine=deepspeed",
            ),
            ["bfloat16", "float32", "float32", "bfloat16"],
        ),
        (
            ("cluster.nodes=[{devices: 2, class: H100-80G}]", "models.all.dtype=float32", "models.ref.dtype=float16"),
            ["float32", "float32", "float16", "float32"],
        ),
    ],
)
def test_models_without_a_type_are_in_bfloat16_where_all_devices_compute_in_it(
    overrides: tuple[str, ...], types: list[str]
) -> None:
    """DeepSpeed needs a stage for it; a type that is written stays, also in the YAML that the ranks read."""
    plan = plan_of(None, 2, *overrides)
    roles = ("actor", "critic", "ref", "reward")
    assert [plan.model(role).dtype for role in roles] == types
    for short in (False, True):
        again = make_plan(Spec.parse(read_yaml(plan.spec.dump(short=short))))
        assert [again.model(role).dtype for role in roles] == types


MOE = (
    "models.actor.init={model_type: qwen3_moe, hidden_size: 16, intermediate_size: 24, moe_intermediate_size: 8, "
    "num_experts: 8, num_experts_per_tok: 2, num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2, "
    "head_dim: 4, vocab_size: 300}"
)
IN_LOOP = "computes the products of experts of actor, ref one after the other, in"
DECODES = "actor generates with"


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ((MOE, "cluster={nodes: [{devices: 2, class: A100-80G}]}"), [f"A100-80G {IN_LOOP} bfloat16"]),
        ((MOE, "cluster={nodes: [{devices: 2, class: H100-80G}]}"), []),
        (
            (MOE, "cluster={nodes: [{devices: 2, class: H100-80G}]}", "models.all.dtype=float16"),
            [f"H100-80G {IN_LOOP} float16"],
        ),
        ((MOE, "cluster={nodes: [{devices: 2, class: A100-80G}], device: cpu}"), []),
        (
            (MOE, "cluster.device=cuda", "models.actor.ep=2"),
            [f"{DECODES} experts on 2 ranks: each of up to 8 tokens takes 10 collectives of its ranks, and the host"],
        ),
        (
            ("cluster.device=cuda", "models.actor.zero=3"),
            [f"{DECODES} weights sharded by zero: 3: each of up to 8 tokens takes 3 collectives"],
        ),
        (
            ("cluster={nodes: [{devices: 2, class: H100-80G}]}", "models.actor.zero=2", "rollout.engine=transformers"),
            [f"{DECODES} weights sharded by zero: 2: each of up to 8 tokens takes 1 collective of its ranks"],
        ),
        (("models.actor.zero=3",), []),
        (("cluster.device=cuda", "models.actor.zero=3", "rollout.engine=vllm"), []),
        (("cluster.device=cuda", "models.actor.zero=3", "rollout.engine=torch"), []),
    ],
)
def test_settings_that_are_slow_on_gpus_alone_are_warned_of(overrides: tuple[str, ...], found: list[str]) -> None:
    """In the printed plan, by the class or by ``cluster.device``."""
    text = format_plan(plan_of(None, 2, *overrides))
    lines = [line.strip().removeprefix("warning: ") for line in text.splitlines() if "warning: " in line]
    assert [line[: len(start)] for line, start in zip(lines, found, strict=True)] == found, lines
