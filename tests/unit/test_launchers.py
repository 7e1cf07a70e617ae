"""Launchers of a job: how they find each other, their exchange, and their environment."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from small_runs import plan_of
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec

from flexrlhf.cli.run import check_restarts
from flexrlhf.comm.store import Endpoint, Notice, interface_to
from flexrlhf.comm.world import World, open_world
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.launch import node_watch, rendezvous
from flexrlhf.launch.agent import rank_variables
from flexrlhf.launch.devices import choose_device, why_no_gpu
from flexrlhf.launch.failures import Failure
from flexrlhf.launch.node_watch import NodeWatch
from flexrlhf.launch.rendezvous import NodeRendezvous, endpoint_at
from flexrlhf.launch.worker import needs_one_queue
from flexrlhf.placement.hosts import Hosts
from flexrlhf.runs.resume import RunOrder

NAMES = ("node 0 (host a; ranks 0)", "node 1 (host b; ranks 1)")
KILLED = Failure("killed", "rank 1 (host b) ended the run, killed by SIGKILL", 2.0)
CLOSED = Failure("closed", "rank 0 (host a): the connection to rank 1 closed", 1.0)


@pytest.mark.parametrize("nnodes", [1, 2])
@pytest.mark.parametrize("port", ["0", "65536", "123456789"])
def test_a_port_out_of_range_is_refused(port: str, nnodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=f"^--rdzv-endpoint a:{port}: no port, use 1 to 65535, such as a:29500$"):
        Hosts(nnodes, 0, f"a:{port}")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^MASTER_PORT: no port {port}, use 1 to 65535$"), open_world("cpu", 1.0):
        pass


@pytest.mark.parametrize(
    ("endpoint", "likely"),
    [
        ("nohost", "nohost:29500"),
        ("::1:29544", "[::1]:29544"),
        ("fe80::1", "[fe80::1]:29500"),
        ("[::1]", "[::1]:29500"),
        ("[::1]:x", "HOST:29500"),
        ("[a:b]:1", "HOST:29500"),
        ("a:b", "a:29500"),
        ("http://a:1/", "a:1"),
        (":29500", "HOST:29500"),
        ("a b:1", "HOST:29500"),
        ("user:pw@a:1", "a:1"),
        ("a:\u0661", "a:29500"),
    ],
)
def test_an_endpoint_of_another_form_is_refused_with_the_likely_one(endpoint: str, likely: str) -> None:
    with pytest.raises(UserError) as caught:
        Hosts(2, 0, endpoint)
    assert str(caught.value) == f"--rdzv-endpoint {endpoint}: expected HOST:PORT, such as {likely}"


def test_an_endpoint_with_an_ipv6_address_is_in_brackets() -> None:
    Hosts(2, 0, "[::1]:29544")
    endpoint = endpoint_at("[fd00::2%eth0]:29544")
    assert (endpoint.host, endpoint.port, str(endpoint)) == ("fd00::2%eth0", 29544, "[fd00::2%eth0]:29544")
    assert endpoint_at("host-1.a:29500").host == "host-1.a"
    store = Endpoint("test", "::1", 0).serve(True, 10)
    connected = Endpoint("test", "::1", store.port).connect(10, Notice("test"))
    connected.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    ("setting", "found", "device", "printed"),
    [
        ("auto", 2, "cuda", ""),
        ("auto", 1, "cpu", "2 ranks but 1 CUDA devices on this node: running on CPU"),
        ("auto", 0, "cpu", ""),
        ("cpu", 2, "cpu", ""),
        ("cuda", 2, "cuda", ""),
        ("cuda", 1, "cuda", "2 ranks on 1 CUDA devices of this node: over gloo"),
    ],
)
def test_the_device_of_two_ranks(
    setting: str,
    found: int,
    device: str,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    assert choose_device(setting, 2) == device
    assert capsys.readouterr().err.strip() == (f"flexrlhf: {printed}" if printed else "")


@pytest.mark.parametrize(
    ("found", "hidden", "sentence"),
    [
        (0, None, "none (NVIDIA's driver is not loaded); write cluster.device: cpu to train on CPUs"),
        (0, "", "none (CUDA_VISIBLE_DEVICES is ''); write cluster.device: cpu to train on CPUs"),
        (1, None, "1 for 2 ranks; write cluster.device: cpu to train on CPUs, or cuda for ranks that share a GPU"),
    ],
)
def test_ranks_that_are_planned_on_gpus_do_not_run_on_cpus(
    found: int, hidden: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setattr("flexrlhf.launch.devices.why_no_gpu", lambda: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    cluster = plan_of(None, 2, "cluster={nodes: [{count: 2, devices: 1, class: A100-80G}]}").cluster
    planned = cluster.planned_gpu(Hosts(2, 1, "a:1").local_ranks(cluster))
    with pytest.raises(UserError) as caught:
        choose_device("auto", 2, planned)
    assert str(caught.value) == f"node 1: its class A100-80G is a GPU, and this machine has {sentence}"
    assert choose_device("cpu", 2, planned) == "cpu" and choose_device("auto", found, planned) == "cuda"


def test_cuda_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="^cluster.device: cuda needs a CUDA device on this node, found 0; use cpu$"):
        choose_device("cuda", 2)


@pytest.mark.parametrize(
    ("module", "cuda", "reason"),
    [
        ("Kernel Module  550.54.15  Tue Mar  5", "13.0", "which needs NVIDIA's driver 580, found 550"),
        ("Open Kernel Module for x86_64  570.86.10  Release", "13.0", "which needs NVIDIA's driver 580, found 570"),
        ("Open Kernel Module for x86_64  580.65.06  Release", "13.0", "no GPU is visible"),
        ("Kernel Module  550.54.15  Tue Mar  5", "12.8", "no GPU is visible"),
        ("Kernel Module  580.65.06", None, "torch is built for CPUs"),
    ],
)
def test_why_there_is_no_gpu_next_to_a_driver(module: str, cuda: str | None, reason: str, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 {module}\nGCC version: gcc 12.2.0\n")
    assert reason in why_no_gpu(tmp_path / "version", cuda)
    assert not why_no_gpu(tmp_path / "absent", cuda)


def test_ranks_that_see_one_gpu_each_have_their_own() -> None:
    assert World.backend_of(["GPU-1", "GPU-2"]) == "nccl"
    assert World.backend_of(["GPU-1", "GPU-2", "GPU-1"]) == "gloo"


def test_ranks_with_tensor_parallel_megatron_have_one_hardware_queue() -> None:
    megatron = ("models.actor.engine=megatron", "models.actor.tp=2", "rollout.engine=vllm")
    left, right = {"ranks": [0, 1]}, {"ranks": [2, 3]}
    placement = {"actor": left, "critic": left, "ref": right, "reward": right, "actor.rollout": right}
    orders = [RunOrder(plan_of(placement, 4, *megatron).spec)]
    assert [needs_one_queue(orders, rank) for rank in range(4)] == [True, True, False, False]


def test_variables_of_a_rank_that_torchrun_did_not_start_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert Hosts.rank_notice() is None
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    notice = Hosts.rank_notice()
    assert notice is not None and notice.startswith("RANK=1, WORLD_SIZE=4, MASTER_ADDR=a in the environment: ")
    assert "`unset RANK WORLD_SIZE MASTER_ADDR`" in notice
    with pytest.raises(UserError, match="--max-restarts 2: .* its own"):
        check_restarts(2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert Hosts.rank_notice() is None


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("::1") == "lo"


def test_two_machines_of_one_number_are_refused() -> None:
    with pytest.raises(UserError, match="--node-rank 0: another machine has joined under this number"):
        first = NodeRendezvous(Hosts())
        second = NodeRendezvous(Hosts())
        first.next_rendezvous()
        second.store = first.store
        second.next_rendezvous()


def test_a_restart_waits_for_a_lost_launcher_for_a_shorter_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "REJOIN_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    first = NodeRendezvous(Hosts(2, 0, f"127.0.0.1:{port}"), attempt=1)
    first.store = Endpoint("loopback", "127.0.0.1", port).serve(False, 5)
    first.store.set("nodes/1/node/1", "b")
    first.next_rendezvous()
    with pytest.raises(RunStopped, match="missing node 1; arrived: node 0; gave up after 0 s"):
        first.next_rendezvous()


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], NodeWatch]]:
    """Makes the watch of a node; a node counts as lost after a second."""
    monkeypatch.setattr(node_watch, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(node_watch, "GONE_SECONDS", 1.0)
    monkeypatch.setattr(node_watch, "CLOSE_SECONDS", 0.5)
    server = Endpoint("loopback", "127.0.0.1", 0).serve(False, 5)
    store = dist.PrefixStore("nodes/0", server)
    made: list[NodeWatch] = []

    def make(node: int) -> NodeWatch:
        made.append(NodeWatch(store, node, NAMES, 1.0))
        return made[-1]

    yield make
    # together, as the processes of two machines
    threads = [Thread(target=watch.close) for watch in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def problem_of(watch: NodeWatch) -> Failure:
    deadline = time.monotonic() + 10
    while (problem := watch.problem()) is None:
        assert time.monotonic() < deadline, "no problem was seen"
        time.sleep(0.01)
    return problem


def test_launchers_read_each_others_failures(watches: Callable[[int], NodeWatch]) -> None:
    first, second = watches(0), watches(1)
    time.sleep(0.3)
    assert first.problem() is None and second.problem() is None
    second.publish(KILLED)
    assert problem_of(first) == KILLED
    first.publish(CLOSED)
    assert (first.settle(), second.settle()) == ([KILLED], [CLOSED])


def test_a_launcher_that_writes_no_more_is_lost(watches: Callable[[int], NodeWatch]) -> None:
    first, second = watches(0), watches(1)
    time.sleep(0.2)
    # as if its process had ended
    second._posted.set()
    assert problem_of(first).sentence == f"the launcher of {NAMES[1]} has given no sign of life for 1 s"
    assert [each.kind for each in first.settle()] == ["node"]


def test_one_node_watches_nothing() -> None:
    watch = NodeWatch(Endpoint("loopback", "127.0.0.1", 0).serve(False, 5), 0, NAMES[:1], 1.0)
    assert watch.problem() is None and watch.settle() == []
    watch.close()


def test_a_rank_gets_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    handler = NodeRendezvous(Hosts(), attempt=1)
    group = WorkerGroup(WorkerSpec("rank", 2, handler, entrypoint="module", max_restarts=2))
    group.master_addr, group.master_port = "10.0.0.1", 4000
    assert rank_variables(group, Worker(local_rank=1, global_rank=3, world_size=4), attempt=1) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4000",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
