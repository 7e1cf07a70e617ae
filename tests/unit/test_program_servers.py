"""Programs that call the policy and run on servers: episodes are shared, and a server that is lost costs its own."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from test_environment_servers import Server, serving
from test_programs import SECONDS, begin, playing, turn_of

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.environments.base import EpisodeReply
from flexrlhf.environments.sources import check_variables
from flexrlhf.environments.tool_schemas import EnvironmentTools
from flexrlhf.errors import UserError
from flexrlhf.serving.model_calls import ModelCall

ROWS = range(4)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    with ExitStack() as stack:
        first, second = (stack.enter_context(serving("agent_server.py", tmp_path)) for _ in range(2))
        yield first, second


def settings_of(*addresses: str, seconds: float = 20.0, **options: object) -> EnvironmentSpec:
    given = {"path": ",".join(addresses), "api": "openai", "processes": 1, "timeout_seconds": seconds}
    return EnvironmentSpec.model_validate({**given, "options": options})


def asked(replies: Sequence[EpisodeReply]) -> list[str]:
    """Return the last message of each call of a program."""
    assert [reply.failure for reply in replies] == [None] * len(replies)
    return [str(ModelCall.read(reply.call).messages[-1]["content"]) for reply in replies]


def test_a_server_of_programs_that_is_killed_costs_its_episodes(servers: tuple[Server, Server]) -> None:
    """Others go on as with a program of this machine; later episodes begin with the server that is left."""
    first, second = servers
    with playing(settings_of(*(f"{each.url}/two_turns" for each in servers), bonus=0.5)) as episodes:
        calls, begun = begin(episodes, [*"abcd"])
        assert asked(begun) == [*"abcd"]
        calls = [turn_of(call, reply, "xyz") for call, reply in zip(calls, begun, strict=True)]
        replies = episodes.replies(calls, SECONDS)
        assert asked(replies) == ["more 7"] * 4
        second.end()
        calls = [turn_of(call, reply, "uv") for call, reply in zip(calls, replies, strict=True)]
        ended = episodes.replies(calls, SECONDS)
        assert [(reply.reward, reply.is_done, reply.failure) for reply in ended[::2]] == [(5.5, True, None)] * 2
        address = f"{second.url}/two_turns"
        for row in ROWS[1::2]:
            failure = ended[row].failure
            assert failure is not None and failure.kind == f"server {address}"
            assert f"step 0, row {row}, turn 2: {address}: has gone: " in failure.text
    with playing(settings_of(*(f"{each.url}/two_turns" for each in servers))) as episodes:
        assert asked(begin(episodes, [*"efgh"])[1]) == [*"efgh"]
    first.end()
    with playing(settings_of(*(f"{each.url}/two_turns" for each in servers))) as episodes:
        for reply in begin(episodes, [*"abcd"])[1]:
            assert reply.failure is not None and reply.failure.kind == "server"
            assert all(f"{each.url}/two_turns: not reached: " in reply.failure.text for each in servers)


def test_a_reply_of_a_server_without_a_reward_fails_its_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, in time, and another one of its process goes on; the password of an address is sent, not shown."""
    monkeypatch.setenv("AGENT_PASSWORD", "s3cr")
    expected = {
        "sleeps": ("timeout", "took longer than 1.5 s"),
        "full": ("server", "has no room for another episode: come later"),
        "text": ("reply", "replied b'fine', which is not JSON"),
        "raise": ("raise", "status 500: raised no more"),
    }
    with (
        serving("agent_server.py", tmp_path) as server,
        playing(
            settings_of(address := f"{server.url}/behaves".replace("//", "//me:${AGENT_PASSWORD}@"), seconds=1.5)
        ) as episodes,
    ):
        calls, begun = begin(episodes, [*expected, "user"])
        assert asked(begun[3:]) == ["raise", f"Basic {b64encode(b'me:s3cr').decode()}"]
        turns = [turn_of(call, reply, "x") for call, reply in zip(calls[3:], begun[3:], strict=True)]
        raised, going = episodes.replies(turns, SECONDS)
        for reply, (kind, sentence) in zip([*begun[:3], raised], expected.values(), strict=True):
            assert reply.failure is not None and reply.failure.kind == kind
            assert f"{address}: {sentence}" in reply.failure.text and "s3cr" not in str(reply.failure)
        assert asked([going]) == ["on"]
        (ended,) = episodes.replies([turn_of(turns[1], going, "x")], SECONDS)
        assert (ended.reward, ended.failure) == (1.0, None)


def test_addresses_of_programs_are_checked() -> None:
    EnvironmentTools(settings_of("http://one:1/run", "http://two:1/run")).check_class(["prompt"])
    check_variables(settings_of("http://one:1/run", "http://two:1/run"))
    with pytest.raises(UserError, match="such as http://localhost:8000, or several with commas between"):
        check_variables(settings_of("http://one:1/run", "two:1/run"))
    with pytest.raises(ValueError, match="add api: openai, or write openenv: in front of it"):
        EnvironmentSpec(path="http://one:1/run")
    with pytest.raises(ValueError, match="python is of a program on this machine"):
        EnvironmentSpec(path="http://one:1/run", api="openai", python="/usr/bin/python3")
