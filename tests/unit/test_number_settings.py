"""Which settings two specs differ in that numbers depend on."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from small_runs import PPO

from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import apply_override


def spec(*overrides: str) -> Spec:
    raw = yaml.safe_load(yaml.safe_dump(PPO))
    for override in overrides:
        apply_override(raw, override)
    return Spec.parse(raw)


def differing(*overrides: str, also: tuple[str, ...] = ()) -> list[tuple[str, object, object]]:
    """``also``: settings of both."""
    return [(d.key, d.first, d.second) for d in spec(*also).differences(spec(*also, *overrides))]


@pytest.mark.parametrize(
    "setting",
    [
        *("name=other", "cluster.devices=4", "placement=[1,1,0.5,0.5]", "schedule.num_chunks=1", "runs=elsewhere"),
        *("models.actor.zero=3", "models.actor.engine=deepspeed", "models.reward.tp=2", "steps=7", "save.every=2"),
        *(
            "models.actor.micro_batch_tokens=64",
            "rollout.engine=vllm",
            "debug.record_columns=true",
            "sync.overlap=true",
        ),
        *("models.actor.dtype=bfloat16", "timeout_seconds=60", "sync.overlap=true"),
    ],
)
def test_settings_that_change_no_number(setting: str) -> None:
    assert differing(setting) == []


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("seed=5", "seed", 5),
        ("algorithm.gae_lambda=0.5", "algorithm.gae_lambda", 0.5),
        ("data.max_response_tokens=3", "data.max_response_tokens", 3),
        ("models.actor.optimizer.learning_rate=0.5", "models.actor.optimizer.learning_rate", 0.5),
        ("models.actor.optimizer.betas=[0.5, 0.6]", "models.actor.optimizer.betas", [0.5, 0.6]),
        ("schedule.lag=1", "schedule.lag", 1),
        ("sync.every=2", "sync.every", 2),
        ("algorithm.kl=null", "algorithm.kl", None),
        ("data.form=question", "data.form", "question"),
        ("data.system=Be brief.", "data.system", "Be brief."),
        ("data.template='{prompt}!'", "data.template", "{prompt}!"),
        ("data.columns.prompt=question", "data.columns.prompt", "question"),
        ("data.long_prompts=truncate-left", "data.long_prompts", "truncate-left"),
    ],
)
def test_settings_that_change_numbers(setting: str, key: str, value: object) -> None:
    ((found, _, second),) = differing(setting)
    assert (found, second) == (key, value)


def test_replies_of_an_environment_follow_from_settings_and_not_from_its_calls() -> None:
    game = ("environment={path: games.py:Game, max_turns: 3}",)
    calls = ("processes=9", "timeout_seconds=3", "seconds=1", "memory_mb=99", "open_files=20", "max_failures=2")
    assert differing(*(f"environment.{each}" for each in calls), also=game) == []
    for setting, value in (("max_turns", 5), ("turn_tokens", 7), ("path", "games.py:Other"), ("bridge", True)):
        ((key, _, second),) = differing(f"environment.{setting}={value}", also=game)
        assert (key, second) == (f"environment.{setting}", value)
    assert [key for key, *_ in differing(*game)] == ["environment"]


def test_a_mapping_of_one_side_is_one_setting() -> None:
    ((key, first, second),) = differing("models.actor.lora={rank: 2}")
    assert (key, first) == ("models.actor.lora", None) and second["rank"] == 2


def test_two_algorithms_differ_in_their_name() -> None:
    assert differing("algorithm.name=ac-share")[0] == ("algorithm.name", "ppo", "ac-share")
    assert not [key for key, *_ in differing("algorithm.name=ac-share") if key.startswith("algorithm.v")]


def test_sources_of_scores_differ_in_what_they_return() -> None:
    source = "reward=[{rule: length, target_tokens: 4}]"
    assert differing("reward=[{rule: length, target_tokens: 4, batch_size: 3}]", also=(source,)) == []
    other = differing("reward=[{rule: length, target_tokens: 5, weight: 2}]", also=(source,))
    assert other == [("reward.0.weight", 1.0, 2.0), ("reward.0.target_tokens", 4, 5)]


def test_steps_count_where_a_learning_rate_ends_with_them() -> None:
    assert differing("steps=7", also=("steps=3",)) == []
    falling = ("steps=3", "models.critic.optimizer.schedule=linear")
    assert differing("steps=7", also=falling) == [("steps", 3, 7)]


def test_paths_are_the_same_from_here() -> None:
    assert differing(f"data.path={Path('a.jsonl').absolute()}", also=("data.path=a.jsonl",)) == []
    assert [key for key, *_ in differing("data.path=b.jsonl", also=("data.path=a.jsonl",))] == ["data.path"]


def test_sources_differ_in_their_shares() -> None:
    sources = "data={{sources: [{{path: a.jsonl, weight: {}}}, {{path: b.jsonl}}]}}"
    assert differing(sources.format(2), also=(sources.format(2),)) == []
    assert differing(sources.format(3), also=(sources.format(2),)) == [("data.sources.0.weight", 2, 3)]


def test_the_engine_counts_where_a_shared_trunk_is_stale() -> None:
    shared = ("algorithm.name=ac-share", "models.critic=null")
    assert differing("rollout.engine=vllm", also=shared) == []
    assert differing("rollout.engine=vllm", also=(*shared, "schedule.lag=1"))[0][0] == "rollout.engine"


def test_a_difference_is_a_phrase() -> None:
    (difference,) = spec("seed=1").differences(spec("seed=2"))
    assert str(difference) == "seed is 1 and 2"
