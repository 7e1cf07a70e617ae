"""Environments of the example configs, with the settings that these give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.data.chat import ChatFormat
from flexrlhf.data.examples import Example
from flexrlhf.data.messages import Message
from flexrlhf.data.turn_tokens import TurnTokens
from flexrlhf.environments.base import EpisodeCall, ProgramTurn
from flexrlhf.environments.episodes import Episodes
from flexrlhf.environments.tool_schemas import EnvironmentTools
from flexrlhf.serving.model_calls import ModelCall

CONFIGS = Path(__file__).parents[2] / "configs"


def environment_of(config: str) -> EnvironmentSpec:
    """Return the environment of a config, whose path is relative to where the config runs."""
    environment = load_spec(CONFIGS / config).environment
    assert environment is not None and environment.path is not None
    path = str(CONFIGS / environment.path.rpartition("configs/")[2])
    return environment.model_copy(update={"path": path})


def replies_of(config: str, row: Mapping[str, Any], turns: Sequence[str]) -> list[tuple[str, float]]:
    """Return text and reward of the replies to the reset and to each turn of one episode."""
    episodes = Episodes(environment_of(config), 1)
    calls = [
        EpisodeCall((0, 0), row, 7, tuple(turns[:count]), is_last=count == len(turns))
        for count in range(len(turns) + 1)
    ]
    try:
        replies = [episodes.replies([call], 60.0)[0] for call in calls]
    finally:
        episodes.close()
    assert [reply.failure for reply in replies] == [None] * len(calls)
    return [(" ".join(text for _, text in reply.messages), reply.reward) for reply in replies]


@pytest.mark.parametrize(
    ("turns", "replies"),
    [
        (["I will bring you a new towel.", "You are welcome!"], [(" Thank you!", 0), ("", 1)]),
        (["Somebody will bring your new towel."], [("", 0)]),
        (["We will fix the towel."], [(" Thank you!", 1)]),
        (["I will bring you a new key.", "Sorry."], [(" I do not need that.", 0), ("", 0)]),
    ],
)
def test_the_agent_is_rewarded_for_a_thing_that_the_guest_has_named(turns: list[str], replies: list[Any]) -> None:
    assert replies_of("agent.yaml", {"prompt": "Can I have another towel?"}, turns) == [("", 0), *replies]


@pytest.mark.parametrize(
    "turns",
    [
        ["I will bring you a new towel.", "You are welcome!"],
        ["Somebody will bring your new towel."],
        ["I will bring you a new key.", "Sorry."],
    ],
)
def test_the_agent_that_is_a_program_has_the_replies_and_rewards_of_the_class(turns: list[str]) -> None:
    pytest.importorskip("openai")
    row = {"prompt": "Can I have another towel?"}
    expected, episodes = replies_of("agent.yaml", row, turns), Episodes(environment_of("own-agent.yaml"), 1)
    text, call = row["prompt"], EpisodeCall((0, 0), row, 7)
    try:
        for turn, (said, _) in zip((*turns, ""), expected, strict=True):
            (reply,) = episodes.replies([call], 60.0)
            assert reply.failure is None
            if not reply.call:
                break
            text += said
            assert ModelCall.read(reply.call).prompt == (text if not call.turns else said)
            text += turn
            turns_so_far = (*call.turns, ProgramTurn(turn).as_json)
            call = replace(call, turns=turns_so_far, replied=(*call.replied, reply.digest))
    finally:
        episodes.close()
    assert reply.is_done and reply.reward == sum(reward for _, reward in expected)


def test_each_turn_of_the_word_game_has_a_reward() -> None:
    ((first, _),) = replies_of("word-game.yaml", {}, [])
    *_, (_, right), (_, wrong) = replies_of("word-game.yaml", {}, [f"the{first} the", "nothing"])
    assert (right, wrong) == (pytest.approx(1 / 3), 0)


@pytest.mark.parametrize(
    ("turns", "replies"),
    [
        (["1. 48 clips / 2 friends. 48 / 2 =", "and 48 + 24 =", "#### 72"], [("24", 0), ("72", 0), ("", 0.5)]),
        (["$1,000 x 2 =", "#### 2000"], [("2000", 0), ("", 0)]),
        (
            ["(48 + 2) / 0 =", "#### 0"],
            [("error: calculate raised ZeroDivisionError: float division by zero", 0), ("", 0)],
        ),
        (["x = 48"], [("", 0)]),
    ],
)
def test_the_calculator_is_called_by_an_equation(turns: list[str], replies: list[Any]) -> None:
    found = replies_of("real/tools.yaml", {"question": "Natalia sold clips to 48 friends, then half (1/2)."}, turns)
    assert [found[0], *[(text.partition(" (calc")[0], reward) for text, reward in found[1:]]] == [("", 0), *replies]


def test_the_template_of_the_calculator_has_its_tool_and_leaves_turns_as_they_are(tokenizers: Any) -> None:
    tokenizer = tokenizers["smollm2"]
    chat = ChatFormat(
        "always",
        (CONFIGS / "real/tools.jinja").read_text(),
        tools=EnvironmentTools(environment_of("real/tools.yaml")).schemas(),
    )
    tokens = TurnTokens(tokenizer, chat)
    text = tokenizer.decode(tokens.prompt(Example((1,), (), (), turns=(Message("user", "How many?"),)), ()))
    assert "calculate: Write an expression" in text and text.endswith("assistant\n")
    reply = tokenizer.decode(tokens.reply([("tool", "24")], False))
    assert reply == "<|im_end|>\n<|im_start|>tool\n24<|im_end|>\n<|im_start|>assistant\n"
