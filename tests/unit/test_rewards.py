"""Scores that come from no model: by functions and rules; a faulty function costs no more than its batch."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replicas import batch_of, mask_of
from small_runs import TINY, plan_of, spec_of

from flexrlhf.config.reward_sources import FunctionSource, RuleSource, ServiceSource
from flexrlhf.data.examples import Example
from flexrlhf.errors import UserError
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.plan.input_checks import check_inputs, check_runs
from flexrlhf.rewards.base import Sample, ScoreBatch, Scores, make_batch
from flexrlhf.rewards.checks import SourceChecks
from flexrlhf.rewards.replies import read_reply
from flexrlhf.rewards.scorer import Scorer
from flexrlhf.trainer.text_operators import make_external_scorers
from flexrlhf.user_code import worker_process
from flexrlhf.user_code.call_failures import BadReply

FILE = str(Path(__file__).with_name("reward_functions.py"))


def sample(response: str, num_tokens: int = 3, **columns: Any) -> Sample:
    return Sample("question ", response, num_tokens, columns)


def function(name: str, **settings: Any) -> FunctionSource:
    return FunctionSource(function=f"{FILE}:{name}", **{"timeout_seconds": 20.0} | settings)


def scorer(*sources: FunctionSource | RuleSource) -> Scorer:
    return Scorer(sources, "reward", 120)


def scores(sources: Sequence[FunctionSource | RuleSource], samples: Sequence[Sample]) -> Scores:
    section = scorer(*sources)
    try:
        return section.score(samples)
    finally:
        section.close()


# --- functions


def test_a_function_is_given_texts_and_the_columns_that_it_names() -> None:
    samples = [sample("a", right="a", bonus=0.5, unused=1), sample("b", right="a")]
    found = scores([function("lengths"), function("by_columns", weight=2.0)], samples)
    assert found == Scores([1 + 2 * 1.5, 1.0], None, 0)


def test_a_function_that_takes_all_is_given_all_columns() -> None:
    samples = [sample("a", 4, right="a", **{"no identifier": 1}), sample("b", 7)]
    assert scores([function("names_of_columns")], samples).totals == [4, 7]
    clash = sample("said", question="q", answer="not this")
    assert scores([function("takes_a_column_for_a_text")], [clash]).totals == [1]


def test_texts_may_be_taken_by_place_alone() -> None:
    samples = [sample("a", 4, right="a"), sample("a", 7, right="b")]
    assert scores([function("texts_by_place")], samples).totals == [1, 0]
    assert scores([function("texts_by_place_and_all")], samples).totals == [4, 7]


def test_a_column_named_num_tokens_stands_not_for_ours() -> None:
    found = scores([function("per_token", level="token")], [Sample("", "a", 2, {"num_tokens": 9})])
    assert found.tokens == [[0, 1]]


PARALLEL = """import multiprocessing
def half(text):
    return len(text) / 2
