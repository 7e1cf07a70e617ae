"""Environments in worker processes: whose forms there are, what an episode is, tools, packages."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from small_runs import PPO

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.config.spec import Spec
from flexrlhf.data.quickstart import prepare_corpus
from flexrlhf.environments import sandbox, sources
from flexrlhf.environments.base import EpisodeCall, EpisodeReply
from flexrlhf.environments.call_forms import ToolCall
from flexrlhf.environments.episodes import Episodes
from flexrlhf.environments.sources import check_package
from flexrlhf.environments.tool_calls import parse_calls
from flexrlhf.environments.tool_schemas import EnvironmentTools
from flexrlhf.errors import UserError
from flexrlhf.measure.environment_calls import example_call, measure_environments
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.user_code import worker_process

FILE = Path(__file__).with_name("example_environments.py")
Play = Callable[..., list[EpisodeReply]]


@pytest.fixture
def play() -> Iterator[Play]:
    """Function that runs the turns of one episode, and returns the reply to its reset and to each of them."""
    opened: dict[str, Episodes] = {}

    def turns(texts: Sequence[str], row: dict[str, Any] | None = None, **settings: Any) -> list[EpisodeReply]:
        spec = EnvironmentSpec(**settings)
        episodes = opened.setdefault(repr(spec), Episodes(spec, 1))
        calls = [
            EpisodeCall((0, len(opened)), row or {}, 7, tuple(texts[:count]), is_last=count == len(texts))
            for count in range(len(texts) + 1)
        ]
        return [episodes.replies([call], 60.0)[0] for call in calls]

    yield turns
    for episodes in opened.values():
        episodes.close()


def own(name: str) -> str:
    return f"{FILE}:{name}"


def call(name: str, **arguments: Any) -> str:
    """A call as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(replies: Sequence[EpisodeReply]) -> list[tuple[tuple[str, str], ...]]:
    assert [reply.failure for reply in replies] == [None] * len(replies)
    return [reply.messages for reply in replies]


# --- episodes


def test_an_episode_of_a_class(play: Play) -> None:
    replies = play(["3", "7"], {"greeting": "hello"}, path=own("Guess"), options={"limit": 8})
    prompt = (("user", "hello: guess a number below 8"),)
    assert said(replies) == [prompt, (("", "wrong at 1"),), (("", "right at 2"),)]
    assert [(reply.reward, reply.is_done) for reply in replies] == [(0, False), (0, False), (1, True)]


def test_episodes_are_shared_by_processes_and_stay_in_theirs() -> None:
    episodes = Episodes(EnvironmentSpec(path=own("Process")), 2)

    def replies(texts: Sequence[str], rows: Sequence[int] = range(6)) -> list[str]:
        calls = [EpisodeCall((1, row), {}, 0, tuple(texts)) for row in rows]
        return [reply.messages[0][1] for reply in episodes.replies(calls, 60.0)]

    try:
        processes = replies([])
        assert len(set(processes)) == 2 and str(os.getpid()) not in processes
        assert replies(["on"]) == [f"{process} 1" for process in processes]
        assert replies(["on", "modules"]) == ["modules "] * 6
        os.kill(int(processes[1]), signal.SIGKILL)
        later = replies(["on", "on", "on"])
        assert [each.split()[1] for each in later] == ["3"] * 6
        assert [one == other.split()[0] for one, other in zip(processes, later, strict=True)] == [True, False] * 3
    finally:
        episodes.close()


def test_an_episode_is_resumed_by_its_turns(play: Play) -> None:
    """By another process, which has none of it."""
    episodes = Episodes(EnvironmentSpec(path=own("Guess")), 1)
    try:
        (reply,) = episodes.replies([EpisodeCall((3, 1), {"greeting": "a"}, 5, ("1", "2", "5"))], 60.0)
    finally:
        episodes.close()
    assert (reply.messages, reply.reward, reply.is_done, reply.failure) == ((("", "right at 3"),), 1.0, True, None)


