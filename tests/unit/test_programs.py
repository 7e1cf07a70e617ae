"""Programs that call the policy as a model of OpenAI's API: their episodes in processes."""

from __future__ import annotations

import json
import os
import sys
import threading
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import example_programs
import pytest
from small_runs import plan_of

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.environments.base import EpisodeCall, EpisodeReply, ProgramTurn, SequenceRecord
from flexrlhf.environments.episodes import Episodes
from flexrlhf.environments.sources import check_environment, program_of
from flexrlhf.environments.tool_schemas import EnvironmentTools
from flexrlhf.errors import UserError
from flexrlhf.serving.model_calls import ModelCall

FILE = Path(example_programs.__file__)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
SECONDS = 60.0
NO_TOOL = "error: no tool 'no_tool'; there are sums_add"


def settings_of(name: str, **settings: object) -> EnvironmentSpec:
    """Return the settings of a program of ``example_programs``."""
    given = {"path": f"{FILE}:{name}", "api": "openai", "processes": 1, "timeout_seconds": 20.0, **settings}
    return EnvironmentSpec.model_validate(given)


@contextmanager
def playing(settings: EnvironmentSpec) -> Iterator[Episodes]:
    """Close the processes behind the body."""
    episodes = Episodes(settings, settings.processes, sampling=SAMPLING)
    try:
        yield episodes
    finally:
        episodes.close()


def begin(episodes: Episodes, prompts: Sequence[str]) -> tuple[list[EpisodeCall], list[EpisodeReply]]:
    """Begin an episode for each prompt."""
    calls = [EpisodeCall((0, row), {"prompt": prompt}, 7) for row, prompt in enumerate(prompts)]
    return calls, episodes.replies(calls, SECONDS)


def turn_of(call: EpisodeCall, reply: EpisodeReply, text: str, is_last: bool = False) -> EpisodeCall:
    """Return the call behind ``reply`` with a turn of the policy."""
    turn = ProgramTurn(text, tokens=len(text)).as_json
    return replace(call, turns=(*call.turns, turn), replied=(*call.replied, reply.digest), is_last=is_last)


class Conversations:
    """Conversations of one episode, each of which is played by a thread: its turns are numbered texts."""

    def __init__(self, episodes: Episodes, number: int) -> None:
        self.episodes, self.turns = episodes, [list[str]() for _ in range(number)]
        self.began, self.ended = [""] * number, list[EpisodeReply]()
        self.records = [SequenceRecord()] * number

    def play(self, number: int = 0) -> None:
        """Play the conversation ``number``, and the ones that begin during it."""
        call = EpisodeCall((0, number), {"prompt": "x"}, 7, sequence=number)
        reply = self._reply(call)
        self.began[number] = reply.call
        others = list[threading.Thread]()
        if reply.call and number + 1 < len(self.turns):
            others.append(threading.Thread(target=self.play, args=(number + 1,)))
            others[0].start()
        while reply.call:
            self.turns[number].append(f"{number}{len(call.turns)}")
            said = ModelCall.read(reply.call)
            call = turn_of(call, reply, (said.prompt or said.messages[-1]["content"])[-1] + "!")
            self.records[number] = SequenceRecord(call.turns, call.replied)
            reply = self._reply(call)
        self.ended.append(reply)
        for thread in others:
            thread.join()

    def _reply(self, call: EpisodeCall) -> EpisodeReply:
        (reply,) = self.episodes.replies([replace(call, siblings=tuple(self.records))], SECONDS)
        assert reply.failure is None, reply.failure
        return reply