def f(p, r):
    with multiprocessing.get_context({!r}).Pool(1) as pool:
        return pool.map(half, r)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_function_may_use_processes(method: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(PARALLEL.format(method))
    assert scores([FunctionSource(function=f"{tmp_path}/own.py:f")], [sample("abc")]).totals == [1.5]


@pytest.mark.parametrize("name", ["json", "wave", "neighbour", "own-1"])
def test_a_file_shadows_no_module(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded already, of the standard library, in the working directory; or with a name that no module has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "own").mkdir()
    file = tmp_path / f"own/{name}.py"
    file.write_text(f"def f(p, r):\n    return [float(__name__ == 'flexrlhf_user_{name}')] * len(p)\n")
    assert scores([FunctionSource(function=f"{file}:f")], [sample("a")]).totals == [1]


def test_a_module_is_found_by_its_name_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scoring").mkdir()
    (tmp_path / "scoring/own.py").write_text("def f(p, r):\n    return [2.0] * len(p)\n")
    monkeypatch.chdir(tmp_path)
    source = FunctionSource(function="scoring.own:f")
    SourceChecks([source]).check()
    assert scores([source], [sample("a")]).totals == [2]


def test_a_file_finds_modules_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/neighbour.py").write_text("VALUE = 5\n")
    (tmp_path / "folder/own.py").write_text("from neighbour import VALUE\ndef f(p, r):\n    return [VALUE] * len(p)\n")
    monkeypatch.chdir(tmp_path)
    assert scores([FunctionSource(function="folder/own.py:f")], [sample("a")]).totals == [5]


def test_batches_are_shared_by_the_workers() -> None:
    section = scorer(function("process", workers=2, batch_size=2))
    found = section.score([sample("a")] * 8).totals
    assert found[::2] == found[1::2], "a response of a batch was scored elsewhere"
    assert len(set(found)) == 2 and os.getpid() not in found
    section.close()
    assert not any(_lives(int(pid)) for pid in set(found))


def test_a_worker_loads_the_users_file_alone() -> None:
    assert scores([function("loaded_heavy")], [sample("a")]).totals == [0]


def test_nothing_starts_before_the_first_score() -> None:
    section = scorer(function("lengths"))
    assert section.score([]) == Scores([], None, 0)
    section.close()
    section.close()


# --- a fault costs one batch


@pytest.fixture(scope="module")
def by_response() -> Iterator[Scorer]:
    section = scorer(function("by_response", batch_size=2))
    yield section
    section.close()


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("hang", "took longer than 0.5 s"),
        ("hang in C", "took longer than 0.5 s"),
        ("exit", "raised SystemExit: 3 (reward_functions.py, line "),
        ("die", "ended its process, exit code 7"),
        ("die quietly", "took longer than 0.5 s"),
        ("segfault", "ended its process, killed by SIGSEGV"),
        ("raise", "raised ValueError: no such thing (reward_functions.py, line "),
        ("count", "returned 3 scores for 2 responses"),
        ("text", "returned '1.0' instead of a number"),
        ("none", "returned None instead of a list of scores"),
        ("emptied", "returned 0 scores for 2 responses"),
        ("escapes", r"raised ValueError: \x1b[2J gone (reward_functions.py, line "),
    ],
)
def test_a_call_that_fails_costs_its_batch_and_is_reported_once(
    word: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = 0.5 if "longer" in words else 20.0
    section = scorer(function("by_response", batch_size=2, timeout_seconds=limit))
    start = time.monotonic()
    for _ in range(2):
        found = section.score([sample("ab"), sample("abc"), sample(word), sample("a"), sample("x")])
        assert found.totals == pytest.approx([2, 3, math.nan, math.nan, 1], nan_ok=True)
        assert (found.tokens, found.failed) == (None, 2)
    section.close()
    assert time.monotonic() - start < 15
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flexrlhf: reward.function {FILE}:by_response: {words}")


@pytest.mark.parametrize(("word", "failed"), [("one none", 1), ("nan", 0)])
def test_no_score_for_one_response_costs_that_response(word: str, failed: int, by_response: Scorer) -> None:
    """A function that says NaN means it: that is no failure of the function."""
    found = by_response.score([sample(word), sample("a")])
    assert found.totals == pytest.approx([math.nan, 1], nan_ok=True)
    assert found.failed == failed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_module\n", "could not be loaded ModuleNotFoundError: No module named 'no_such_module'"),
        ("import sys\nsys.exit(2)\n", "could not be loaded SystemExit: 2 (own.py, line 2)"),
        ("import os\nos._exit(2)\n", "could not be loaded: ended its process, exit code 2"),
        (
            "def g(p, r): pass\n",
            "could not be loaded AttributeError: module 'own' has no attribute 'f'",
        ),
    ],
)
def test_a_file_that_does_not_load_costs_the_scores(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(text)
    found = scores([FunctionSource(function=f"{tmp_path}/own.py:f", batch_size=1)], [sample("a"), sample("b")])
    assert found.failed == 2 and all(map(math.isnan, found.totals))
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_loading_may_take_longer_than_a_call_and_is_not_waited_for_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "import time\ntime.sleep({})\ndef f(p, r):\n    return [1.0] * len(p)\n"
    (tmp_path / "slow.py").write_text(body.format(1.2))
    (tmp_path / "never.py").write_text(body.format(1000))
    slow = FunctionSource(function=f"{tmp_path}/slow.py:f", timeout_seconds=1)
    assert scores([slow], [sample("a")]).totals == [1]
    monkeypatch.setattr(worker_process, "LOAD_SECONDS", 0.5)
    start = time.monotonic()
    never = FunctionSource(function=f"{tmp_path}/never.py:f", batch_size=1)
    assert scores([never], [sample("a")] * 40).failed == 40
    assert time.monotonic() - start < 15


def test_a_worker_loads_no_library_from_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "threading.py").write_text("raise SystemExit('executed')")
    (tmp_path / "own.py").write_text("import os\ndef f(p, r):\n    return [float('PYTHONSAFEPATH' in os.environ)]\n")
    code = (
        "from flexrlhf.config.reward_sources import FunctionSource\n"
        "from flexrlhf.rewards.base import Sample\n"
        "from flexrlhf.user_code.processes import keep_children_safe\n"
        "from flexrlhf.rewards.scorer import Scorer\n"
        "if __name__ == '__main__':\n"
        "    keep_children_safe()\n"
        "    scorer = Scorer([FunctionSource(function='own.py:f')], 'reward', 60)\n"
        "    print(scorer.score([Sample('', 'a', 1, {})]).totals)\n"
        "    scorer.close()\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[0.0]\n", "")


