"""Plug-ins: the table of this package, parts of other packages, and ones that cannot be used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import yaml
from guests import install_guest
from small_runs import PPO, TINY
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.config import engines, plugins
from flexrlhf.config.algorithms import AnyAlgorithm
from flexrlhf.config.plugins import SHIPPED, Plugin, load_plugin
from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import RankFailure, UserError
from flexrlhf.guideline.costs.profiles import PROFILES, profile_of
from flexrlhf.launch.job import Job
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.runs.fingerprints import Fingerprints

Install = Callable[..., None]
RUN: dict[str, Any] = {
    **deepcopy(PPO),
    "algorithm": {"name": "guest", "prompts_per_step": 8, "guests": 2},
    "models": {"actor": {"init": dict(TINY), "engine": "guest"}},
    "reward": {"function": "guest"},
    "loggers": [{"name": "guest", "file": "a.txt"}],
}


def clear() -> None:
    for cached in (
        Plugin.of_others,
        plugins.load_plugin,
        engines.EngineFacts.of,
        engines.EngineFacts.all_engines,
    ):
        cached.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "guest"]:
        del sys.modules[name]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    def into_site(broken: str = "") -> None:
        monkeypatch.syspath_prepend(install_guest(tmp_path / "site", broken))
        clear()

    yield into_site
    monkeypatch.undo()
    clear()


@pytest.mark.parametrize("group", SHIPPED)
def test_every_part_of_this_package_loads(group: str) -> None:
    for name in SHIPPED[group]:
        load_plugin(group, name)


def test_algorithms_have_the_names_of_the_table() -> None:
    assert [kind.model_fields["name"].default for kind in get_args(AnyAlgorithm)] == list(SHIPPED["algorithms"])


def test_a_run_of_a_guests_parts_is_planned_and_written(install: Install) -> None:
    install()
    spec = Spec.parse(RUN)
    assert spec.algorithm.samples_per_prompt == 2 and spec.reward[0].function == "guest.parts:length"
    again = read_yaml(spec.dump())
    assert Spec.parse(again) == spec
    assert again["algorithm"]["guests"] == 2 and again["loggers"] == [{"name": "guest", "file": "a.txt"}]
    plan = make_plan(spec)
    assert plan.placement["actor"].facts.constructor == "guest.engine:GuestEngine"
    used = {f"{each} guest": "guest 1.2" for each in ("algorithm", "engine", "logger", "reward")}
    assert {name: text for name, text in Fingerprints([plan]).fixed().items() if name in used} == used
    assert used.items() <= Fingerprints([plan]).versions().items()


def test_an_environment_has_a_guests_name(install: Install) -> None:
    install()
    raw = {**RUN, "environment": {"path": "guest"}}
    del raw["reward"]
    assert Spec.parse(raw).environment.path == "guest.parts:Echo"


def test_the_help_names_guests(install: Install) -> None:
    install()
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert "Of other packages:" in text and "Greet somebody." in text
    assert "engine guest" in text and "launcher guest" in text and "guest 1.2" in text
    assert CliRunner().invoke(app, ["guest", "--name", "you"]).stdout == "hello you\n"
    assert f"known: {', '.join(SHIPPED['loggers'])}, guest" in _sentence({**RUN, "loggers": [{"name": "guests"}]})


def test_an_engine_without_tensor_parallelism_is_refused_with_it(install: Install) -> None:
    install()
    models = {"actor": {"init": dict(TINY), "engine": "guest", "tp": 2}}
    assert _sentence({**RUN, "models": models, "cluster": {"devices": 2}}) == (
        "models.actor.tp: engine guest has no tensor parallel, found tp 2; use 1, or engine torch or deepspeed"
    )


def test_an_engine_without_a_price_is_planned_and_not_predicted(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(yaml.safe_dump({**RUN, "placement": [1, 1], "cluster": {"devices": 1, "device": "cpu"}}))
    result = CliRunner().invoke(app, ["plan", "a.yaml"])
    assert "test: models.actor.engine: guest has no price" in result.stdout, result.stderr
    result = CliRunner().invoke(app, ["simulate", "a.yaml"])
    assert result.exit_code == 2 and "has no price" in result.stderr


def test_an_engine_without_rows_of_costs_is_priced_as_its_facts_say(install: Install, tmp_path: Path) -> None:
    install()
    facts = tmp_path / "site" / "guest" / "facts.py"
    facts.write_text(facts.read_text().replace('priced_as=""', 'priced_as="torch"'))
    assert profile_of(PROFILES, "guest") == PROFILES["torch"] != profile_of(PROFILES, "megatron")


def _sentence(raw: dict[str, Any]) -> str:
    with pytest.raises(UserError) as found:
        make_plan(Spec.parse(raw))
    return str(found.value)


@pytest.mark.parametrize(
    ("what", "broken", "settings"),
    [
        ("engine", "facts", {"models": {**PPO["models"], "actor": {"init": dict(TINY), "engine": "guest"}}}),
        ("algorithm", "parts", {"algorithm": {"name": "guest"}}),
        ("logger", "parts", {"loggers": [{"name": "guest"}]}),
    ],
    ids=["engine", "algorithm", "logger"],
)
def test_a_broken_guest_is_a_sentence(what: str, broken: str, settings: dict[str, Any], install: Install) -> None:
    install(broken)
    sentence = _sentence({**deepcopy(PPO), **settings})
    assert f"{what} guest: the package guest 1.2 cannot be used, since it raised SystemExit: out of order" in sentence
    # other runs are planned
    make_plan(Spec.parse(PPO))


def test_a_broken_command_or_launcher_is_a_sentence(install: Install) -> None:
    install("parts")
    result = CliRunner().invoke(app, ["guest"])
    assert result.exit_code == 2 and "command guest: the package guest 1.2 cannot be used" in result.stderr
    assert "command guest: the package guest 1.2" in " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    with pytest.raises(UserError, match="launcher guest: the package guest 1.2 cannot be used"):
        load_plugin("launchers", "guest")


class FullLauncher:
    """Launcher whose library finds no devices."""

    failures = (TimeoutError,)

    def device(self, plan: Any, hosts: Hosts) -> str:
        return "cpu"

    def __call__(self, job: Job, max_restarts: int, factory: object) -> bool:
        raise TimeoutError("no room\nat all")


def test_a_launchers_failure_is_a_sentence() -> None:
    job = Job(runs=(cast(Any, None),), hosts=Hosts(), device="cpu", launcher=FullLauncher())
    with pytest.raises(RankFailure, match="^FullLauncher has failed: no room at all$"):
        job.start()


def test_a_guest_of_another_kind_is_a_sentence(install: Install, tmp_path: Path) -> None:
    install()
    (tmp_path / "site" / "guest" / "facts.py").write_text("GUEST = {}\n")
    engine = {"models": {**PPO["models"], "actor": {"init": dict(TINY), "engine": "guest"}}}
    assert _sentence({**deepcopy(PPO), **engine}) == (
        "engine guest: guest.facts:GUEST of guest 1.2 lacks name, kinds, constructor, priced_as"
    )


def test_two_packages_may_not_have_one_name(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    entries = tmp_path / "site" / "guest-1.2.dist-info" / "entry_points.txt"
    entries.write_text("[flexrlhf.engines]\ntorch = guest.facts:GUEST\nguest = guest.facts:GUEST\n")
    with pytest.raises(UserError, match="engine torch: of flexrlhf and of guest; uninstall one of them"):
        Plugin.find("engines", "guest")
    assert isinstance(Spec.parse(PPO), Spec)
