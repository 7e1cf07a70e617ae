"""Machines of a job compare settings, versions, files and directories before anything is written."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from socket import create_server, gethostname

import pytest
import torch.distributed as dist
from small_runs import plan_of

from flexrlhf.comm.store import Endpoint
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.launch import agreement, shared_directories
from flexrlhf.launch.agreement import Member, agree
from flexrlhf.launch.refusals import Refusals, write_refusal
from flexrlhf.launch.rendezvous import JOB_OFFER, JobOffer, OpenJob
from flexrlhf.launch.shared_directories import DirectoryFacts, Sharing
from flexrlhf.launch.terms import Sides, Terms
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.fingerprints import BLOCK_BYTES, NUM_BLOCKS, file_digest
from flexrlhf.runs.resume import RunOrder

TERMS = Terms(3, 0, ("seed: 0\n",), {"torch": "2.13.0"}, {"errors.py": "1"}, {"data.path rows.jsonl": "ab"})
ENDINGS = {
    "settings": (
        {"specs": ("seed: 3\n",)},
        "seed is 0 on node 0 (host a) and 3 on node 2 (host c); start the same command with the same files on all "
        "machines",
    ),
    "runs": (
        {"specs": ("seed: 0\n",) * 2},
        "1 run on node 0 (host a) and 2 on node 2 (host c); start the same command with the same files on all machines",
    ),
    "versions": (
        {"versions": {"torch": "2.12.0"}},
        "torch is 2.13.0 on node 0 (host a) and 2.12.0 on node 2 (host c); install the same versions on all machines",
    ),
    "sources": (
        {"sources": {"errors.py": "2"}},
        "flexrlhf/errors.py differs on node 0 (host a) and node 2 (host c); install the same versions on all machines",
    ),
    "files": (
        {"inputs": {"data.path rows.jsonl": "cd"}},
        "data.path rows.jsonl differs between node 0 (host a) (ab) and node 2 (host c) (cd); copy models and data to "
        "all machines",
    ),
    "restarts": (
        {"restarts": 2},
        "--max-restarts is 0 on node 0 (host a) and 2 on node 2 (host c); start the same command with the same files "
        "on all machines",
    ),
    "nodes": (
        {"nodes": 2},
        "--nnodes is 3 on node 0 (host a) and 2 on node 2 (host c); start the same command with the same files on all "
        "machines",
    ),
}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_of(None, 2, f"runs={tmp_path / 'runs'}")


def ends(plan: Plan, terms: list[Terms | None], seconds: float = 20.0) -> list[str]:
    """How each member ends that comes with its terms; empty if all agree."""
    return ["" if isinstance(each, bool) else each for each in results(plan, terms, seconds)]


def results(plan: Plan, terms: list[Terms | None], seconds: float = 20.0) -> list[str | bool]:
    """Whether each member shares the directories of the first one, or why the job does not start."""
    store = dist.HashStore()

    def come(number: int) -> str | bool:
        own = terms[number]
        member = Member(number, 3, "abc"[number])
        try:
            return agree(store, member, [plan], None if own is None else lambda: own, seconds)
        except (UserError, RunStopped) as error:
            return str(error)

    with ThreadPoolExecutor(len(terms)) as pool:
        return list(pool.map(come, range(len(terms))))


def test_equal_machines_agree(plan: Plan, tmp_path: Path) -> None:
    """One that leaves the comparison to another process of its machine agrees, too; and no probe is left."""
    assert ends(plan, [TERMS, TERMS, None]) == ["", "", ""]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ENDINGS)
def test_all_end_with_the_same_sentence(name: str, plan: Plan) -> None:
    changes, sentence = ENDINGS[name]
    other: Terms = replace(TERMS, **changes)  # type: ignore[arg-type]
    assert ends(plan, [TERMS, TERMS, other]) == [sentence] * 3


def test_a_machine_that_does_not_come_is_named(plan: Plan) -> None:
    first, second = ends(plan, [TERMS, TERMS], seconds=0.1)
    assert first.startswith("node 0 (host a) compares settings, versions and files: missing node 2; arrived: node 1")
    assert "missing node 0" in second


@pytest.mark.parametrize("secret", ["5" * 64, "6" * 64, ""])
def test_a_machine_that_was_refused_ends_the_job_if_it_has_its_secret(
    secret: str, plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another one could be anybody: node 0 names it, and waits for the machines of its job."""
    store, member = dist.HashStore(), Member(0, 2, "a")
    with monkeypatch.context() as other:
        other.setenv("FLEXRLHF_TOKEN", secret)
        write_refusal(store, "there is no data file a.jsonl")
    monkeypatch.setenv("FLEXRLHF_TOKEN", "5" * 64)
    monkeypatch.setattr(agreement, "LISTEN_SECONDS", 0.0)
    refused = f"a machine that would join (host {gethostname()}) was refused: there is no data file a.jsonl"
    with pytest.raises((UserError, RunStopped)) as caught:
        agree(store, member, [plan], lambda: TERMS, 0.1)
    printed = capsys.readouterr().err
    if secret == "5" * 64:
        assert str(caught.value) == refused and not printed
    else:
        assert isinstance(caught.value, RunStopped) and "missing node 1" in str(caught.value)
        assert printed == f"flexrlhf: {refused}; it has not the secret of this job, so node 0 waits for another\n"