@pytest.mark.parametrize("name", ["two_turns", "two_turns_at_once"])
def test_a_call_is_a_reply_and_a_turn_its_response(name: str) -> None:
    """Messages that follow are those behind the policy's turn; another process plays the episode up to there."""
    with playing(settings_of(name)) as episodes:
        calls, begun = begin(episodes, ["a", "b"])
        assert [ModelCall.read(each.call).messages for each in begun] == [
            ({"role": "user", "content": "a"},),
            ({"role": "user", "content": "b"},),
        ]
        calls = [turn_of(call, reply, "abc") for call, reply in zip(calls, begun, strict=True)]
        replies = episodes.replies(calls, SECONDS)
        assert ModelCall.read(replies[0].call).messages == ({"role": "user", "content": "more 7"},)
        last = [turn_of(call, reply, "de") for call, reply in zip(calls, replies, strict=True)]
        (ended,) = episodes.replies(last[:1], SECONDS)
        assert (ended.reward, ended.is_done, ended.failure) == (5.0, True, None)
    with playing(settings_of(name)) as episodes:
        (ended,) = episodes.replies(last[1:], SECONDS)
        assert (ended.reward, ended.is_done, ended.failure) == (5.0, True, None)
        changed = replace(last[1], key=(0, 5), replied=(1, 2))
        (other,) = episodes.replies([changed], SECONDS)
        assert other.failure is not None and other.failure.kind == "replay"


def test_a_text_goes_on_with_its_limits() -> None:
    """A stop string ends the text that the program receives; what it adds is what follows, also if it writes the stop
    string itself, which the row has."""
    with playing(settings_of("completions")) as episodes:
        (call,), (begun,) = begin(episodes, ["a"])
        found = ModelCall.read(begun.call)
        assert (found.prompt, found.stop, found.most_tokens) == ("a 0:", ("!",), 3)
        call = turn_of(call, begun, "bc!d")
        (reply,) = episodes.replies([call], SECONDS)
        assert ModelCall.read(reply.call).prompt == " 1:"
        (ended,) = episodes.replies([turn_of(call, reply, "e")], SECONDS)
        assert ended.reward == len("a 0:bc 1:e") and ended.is_done
    with playing(settings_of("reasons")) as episodes:
        (call,), (begun,) = begin(episodes, ["a"])
        (reply,) = episodes.replies([turn_of(call, begun, " look Result:")], SECONDS)
        assert ModelCall.read(reply.call).prompt == " 3"


def test_a_program_whose_call_cannot_be_read_fails_at_once() -> None:
    """Its rank says why; another conversation that it began in vain has the reason as its error."""
    with playing(settings_of("two_turns", sequences=2)) as episodes:
        (call,), (begun,) = begin(episodes, ["a"])
        failed = replace(call, replied=(begun.digest,), reason="too long a prompt", is_failed=True)
        further = replace(call, key=(0, 1), sequence=1)
        for reply in episodes.replies([failed, further], SECONDS):
            assert reply.failure is not None and reply.failure.kind == "tokens" and "too long" in reply.failure.text


def test_a_branch_is_played_again_as_it_was() -> None:
    """Of two calls that go on with one conversation the first one does; a replay has them in any order."""
    with playing(settings_of("branches", sequences=2)) as episodes:
        found = Conversations(episodes, 2)
        found.play()
        assert sorted(map(len, found.turns)) == [1, 2] and sum(each.reward for each in found.ended) == 2.0
    own = found.records[0]
    for order in ("ab", "ba"):
        with playing(settings_of("branches", sequences=2, options={"order": order})) as episodes:
            call = EpisodeCall(
                (0, 0), {"prompt": "x"}, 7, own.turns, replied=own.replied, siblings=tuple(found.records)
            )
            (ended,) = episodes.replies([call], SECONDS)
            assert (ended.reward, ended.failure) == (2.0, None)


def test_a_program_has_an_interpreter_of_its_own(tmp_path: Path) -> None:
    """It needs no library of this one, and another reward where these are there."""
    venv.create(tmp_path / "other", with_pip=False)
    for python, reward in ((tmp_path / "other/bin/python", 1.0), (None, 0.0)):
        settings = settings_of("of_another_interpreter", python=None if python is None else str(python))
        with playing(settings) as episodes:
            (call,), (begun,) = begin(episodes, ["a"])
            (ended,) = episodes.replies([turn_of(call, begun, "hi")], SECONDS)
            assert (ended.reward, ended.failure) == (reward, None)


