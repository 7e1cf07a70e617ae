"""Secrets of reward services: only the names of environment variables are in a spec and in files written from it."""

from __future__ import annotations

import logging
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from reward_server import RewardServer
from small_runs import PPO
from typer.testing import CliRunner

from flexrlhf.cli.app import app
from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.config.reward_sources import ServiceSource
from flexrlhf.config.secrets import hidden, without_secrets
from flexrlhf.config.spec import Spec
from flexrlhf.environments.base import EpisodeCall
from flexrlhf.environments.episode_process import make_process
from flexrlhf.environments.sources import check_variables
from flexrlhf.errors import UserError
from flexrlhf.rewards.base import Sample
from flexrlhf.rewards.checks import SourceChecks
from flexrlhf.rewards.scorer import Scorer
from flexrlhf.rewards.services import HttpService
from flexrlhf.runs.tensor_files import save_tensors
from flexrlhf.user_code.call_failures import WarnOnce
from flexrlhf.user_code.deadline import Deadline

SECRET = "s3cr/t@x"
SAMPLES = [Sample("a", "b", 1, {})]


def refusal(**source: Any) -> str:
    with pytest.raises(UserError) as error:
        Spec.parse(PPO | {"reward": source})
    message = str(error.value)
    assert SECRET not in message and "s3cr" not in message and "\n" not in message
    return message


LITERALS: list[dict[str, Any]] = [
    {"url": "http://a", "headers": {"Authorization": f"Bearer {SECRET}"}},
    {"url": "http://a", "headers": {"authorization": SECRET}},
    {"url": "http://a", "headers": {"X-API-Key": SECRET}},
    {"url": "http://a", "headers": {"Cookie": f"session={SECRET}"}},
    {"url": "http://a", "headers": {"X-Mine": f"Bearer {SECRET}"}},
    {"url": "http://user:s3cr@a/score"},
    {"url": "http://s3cr@a/score"},
    {"url": ["http://b", "http://a/score?api_key=s3cr"]},
]


@pytest.mark.parametrize("source", LITERALS, ids=str)
def test_a_literal_secret_is_refused_with_the_form_that_works(source: dict[str, Any]) -> None:
    message = refusal(**source)
    assert "environment variable" in message and "${REWARD_" in message


OTHERS: list[dict[str, Any]] = [
    {"url": "ftp://user:s3cr@a"},
    {"url": "http://user:s3cr@a", "rule": "gsm8k", "headers": {"Authorization": SECRET}},
    {"url": {"http://user:s3cr@a": 1}},
    {"url": ["http://user:s3cr@a", 3]},
    {"url": "http://a", "headers": [{"headers": SECRET}]},
]


@pytest.mark.parametrize("source", OTHERS, ids=str)
def test_other_mistakes_show_no_secret_either(source: dict[str, Any]) -> None:
    assert refusal(**source)


REFUSED = [
    "reward={url: 'ftp://user:s3cr@a'}",
    "reward={url: 'http:/user:s3cr@a'}",
    "reward={url: 'http//user:s3cr@a'}",
    "reward={url: 'user:s3cr@a/score'}",
    "reward={url: 'ftp://user:s3/cr@a'}",
    "reward={url: 'ftp://user:s3 cr@a'}",
    "reward={url: 'http://user:s3cr@[::1'}",
    "reward={url: 'ftp://a?api_key=s3cr'}",
    "reward={url: 'http://user:${NAME}s3cr@a'}",
    "reward={url: 'http://user:s3cr@a'",
    "rewards={url: 'http://user:s3cr@a'}",
    "reward={url: http://a, headers: {Authorization: s3cr}",
    "reward={url: http://a, header: {Authorization: s3cr}}",
    "reward={url: http://a, headers: 's3cr'}",
    "rewards.headers.Authorization=Bearer s3cr",
    "models.actor.path=https://user:s3cr@hub/x",
]


