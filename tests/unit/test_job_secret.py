"""Secret of a job: what decides which code runs, or where files go, is taken from no one without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from small_runs import plan_of

from flexrlhf.comm.store import Endpoint
from flexrlhf.config.job_secret import JobSecret
from flexrlhf.errors import UserError
from flexrlhf.launch.agreement import Member, agree
from flexrlhf.launch.rendezvous import JOB_OFFER, OFFER, JobOffer, OpenJob, agreement_store
from flexrlhf.launch.shared_secret import found_secret, made_secret
from flexrlhf.launch.terms import Terms
from flexrlhf.runs.resume import RunOrder

SECRET, OTHER = "5" * 64, "6" * 64
TERMS = Terms(2, 0, (), {}, {}, {})


@pytest.mark.parametrize(
    ("first", "own", "problem"),
    [
        (SECRET, SECRET, None),
        ("", "", None),
        (SECRET, "", "missing on this machine, whose directory of runs is not that of the first machine of the job"),
        ("", SECRET, "this machine has one, the first machine of the job has none"),
        (OTHER, SECRET, "this machine's is not that of the first machine of the job"),
    ],
    ids=["the same", "none", "missing here", "missing there", "another"],
)
def test_a_text_is_verified_by_the_secret(
    first: str, own: str, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXRLHF_TOKEN", first)
    value = JobSecret.here().signed("offer", "line\nline")
    monkeypatch.setenv("FLEXRLHF_TOKEN", own)
    if problem is None:
        assert JobSecret.here().verified("offer", value) == "line\nline"
    else:
        with pytest.raises(UserError, match=f"^FLEXRLHF_TOKEN: {problem}; set the same secret on all machines"):
            JobSecret.here().verified("offer", value)


def test_a_tag_belongs_to_its_key_and_contains_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXRLHF_TOKEN", SECRET)
    with pytest.raises(UserError):
        JobSecret.here().verified("terms", JobSecret.here().signed("offer", "text"))
    assert SECRET not in JobSecret.here().signed("offer", "text") + JobSecret.here().derived_token("nonce")
    assert JobSecret.here().derived_token("nonce") != JobSecret.here().derived_token("other")


def test_a_secret_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXRLHF_TOKEN", "hunter2")
    with pytest.raises(UserError, match="^FLEXRLHF_TOKEN: 7 characters, needs 32; export FLEXRLHF_TOKEN=") as caught:
        JobSecret.here()
    assert "hunter2" not in str(caught.value)


def test_a_stranger_offers_no_job_and_no_terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's store has no authentication: a stranger writes there as node 0 does, but without the secret."""
    plan = plan_of(None, 2, f"runs={tmp_path / 'runs'}")
    offer = JOB_OFFER.dump_json(JobOffer((RunOrder(plan.spec),), 2, 0)).decode()
    store = Endpoint("test", "127.0.0.1", 0).serve(False, 10)
    agreement = agreement_store(store)
    stranger = {OFFER: offer, "host": "a", "directories": "[]", "terms": TERMS.json}
    for key, text in stranger.items():
        agreement.set(key, JobSecret.here().signed(key, text))
    with pytest.raises(UserError, match="^FLEXRLHF_TOKEN: missing on this machine"):
        OpenJob.find(f"127.0.0.1:{store.port}", 10)
    monkeypatch.setenv("FLEXRLHF_TOKEN", SECRET)
    with pytest.raises(UserError, match="the first machine of the job has none"):
        OpenJob.find(f"127.0.0.1:{store.port}", 10)
    with pytest.raises(UserError, match=r"^node 1 \(host b\): FLEXRLHF_TOKEN: this machine has one, the first"):
        agree(agreement, Member(1, 2, "b"), [plan], lambda: TERMS, 10)


def test_machines_without_a_common_directory_need_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(None, 2, f"runs={tmp_path / 'runs'}")
    store = dist.HashStore()
    monkeypatch.setattr("flexrlhf.launch.shared_directories.SEEN_SECONDS", 0.1)
    directories = '[{"path": "runs", "place": "/runs", "problem": "", "probe": ".preflight-0"}]'
    for key, text in {"host": "a", "directories": directories, "terms": TERMS.json}.items():
        store.set(key, text if key == "host" else JobSecret.here().signed(key, text))
    with pytest.raises(UserError, match=r"runs: .* on node 1 \(host b\) is not that of .* export FLEXRLHF_TOKEN="):
        agree(store, Member(1, 2, "b"), [plan], lambda: TERMS, 10)


def test_a_common_directory_has_the_secret_until_all_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexrlhf.launch.shared_directories.SEEN_SECONDS", 0.1)
    plan = plan_of(None, 2, f"runs={tmp_path / 'runs'}")
    with made_secret([plan]) as file:
        secret = JobSecret.here().value
        assert len(secret) == 64 and Path(file).read_text() == secret and Path(file).stat().st_mode & 0o777 == 0o600
        value = JobSecret.here().signed("offer", "text")
        with pytest.MonkeyPatch.context() as other:
            other.delenv("FLEXRLHF_TOKEN")
            with found_secret(file):
                assert JobSecret.here().verified("offer", value) == "text"
            # a file that others may have written, a link, another name, none
            (tmp_path / "secret").write_text(SECRET)
            (tmp_path / "links").mkdir()
            (tmp_path / "links" / "secret").symlink_to(file)
            (tmp_path / "key").write_text(SECRET)
            (tmp_path / "key").chmod(0o600)
            for wrong in ("secret", "links/secret", "key", "nothing/secret"):
                with found_secret(str(tmp_path / wrong)), pytest.raises(UserError):
                    JobSecret.here().verified("offer", value)
    assert not JobSecret.here().value and not (tmp_path / "runs").exists()
    monkeypatch.setenv("FLEXRLHF_TOKEN", SECRET)
    with made_secret([plan]) as file:
        assert file == "" and JobSecret.here().value == SECRET