def test_a_program_that_can_have_no_further_turn_ends_by_itself_or_raises() -> None:
    """Behind its last turn, or without room; one that raises then has no reward."""
    for name, reward in (("without_end", 3.0), ("without_end_or_reward", 0.0)):
        with playing(settings_of(name)) as episodes:
            calls, begun = begin(episodes, ["a", "b"])
            last = turn_of(calls[0], begun[0], "x", is_last=True)
            (ended,) = episodes.replies([last], SECONDS)
            assert (ended.reward, ended.is_done, ended.refused_calls, ended.failure) == (reward, False, 1, None)
            call = turn_of(calls[1], begun[1], "x")
            (reply,) = episodes.replies([call], SECONDS)
            (ended,) = episodes.replies([replace(call, replied=(*call.replied, reply.digest), is_ended=True)], SECONDS)
            assert (ended.reward, ended.is_done, ended.failure) == (reward, False, None)


def test_conversations_that_begin_at_once_are_sequences_of_an_episode() -> None:
    """Each goes on by itself, whatever comes first; the reward is that of the first one, and unused ones just end."""
    with playing(settings_of("with_helpers", sequences=6)) as episodes:
        found = Conversations(episodes, 6)
        found.play()
        first, *helpers, _, unused = found.began[:5] + found.began[5:]
        tasks = sorted(ModelCall.read(each).messages[0]["content"] for each in helpers if each)
        assert tasks == ["x! a", "x! a", "x! b"] and ModelCall.read(first).messages[0]["content"] == "x"
        assert [len(each) for each in found.turns] == [2, 2, 2, 2, 0, 0] and not unused
        assert all(each.is_done for each in found.ended)
        assert sorted(each.reward for each in found.ended) == [0.0] * 4 + [12.0]
    with playing(settings_of("with_helpers", sequences=6)) as episodes:
        # another process plays all of them again, in whatever order they come
        own = found.records[0]
        call = EpisodeCall((0, 0), {"prompt": "x"}, 7, own.turns, replied=own.replied, siblings=tuple(found.records))
        (ended,) = episodes.replies([call], SECONDS)
        assert (ended.reward, ended.is_done, ended.failure) == (12.0, True, None)


@pytest.mark.parametrize(
    ("kind", "failure", "text"),
    [
        ("early", "reply", "it returned before its first call of the policy"),
        ("raise", "raise", "raised ValueError: no more"),
        ("text", "reply", "reward is 'a lot' (str) instead of a finite number"),
        ("forget", "raise", "environment.sequences is 1, and the messages go on with none of the earlier"),
        ("hot", "raise", "its last refused call: temperature"),
        ("sleep", "timeout", "took longer than 1.5 s"),
        ("insist", "timeout", "took longer than 1.5 s"),
        ("exit", "crash", "exit code 3"),
    ],
)
def test_a_program_that_misbehaves_costs_its_episode(kind: str, failure: str, text: str) -> None:
    """It is named, in time; another one of its process goes on, or is played again in another one."""
    with playing(settings_of("misbehaves", timeout_seconds=1.5)) as episodes:
        calls, begun = begin(episodes, [kind, "threads"])
        turns = [turn_of(call, reply, "x") for call, reply in zip(calls, begun, strict=True) if reply.call]
        replies = [*(reply for reply in begun if not reply.call), *episodes.replies(turns, SECONDS)]
        failed, going = replies
        assert failed.failure is not None and failed.failure.kind == failure and text in failed.failure.text
        assert failed.failure.text.startswith(f"{FILE}:misbehaves: step 0, row 0, ")
        assert going.failure is None and going.call
        (ended,) = episodes.replies([turn_of(turns[-1], going, "y")], SECONDS)
        assert (ended.reward, ended.failure) == (1.0, None)


