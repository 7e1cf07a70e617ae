"""Answers are put to rules and functions as texts, and what they say becomes columns of the answers' rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from replicas import Alone, Port, batch_of, mask_of, on_replicas
from small_runs import spec_of
from torch import Tensor

from flexrlhf.data.examples import Example
from flexrlhf.data.messages import Message
from flexrlhf.engines.base import Batch, Moments
from flexrlhf.objectives.context import Columns
from flexrlhf.objectives.reward_shaping import last_positions
from flexrlhf.operators.graph import Operator
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.trainer.text_operators import ExternalScorers, make_external_scorers

FUNCTIONS = Path(__file__).with_name("reward_functions.py")
TRL_FUNCTIONS = Path(__file__).with_name("trl_reward_functions.py")
WORDS = {1: "yes", 2: "no", 3: "#### 7", 4: "#### 8", 9: ""}
"""Tokens of a toy language; 9 is its end token, which the text does not have."""
PROMPT = [5, 5]


def decode(tokens: Sequence[int]) -> str:
    return " ".join(WORDS[token] for token in tokens).strip()


@dataclass
class Parts:
    """The ranks of one replica, which hold the same rows."""

    port: Any
    is_first: bool

    def sum(self, tensor: Tensor) -> Tensor:
        found: Tensor = self.port.sum(tensor)
        return found


ONE = Parts(Alone(), True)


def drawn(*answers: list[int], width: int = 4) -> Batch:
    """Answers right-padded with the end token, which may be a word of an answer, too."""
    columns = {
        "tokens": torch.tensor([PROMPT + answer + [9] * (width - len(answer)) for answer in answers]),
        "response_mask": mask_of(*("1" * len(answer) + "0" * (width - len(answer)) for answer in answers)),
        "finished": torch.ones(len(answers), dtype=torch.uint8),
    }
    return batch_of(**columns)


def asked_about(**columns: Any) -> Example:
    return Example(tuple(PROMPT), (), (), "a question", columns)


@dataclass(frozen=True)
class Asked:
    """What a graph with sources asks, and the operators that ask it."""

    scoring: ExternalScorers
    operator: Operator

    def score(self, batch: Batch, examples: Sequence[Example], tp: Any = ONE) -> tuple[Columns, Moments]:
        return self.scoring.score(self.operator, batch, examples, tp)


@pytest.fixture
def ask() -> Iterator[Any]:
    """Makes what a run with these ``reward`` sources asks; whatever it starts ends with the test."""
    made: list[ExternalScorers] = []

    def make(reward: str) -> Asked:
        spec = spec_of(None, 1, f"reward={reward}")
        graph = make_graph(spec)
        made.append(make_external_scorers(graph, spec, decode))
        return Asked(made[-1], next(operator for operator in graph.operators if operator.kind == "score"))

    yield make
    for scoring in made:
        scoring.close()


# --- what is asked, and what comes back


def test_the_text_of_an_answer_is_that_of_its_mask(ask: Any) -> None:
    """Not of the prompt, not of the padding, which here is the same token as the end of an answer."""
    batch = drawn([1, 9], [2, 1, 9], [1, 2, 2, 1], [])
    examples = [asked_about(answer=text) for text in ("yes", "no yes", "yes no no yes", "")]
    columns, statistics = ask("{rule: exact_answer}").score(batch, examples)
    assert columns["scores"].tolist() == [1.0, 1.0, 1.0, 1.0]
    assert columns["scores"].dtype == torch.float32 and set(columns) == {"scores"}
    assert statistics["score_failed"].tolist()[:2] == [4.0, 0.0]


def test_rows_are_asked_about_with_their_own_examples(ask: Any) -> None:
    examples = [asked_about(answer="why #### 7"), asked_about(answer="8"), asked_about(answer="#### 7")]
    columns, _ = ask("{rule: gsm8k}").score(drawn([3], [3], [4, 3]), examples)
    assert columns["scores"].tolist() == [1.0, 0.0, 1.0]


def test_tokens_are_counted_by_the_mask_end_token_included(ask: Any) -> None:
    columns, _ = ask("{rule: length, target_tokens: 2}").score(drawn([1, 9], [1, 2, 9], [9], []), [asked_about()] * 4)
    assert columns["scores"].tolist() == [1.0, 0.5, 0.5, 0.0]


def test_sources_weigh_and_add_up(ask: Any) -> None:
    asked = ask("[{rule: exact_answer, weight: 2}, {rule: length, target_tokens: 2, weight: -0.5}]")
    columns, _ = asked.score(drawn([1, 9], [2, 2, 9]), [asked_about(answer="yes")] * 2)
    assert columns["scores"].tolist() == [1.5, -0.25]


def test_an_answer_that_nobody_can_score_is_no_number_and_counted(ask: Any) -> None:
    """A row without a right answer; the others have theirs."""
    examples = [asked_about(answer="yes"), asked_about(), asked_about(answer="no")]
    asked = ask("[{rule: exact_answer}, {rule: length, target_tokens: 1}]")
    columns, statistics = asked.score(drawn([1], [1], [1]), examples)
    assert math.isnan(columns["scores"][1])
    assert columns["scores"][[0, 2]].tolist() == [2.0, 1.0]
    assert statistics["score_failed"].tolist()[:2] == [3.0, pytest.approx(1.0)]


def test_a_rank_without_rows_asks_nobody(ask: Any) -> None:
    columns, statistics = ask("{rule: gsm8k}").score(drawn([1]).select(slice(0, 0)), [])
    assert columns["scores"].shape == (0,)
    assert statistics["score_failed"].tolist() == [0.0, 0.0, 0.0]


def test_what_failed_adds_up_over_parts_of_the_rows(ask: Any) -> None:
    asked = ask("{rule: exact_answer}")
    examples = [asked_about(), asked_about(answer="yes"), asked_about(), asked_about()]
    batch, total = drawn([1], [1], [1], [1]), torch.zeros(3, dtype=torch.float64)
    for part in (slice(0, 1), slice(1, 1), slice(1, 4)):
        total += asked.score(batch.select(part), examples[part])[1]["score_failed"]
    assert total.tolist()[:2] == [4.0, pytest.approx(3.0)]


def test_a_function_of_trls_form_is_given_chats_and_tokens(ask: Any) -> None:
    """The chat that a prompt is, and the tokens of the mask, end token included."""
    chat = Example(tuple(PROMPT), (), (), "<user> a question", {"answer": "yes"}, (Message("user", "a question"),))
    columns, _ = ask(f"{{function: '{TRL_FUNCTIONS}:right_of_chats'}}").score(drawn([1, 9], [2, 9]), [chat] * 2)
    assert columns["scores"].tolist() == [11.0, 10.0]
    columns, _ = ask(f"{{function: '{TRL_FUNCTIONS}:sums'}}").score(drawn([1, 9], [2, 9]), [asked_about()] * 2)
    assert columns["scores"].tolist() == [10.0, 11.0]


def test_a_function_that_applies_to_nothing_is_no_failure_next_to_a_model(ask: Any) -> None:
    """The model's score is added by another operator; without a model the response has none."""
    never = f"{{function: '{TRL_FUNCTIONS}:never'}}"
    columns, statistics = ask(f"[{{model: reward}}, {never}]").score(drawn([1, 9]), [asked_about()])
    (scores,) = columns.values()
    assert scores.tolist() == [0.0] and sum(each.tolist()[1] for each in statistics.values()) == 0.0
    columns, statistics = ask(never).score(drawn([1, 9]), [asked_about()])
    assert columns["scores"].isnan().all() and statistics["score_failed"].tolist()[1] == 1.0