@pytest.mark.parametrize("option", REFUSED)
def test_a_refusal_shows_no_secret_of_an_option(option: str, tmp_path: Path) -> None:
    """The refused value and the option around it, whatever is wrong with either."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(PPO))
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "run.yaml"), "--set", option])
    assert result.exit_code == 2 and "s3" not in result.output.replace(str(tmp_path), ""), result.output


def test_the_form_that_works_is_shown() -> None:
    sentence = "found http://b:80, use http://user:${REWARD_PASSWORD}@host/score or mail@host; a:b"
    assert without_secrets(sentence) == sentence


def test_a_message_shows_a_setting_without_its_secrets() -> None:
    found = without_secrets({"url": ["http://u:p@a/b"], "headers": {"A": "b"}, "weight": 1})
    assert found == {"url": ["http://***@a/b"], "headers": "***", "weight": 1}


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("REWARD_TOKEN", SECRET)
    return "${REWARD_TOKEN}"


def test_what_is_written_has_the_names_and_loads_again(token: str) -> None:
    source = {"url": f"http://user:{token}@a/score", "headers": {"Authorization": f"Bearer {token}", "X-Run": "seven"}}
    spec = Spec.parse(PPO | {"reward": source})
    SourceChecks(spec.reward or ()).check()
    text = spec.dump()
    assert SECRET not in text and f"Bearer {token}" in text and "X-Run: seven" in text
    assert SECRET not in repr(spec)
    from flexrlhf.config.yaml_io import read_yaml

    assert Spec.parse(read_yaml(text)) == spec


def test_the_service_receives_the_values(token: str) -> None:
    with RewardServer() as server:
        url = server.url.replace("http://", f"http://user:{token}@")
        headers = {"X-Token": f"<{token}>"}
        http = HttpService(ServiceSource(url=(url,), headers=headers), WarnOnce("reward.url"))
        assert len(http.score(SAMPLES, Deadline.after(60))) == 1
        (request,) = server.requests
    assert request.headers["X-Token"] == f"<{SECRET}>"
    expected = httpx.BasicAuth("user", SECRET)._auth_header
    assert request.headers["Authorization"] == expected


def test_failures_and_logs_have_no_values(
    token: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    source = ServiceSource(url=(f"http://user:{token}@127.0.0.1:1/score",), retries=0)
    assert Scorer([source], "reward", 60).score(SAMPLES).failed == 1
    error = capsys.readouterr().err
    assert f"http://user:{token}@127.0.0.1:1/score: ConnectError" in error
    assert "s3cr" not in error and "s3cr" not in caplog.text
    http = HttpService(ServiceSource(url=("http://a",), headers={"X-Token": token}), WarnOnce("reward.url"))
    failure = http._failure("http://a", httpx.ConnectError(f"refused {SECRET}"))
    assert failure.text == f"ConnectError refused {token}"


@pytest.mark.parametrize(
    "settings", [{"url": "http://${REWARD_TOKEN}/a"}, {"headers": {"A": "${REWARD_TOKEN}"}}], ids=str
)
def test_a_variable_that_is_not_set_is_named_before_a_rank_starts(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    source = ServiceSource(**{"url": "http://a"} | settings)
    with pytest.raises(UserError, match="the environment has no REWARD_TOKEN; export it"):
        SourceChecks([source]).check()
    with pytest.raises(UserError, match="the environment has no REWARD_TOKEN; export it"):
        HttpService(source, WarnOnce("reward.url"))


def test_saved_weights_have_the_permissions_of_any_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    save_tensors({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "a.safetensors")}
    assert len(modes) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hub_token", "s3cr"),
        ("logger.wandb.key", "s3cr"),
        ("--use_wandb", "s3cr"),
        ("env_vars.OPENAI_API_KEY", "s3cr"),
        ("aws_secret_access_key", "s3cr"),
        ("db.password", "s3cr"),
        ("notes", "hf_S3cr0123456789abcdef and sk-S3cr0123456789abcdef"),
        ("notes", "0123456789abcdef0123456789abcdef01234567"),
        ("notes", '{"env_vars": {"WANDB_API_KEY": "s3cr"}}'),
        ("notes", "x: HF_TOKEN=s3cr,WANDB_API_KEY=s3cr"),
        ("notes", "curl -H 'Authorization: Bearer s3cr0123' --password s3cr"),
        ("notes", "https://user:s3cr@host/x?api_key=s3cr"),
    ],
)
def test_what_others_have_written_is_shown_without_secrets(name: str, value: str) -> None:
    shown = hidden(value, name)
    assert "***" in shown and "s3cr" not in shown.lower() and "0123456789" not in shown


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eos_token", "<|im_end|>"),
        ("prompt_key", "prompt"),
        ("reward_fn_key", "data_source"),
        ("max_tokens_per_gpu", "16384"),
        ("hub_token", "$HF_TOKEN"),
        ("use_wandb", "true"),
        ("path", "/hub/snapshots/0123456789abcdef0123456789abcdef01234567/model"),
        ("model_revision", "0123456789abcdef0123456789abcdef01234567"),
        ("why", "model_name_or_path: a job needs a model, and the key: value"),
    ],
)
def test_words_that_only_look_like_secrets_are_shown(name: str, value: str) -> None:
    assert hidden(value, name) == value


KEY = "sk-Abc0123s3cr456789xyz"
ENVIRONMENT = {"path": "own.py:Env"}
FREE_LITERALS: list[dict[str, Any]] = [
    {"environment": ENVIRONMENT | {"options": {"api_key": "s3cr"}}},
    {"environment": ENVIRONMENT | {"options": {"judges": [{"password": "s3cr"}]}}},
    {"environment": ENVIRONMENT | {"options": {"headers": {"Authorization": "Bearer s3cr"}}}},
    {"environment": ENVIRONMENT | {"options": {"names": ["a", KEY]}}},
    {"environment": ENVIRONMENT | {"options": {"url": "http://me:s3cr@a"}}},
    {"environment": {"path": "openenv:http://me:s3cr@a:1"}},
    {"environment": {"path": "openenv:http://a:1,http://me:s3cr@b:1"}},
    {"environment": {"path": "openenv:http://a:1?token=s3cr"}},
    {"environment": ENVIRONMENT | {"options": {"api_key": "$s3cr", "password": 12345678}}},
    {"environment": ENVIRONMENT | {"options": {"password": 12345678}}},
    {"reward": {"url": "http://a", "headers": {"X-Mine": KEY}}},
    {"rollout": {"config": {"hf_token": "s3cr"}}},
    {"loggers": [{"name": "wandb", "entity": KEY}]},
]


@pytest.mark.parametrize("section", FREE_LITERALS, ids=str)
def test_a_secret_for_other_code_is_refused_with_the_form_that_works(section: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"a secret would be written to config.yaml; .*, such as \$\{API_KEY\}"
    ) as error:
        Spec.parse(PPO | section)
    assert "s3cr" not in str(error.value) and "1234" not in str(error.value)


ADDRESSES: list[dict[str, Any]] = [
    {"data": {"path": "https://me:s3cr@a/x.jsonl"}},
    {"data": {"sources": [{"path": "s3://me:s3cr@bucket/x.jsonl"}]}},
    {"data": {"path": "a.jsonl", "tokenizer": "https://me:s3cr@a/x"}},
    {"eval": {"path": "https://a/x.jsonl?token=s3cr"}},
    {"models": {"actor": {"path": "https://me:s3cr@a/x"}}},
    {"environment": {"path": "https://a/x.py:Env"}},
]


@pytest.mark.parametrize("section", ADDRESSES, ids=str)
def test_an_address_is_no_file_or_model(section: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="expected a path or a name, found an address, .*; download it") as error:
        Spec.parse(PPO | section)
    assert "s3cr" not in str(error.value)


UNKNOWN = [
    "api_key=s3cr",
    "wandb.key=s3cr",
    "loggers=[{name: wandb, api_key: s3cr}]",
    "loggers=[{name: wandb, api_key: s3cr}",
    "steps.api_key=s3cr",
    "nobody:hub_token=s3cr",
    f"notes {KEY}",
    f"steps=[{KEY}]",
]


@pytest.mark.parametrize("option", UNKNOWN)
def test_a_refusal_shows_no_secret_under_an_unknown_key(option: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(PPO))
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "run.yaml"), "--set", option])
    assert result.exit_code == 2 and "s3cr" not in result.output and "***" in result.output, result.output


def test_options_that_are_no_secrets_are_taken() -> None:
    options = {"stop_token": "</answer>", "tokenizer": "Qwen", "author": "me", "key": "answer", "sort_key": "x"}
    numbers = {"max_tokens": 5, "num_tokens": "7", "auth": False, "session_tokens": 12, "secret": None}
    section = {"environment": ENVIRONMENT | {"options": options | numbers | {"url": "http://me:${NAME}@a"}}}
    environment = Spec.parse(PPO | section).environment
    assert environment is not None and environment.options == section["environment"]["options"]


def test_an_episode_reads_variables_and_its_failures_have_their_names(tmp_path: Path, token: str) -> None:
    (tmp_path / "own.py").write_text(
        "class Env:\n    def __init__(self, key, keys):\n        self._found = key + keys[0]['x']\n"
        "    def reset(self, row, seed):\n        return self._found\n"
        "    def step(self, reply):\n        raise ValueError(self._found)\n"
    )
    settings = EnvironmentSpec(path=f"{tmp_path}/own.py:Env", options={"key": token, "keys": [{"x": f"<{token}>"}]})
    check_variables(settings)
    process = make_process(settings)
    calls = [EpisodeCall((0, 0), {}, 1, turns) for turns in ((), ("a",))]
    first, second = [process.submit([call], Deadline.after(60))[0].result() for call in calls]
    process.close()
    assert first.messages[0][1] == f"{SECRET}<{SECRET}>"
    assert second.failure is not None and f"raised ValueError: {token}<{token}>" in second.failure.text
    with pytest.raises(UserError, match="environment.options.keys.0.x: the environment has no NOWHERE; export it"):
        check_variables(EnvironmentSpec(path="own.py:Env", options={"keys": [{"x": "${NOWHERE}"}]}))
