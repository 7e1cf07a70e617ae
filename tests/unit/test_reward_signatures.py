"""Reward functions in the forms of TRL, verl and OpenRLHF, next to ours, in real worker processes; and functions of no
form."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flexrlhf.config.reward_sources import FunctionSource, RuleSource
from flexrlhf.errors import UserError
from flexrlhf.rewards.base import Sample, Scores
from flexrlhf.rewards.checks import SourceChecks
from flexrlhf.rewards.scorer import Scorer
from flexrlhf.rewards.worker_calls import form_of

FILE = str(Path(__file__).with_name("trl_reward_functions.py"))
CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"})


def sample(response: str, turns: Sequence[dict[str, str]] = (), ids: Sequence[int] = (), **columns: Any) -> Sample:
    return Sample("2 + 2? ", response, 2, columns, token_ids=ids, turns=turns)


def trl(name: str, **settings: Any) -> FunctionSource:
    return FunctionSource(function=f"{FILE}:{name}", **{"timeout_seconds": 20.0} | settings)


def scores(
    sources: Sequence[FunctionSource | RuleSource], samples: Sequence[Sample], with_models: bool = False
) -> Scores:
    section = Scorer(sources, "reward", 120, with_models)
    try:
        return section.score(samples)
    finally:
        section.close()


def totals(name: str, *samples: Sample) -> list[float]:
    return scores([trl(name)], samples).totals


def test_completions_are_texts_and_columns_come_by_name() -> None:
    samples = [sample("four", answer="four"), sample("five", answer="four")]
    assert totals("lengths", *samples) == [4, 4]
    assert totals("right", *samples) == [1, 0]
    assert totals("decorated", *samples) == [4, 4]


def test_prompts_and_completions_of_chats_are_messages() -> None:
    assert totals("right_of_chats", sample("4", CHAT, answer="4"), sample("5", CHAT[1:], answer="4")) == [21, 10]


def test_a_function_that_takes_all_receives_what_trl_passes() -> None:
    """The columns prompt and completion of the data are left out: they are not the model's input and output."""
    assert totals("whatever_comes", sample("4", prompt="raw", completion="gold", answer="4")) == [7]


def test_tokens_come_by_trls_name() -> None:
    assert totals("sums", sample("4", ids=[3, 4]), sample("", ids=[])) == [7, 0]


def test_a_source_that_does_not_apply_adds_nothing() -> None:
    samples = [sample("12", answer="12"), sample("x", answer="x"), sample("y", answer="x")]
    assert scores([trl("sometimes"), RuleSource(rule="exact_answer")], samples) == Scores([13, 1, 0], None, 0)


def test_a_response_to_which_no_source_applies_has_no_score() -> None:
    found = scores([trl("sometimes"), trl("never")], [sample("12"), sample("x")])
    assert found.totals == pytest.approx([12, math.nan], nan_ok=True)
    assert found.failed == 1


def test_next_to_models_a_response_to_which_no_function_applies_keeps_their_score() -> None:
    assert scores([trl("never")], [sample("x")], with_models=True) == Scores([0], None, 0)


def test_numbers_of_tokens_and_none_for_a_response() -> None:
    found = scores([trl("per_token", level="token"), trl("lengths", weight=0.5)], [sample("four"), sample("")])
    assert found.tokens == [[1, 1 + 2], [0, 0]]
    assert found.failed == 0


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (lambda completions, **kwargs: None, "by_name"),
        (lambda prompts, completions, answer, **kwargs: None, "by_name"),
        (lambda *, completions: None, "by_name"),
        (lambda prompts, completion_ids, **kwargs: None, "by_name"),
        (lambda **kwargs: None, "by_name"),
        (lambda prompts, **kwargs: None, "by_name"),
        (lambda data_source, solution_str, ground_truth, extra_info=None: None, "single"),
        (lambda queries, prompts, labels, **kwargs: None, "queries"),
        (lambda queries, responses: None, "texts"),
        (lambda prompts, responses: None, "texts"),
        (lambda p, r=None, **columns: None, "texts"),
        (lambda prompts, completions, /: None, "texts"),
        (lambda *texts: None, "texts"),
        (lambda: None, None),
        (lambda text: None, None),
        (lambda completion, **kwargs: None, None),
        (lambda completions, /: None, None),
        (lambda prompts: None, None),
    ],
)
def test_the_form_follows_from_the_parameters(function: Callable[..., Any], form: str | None) -> None:
    assert form_of(inspect.signature(function)) == form


