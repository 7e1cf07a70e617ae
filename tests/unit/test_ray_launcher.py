"""Ray's launcher without a Ray cluster: bundles of a plan, actors of its nodes, and refusals."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from small_runs import plan_of

from flexrlhf.config.placement_settings import ClusterSpec
from flexrlhf.errors import UserError
from flexrlhf.launch.job import Job
from flexrlhf.launch.ray.cluster import (
    check_address,
    check_capacity,
    class_resources,
    node_bundles,
    ray_device,
    require_ray,
    resources_text,
    total_of,
)
from flexrlhf.launch.ray.driver import PlannedNode, RayLauncher, end_of_job, passed_on, reason
from flexrlhf.launch.ray.node import NodeEnd, RayNode
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.hosts import Hosts
from flexrlhf.runs.resume import Resumption

TWO_NODES = Cluster.of(ClusterSpec.model_validate({"nodes": [{"count": 2, "devices": 2}], "device": "cpu"}))
MIXED = Cluster.of(
    ClusterSpec.model_validate(
        {"nodes": [{"count": 1, "devices": 2, "class": "A100-80G"}, {"count": 1, "devices": 1, "class": "V100-32G"}]}
    )
)
GPU_NODES = ("CPU", "GPU", "accelerator_type:A100", "accelerator_type:V100")


def test_a_planned_node_is_one_bundle_with_all_its_devices() -> None:
    bundles = node_bundles(TWO_NODES, "cpu", ["CPU"])
    assert bundles == ({"CPU": 2.0}, {"CPU": 2.0})
    assert total_of(bundles) == {"CPU": 4.0}


def test_device_classes_are_the_kinds_of_gpus_of_ray() -> None:
    first, second = node_bundles(MIXED, "cuda", GPU_NODES)
    assert first == {"GPU": 2.0, "CPU": 2.0, "accelerator_type:A100": 0.001}
    assert second == {"GPU": 1.0, "CPU": 1.0, "accelerator_type:V100": 0.001}
    assert resources_text(second) == "1 GPU, 1 CPU, accelerator_type:V100"


def test_a_resource_of_the_user_marks_a_class() -> None:
    offered = (*GPU_NODES, "flexrlhf_V100-32G", "flexrlhf_A100-80G")
    assert class_resources(MIXED.classes, "cuda", offered)["V100-32G"] == "flexrlhf_V100-32G"
    assert class_resources(MIXED.classes, "cpu", offered)["A100-80G"] == "flexrlhf_A100-80G"


@pytest.mark.parametrize(
    ("classes", "device", "named"),
    [
        (("A100-80G", "V100-32G"), "cpu", "no Ray node offers a resource of the class A100-80G"),
        (("A100-80G", "H100"), "cuda", "no Ray node offers a resource of the class H100"),
        (("A100-40G", "A100-80G"), "cuda", "one resource accelerator_type:A100 for the classes A100-40G and A100-80G"),
    ],
)
def test_classes_that_ray_does_not_distinguish_are_refused(classes: tuple[str, ...], device: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        class_resources(classes, device, GPU_NODES)


def test_one_class_needs_no_resource() -> None:
    assert class_resources(["V100-32G"], "cpu", ["CPU"]) == class_resources(["any"], "cuda", GPU_NODES) == {}


def test_a_cluster_that_is_too_small_is_refused_at_once() -> None:
    bundles = node_bundles(TWO_NODES, "cpu", ["CPU"])
    check_capacity(bundles, [{"CPU": 2.0}, {"CPU": 2.0}])
    # a large Ray node has room for two planned ones
    check_capacity(bundles, [{"CPU": 8.0}])
    with pytest.raises(UserError, match="node 0 .* needs 2 CPU on one Ray node; Ray has 4 nodes: 4 with 1 CPU$"):
        check_capacity(bundles, [{"CPU": 1.0}] * 4)
    with pytest.raises(UserError, match="the plan needs 4 CPU; Ray has 2 nodes: 1 with 3 CPU; 1 with 0 CPU$"):
        check_capacity(bundles, [{"CPU": 3.0}, {"memory": 1.0}])


def test_variables_of_a_run_are_passed_on() -> None:
    found = {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO", "HOME": "/home/a", "RANK": "0", "PYTHONPATH": "b"}
    assert passed_on(found) == {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO", "PYTHONPATH": "b"}


def test_options_of_other_launchers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Hosts().of_launcher("ray", {}) == Hosts()
    with pytest.raises(UserError, match="--nnodes: with --launcher ray the nodes are those of cluster.nodes"):
        Hosts(2, 0, "a:1").of_launcher("ray", {})
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--launcher ray: another launcher started this process as a rank"):
        Hosts().of_launcher("ray", {})


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr("flexrlhf.launch.ray.cluster.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"needs the package ray, .*; pip install 'flexrlhf\[ray\]'$"):
        require_ray()


def test_a_device_that_is_set_needs_no_cluster() -> None:
    assert ray_device("cpu", 4, "node 0: its class A100-80G is a GPU") == "cpu"


def test_the_line_of_an_error_of_ray_that_says_most() -> None:
    assert reason(RuntimeError("The actor died\n  Traceback\nModuleNotFoundError: No module named 'flexrlhf'")) == (
        "ModuleNotFoundError: No module named 'flexrlhf'"
    )
    assert reason(RuntimeError("The actor died unexpectedly\n\tactor_id: 1")) == "The actor died unexpectedly"
    assert reason(RuntimeError()) == "RuntimeError"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayNode:
    """Node whose launcher is a program: it writes its arguments, and waits for its end."""
    package = tmp_path / "flexrlhf" / "launch" / "ray"
    package.mkdir(parents=True)
    for folder in (package.parent.parent, package.parent, package):
        (folder / "__init__.py").touch()
    program = (
        "import json, os, signal, sys, time\n"
        "from pathlib import Path\n"
        "files = Path(sys.argv[1])\n"
        "def end(*_):\n"
        "    (files / 'end.json').write_text(json.dumps(['failed', 'rank 1 ended the run']))\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print((files / 'orders.json').read_text(), *sys.argv[2:], os.environ['FLEXRLHF_LAUNCHER'], flush=True)\n"
        "time.sleep(60)\n"
    )
    (package / "node.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    actor = RayNode()
    actor.start("orders", 2, 1, "a:1", 3)
    lines: list[tuple[int, str]] = []
    while not lines:
        more, end = actor.poll()
        lines += more
        assert end is None, end
    assert lines == [(1, f"orders 2 1 a:1 3 {os.getpid()}")]
    return actor


def end_of(actor: RayNode) -> NodeEnd:
    while True:
        _, end = actor.poll()
        if end is not None:
            return end


def test_an_actor_runs_a_launcher_and_reports_its_end(node: RayNode) -> None:
    node.signal(signal.SIGTERM)
    assert end_of(node) == NodeEnd("failed", "rank 1 ended the run")


def test_a_launcher_that_is_killed_is_lost(node: RayNode) -> None:
    node.signal(signal.SIGKILL)
    assert end_of(node) == NodeEnd("lost", "its launcher was killed by SIGKILL")


def test_an_address_where_nothing_listens_is_refused() -> None:
    for address in ("", "auto", "ray://a:1"):
        check_address(address)
    with pytest.raises(UserError, match=r"^RAY_ADDRESS 127.0.0.1:1: no Ray cluster responds \(Connection refused\)$"):
        check_address("127.0.0.1:1")


LOST = "node 1 (host b; rank 1) ended the run, its Ray node was removed"
KILLED = NodeEnd("failed", "rank 0 (actor; host a) ended the run, killed by SIGKILL")
GONE = NodeEnd("lost", "its Ray node was removed")
NODES = [PlannedNode(number, None, "ab"[number], "10.0.0.1", "7af8", 4000) for number in (0, 1)]


@pytest.mark.parametrize(
    ("ends", "kind", "sentence"),
    [
        ((NodeEnd("finished"), NodeEnd("finished")), "finished", ""),
        ((NodeEnd("finished"), NodeEnd("stopped")), "stopped", ""),
        ((KILLED, NodeEnd("failed", "the same")), "failed", KILLED.sentence),
        ((NodeEnd("failed", "rank 0: the connection to rank 1 closed"), GONE), "failed", LOST),
        ((NodeEnd("interrupted"), GONE), "interrupted", ""),
        ((NodeEnd("refused", "lr: too large"), NodeEnd("interrupted")), "refused", "lr: too large"),
    ],
    ids=["finished", "stopped", "failed", "lost", "interrupted", "refused"],
)
def test_the_end_of_a_job_is_that_of_the_node_that_explains_the_others(
    ends: tuple[NodeEnd, ...], kind: str, sentence: str
) -> None:
    cluster = "cluster={nodes: [{count: 2, devices: 1}], device: cpu}"
    job = Job((Resumption(plan_of([1, 1, 0.5, 0.5], 2, cluster)),), Hosts(), "cpu", RayLauncher())
    found = end_of_job(list(zip(NODES, ends, strict=True)), job)
    assert (found.kind, found.sentence) == (kind, sentence)