def test_episodes_are_closed() -> None:
    """Once done, failed, at the last turn, or when a later step has begun."""
    episodes = Episodes(EnvironmentSpec(path=own("Open")), 1)

    def reply(step: int, row: int, *turns: str, is_last: bool = False) -> EpisodeReply:
        return episodes.replies([EpisodeCall((step, row), {}, 0, turns, is_last)], 60.0)[0]

    try:
        assert [reply(1, row).messages for row in range(4)] == [(("", str(row + 1)),) for row in range(4)]
        assert reply(1, 0, "done").is_done and reply(1, 1, "raise").failure is not None
        assert said([reply(1, 2, "go", is_last=True)]) == [(("", "2"),)]
        assert said([reply(2, 0), reply(2, 0), reply(3, 0)]) == [(("", "2"),), (("", "2"),), (("", "2"),)]
    finally:
        episodes.close()


def test_calls_of_async_episodes_join_the_ones_under_way() -> None:
    """One process sleeps for all of them at once, and each has its reply when it is there, also during the first call;
    if one ends the process, the others are replayed in another one."""
    episodes = Episodes(EnvironmentSpec(path=own("Sleeper")), 1)
    began, ends = 0.0, dict[int, float]()

    def reply(row: int, *turns: str) -> EpisodeReply:
        (found,) = episodes.replies([EpisodeCall((1, row), {} if row else {"seconds": 1.5}, 0, turns)], 60.0)
        ends[row] = time.monotonic() - began
        return found

    try:
        with ThreadPoolExecutor(12) as threads:
            slow = threads.submit(reply, 0)
            first = {each.messages for each in threads.map(reply, range(1, 12))}
            assert not slow.done() and slow.result().messages in first
            began = time.monotonic()
            late = threads.submit(reply, 0, "2")
            time.sleep(0.2)
            assert {each.messages for each in threads.map(reply, range(1, 12), ["0.5"] * 11)} == first
            assert len(first) == 1 and max(ends[row] for row in range(1, 12)) < 1.5 and not late.done()
            died = threads.submit(reply, 1, "0.5", "die").result()
            assert died.failure is not None and died.failure.kind == "crash"
            assert late.result().failure is None and late.result().messages not in first
            assert reply(2, "0.5", "0").failure is None
    finally:
        episodes.close()


def test_all_replies_are_there_by_the_deadline() -> None:
    episodes = Episodes(EnvironmentSpec(path=own("Late")), 1)
    try:
        calls = [EpisodeCall((0, row), {}, 0) for row in range(3)]
        replies = episodes.replies(calls, 1.0)
        assert [reply.failure.kind for reply in replies if reply.failure] == ["late"] * 3
        assert "row 2, reset: not all replies of environments within 1 s" in str(replies[2].failure)
    finally:
        episodes.close()


def test_closing_awaits_no_reply() -> None:
    """Neither that of the call under way, which hangs, nor others behind it."""
    episodes = Episodes(EnvironmentSpec(path=own("Late")), 1)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(episodes.replies, [EpisodeCall((0, row), {}, 0) for row in range(3)], 60.0)
        time.sleep(1)
        began = time.monotonic()
        episodes.close()
        assert time.monotonic() - began < 5
        failures = [reply.failure for reply in found.result()]
    assert [(each.kind, each.text.rpartition(": ")[2]) for each in failures if each is not None] == [
        ("late", "its process has been closed")
    ] * 3


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("no_class", "load raise", "could not be loaded: raised TypeError: .* is 7, not a class with reset and step"),
        ("Missing", "load raise", "could not be loaded: raised AttributeError: .*Missing"),
        ("NotAsync", "reply", "returned something to wait for, but is no async def"),
        ("Guess", "raise", "raised KeyError: 'greeting'"),
    ],
)
def test_what_cannot_be_played_is_named(name: str, kind: str, words: str, play: Play) -> None:
    (reply,) = play([], path=own(name))
    assert reply.failure is not None and reply.failure.kind == kind
    assert re.search(words, reply.failure.text), reply.failure.text