# --- scores of tokens


def test_scores_of_tokens_fill_the_places_of_the_mask(ask: Any) -> None:
    """A function numbers the tokens of an answer from 0; the rule's score lands on the last of them."""
    asked = ask(
        f"[{{function: '{FUNCTIONS}:per_token', level: token}}, {{rule: length, target_tokens: 2, weight: 10}}]"
    )
    batch = drawn([1, 9], [1, 2, 2, 9], [])
    batch.columns["response_mask"][1] = torch.tensor([1, 0, 1, 1])
    columns, statistics = asked.score(batch, [asked_about()] * 3)
    assert columns["token_scores"].tolist() == [[0, 11, 0, 0], [0, 0, 1, 7], [0, 0, 0, 0]]
    assert columns["scores"].tolist() == [11.0, 8.0, 0.0]
    assert columns["token_scores"].sum(1).tolist() == columns["scores"].tolist()
    assert last_positions(batch["response_mask"].bool()).tolist() == [1, 3, 0]
    assert statistics["score_failed"].tolist()[1] == 0.0


def test_an_answer_without_scores_has_none_of_its_tokens(ask: Any) -> None:
    """And whatever stands outside its answer stays a number."""
    asked = ask(f"[{{function: '{FUNCTIONS}:per_token', level: token}}, {{rule: exact_answer}}]")
    columns, statistics = asked.score(drawn([1, 9], [1, 9]), [asked_about(answer="yes"), asked_about()])
    assert columns["token_scores"][0].tolist() == [0.0, 2.0, 0.0, 0.0]
    assert columns["token_scores"][1].isnan().tolist() == [True, True, False, False]
    assert columns["scores"].isnan().tolist() == [False, True]
    assert statistics["score_failed"].tolist()[1] == pytest.approx(1.0)


