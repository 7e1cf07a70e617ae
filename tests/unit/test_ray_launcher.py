"""Ray's launcher without a Ray cluster: bundles of a plan, environment of a rank, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path

import pytest
from small_runs import plan_of

from flexrlhf.config.spec import ClusterSpec
from flexrlhf.errors import UserError
from flexrlhf.launch.failures import FailureReporter
from flexrlhf.launch.rank_environment import Meeting, RankPlace, passed_on, rank_variables
from flexrlhf.launch.ray_job.actor import RankActor
from flexrlhf.launch.ray_job.cluster import check_address, ray_device, require_ray
from flexrlhf.launch.ray_job.ranks import reason
from flexrlhf.placement.cluster import make_cluster
from flexrlhf.placement.hosts import Hosts, hosts_of
from flexrlhf.placement.ray_bundles import check_capacity, class_resources, node_bundles, resources_text

TWO_NODES = make_cluster(ClusterSpec.model_validate({"nodes": [{"count": 2, "devices": 2}], "device": "cpu"}))
MIXED = make_cluster(
    ClusterSpec.model_validate(
        {"nodes": [{"count": 1, "devices": 2, "class": "A100-80G"}, {"count": 1, "devices": 1, "class": "V100-32G"}]}
    )
)
GPU_NODES = ("CPU", "GPU", "accelerator_type:A100", "accelerator_type:V100")


def test_a_planned_node_is_one_group_with_a_bundle_for_each_device() -> None:
    first, second = node_bundles(TWO_NODES, "cpu", ["CPU"])
    assert (first.ranks, second.ranks) == ((0, 1), (2, 3))
    assert first.bundles == second.bundles == ({"CPU": 1.0}, {"CPU": 1.0})
    assert first.total == {"CPU": 2.0}


def test_device_classes_are_the_kinds_of_gpus_of_ray() -> None:
    first, second = node_bundles(MIXED, "cuda", GPU_NODES)
    assert first.bundles[0] == {"GPU": 1.0, "CPU": 1.0, "accelerator_type:A100": 0.001}
    assert second.bundles == ({"GPU": 1.0, "CPU": 1.0, "accelerator_type:V100": 0.001},)
    assert resources_text(second.total) == "1 GPU, 1 CPU, accelerator_type:V100"


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
    groups = node_bundles(TWO_NODES, "cpu", ["CPU"])
    check_capacity(groups, [{"CPU": 2.0}, {"CPU": 2.0}])
    # a large Ray node has room for two planned ones
    check_capacity(groups, [{"CPU": 8.0}])
    with pytest.raises(UserError, match="node 0 .* needs 2 CPU on one Ray node; Ray has 4 nodes: 4 with 1 CPU$"):
        check_capacity(groups, [{"CPU": 1.0}] * 4)
    with pytest.raises(UserError, match="the plan needs 4 CPU; Ray has 2 nodes: 1 with 3 CPU; 1 with 0 CPU$"):
        check_capacity(groups, [{"CPU": 3.0}, {"memory": 1.0}])


def test_a_rank_gets_the_variables_of_torchrun() -> None:
    variables = rank_variables(RankPlace(3, 4, 1, 2), Meeting("10.0.0.1", 4000, 1, 2), ("5", "7"))
    assert variables == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4000",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "CUDA_VISIBLE_DEVICES": "5,7",
    }
    assert "CUDA_VISIBLE_DEVICES" not in rank_variables(RankPlace(0, 1, 0, 1), Meeting("a", 1, 0, 0), ())


def test_variables_of_a_run_are_passed_on() -> None:
    found = {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO", "HOME": "/home/a", "RANK": "0", "PYTHONPATH": "b"}
    assert passed_on(found) == {"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO", "PYTHONPATH": "b"}


def test_options_of_other_launchers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hosts_of("ray", Hosts(), {}) == Hosts()
    with pytest.raises(UserError, match="--nnodes: with --launcher ray the nodes are those of cluster.nodes"):
        hosts_of("ray", Hosts(2, 0, "a:1"), {})
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--launcher ray: another launcher started this process as a rank"):
        hosts_of("ray", Hosts(), {})


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr("flexrlhf.launch.ray_job.cluster.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"needs the package ray, .*; pip install 'flexrlhf\[ray\]'$"):
        require_ray()


def test_a_device_that_is_set_needs_no_cluster() -> None:
    assert ray_device("cpu", 4) == "cpu"


def test_the_line_of_an_error_of_ray_that_says_most() -> None:
    assert reason(RuntimeError("The actor died\n  Traceback\nModuleNotFoundError: No module named 'flexrlhf'")) == (
        "ModuleNotFoundError: No module named 'flexrlhf'"
    )
    assert reason(RuntimeError("The actor died unexpectedly\n\tactor_id: 1")) == "The actor died unexpectedly"
    assert reason(RuntimeError()) == "RuntimeError"


def test_a_rank_that_is_lost_is_named_with_its_host() -> None:
    reporter = FailureReporter(plan_of([1, 1, 0.5, 0.5], 2), [], (0, 1), {1: "b"})
    found = reporter.lost(1, "its Ray node was removed", "node")
    assert found.kind == "node"
    assert found.sentence.startswith("rank 1 (") and found.sentence.endswith(
        "; host b) ended the run, its Ray node was removed"
    )


def test_an_actor_runs_a_rank_and_reports_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of the rank's writes a line and an error, and waits for its end."""
    package = tmp_path / "flexrlhf" / "launch"
    package.mkdir(parents=True)
    program = (
        "import json, os, signal, sys, time\n"
        "print(os.environ['RANK'], open(sys.argv[1]).read(), flush=True)\n"
        "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(json.dumps({'kind': 'closed'}))\n"
        "time.sleep(60)\n"
    )
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "rank.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    actor = RankActor()
    actor.start("orders", {"RANK": "2", "PYTHONPATH": str(tmp_path)})
    lines: list[tuple[int, str]] = []
    while not lines:
        report = actor.poll()
        lines += report.lines
        assert report.code is None, report
    assert lines == [(1, "2 orders")]
    actor.request_stop("now")
    end = actor.stop()
    assert end.code == -signal.SIGTERM and json.loads(end.error) == {"kind": "closed"}
    actor.close()


def test_an_address_where_nothing_listens_is_refused() -> None:
    for address in ("", "auto", "ray://a:1"):
        check_address(address)
    with pytest.raises(UserError, match=r"^RAY_ADDRESS 127.0.0.1:1: no Ray cluster responds \(Connection refused\)$"):
        check_address("127.0.0.1:1")