def test_a_replay_that_ends_earlier_is_named(tmp_path: Path) -> None:
    episodes = Episodes(EnvironmentSpec(path=own("Chance")), 1)
    row = {"file": str(tmp_path / "file")}
    try:
        for turns in ((), ("a",), ("a", "b")):
            (reply,) = episodes.replies([EpisodeCall((0, 0), row, 0, turns)], 60.0)
            assert reply.failure is None and not reply.is_done
        calls = [EpisodeCall((0, 1), row, 0, ("die",)), EpisodeCall((0, 0), row, 0, ("a", "b", "c"))]
        crash, replay = (reply.failure for reply in episodes.replies(calls, 60.0))
        assert crash is not None and crash.kind == "crash"
        assert replay is not None and replay.kind == "replay"
        assert "row 0, turn 1: its replay ended here, after 3 recorded turns" in replay.text
    finally:
        episodes.close()


def test_a_replay_that_replies_otherwise_fails_the_episode() -> None:
    episodes = Episodes(EnvironmentSpec(path=own("Secret")), 1)
    try:
        (secret,) = episodes.replies([EpisodeCall((0, 0), {}, 0)], 60.0)
        moved = EpisodeCall((0, 0), {}, 0, ("a",), replied=(secret.digest,))
        calls = [EpisodeCall((0, 1), {}, 0, ("die",)), moved]
        _, replay = (reply.failure for reply in episodes.replies(calls, 60.0))
        assert replay is not None and replay.kind == "replay"
        assert "row 0, reset: its replay replied otherwise than before" in replay.text
    finally:
        episodes.close()


def test_an_episode_without_room_for_a_turn_has_its_reward() -> None:
    for name, row, turn, reward in (("Counter", {"start": 2}, call("add", number=3), 5.0), ("Secret", {}, "a", 0.5)):
        episodes = Episodes(EnvironmentSpec(path=own(name)), 1)
        try:
            calls = [EpisodeCall((0, 0), row, 0, turns) for turns in ((), (turn,))]
            calls.append(EpisodeCall((0, 0), row, 0, (turn,), is_ended=True))
            *_, last = (episodes.replies([each], 60.0)[0] for each in calls)
            assert (last.reward, last.is_done, last.failure) == (reward, True, None)
        finally:
            episodes.close()


def test_loading_that_hangs_is_not_waited_for_twice(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "LOAD_SECONDS", 0.5)
    file = tmp_path / "slow.py"
    file.write_text("import time\nopen(__file__ + '.loads', 'a').write('x')\ntime.sleep(1000)\n")
    for _ in range(2):
        (reply,) = play([], path=f"{file}:Any")
        assert reply.failure is not None and reply.failure.kind == "load timeout"
    assert Path(f"{file}.loads").read_text() == "x"


# --- tools


def test_calls_of_tools_are_run(play: Play) -> None:
    turns = [call("multiply", first=6, second=7), "It is 42."]
    reset, results, end = play(turns, tools=(own("multiply"),))
    assert said([reset, results, end]) == [(), (("tool", "42"),), ()]
    assert [(reply.tool_calls, reply.failed_tool_calls, reply.is_done) for reply in (reset, results, end)] == [
        *[(0, 0, False), (1, 0, False), (0, 0, True)]
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (call("multipl", first=6), "error: no tool 'multipl' (did you mean 'multiply'?); there are multiply"),
        (call("multiply", first=6), "error: multiply: missing a required argument: 'second'"),
        (call("multiply", first=6, second=7, third=8), "error: multiply: got an unexpected keyword argument 'third'"),
        (call("multiply", first="a", second="b"), "error: multiply raised TypeError: can't multiply"),
        ("<tool_call>{no json</tool_call>", "error: "),
    ],
)
def test_a_bad_call_is_a_reply_that_says_so(text: str, words: str, play: Play) -> None:
    _, reply, _ = play([text, "end"], tools=(own("multiply"),))
    assert (reply.tool_calls, reply.failed_tool_calls, reply.is_done, reply.failure) == (1, 1, False, None)
    assert reply.messages[0][0] == "tool" and reply.messages[0][1].startswith(words)