def test_a_program_is_checked_before_a_rank_starts(tmp_path: Path) -> None:
    """It is loaded by its interpreter, and has to take a row, the address and its options."""
    EnvironmentTools(settings_of("two_turns", options={"bonus": 1.0})).check_class(["prompt"])
    cases = {
        "two_turns": ({"options": {"bonuses": 1}}, "got an unexpected keyword argument 'bonuses'"),
        "say": ({}, r"it is called with \(row, api\) and environment.options, and takes \(api"),
        "two_turns_at_once": ({"python": str(tmp_path / "python")}, "No such file or directory"),
    }
    for name, (settings, sentence) in cases.items():
        with pytest.raises(UserError, match=sentence):
            EnvironmentTools(settings_of(name, **settings)).check_class()
    with pytest.raises(ValueError, match="api: openai is of a program in path, found the tools a.py:b"):
        EnvironmentSpec.model_validate({"api": "openai", "path": "a.py:run", "tools": ["a.py:b"]})
    with pytest.raises(ValueError, match="add api: openai"):
        EnvironmentSpec.model_validate({"path": "a.py:run", "python": "/usr/bin/python3"})


def test_conversations_go_on_by_themselves() -> None:
    """Rounds cannot await them, and a cut one may hold up the others."""
    program = f"environment={{path: {FILE}:with_helpers, api: openai, sequences: 3}}"
    plan_of(None, 2, program, "rollout={order: free}")


def test_calls_are_read_as_they_were_written() -> None:
    """Through JSON, in which a log and other ranks have them."""
    call = ModelCall(({"role": "user", "content": "é"},), None, ({"type": "function"},), ("a", "b"), 3)
    assert ModelCall.read(call.text) == call
    assert json.loads(call.text)["most_tokens"] == 3


def test_a_task_set_of_verifiers_is_a_program() -> None:
    """Its interpreter is another one, or has verifiers."""
    settings = EnvironmentSpec(path="verifiers:sums", python=sys.executable, options={"largest": 5})
    assert settings.api == "openai"
    program, options = program_of(settings)
    assert Path(program.removesuffix(":run")).is_file() and options == {"largest": 5, "name": "sums"}
    if find_spec("verifiers") is None:
        with pytest.raises(UserError, match=r"verifiers:sums: .*No module named 'verifiers'"):
            EnvironmentTools(settings).check_class()
        sentence = r"pip install 'flexrlhf\[verifiers\]', or name an interpreter that has it in environment.python$"
        with pytest.raises(UserError, match=sentence):
            check_environment(EnvironmentSpec(path="verifiers:sums"))


def test_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own rollout, with its own tools and reward; one without room for a further turn is scored as it is."""
    python = os.environ.get("FLEXRLHF_TEST_VERIFIERS")
    if python is None:
        pytest.importorskip("verifiers", reason="neither here nor in an interpreter FLEXRLHF_TEST_VERIFIERS")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FILE.parent), os.environ.get("PYTHONPATH", "")]))
    path, options = "verifiers:verifiers-tasks", {"largest": 5}
    settings = EnvironmentSpec(path=path, python=python, options=options, processes=1, timeout_seconds=SECONDS)
    EnvironmentTools(settings).check_class()

    def tool_call(name: str, **arguments: int) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    with playing(settings) as episodes:
        calls = [EpisodeCall((0, row), {"idx": 3}, 7) for row in range(2)]
        replies = episodes.replies(calls, 2 * SECONDS)
        begun = ModelCall.read(replies[0].call)
        assert [each["content"] for each in begun.messages] == ["Add.", "What is 3 + 4?"]
        assert [each["function"]["name"] for each in begun.tools] == ["sums_add"]
        for texts, is_last, contents in [
            ([tool_call("sums_add", first=3, second=4)] * 2, False, ["7", "7"]),
            ([tool_call("no_tool"), f"It is 7. {tool_call('no_tool')}"], True, [NO_TOOL]),
        ]:
            calls = [
                turn_of(call, reply, text, is_last and call.key[1] == 1)
                for call, reply, text in zip(calls, replies, texts, strict=True)
            ]
            replies = episodes.replies(calls, SECONDS)
            assert [ModelCall.read(reply.call).messages[0]["content"] for reply in replies if reply.call] == contents
        assert (replies[1].reward, replies[1].is_done, replies[1].refused_calls) == (1.0, False, 1)
        (ended,) = episodes.replies([turn_of(calls[0], replies[0], "It is 7.")], SECONDS)
        assert (ended.reward, ended.is_done, ended.failure) == (1.0, True, None)