@pytest.mark.parametrize("value", ["", "\n", "x\n\x1b[2J", "x\na\nb\nc", "x\n" + "[" * 5000])
def test_a_refusal_of_any_form_is_one_line(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    store.set("refusal/1", value)
    Refusals(store).check()
    assert capsys.readouterr().err.count("\n") == 1


def test_a_machine_that_waits_reads_why_node_0_has_ended() -> None:
    """And node 0 ends as soon as it has."""
    with create_server(("127.0.0.1", 0)) as probe:
        endpoint = Endpoint("test", *probe.getsockname())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(OpenJob.find, str(endpoint), 20.0)
        OpenJob.refuse(Hosts(2, 0, str(endpoint)), "placement: no vector")
        with pytest.raises(RunStopped, match="^the first machine .* has ended before it began: placement: no vector$"):
            waiting.result(20)


def test_a_directory_that_is_another_one_is_not_shared(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_directories, "SEEN_SECONDS", 0.1)
    monkeypatch.setenv("FLEXRLHF_TOKEN", "5" * 64)
    assert results(plan, [TERMS, TERMS, TERMS]) == [True, True, True]
    monkeypatch.setattr(DirectoryFacts, "look", lambda directories, rank: Sharing(False))
    assert results(plan, [TERMS, TERMS, TERMS]) == [True, False, False]
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    plan = plan_of(None, 2, f"runs={tmp_path / 'file' / 'runs'}")
    assert ends(plan, [TERMS] * 3) == [f"runs: {tmp_path}/file/runs cannot be written (Not a directory)"] * 3


def test_equal_parts_of_terms_travel_once() -> None:
    assert Terms.of_json(TERMS.json) == TERMS
    short = TERMS.without_equals(TERMS)
    assert short.specs == () and short.sources == {}
    assert TERMS.difference(short, Sides("a", "b")) == ""


def test_a_digest_covers_small_files_whole_and_large_ones_by_their_blocks(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"one")
    before = file_digest(small)
    small.write_bytes(b"two")
    assert file_digest(small) != before
    with large.open("wb") as file:
        file.truncate((NUM_BLOCKS + 8) * BLOCK_BYTES)
    before = file_digest(large)
    for place in (0, os.path.getsize(large) - 1):
        with large.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert file_digest(large) != before
        before = file_digest(large)


def offered(plan: Plan) -> OpenJob:
    offer = JobOffer((RunOrder(plan.spec, (Path("runs/a/checkpoints/step-2"),)),), 3, 1)
    assert JOB_OFFER.validate_json(JOB_OFFER.dump_json(offer)) == offer
    return OpenJob(offer, dist.HashStore())


def test_machines_that_join_get_the_free_numbers(plan: Plan) -> None:
    cluster = plan_of(None, 3, "cluster={nodes: [{count: 3, devices: 1}], device: cpu}").cluster
    job = offered(plan)
    job.store.add("taken/1", 1)
    assert job.take_number(cluster) == 2
    with pytest.raises(UserError, match="join: all 3 nodes of this job are taken"):
        job.take_number(cluster)
    uneven = plan_of(None, 4, "cluster={nodes: [{count: 2, devices: 1}, {count: 1, devices: 2}], device: cpu}").cluster
    with pytest.raises(UserError, match="--node-rank: missing; the nodes of this job differ"):
        offered(plan).take_number(uneven)
