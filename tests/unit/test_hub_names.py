"""Models and tokenizers by their names on the Hub, from a local cache without a connection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from small_runs import TINY, plan_of
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.comm.world import World
from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.data.hub import HubName
from flexrlhf.errors import UserError
from flexrlhf.plan.hub_names import in_cache, with_snapshots
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.conversation import Policies
from flexrlhf.trainer.rank_runs import check_commits

COMMIT, LATER = "0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef"
OF_HUB = ("models.actor={path: acme/tiny}", "models.ref={path: acme/tiny@v1}", "data.tokenizer=acme/tiny")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


def put_model(
    cache: Path, name: str = "acme/tiny", refs: tuple[str, ...] = ("main", "v1"), commit: str = COMMIT
) -> Path:
    """Put a model of the size of TINY into the cache; return its directory."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    for ref in refs:
        (repository / "refs" / ref).write_text(commit)
    directory = repository / "snapshots" / commit
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(TINY))
    (directory / "tokenizer.json").write_text("{}")
    shapes = (
        plan_of(None, 1, "models.reward=null", "reward={rule: length, target_tokens: 3}").shapes["actor"].parameters
    )
    save_file({name: torch.zeros(shape) for name, shape in shapes}, directory / "model.safetensors")
    return directory


def hub_plan(*others: str) -> Plan:
    return plan_of(None, 1, *OF_HUB, *others)


@pytest.mark.parametrize(
    ("text", "name", "revision", "parts"),
    [
        ("acme/tiny", "acme/tiny", None, ()),
        ("acme/Tiny-1.5_b@v1.0", "acme/Tiny-1.5_b", "v1.0", ()),
        ("acme/tiny@refs/pr/1:main:train", "acme/tiny", "refs/pr/1", ("main", "train")),
    ],
)
def test_names(text: str, name: str, revision: str | None, parts: tuple[str, ...]) -> None:
    found = HubName.parse(text)
    assert found is not None
    assert (found.name, found.revision, found.parts) == (name, revision, parts)


@pytest.mark.parametrize("path", ["tiny", "/acme/tiny", "./acme/tiny", "../a/b", "a/b/c", "runs/sft", "acme/", "a b/c"])
def test_paths_are_no_names(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert HubName.parse(path) is None


def test_a_plan_has_directories_and_remembers_their_names(own_cache: Path) -> None:
    directory = str(put_model(own_cache))
    plan = hub_plan()
    assert plan.model("actor").path == plan.model("ref").path == plan.spec.data.tokenizer == directory
    assert plan.spec.hub_names == {directory: f"acme/tiny@{COMMIT}"}
    assert make_plan(plan.spec).spec == plan.spec


def test_names_are_written_with_their_commit(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reads them has the same models, also once there is a newer commit, or a folder ``acme``."""
    directory, plan = put_model(own_cache), hub_plan()
    text = plan.spec.dump()
    written = Spec.parse(read_yaml(text))
    assert written.models.actor is not None and written.models.actor.path == f"acme/tiny@{COMMIT}"
    assert written.data.tokenizer == f"acme/tiny@{COMMIT}" and str(own_cache) not in text
    put_model(own_cache, commit=LATER, refs=("main", "v1"))
    (tmp_path / "acme").mkdir()
    monkeypatch.chdir(tmp_path)
    assert make_plan(written).spec == plan.spec and written.differences(plan.spec) == ()
    (tmp_path / "run" / "actor").mkdir(parents=True)
    (tmp_path / "run" / "actor" / "config.json").write_text("{}")
    (tmp_path / "run" / "config.yaml").write_text(text)
    assert Policies.find(tmp_path / "run").before == directory
    unknown = Spec.parse(read_yaml(text.replace("acme/tiny", "acme/other")))
    assert in_cache(unknown).data.tokenizer == f"acme/other@{COMMIT}"


def test_another_commit_is_another_setting(own_cache: Path) -> None:
    put_model(own_cache)
    before = hub_plan().spec
    put_model(own_cache, commit=LATER, refs=("main",))
    difference = before.differences(hub_plan().spec)[0]
    assert difference.key == "data.tokenizer" and difference.second == f"acme/tiny@{LATER}"
    pinned = hub_plan(f"models.actor.path=acme/tiny@{COMMIT}", f"data.tokenizer=acme/tiny@{COMMIT}").spec
    assert before.differences(pinned) == ()


def test_paths_stay_as_they_are(tmp_path: Path) -> None:
    spec = plan_of(None, 1, f"data.tokenizer={tmp_path}").spec
    assert with_snapshots(spec) is spec


def test_a_name_that_is_nowhere_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        hub_plan()
    assert str(caught.value).startswith(
        "models.actor.path acme/tiny: neither a path here, nor in the Hub's cache, nor a model that can be downloaded ("
    )
    assert "\n" not in str(caught.value)


def world(rank: int, store: dist.Store) -> World:
    return World(rank, 2, store, torch.device("cpu"), "gloo", host=f"host-{rank}")


def test_ranks_with_another_commit_stop(own_cache: Path) -> None:
    put_model(own_cache)
    store = dist.HashStore()
    first = hub_plan()
    check_commits(first, world(0, store))
    check_commits(first, world(1, store))
    put_model(own_cache, commit=LATER, refs=("main", "v1"))
    with pytest.raises(UserError) as caught:
        check_commits(hub_plan(), world(1, store))
    assert str(caught.value) == (
        f"models.actor.path: rank 1 (host host-1) has acme/tiny@{LATER} in its Hub cache, rank 0 has "
        f"acme/tiny@{COMMIT}; name the commit, as in acme/tiny@{COMMIT}"
    )


def test_plan_prints_a_run_of_the_hub(own_cache: Path, tmp_path: Path) -> None:
    put_model(own_cache)
    spec: Spec = plan_of(None, 1).spec
    raw: dict[str, Any] = read_yaml(spec.dump())
    raw["models"]["actor"] = {"path": "acme/tiny"}
    (tmp_path / "run.yaml").write_text(json.dumps(raw))
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "run.yaml")])
    assert result.exit_code == 0, result.output
