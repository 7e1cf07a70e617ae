"""The JSON Schema of the YAML: YAMLs that run are valid, others of another form are not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from jsonschema import Draft202012Validator, ValidationError
from small_runs import PPO
from typer.testing import CliRunner

from flexrlhf.cli import app
from flexrlhf.cli.settings import json_schema
from flexrlhf.config.spec_file import apply_override, load_spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.data.quickstart import config_paths

ROOT = Path(__file__).parents[2]
CONFIGS = [*sorted(ROOT.glob("configs/**/*.yaml")), *config_paths()]


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def problems(validator: Draft202012Validator, raw: Any) -> list[str]:
    return [error.message for error in validator.iter_errors(raw)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_valid(path: Path, validator: Draft202012Validator) -> None:
    assert problems(validator, read_yaml(path.read_text())) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_resolved_config_is_valid(path: Path, validator: Draft202012Validator) -> None:
    """As in the ``config.yaml`` of a run."""
    assert problems(validator, read_yaml(load_spec(path).dump())) == []


def blocks() -> list[Any]:
    """The whole configs of the documents."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = []
    for page in pages:
        for number, text in enumerate(re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)):
            raw = read_yaml(text)
            if isinstance(raw, dict) and "name" in raw:
                found.append(pytest.param(raw, id=f"{page.stem}-{number}"))
    return found


@pytest.mark.parametrize("raw", blocks())
def test_a_config_of_the_documents_is_valid(raw: Any, validator: Draft202012Validator) -> None:
    assert problems(validator, raw) == []


FORMS = [
    "placement=auto",
    "placement=[1, 1, 1/2, 0.5]",
    "placement='1,1,0.5,0.5'",
    "placement={actor: 1, critic: {ranks: 0-3}, ref: {ratio: 1/2, on: V100-32G, row_shares: [1, 2/3]}, reward: 0.5}",
    "placement={operators: {generate: {ranks: [0, 1], tp: 2}}, span_classes: true}",
    "reward={function: '~/scores.py:score'}",
    "reward=[{model: reward}, {url: 'http://a', weight: 2}, {url: ['http://a', 'http://b']}]",
    "models.reward_style={path: m}",
    "models.ref=null",
    "models.all={zero: 3, optimizer: {learning_rate: 1e-5}}",
    "models.all=null",
    "algorithm.stop=END",
    "algorithm.truncation={penalty: 1}",
    "algorithm.kl=null",
    "cluster.nodes=[{devices: 2, class: V100-32G, speed: 1/2}]",
]


@pytest.mark.parametrize("setting", FORMS)
def test_every_form_of_a_setting_is_valid(setting: str, validator: Draft202012Validator) -> None:
    assert problems(validator, changed(setting)) == []


BROKEN = [
    ("step=3", "'step'"),
    ("steps=0", "less than the minimum of 1"),
    ("steps=many", "is not of type 'integer'"),
    ("placement=half", "not valid under any"),
    ("models.acter={path: m}", "'acter'"),
    ("models.actor.zero=4", "is not one of"),
    ("models.all.zero=4", "is not one of"),
    ("models.all.path=m", "False schema does not allow 'm'"),
    ("models.actor.optimizer.lr=1", "'lr'"),
    ("algorithm.name=pop", "'ppo' was expected"),
    ("algorithm.clip_low=1.5", "maximum of 1"),
    ("algorithm={prompts_per_step: 2}", "'name' is a required property"),
    ("reward={rule: gsm8}", "is not one of"),
    ("guards.non_finite=ignore", "is not one of"),
]


@pytest.mark.parametrize(("setting", "words"), BROKEN)
def test_a_broken_config_is_not_valid(setting: str, words: str, validator: Draft202012Validator) -> None:
    errors = list(validator.iter_errors(changed(setting)))
    assert errors and any(words in message for message in deep(errors))


def deep(errors: Iterable[ValidationError]) -> Iterator[str]:
    """Messages, also of the members of a union."""
    for error in errors:
        yield error.message
        yield from deep(error.context or ())


def changed(setting: str) -> Any:
    raw = json.loads(json.dumps(PPO))
    apply_override(raw, setting)
    return raw


def test_every_setting_has_a_description() -> None:
    schema = json_schema()
    sections = {"Spec": schema, **schema["$defs"]}
    without = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, setting in section.get("properties", {}).items()
        if not setting.get("description") and key != "name"
    ]
    assert without == []


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_the_command_prints_or_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    for _ in range(2):  # it replaces its own file
        assert f"$schema={file}" in invoke("schema", "-o", str(file)).stdout
    assert json.loads(file.read_text()) == json.loads(invoke("schema").stdout) == json_schema()
    other = tmp_path / "a.yaml"
    other.write_text(yaml.safe_dump(PPO))
    assert "was not written by this command" in invoke("schema", "-o", str(other)).stderr