def test_tools_come_before_the_environment(play: Play) -> None:
    turns = [call("multiply", first=1, second=2) + call("multiply", first=3, second=4), "7"]
    replies = play(turns, {"greeting": "hello"}, path=own("Guess"), tools=(own("multiply"),))
    assert said(replies)[1:] == [(("tool", "2"), ("tool", "12")), (("", "right at 1"),)]
    assert [(reply.tool_calls, reply.reward) for reply in replies] == [(0, 0), (2, 0), (0, 1)]


def test_a_class_in_trls_form(play: Play) -> None:
    turns = [call("add", number=3), call("add", number=-1) + call("look"), call("get_reward"), "done"]
    replies = play(turns, {"start": 2, "prompt": "count"}, path=own("Counter"))
    assert [messages[0] if messages else None for messages in said(replies)] == [
        *[("", "the count is 2"), ("tool", "5"), ("tool", replies[2].messages[0][1]), replies[3].messages[0], None]
    ]
    assert replies[2].messages[0][1].startswith("error: add raised ValueError: only up")
    assert replies[2].messages[1] == ("tool", '{"count": 5}')
    assert "no tool 'get_reward'" in replies[3].messages[0][1]
    assert [(reply.reward, reply.tool_calls, reply.failed_tool_calls) for reply in replies[1:]] == [
        *[(0, 1, 0), (0, 2, 1), (0, 1, 1), (5, 0, 0)]
    ]


def test_the_last_turn_of_an_episode_in_trls_form_has_its_reward(play: Play) -> None:
    *_, reply = play([call("add", number=3)], {"start": 2}, path=own("Counter"))
    assert (reply.reward, reply.is_done) == (5, False)


# --- packages


def test_gymnasium(play: Play) -> None:
    pytest.importorskip("gymnasium")
    options = {"render_mode": "ansi", "is_slippery": False}
    replies = play(["I go right: 2", "nowhere", "9", "1"], path="gymnasium:FrozenLake-v1", options=options)
    start, right, nowhere, nine, hole = (messages[0][1] for messages in said(replies))
    assert start == "\n[S]FFF\nFHFH\nFFFH\nHFFG\n" and right == "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG\n"
    assert nowhere == nine == "no action of Discrete(4)"
    assert "F[H]FH" in hole and replies[4].is_done and replies[4].reward == 0
    assert re.fullmatch(r"\[\d+, \d+, [01]\]", said(play([], path="gymnasium:Blackjack-v1"))[0][0][1])


def test_reasoning_gym(play: Play) -> None:
    gym = pytest.importorskip("reasoning_gym")
    task = gym.create_dataset("chain_sum", seed=7, size=1)[0]
    replies = play(
        ["<answer>no</answer>", f"<answer>{task['answer']}</answer>"],
        path="reasoning-gym:chain_sum",
        options={"attempts": 3},
    )
    assert said(replies)[0] == (("", task["question"]),) and said(replies)[2] == ()
    assert "Try again" in said(replies)[1][0][1]
    assert [reply.is_done for reply in replies] == [False, False, True]
    assert sum(reply.reward for reply in replies) == 1
    row = {"task": "chain_sum", "settings": "{}", "entry": repr(task)}
    replies = play([f"<answer>{task['answer']}</answer>"], row, path="reasoning-gym:chain_sum")
    assert said(replies) == [(), ()] and replies[1].reward == 1 and replies[1].is_done