# --- several ranks, several texts


def test_of_the_ranks_with_the_same_rows_the_first_asks_and_all_know(ask: Any) -> None:
    asked, silent = ask("{rule: exact_answer}"), ExternalScorers({}, decode)
    batch, examples = drawn([1], [2], [1]), [asked_about(answer="yes"), asked_about(answer="yes"), asked_about()]

    def work(rank: int, port: Port) -> tuple[Columns, Moments]:
        scoring = silent if rank else asked.scoring
        return scoring.score(asked.operator, batch, examples, Parts(port, rank == 0))  # type: ignore[arg-type]

    found = on_replicas(3, work)
    for columns, statistics in found:
        assert columns["scores"][:2].tolist() == [1.0, 0.0] and math.isnan(columns["scores"][2])
        assert statistics["score_failed"].tolist()[:2] == [3.0, pytest.approx(1.0)]


@pytest.mark.parametrize(
    ("suffix", "writes"),
    [
        ("", ("scores",)),
        ("", ("scores.called", "token_scores.called")),
        (".cost", ("scores.cost",)),
        (".greedy", ("scores.called.greedy", "token_scores.called.greedy")),
    ],
)
def test_columns_have_the_names_that_the_operator_writes_but_its_suffix(
    ask: Any, suffix: str, writes: tuple[str, ...]
) -> None:
    asked = ask("{rule: exact_answer}")
    operator = Operator("scores", "score", "actor", (), writes, function="reward", suffix=suffix)
    columns, _ = asked.scoring.score(operator, drawn([1]), [asked_about(answer="yes")], ONE)
    assert tuple(f"{name}{suffix}" for name in columns) == writes
    assert all(len(column) == 1 for column in columns.values())


def test_only_sections_that_the_graph_asks_are_made() -> None:
    """Models of a section are not asked here."""
    spec = spec_of(None, 1, "reward={model: reward, weight: 2}")
    assert make_external_scorers(make_graph(spec), spec, decode)._scorers == {}
    spec = spec_of(None, 1, "reward=[{model: reward}, {rule: gsm8k}]")
    assert set(make_external_scorers(make_graph(spec), spec, decode)._scorers) == {"reward"}