def test_output_of_a_function_that_cannot_be_written_costs_no_score(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def f(p, r):\n    print('a' * 10**5)\n    return [1.0] * len(p)\n")
    stdout = os.dup(1)
    with Path("/dev/full").open("w") as full:
        os.dup2(full.fileno(), 1)
    try:
        assert scores([FunctionSource(function=f"{tmp_path}/own.py:f")], [sample("a")]).totals == [1]
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


@pytest.mark.parametrize("name", ["writes_its_process", "holds_the_interpreter"])
def test_a_worker_that_hangs_ends_when_its_rank_is_killed(name: str, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "from flexrlhf.config.reward_sources import FunctionSource\n"
        "from flexrlhf.rewards.base import Sample\n"
        "from flexrlhf.rewards.scorer import Scorer\n"
        f"source = FunctionSource(function={f'{FILE}:{name}'!r}, timeout_seconds=1000)\n"
        f"Scorer([source], 'reward', 1000).score([Sample({str(file)!r}, '', 1, {{}})])\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert _within(20, lambda: file.is_file() and file.read_text() != ""), "the function was not called"
    finally:
        rank.kill()
        rank.wait(5)
    assert _within(5, lambda: not _lives(int(file.read_text()))), "the worker outlives its rank"


@pytest.mark.parametrize("word", ["hang", "die", "return"])
def test_what_a_worker_has_started_ends_with_it(word: str, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    found = scores([function("starts_a_process", timeout_seconds=2)], [Sample(str(file), word, 1, {})])
    assert found.failed == (word != "return")
    assert _within(5, lambda: not _lives(int(file.read_text()))), "the process outlives the worker"


def test_workers_live_from_step_to_step() -> None:
    """Each step calls from threads of its own."""
    section = scorer(function("process"))
    first = section.score([sample("a")])
    time.sleep(0.2)
    assert section.score([sample("a")]) == first
    section.close()


@pytest.mark.parametrize("word", ["hang", "hang in C"])
def test_batches_that_the_step_has_no_time_for_have_no_score(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Other ranks wait: whatever the limit of a call and the number of batches. The next step calls it again."""
    sources = [function("by_response", batch_size=1, timeout_seconds=1000), RuleSource(rule="gsm8k")]
    # in which the worker of the first call also starts
    section = Scorer(sources, "reward", 4)
    assert section.score([sample("a", answer="1")]).totals == [1]
    for _ in range(2):
        start = time.monotonic()
        found = section.score([sample("a", answer="1"), sample(word, answer="1"), *[sample("b", answer="1")] * 30])
        assert 4 <= time.monotonic() - start < 60
        assert found.failed == 31 and found.totals[0] == 1
    section.close()
    (line,) = capsys.readouterr().err.splitlines()
    name = f"flexrlhf: reward.function {FILE}:by_response"
    assert line.startswith(f"{name}: not all scores within 4 s, half of the run's timeout_seconds")


def test_a_function_that_hangs_again_and_again_is_left_alone_for_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    section = scorer(function("by_response", batch_size=1, timeout_seconds=1))
    texts = ["hang", "hang", "a", "hang", "hang", "hang", *["a"] * 20]
    found = section.score([sample(text) for text in texts])
    assert [index for index, total in enumerate(found.totals) if total == 1] == [2]
    assert section.score([sample("a")]).totals == [1]
    section.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "3 timeouts in a row; the step's other batches are not sent" in lines[1]


def test_a_run_gives_a_step_half_of_its_own_limit(capsys: pytest.CaptureFixture[str]) -> None:
    source = f"{{function: '{FILE}:by_response', timeout_seconds: 1000}}"
    spec = spec_of(None, 1, f"reward={source}", "timeout_seconds=2")
    graph = make_graph(spec)
    operator = next(operator for operator in graph.operators if operator.kind == "score")
    scoring = make_external_scorers(graph, spec, lambda _: "hang")
    alone: Any = SimpleNamespace(is_first=True, sum=lambda tensor: tensor)
    masks = {"attention_mask": mask_of("111"), "response_mask": mask_of("11")}
    batch = batch_of(tokens=torch.ones(1, 3, dtype=torch.long), **masks)
    columns, _ = scoring.score(operator, batch, [Example((1,), (), ())], alone)
    scoring.close()
    assert columns["scores"].isnan().all()
    assert "not all scores within 1 s, half of the run's timeout_seconds" in capsys.readouterr().err


def _within(seconds: float, happens: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.05)
    return happens()


def _lives(pid: int) -> bool:
    """A process that has ended but whom no one has waited for does not live."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- tokens


def test_scores_of_tokens_add_up_and_that_of_an_answer_lands_on_the_last() -> None:
    sources = [function("per_token", level="token", weight=2.0), function("lengths", weight=0.5)]
    found = scores(sources, [sample("ab", 3), sample("abcd", 1), sample("", 0)])
    assert found.tokens == [[0, 2, 4 + 1], [0 + 2], []]
    assert found.totals == [7, 2, 0]
    assert found.failed == 0


def test_a_list_of_another_length_costs_that_response(capsys: pytest.CaptureFixture[str]) -> None:
    sources = [function("one_token_short", level="token"), function("lengths")]
    found = scores(sources, [sample("short", 3), sample("good", 2)])
    assert found.totals == pytest.approx([math.nan, 2 + 4], nan_ok=True)
    assert found.tokens is not None
    assert len(found.tokens[0]) == 3 and all(map(math.isnan, found.tokens[0]))
    assert found.tokens[1] == [1, 5]
    assert found.failed == 1
    assert "returned 2 numbers for a response of 3 tokens" in capsys.readouterr().err


# --- replies


def replied(*num_tokens: int) -> ScoreBatch:
    """Responses with so many tokens."""
    return make_batch([sample("", count) for count in num_tokens])


@pytest.mark.parametrize(
    ("reply", "entries"),
    [
        ([1, 2.5], [1, 2.5]),
        ((True, False), [1, 0]),
        ([None, 2], [None, 2]),
        ([math.inf, -math.inf], [math.inf, -math.inf]),
        (iter([1, 2]), [1, 2]),
    ],
)
def test_a_reply_of_one_number_a_response(reply: Any, entries: list[float | None]) -> None:
    assert read_reply(reply, replied(3, 3), "answer").scores == entries


@pytest.mark.parametrize(
    "reply",
    [None, 1.0, "12", b"12", {"a": 1, "b": 2}, [1], [1, 2, 3], [1, "2"], [1, [2]], [1, 10**400], [1, {}], [1, 1j]],
)
def test_a_reply_that_is_none(reply: Any) -> None:
    with pytest.raises(BadReply):
        read_reply(reply, replied(3, 3), "answer")


def test_a_reply_of_one_number_a_token() -> None:
    found = read_reply([[1, 2], [1], None, [1, None], []], replied(2, 2, 2, 2, 0), "token")
    assert found.scores == [[1, 2], None, None, None, []]
    assert found.failure is not None and found.failure.text == "returned 1 numbers for a response of 2 tokens"
    with pytest.raises(BadReply):
        read_reply([1.0], replied(2), "token")


# --- rules


def rule(name: str, samples: Sequence[Sample], **settings: Any) -> list[float]:
    return scores([RuleSource(rule=name, **settings)], samples).totals  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("response", "right", "score"),
    [
        ("72", "72", 1),
        (" 72\n", "72", 1),
        ("72.0", "72", 0),
        ("The answer is 72", "72", 0),
        ("5", 5, 1),
        ("true", True, 1),
    ],
)
def test_exact_answer(response: str, right: Any, score: float) -> None:
    assert rule("exact_answer", [sample(response, answer=right)]) == [score]
    assert rule("exact_answer", [sample(response, truth=right)], answer="truth") == [score]


@pytest.mark.parametrize(
    ("response", "right", "score"),
    [
        ("so 3 + 4 = 7\n#### 7", "3 + 4 = <<3+4=7>>7\n#### 7", 1),
        ("#### 7.", "#### 7", 1),
        ("####7", "#### 7", 1),
        ("#### $1,000.00", "#### 1000", 1),
        ("#### 1000", "#### 1,000", 1),
        ("#### -5", "#### -5", 1),
        ("#### -$5", "#### -5", 1),
        ("#### 5", "#### -5", 0),
        ("#### 3\n#### 7", "#### 7", 1),
        ("#### 7\n#### 3", "#### 7", 0),
        ("The answer is 7", "#### 7", 0),
        ("#### seven", "#### 7", 0),
        ("#### .,", "#### 7", 0),
        ("#### 1.2.3", "#### 7", 0),
        ("#### 7", "7", 1),
        ("#### 7", 7, 1),
        ("#### +7", "7", 1),
        ("#### \u22127", "-7", 1),
        ("#### -7", "\u22127", 1),
        ("#### \\$9,500", "9500", 1),
        ("#### 9 500", "$9{,}500", 1),
        ("#### 9\u202f500.00", "9 500", 1),
        ("#### **7**", "7.", 1),
        ("**#### $7$**", "\\boxed{7}", 1),
        ("#### \uff17", "#### +7", 1),
        ("#### 9", "9{,}500", 0),
        ("#### 500", "9 500", 0),
        ("#### 7\u00b2", "72", 0),
        ("#### 7", "7 apples", math.nan),
        ("#### 7", "sNaN", math.nan),
        ("#### 7", "no number", math.nan),
    ],
)
def test_gsm8k(response: str, right: Any, score: float) -> None:
    assert rule("gsm8k", [sample(response, answer=right)]) == pytest.approx([score], nan_ok=True)


def test_math() -> None:
    cases: list[tuple[str, Any, float]] = [
        ("so x is \\boxed{\\frac{1}{2}}", "0.5", 1),
        ("so x is $\\frac{2}{4}$.", "\\frac{1}{2}", 1),
        ("The answer is 1,000", "1000", 1),
        ("$\\{1, 2\\}$", "$\\{2, 1\\}$", 1),
        ("\\boxed{x + 1}", "$1 + x$", 1),
        ("\\boxed{5}", 5, 1),
        ("\\boxed{7}", "8", 0),
        ("I do not know", "8", 0),
        ("\\boxed{7}", "", math.nan),
        ("\\boxed{5}", "The answer is 5\\pi.", 0),
        ("\\boxed{5\\pi}", "The answer is 5\\pi.", 1),
        ("\\boxed{20}", "4 \\cdot 5 = 20\n#### 1,020", 0),
        ("It costs \\$9,500.", "9500", 1),
        ("\\boxed{9\\,500}", "9{,}500", 1),
        ("\\boxed{7}", "x \\text{ is }", math.nan),
    ]
    found = rule("math", [sample(response, answer=right) for response, right, _ in cases])
    assert found == pytest.approx([score for _, _, score in cases], nan_ok=True)


FORMULAS = {
    r"\left( 3, \frac{\pi}{2} \right)": (r"(3, \pi/2)", "3"),
    r"[0, 1)": ("[0,1)", "1"),
    r"x \in (-\infty, 2]": (r"(-\infty, 2]", "2"),
    r"\{1, 2, 3\}": (r"\{3,2,1\}", "3"),
    "2, -3": ("-3, 2", "2"),
    r"3\sqrt{5}": (r"\sqrt{45}", "3"),
    r"1 + \sqrt{2}": (r"\sqrt2+1", "2"),
    r"36\pi": (r"36\pi", "36"),
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "4"),
    r"\langle 1, 2 \rangle": ("(1, 2)", "2"),
    r"2^{10}": ("1024", "10"),
    r"2 + 3i": ("3i+2", "2"),
    r"3\frac{1}{2}": ("3.5", "3"),
    r"-\dfrac{1}{2}": ("-0.5", "2"),
    r"25\%": ("25", "5"),
    r"12\text{ cm}^2": ("12", "2"),
    "15 cm^2": ("15", "2"),
    r"\$18.90": ("18.9", "18"),
    r"9{,}500": ("9500", "500"),
    "12 345": ("12345", "345"),
    "60\u00b0": ("60", "6"),
    "x = 3": ("3", "4"),
    r"1 < x < 4": ("1<x<4", "4"),
    r"1.5 \times 10^{6}": ("1500000", "1.5"),
    "6.02e23": (r"6.02 \times 10^{23}", "6.02"),
    r"2 \pm \sqrt{3}": (r"2+\sqrt3, 2-\sqrt3", "2"),
    "3\u221a5": (r"3\sqrt5", "3"),
    "\u22123.": ("-3", "3"),
    r"5 \text{ or } 7": ("5, 7", "7"),
    "(2, 3), (4, 5)": ("(2,3),(4,5)", "5"),
}
"""Solution without delimiters → the same in other words, and a part of it, which is wrong."""


def test_a_solution_without_delimiters_is_a_formula_as_a_whole() -> None:
    cases = [
        (sample(f"It is \\boxed{{{answer}}}.", answer=solution), score)
        for solution, (right, wrong) in FORMULAS.items()
        for answer, score in ((solution, 1.0), (right, 1.0), (wrong, 0.0))
    ]
    found = rule("math", [each for each, _ in cases])
    assert [each.columns for (each, score), value in zip(cases, found, strict=True) if value != score] == []
    # and the other way round
    parts = [sample(f"\\boxed{{{solution}}}", answer=wrong) for solution, (_, wrong) in FORMULAS.items()]
    assert rule("math", parts) == [0.0] * len(parts)


@pytest.mark.parametrize(("name", "solution"), [("gsm8k", "7 apples"), ("math", "The proof is by induction.")])
def test_a_solution_that_no_rule_reads_is_named(
    name: Any, solution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = scores([RuleSource(rule=name)], [sample("#### 7", answer=solution)] * 2)
    assert found.failed == 2
    words = f"the solution {solution!r} in column 'answer' cannot be read by the rule"
    assert capsys.readouterr().err.count(f"reward.rule {name}: {words}") == 1
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "a", "answer": solution}] * 3
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = plan_of(None, 1, "data.path=data.jsonl", NO_REWARD_MODEL, f"reward={{rule: {name}}}")
    assert list(plan.data.solution_lines(plan.data.sources[0])) == [
        f"reward.answer: solutions that the rule cannot read: 3 of 3; the first is {solution!r}"
    ]
    with pytest.raises(UserError, match="reward.answer: the rule cannot read the solutions in data.jsonl, such as"):
        check_inputs([plan])


def test_math_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexrlhf.rewards.checks.find_spec", lambda _: None)
    with pytest.raises(UserError) as error:
        SourceChecks([RuleSource(rule="math")]).check()
    assert str(error.value) == "reward.rule: math needs the package math-verify; install flexrlhf[math]"


@pytest.mark.parametrize("name", ["gsm8k", "exact_answer", "math"])
def test_a_row_without_a_right_answer_scores_nothing(name: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = scores([RuleSource(rule=name, answer="solution")], [sample("#### 1", answer="1")] * 3)
    assert found.failed == 3 and all(map(math.isnan, found.totals))
    warning = f"reward.rule {name}: a row has no solution in its column 'solution'"
    assert capsys.readouterr().err.count(warning) == 1


def test_format() -> None:
    pattern = r"<think>.*</think>\s*<answer>\d+</answer>"
    texts = ["<think>a\nb</think> <answer>7</answer>\n", "x<think></think><answer>7</answer>", "<answer>7</answer>"]
    assert rule("format", [sample(text) for text in texts], pattern=pattern, batch_size=2) == [1, 0, 0]


def test_a_pattern_without_an_end_costs_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexrlhf.rewards.rules.PATTERN_SECONDS", 0.5)
    texts = ["aaa", "a" * 60 + "b", "aa"]
    found = rule("format", [sample(text) for text in texts], pattern="(a|a)*", batch_size=1)
    assert found == pytest.approx([1, math.nan, 1], nan_ok=True)


def test_length() -> None:
    counts = (0, 5, 10, 15, 20, 30)
    assert rule("length", [sample("", count) for count in counts], target_tokens=10) == [0, 0.5, 1, 0.5, 0, 0]


# --- before a run


@pytest.mark.parametrize("name", ["lengths", "by_columns"])
def test_sources_that_can_be_called_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "x")
    headers = {"Authorization": "Bearer ${REWARD_TOKEN}"}
    service = ServiceSource(url=("http://localhost:1/a", "https://[::1]"), headers=headers)
    SourceChecks([function(name), service, RuleSource(rule="format", pattern="a(b)*")]).check()


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("lengths", "reward.function: expected path/to/file.py:name or module:name, found 'lengths'"),
        (f"{FILE}:", "reward.function: expected path/to/file.py:name or module:name"),
        (FILE.replace("functions", "functoins") + ":lengths", f"(did you mean '{FILE}'?)"),
        ("nowhere/own.py:f", "reward.function: no file nowhere/own.py"),
        ("no_such_module:f", "reward.function: no module 'no_such_module'; a file is named as path/to/file.py:name"),
        ("json.decodr:f", "reward.function: no module 'json.decodr'"),
        ("json.decoder.a:f", "reward.function: no module 'json.decoder.a'"),
        (f"{FILE}:lenghts", "defines no 'lenghts' (did you mean 'lengths'?)"),
        ("json.decoder:zzzzz", "defines no 'zzzzz'; it has "),
        (f"{FILE}:LIMIT", "'LIMIT' in"),
        (f"{FILE}:waits", "is async; give a plain function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(reference: str, words: str) -> None:
    assert words in _refusal(FunctionSource(function=reference))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(p, r)\n", "own.py, line 1: expected ':'"),
        ("\0", "own.py"),
        ("raise SystemExit\ndef g(p, r): ...\n", "defines no 'f'; it has g"),
    ],
)
def test_a_file_is_read_and_not_run(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(text)
    assert words in _refusal(FunctionSource(function=f"{tmp_path}/own.py:f"))


@pytest.mark.parametrize(
    "text",
    [
        "from json import loads as f\n",
        "try:\n    from a import f\nexcept ImportError:\n    pass\n",
        "try:\n    import a\nexcept ImportError:\n    def f(p, r): ...\n",
        "if True:\n    pass\nelse:\n    f = print\n",
        "from a import *\n",
        "class f: ...\n",
        "import f.g\n",
        "f, g = make()\n",
        "f: object = make()\n",
    ],
)
def test_a_name_may_come_about_in_many_ways(text: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(text)
    SourceChecks([FunctionSource(function=f"{tmp_path}/own.py:f")]).check()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (RuleSource(rule="format", pattern="a("), "reward.pattern: no regular expression: missing ), "),
        (ServiceSource(url=("http://",)), "reward.url: expected an address such as"),
        (ServiceSource(url=("http://a:b/",)), "reward.url: expected an address such as"),
        (ServiceSource(url=("http://a",), headers={"Key": "a\nb"}), "reward.headers.Key: a header is one line"),
        (ServiceSource(url=("http://a",), headers={"Key": "ä"}), "reward.headers.Key: a header is one line"),
    ],
)
def test_other_sources_that_cannot_be_called_are_refused(source: Any, words: str) -> None:
    assert words in _refusal(source)