ODD_RESULTS = [
    ("an_object", r"an_object returned <object object at 0x\w+>, an object, instead of a text or what JSON has"),
    ("objects_inside", "objects_inside returned <function objects_inside.<locals>.<lambda> at"),
    ("some_bytes", r"some_bytes returned b'x' \(bytes\), which is no text and no JSON: it has bytes"),
    ("a_set", "a_set returned .*, which is no text and no JSON: it has set"),
    ("keys_that_are_none", "which is no text and no JSON: keys must be str"),
]


@pytest.mark.parametrize(("name", "sentence"), ODD_RESULTS)
def test_a_result_that_no_other_process_repeats_fails_its_episode(play: Play, name: str, sentence: str) -> None:
    *_, last = play([call(name)], tools=(own(name),))
    assert last.failure is not None and last.failure.kind == "reply"
    assert re.search(sentence, last.failure.text)


def test_results_of_a_turn_have_a_limit_together(play: Play) -> None:
    """The calls that follow are not run; a lying text counts with its own characters; an address is not read."""
    _, reply, lied, raised, dates, _ = play(
        [call("half_a_million") * 4, call("lies"), call("raises_an_object"), call("a_date"), "done"],
        tools=(own("half_a_million"), own("lies"), own("raises_an_object"), own("a_date")),
    )
    texts = [text for _, text in reply.messages]
    assert [len(text) for text in texts[:2]] == [500_000] * 2 and len(texts) == 3
    assert texts[2] == "error: the results of a turn are too long; the last 2 are left out"
    assert (reply.tool_calls, reply.failed_tool_calls) == (4, 1)
    assert said([lied]) == [(("tool", "error: a text has 2000000 characters; at most 1048576 are read"),)]
    assert "raised ValueError: <an object>" in raised.messages[0][1]
    assert said([dates]) == [(("tool", '{"day": "2026-01-31", "price": "1.50"}'),)]


def test_the_replies_of_an_episode_have_a_limit_together(play: Play) -> None:
    *good, last = play([call("half_a_million") * 2] * 9, tools=(own("half_a_million"),))[:10]
    assert said(good[1:]) and last.failure is not None
    assert "the replies of the episode have 9000072 characters; 8388608 are read" in last.failure.text


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_package("gymnasium:FrozenLake-v1")
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    check_package(own("Guess"))
    words = (
        r"environment\.path: reasoning-gym:x needs the package reasoning_gym, .* pip install 'flexrlhf\[reasoning\]'"
    )
    with pytest.raises(UserError, match=words):
        check_package("reasoning-gym:x")


# --- code that a model writes