def test_a_function_of_neither_form_is_refused_before_a_run() -> None:
    with pytest.raises(UserError) as caught:
        SourceChecks([trl("neither")]).check()
    assert str(caught.value) == (
        f"reward.function: neither(text) in {FILE} is neither f(prompts, responses, **columns) nor, as in TRL, "
        "f(completions, **kwargs)"
    )


def test_one_that_only_its_worker_can_judge_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A decorator may change the parameters, so that the file alone does not say them."""
    SourceChecks([trl("decorated_neither")]).check()
    assert scores([trl("decorated_neither", batch_size=1)], [sample("a"), sample("b")]).failed == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "its signature (text: 'str', **kwargs: 'Any') -> 'list[float]' is neither f(prompts, responses" in line


@pytest.mark.parametrize("name", ["lengths", "sums", "whatever_comes", "right"])
def test_columns_of_trls_form_are_looked_up(name: str) -> None:
    SourceChecks([trl(name)]).check()
    SourceChecks([trl(name)], "reward").check_columns(["prompt", "answer"], "data.jsonl")


@pytest.mark.parametrize(("name", "column"), [("right", "answer"), ("of_state", "trainer_state")])
def test_a_column_of_trls_form_that_is_not_there_is_refused(name: str, column: str) -> None:
    with pytest.raises(UserError, match=f"{name} takes '{column}', no column of data.jsonl"):
        SourceChecks([trl(name)], "reward").check_columns(["prompt"], "data.jsonl")


PEERS = """
def single(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth) + 10 * extra_info["level"], "accuracy": 0}

def plain(solution_str, ground_truth, data_source=None):
    return float(solution_str == ground_truth) + 2 * (data_source == "sums")

def queries(queries, prompts, labels):
    return {"rewards": [float(whole == prompt + label) for whole, prompt, label in zip(queries, prompts, labels)]}

def unlabelled(queries, prompts, labels, **kwargs):
    return [float(len(query) - len(prompt) - len(label)) for query, prompt, label in zip(queries, prompts, labels)]
"""


@pytest.mark.parametrize(
    ("name", "expected"), [("single", [11, 20]), ("plain", [3, 0]), ("queries", [1, 0]), ("unlabelled", [0, 1])]
)
def test_functions_of_verl_and_openrlhf_are_called_as_there(tmp_path: Path, name: str, expected: list[float]) -> None:
    file = tmp_path / "peers.py"
    file.write_text(PEERS)
    right = {"ground_truth": "4", "labels": "4", "data_source": "sums", "extra_info": {"level": 1}}
    wrong = {"ground_truth": "4", "labels": "4" * (name != "unlabelled"), "extra_info": {"level": 2}}
    source = FunctionSource(function=f"{file}:{name}", timeout_seconds=20.0)
    SourceChecks([source]).check()
    assert scores([source], [sample("4", **right), sample("5", **wrong)]) == Scores(expected, None, 0)
    needed = [column for column in ("data_source", "ground_truth") if name == "single" or column == "ground_truth"]
    if name in ("single", "plain"):
        SourceChecks([source], "reward").check_columns(needed, "data.jsonl")
        with pytest.raises(UserError, match="takes 'ground_truth', no column of data.jsonl"):
            SourceChecks([source], "reward").check_columns(["data_source"], "data.jsonl")


def test_a_function_of_a_script_is_loaded_without_its_training(tmp_path: Path) -> None:
    """What it refers to is there: imports, also of a file next to it, constants and functions."""
    (tmp_path / "helpers.py").write_text("def half(number): return number / 2\n")
    (tmp_path / "train.py").write_text(
        "from __future__ import annotations\nimport re\nfrom helpers import half\nfrom nowhere import GRPOTrainer\n"
        "PATTERN: Pattern = re.compile('a')\ndef count(text): return half(len(PATTERN.findall(text)))\n"
        "def score(completions: list[str], **kwargs): return [count(each) for each in completions]\n"
        "trainer = GRPOTrainer(reward_funcs=score)\ntrainer.train()\n"
    )
    source = FunctionSource(function=f"{tmp_path}/train.py:score", timeout_seconds=20.0)
    assert scores([source], [sample("banana")]) == Scores([1.5], None, 0)
