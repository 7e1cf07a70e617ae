"""Device classes and clusters that would turn a check off in silence are refused or reported."""

from __future__ import annotations

import pytest
from small_runs import plan_of

from flexrlhf.errors import UserError
from flexrlhf.plan.plan_text import format_plan

CLASSES = [
    ("A100", "", "cluster.nodes: class 'A100' has no figures; use A100-40G or A100-80G"),
    ("a100-80g", "", "cluster.nodes: class 'a100-80g' has no figures; use A100-80G"),
    ("V100", ", memory_gb: 32", "class 'V100' has no figures; use V100-16G or V100-32G"),
    ("A100-80GB", "", "class 'A100-80GB' has no figures (did you mean 'A100-80G'?); give memory_gb"),
    ("big", "", "class 'big' has no figures; give memory_gb, by which a plan is checked, or one of V100-16G, "),
]


@pytest.mark.parametrize(("name", "memory", "sentence"), CLASSES, ids=str)
def test_a_class_without_figures_is_refused(name: str, memory: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        plan_of(None, 2, f"cluster={{nodes: [{{devices: 2, class: {name}{memory}}}]}}")
    assert sentence in str(error.value)


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