def test_one_of_several_sources_is_named_by_its_place() -> None:
    sources = [RuleSource(rule="gsm8k"), FunctionSource(function="own")]
    with pytest.raises(UserError, match=r"^cost\.1\.function: expected"):
        SourceChecks(sources, "cost").check()


NO_REWARD_MODEL = f"models={json.dumps({'actor': {'init': TINY}})}"
COLUMNS = ["prompt", "right", "mark"]
"""Of the data."""


@pytest.mark.parametrize(
    "source",
    [
        function("lengths"),
        function("needs_columns"),
        function("names_of_columns"),
        FunctionSource(function="json.decoder:JSONDecoder"),
        RuleSource(rule="gsm8k", answer="right"),
        RuleSource(rule="length", target_tokens=1),
        ServiceSource(url=("http://a",)),
        ServiceSource(url=("http://a",), label="mark"),
    ],
)
def test_sources_whose_columns_are_there_pass(source: Any) -> None:
    SourceChecks([source], "reward").check_columns(COLUMNS, "data.jsonl")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (RuleSource(rule="gsm8k"), "reward.0.answer: 'answer', no column of data.jsonl; there are prompt, right, mark"),
        (RuleSource(rule="exact_answer", answer="rihgt"), "reward.0.answer: 'rihgt', no column of data.jsonl (did you"),
        (ServiceSource(url=("http://a",), label="label"), "reward.0.label: 'label', no column of data.jsonl; there"),
        (function("by_columns"), f"reward.0.function: {FILE}:by_columns takes 'bonus', no column of data.jsonl; there"),
    ],
)
def test_a_column_that_is_not_there_is_refused(source: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        SourceChecks([source, RuleSource(rule="length", target_tokens=1)], "reward").check_columns(
            COLUMNS, "data.jsonl"
        )
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("def f(p, r, a): ...", "a"),
        ("def f(p, r, /, a, b=1): ...", "a"),
        ("def f(p, r, /, *, a, b=1): ...", "a"),
        ("def f(p, r, b=1, *, a, **more): ...", "a"),
        ("if True:\n    def f(p, r, a): ...", "a"),
        ("def f(p, r, num_tokens, b=1, *, c=2, **more): ...", None),
        ("def f(p, r=None): ...", None),
        ("def f(*texts): ...", None),
        ("@other\ndef f(p, r, a): ...", None),
        ("def f(p, r, a): ...\nf = other(f)", None),
        ("from other import f", None),
    ],
)
def test_what_a_function_cannot_be_called_without_is_read_from_its_file(
    text: str, column: str | None, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(text)
    source = FunctionSource(function=f"{tmp_path}/own.py:f")
    if column is None:
        return SourceChecks([source], "reward").check_columns(COLUMNS, "data.jsonl")
    with pytest.raises(UserError, match=f"own.py:f takes '{column}', no column of data.jsonl"):
        SourceChecks([source], "reward").check_columns(COLUMNS, "data.jsonl")


@pytest.mark.parametrize(
    ("held_out", "reward", "words"),
    [
        ("", "{rule: gsm8k, answer: rihgt}", "reward.answer: 'rihgt', no column of data.jsonl (did you mean 'right'?)"),
        (
            "right",
            "[{rule: gsm8k, answer: right}, {rule: gsm8k}]",
            "reward.1.answer: 'answer', no column of data.jsonl",
        ),
        (
            "wrong",
            "{rule: gsm8k, answer: right}",
            "reward.answer: 'right', no column of held_out.jsonl; there are prompt",
        ),
        ("right", f"{{function: '{FILE}:by_columns'}}", f"reward.function: {FILE}:by_columns takes 'bonus', no column"),
    ],
)
def test_the_columns_of_a_runs_files_are_looked_at_before_it_starts(
    held_out: str, reward: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a", "right": "7"}\n')
    Path("held_out.jsonl").write_text(f'{{"prompt": "a", "{held_out}": "7"}}\n')
    others = ["eval={path: held_out.jsonl, every: 2}"] if held_out else []
    with pytest.raises(UserError) as caught:
        check_runs([plan_of(None, 1, "data.path=data.jsonl", NO_REWARD_MODEL, f"reward={reward}", *others)])
    assert str(caught.value).startswith(words)


def _refusal(source: FunctionSource | ServiceSource | RuleSource) -> str:
    with pytest.raises(UserError) as caught:
        SourceChecks([source]).check()
    assert "\n" not in str(caught.value)
    return str(caught.value)