SHARED = """import ctypes, mmap
shared = mmap.mmap(-1, 640 << 20)
for part in range(10):
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(shared)) + (part << 26), 1, 1 << 26)"""
"""Code that uses memory which a limit of the memory of its own does not count."""


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print('a')\n2 ** 10", "a\n1024"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x ===", "SyntaxError: invalid syntax"),
        ("import os\nsorted(os.environ)", "[]"),
        ("import os\nos.listdir()", "[]"),
        ("'a' * 10**10", "MemoryError"),
        ("open('x', 'w').write('a' * 10**8)", "OSError: [Errno 27] File too large"),
        ("import os\nos._exit(3)", "ended with code 3"),
        ("input()", "EOFError: EOF when reading a line"),
        ("while True: pass", "ended after 0.5 s"),
        ("print({'a', 'b', 'c'}, object())", "{'c', 'a', 'b'} <object object at 0x...>"),
        (f"{SHARED}\nprint('all of it')", "ended, as its processes have more than 512 MB of memory together"),
    ],
)
def test_code_is_run_with_limits(code: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "while" in code:
        monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    assert sandbox.python(code) == output


@pytest.mark.parametrize("is_forked", [False, True])
def test_code_that_leads_a_session_of_its_own_ends(is_forked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 1.0)
    daemon = "import os\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
    begins = daemon if is_forked else "import os\nos.setsid()\n"
    code = f"{begins}os.execvp('sleep', ['sleep', '98765'])"
    assert sandbox.python(code) == ("" if is_forked else "ended after 1 s")
    assert not _running(b"98765")


def _running(name: bytes) -> bool:
    """Whether a process has an argument ``name``; one that is killed has none from then on."""
    return any(name in file.read_bytes().split(b"\0") for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists())


def test_files_in_shared_memory_are_of_one_run(play: Play) -> None:
    """Also within the limits of a worker process."""
    kept = "import os\nopen('/dev/shm/flexrlhf-kept', 'wb').write(bytes(9))\nprint(os.listdir('/dev/shm'))"
    (_, *replies) = play([call("python", code=kept)] * 2, tools=("flexrlhf.environments.sandbox:python",))
    assert said(replies) == [(("tool", "['flexrlhf-kept']"),)] * 2
    assert not Path("/dev/shm/flexrlhf-kept").exists()


def test_code_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    code = "import os\nopen('file', 'w').write('x')\nif os.fork() == 0: os.execvp('sleep', ['sleep', '987654'])"
    assert sandbox.python(code) == ""
    assert list(tmp_path.iterdir()) == []
    names = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert not any(b"987654" in name for name in names)


def test_code_is_a_tool(play: Play) -> None:
    _, reply, _ = play([call("python", code="print(6 * 7)"), "42"], tools=("flexrlhf.environments.sandbox:python",))
    assert said([reply]) == [(("tool", "42"),)]


SLOW = """
import time
from flexrlhf.environments.base import Turn
class Slow:
    def reset(self, row, seed):
        self.is_slow = seed % 2
        return ""
    def step(self, reply):
        time.sleep(0.05 + 0.1 * self.is_slow)
        return Turn(is_done=not reply)
"""


def test_profile_measures_replies_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginnings and replies apart, with the time around them; all calls that fail are one sentence."""
    monkeypatch.chdir(tmp_path)
    prepare_corpus()
    (tmp_path / "slow.py").write_text(SLOW)
    rows = {"path": "runs/quickstart-corpus/prompts.jsonl", "tokenizer": "runs/quickstart-corpus/tokenizer"}
    raw = PPO | {
        "data": PPO["data"] | rows | {"max_prompt_tokens": 24},
        "environment": {"path": "slow.py:Slow", "max_turns": 3, "processes": 2},
        "reward": None,
        "cluster": {"devices": 1},
    }
    plan = make_plan(Spec.parse(raw))
    (found,) = measure_environments([plan, plan], seconds=1.5)
    assert (found.name, found.is_concurrent, found.failures) == ("slow.py:Slow", False, 0)
    assert max(found.resets) < 0.05 <= min(found.replies) < 0.15 <= max(found.replies)
    assert 0 < found.around < 0.1 and found.computing < 0.3
    (tmp_path / "slow.py").write_text(SLOW.replace("def step", "async def step"))
    alone = make_plan(Spec.parse(raw | {"environment": raw["environment"] | {"processes": 1}}))
    (found,) = measure_environments([alone], seconds=0.1)
    # as many at the same time as in the run
    assert found.is_concurrent and len(found.resets) == alone.processes.most_episodes == 8
    (tmp_path / "slow.py").write_text(SLOW.replace("time.sleep", "time.sleeps"))
    with pytest.raises(UserError, match="no reply could be measured: .*sleeps"):
        measure_environments([plan], seconds=0.1)


def test_profile_calls_tools() -> None:
    (tool,) = EnvironmentTools(EnvironmentSpec(tools=(f"{FILE}:multiply",))).schemas()
    expected = ToolCall("multiply", {"first": 1.0, "second": 1.0})
    assert parse_calls(example_call(tool["function"]), "hermes") == ([expected], [])
