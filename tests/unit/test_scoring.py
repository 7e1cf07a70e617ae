"""Rules and functions receive responses as text, and their scores become columns of the responses' rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replicas import Alone, Port, batch_of, mask_of, on_replicas
from small_runs import spec_of
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from flexrlhf.data.examples import Example
from flexrlhf.data.messages import Message
from flexrlhf.data.turn_tokens import Replies
from flexrlhf.engines.base import Batch, Moments, Sampling
from flexrlhf.engines.sampling import completes_stop
from flexrlhf.objectives.context import Columns
from flexrlhf.objectives.reward_shaping import last_positions
from flexrlhf.operators.graph import Operator
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.trainer.operator_context import sampled_ids
from flexrlhf.trainer.response_text import ResponseText
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
    """The ranks of one replica, which have the same rows."""

    port: Any
    is_first: bool

    def sum(self, tensor: Tensor) -> Tensor:
        found: Tensor = self.port.sum(tensor)
        return found


ONE = Parts(Alone(), True)


def read(tokens: Sequence[int]) -> Replies:
    """Return a reply as a text."""
    return (("", decode(tokens)),)


def read_reset(example: Example, tokens: Sequence[int]) -> Replies:
    """Return what is behind the prompt."""
    return read(tokens[len(example.prompt) :]) if len(tokens) > len(example.prompt) else ()


def sampled(*responses: list[int], width: int = 4) -> Batch:
    """Responses right-padded with the end token, which may be a word of a response, too."""
    mask = mask_of(*("1" * len(answer) + "0" * (width - len(answer)) for answer in responses))
    columns = {
        "tokens": torch.tensor([PROMPT + answer + [9] * (width - len(answer)) for answer in responses]),
        "attention_mask": torch.cat([torch.ones(len(responses), len(PROMPT), dtype=mask.dtype), mask], 1),
        "response_mask": mask,
        "finished": torch.ones(len(responses), dtype=torch.uint8),
    }
    return batch_of(**columns)


def example_of(**columns: Any) -> Example:
    return Example(tuple(PROMPT), (), (), "a question", columns)


@dataclass(frozen=True)
class Scoring:
    """Scorers of a graph with sources, and the operator that calls them."""

    scorers: ExternalScorers
    operator: Operator

    def score(self, batch: Batch, examples: Sequence[Example], tp: Any = ONE) -> tuple[Columns, Moments]:
        return self.scorers.score(self.operator, batch, examples, tp)


@pytest.fixture
def scoring_of() -> Iterator[Any]:
    """Makes the scorers of a run with these ``reward`` sources; their workers end with the test."""
    made: list[ExternalScorers] = []

    def make(reward: str, *further: str) -> Scoring:
        spec = spec_of(None, 1, f"reward={reward}", *further)
        graph = make_graph(spec)
        made.append(
            make_external_scorers(graph, spec, decode, *(() if spec.environment is None else (read, read_reset)))
        )
        return Scoring(made[-1], next(operator for operator in graph.operators if operator.kind == "score"))

    yield make
    for scorers in made:
        scorers.close()


# --- special tokens in texts

SPECIAL = ("<pad>", "<bos>", "<eos>", "<think>", "</think>", "</answer>", "<|end|>")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A tokenizer of characters, whose tags are special tokens, and whose <|end|> is an added one that is not."""
    made = Tokenizer(models.WordLevel({each: number for number, each in enumerate([*SPECIAL, *"abc. "])}, "a"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    made.add_special_tokens(list(SPECIAL[:-1]))
    made.add_tokens([AddedToken(SPECIAL[-1], special=False)])
    names = {"pad_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def text_of(tokenizer: Any, *overrides: str, ends: Sequence[str] = ("<pad>", "<eos>")) -> ResponseText:
    return ResponseText.of(spec_of(None, 1, *overrides), tokenizer, tokenizer.convert_tokens_to_ids(list(ends)))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def test_a_text_has_all_special_tokens_but_its_borders(tokenizer: Any) -> None:
    ids = ids_of(tokenizer, "<bos><think>a b</think><pad>c</answer><|end|><eos>")
    assert text_of(tokenizer)(ids) == "<think>a b</think>c</answer><|end|>"
    assert text_of(tokenizer, "rollout.special_tokens=skip")(ids) == "a bc<|end|>"
    # a further token that ends a response is left out if it is a special one
    assert text_of(tokenizer, ends=("<pad>", "</answer>", "<|end|>"))(ids) == "<think>a b</think>c<|end|><eos>"
    assert text_of(tokenizer)([]) == ""


def test_a_stop_string_may_be_a_special_token(tokenizer: Any) -> None:
    ids = ids_of(tokenizer, "ab<think>c</answer>")
    for how, completed in (("keep", len(ids)), ("skip", None)):
        decode = text_of(tokenizer, f"rollout.special_tokens={how}")
        sampling = Sampling(0, 0, 1.0, (2,), 0, stop=("c</answer>",), decode=decode)
        ends = (count for count in range(1, len(ids) + 1) if completes_stop(ids[:count], sampling))
        assert next(ends, None) == completed


@pytest.mark.parametrize(("how", "score"), [("keep", 1.0), ("skip", 0.0)])
def test_rules_and_functions_receive_special_tokens(tokenizer: Any, how: str, score: float) -> None:
    overrides = f"reward=[{{rule: format, pattern: '<think>.*'}}, {{function: '{FUNCTIONS}:tags', weight: 10}}]"
    spec = spec_of(None, 1, overrides)
    graph = make_graph(spec)
    scorers = make_external_scorers(graph, spec, text_of(tokenizer, f"rollout.special_tokens={how}"))
    operator = next(each for each in graph.operators if each.kind == "score")
    try:
        columns, _ = scorers.score(operator, sampled([3, 7, 4, 2]), [example_of()], ONE)
    finally:
        scorers.close()
    assert columns["scores"].tolist() == [11 * score]


@pytest.mark.parametrize(
    ("embeddings", "tokens", "readers", "expected"),
    [(12, 12, 12, None), (12, 14, 12, None), (20, 12, 20, 12), (20, 12, 16, 12), (20, 18, 16, 16), (20, 20, 16, 16)],
)
def test_ids_beyond_the_tokenizer_are_not_sampled(
    embeddings: int, tokens: int, readers: int, expected: int | None
) -> None:
    """Nor those that another model has no embedding for."""
    sizes = {role: SimpleNamespace(sizes=SimpleNamespace(vocabulary=each)) for role, each in (("actor", embeddings),)}
    plan = SimpleNamespace(
        graph=SimpleNamespace(generated="actor"), shapes=sizes, sampled_ids=readers if readers < embeddings else None
    )
    rank: Any = SimpleNamespace(plan=plan, data=SimpleNamespace(num_ids=tokens))
    assert sampled_ids(rank) == expected


# --- what scorers receive and return


def test_the_text_of_a_response_follows_from_its_mask(scoring_of: Any) -> None:
    """Not of the prompt, not of the padding, which here is the same token as the end of an answer."""
    batch = sampled([1, 9], [2, 1, 9], [1, 2, 2, 1], [])
    examples = [example_of(answer=text) for text in ("yes", "no yes", "yes no no yes", "")]
    columns, statistics = scoring_of("{rule: exact_answer}").score(batch, examples)
    assert columns["scores"].tolist() == [1.0, 1.0, 1.0, 1.0]
    assert columns["scores"].dtype == torch.float32 and set(columns) == {"scores"}
    assert statistics["score_failed"].tolist()[:2] == [4.0, 0.0]


def test_functions_receive_the_conversation_of_an_episode(scoring_of: Any, tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text(
        "def judge(prompts, responses, conversation):\n"
        "    assert responses == ['yes\\n#### 8', 'no\\nyes'], responses\n"
        "    first, *turns = conversation[0]\n"
        "    assert first == {'role': 'environment', 'content': 'yes'}, first\n"
        "    roles = [[turn['role'] for turn in turns] for turns in (turns, conversation[1])]\n"
        "    assert roles == [['assistant', 'environment', 'assistant'], ['assistant'] * 2], roles\n"
        "    return [float(turns[1]['content'] == 'no'), 0.0]\n"
    )
    batch = sampled([1, 2, 4], [2, 1])
    batch["response_mask"][0, 1] = 0
    # the reply between the turns of the second one is empty
    batch = batch_of(**batch.columns, turn_ends=mask_of("1010", "1100"))
    scoring = scoring_of(f"{{function: '{file}:judge'}}", "environment={path: 'game.py:Game'}")
    # the first one has a text of its reset behind its prompt
    batch["tokens"][0, 1] = 1
    columns, _ = scoring.score(batch, [replace(example_of(), prompt=(5,)), example_of()])
    assert [value for name, value in columns.items() if name.startswith("scores")][0].tolist() == [1.0, 0.0]


def test_rows_are_scored_with_their_own_examples(scoring_of: Any) -> None:
    examples = [example_of(answer="why #### 7"), example_of(answer="8"), example_of(answer="#### 7")]
    columns, _ = scoring_of("{rule: gsm8k}").score(sampled([3], [3], [4, 3]), examples)
    assert columns["scores"].tolist() == [1.0, 0.0, 1.0]


def test_tokens_are_counted_by_the_mask_end_token_included(scoring_of: Any) -> None:
    columns, _ = scoring_of("{rule: length, target_tokens: 2}").score(
        sampled([1, 9], [1, 2, 9], [9], []), [example_of()] * 4
    )
    assert columns["scores"].tolist() == [1.0, 0.5, 0.5, 0.0]


def test_sources_weigh_and_add_up(scoring_of: Any) -> None:
    scoring = scoring_of("[{rule: exact_answer, weight: 2}, {rule: length, target_tokens: 2, weight: -0.5}]")
    columns, _ = scoring.score(sampled([1, 9], [2, 2, 9]), [example_of(answer="yes")] * 2)
    assert columns["scores"].tolist() == [1.5, -0.25]


def test_a_response_without_any_score_is_nan_and_counted(scoring_of: Any) -> None:
    """A row without a right answer; the others have theirs."""
    examples = [example_of(answer="yes"), example_of(), example_of(answer="no")]
    scoring = scoring_of("[{rule: exact_answer}, {rule: length, target_tokens: 1}]")
    columns, statistics = scoring.score(sampled([1], [1], [1]), examples)
    assert math.isnan(columns["scores"][1])
    assert columns["scores"][[0, 2]].tolist() == [2.0, 1.0]
    assert statistics["score_failed"].tolist()[:2] == [3.0, pytest.approx(1.0)]


def test_a_rank_without_rows_calls_no_scorer(scoring_of: Any) -> None:
    columns, statistics = scoring_of("{rule: gsm8k}").score(sampled([1]).select(slice(0, 0)), [])
    assert columns["scores"].shape == (0,)
    assert statistics["score_failed"].tolist() == [0.0, 0.0, 0.0]


def test_failures_add_up_over_parts_of_the_rows(scoring_of: Any) -> None:
    scoring = scoring_of("{rule: exact_answer}")
    examples = [example_of(), example_of(answer="yes"), example_of(), example_of()]
    batch, total = sampled([1], [1], [1], [1]), torch.zeros(3, dtype=torch.float64)
    for part in (slice(0, 1), slice(1, 1), slice(1, 4)):
        total += scoring.score(batch.select(part), examples[part])[1]["score_failed"]
    assert total.tolist()[:2] == [4.0, pytest.approx(3.0)]


def test_a_function_of_trls_form_is_given_chats_and_tokens(scoring_of: Any) -> None:
    """The chat that a prompt is, and the tokens of the mask, end token included."""
    chat = Example(tuple(PROMPT), (), (), "<user> a question", {"answer": "yes"}, (Message("user", "a question"),))
    columns, _ = scoring_of(f"{{function: '{TRL_FUNCTIONS}:right_of_chats'}}").score(
        sampled([1, 9], [2, 9]), [chat] * 2
    )
    assert columns["scores"].tolist() == [11.0, 10.0]
    columns, _ = scoring_of(f"{{function: '{TRL_FUNCTIONS}:sums'}}").score(sampled([1, 9], [2, 9]), [example_of()] * 2)
    assert columns["scores"].tolist() == [10.0, 11.0]


def test_a_function_that_applies_to_nothing_is_no_failure_next_to_a_model(scoring_of: Any) -> None:
    """The model's score is added by another operator; without a model the response has none."""
    never = f"{{function: '{TRL_FUNCTIONS}:never'}}"
    columns, statistics = scoring_of(f"[{{model: reward}}, {never}]").score(sampled([1, 9]), [example_of()])
    (scores,) = columns.values()
    assert scores.tolist() == [0.0] and sum(each.tolist()[1] for each in statistics.values()) == 0.0
    columns, statistics = scoring_of(never).score(sampled([1, 9]), [example_of()])
    assert columns["scores"].isnan().all() and statistics["score_failed"].tolist()[1] == 1.0


# --- scores of tokens


def test_scores_of_tokens_fill_the_places_of_the_mask(scoring_of: Any) -> None:
    """A function numbers the tokens of an answer from 0; the rule's score lands on the last of them."""
    scoring = scoring_of(
        f"[{{function: '{FUNCTIONS}:per_token', level: token}}, {{rule: length, target_tokens: 2, weight: 10}}]"
    )
    batch = sampled([1, 9], [1, 2, 2, 9], [])
    batch.columns["response_mask"][1] = torch.tensor([1, 0, 1, 1])
    columns, statistics = scoring.score(batch, [example_of()] * 3)
    assert columns["token_scores"].tolist() == [[0, 11, 0, 0], [0, 0, 1, 7], [0, 0, 0, 0]]
    assert columns["scores"].tolist() == [11.0, 8.0, 0.0]
    assert columns["token_scores"].sum(1).tolist() == columns["scores"].tolist()
    assert last_positions(batch["response_mask"].bool()).tolist() == [1, 3, 0]
    assert statistics["score_failed"].tolist()[1] == 0.0


def test_a_response_without_scores_has_none_of_its_tokens(scoring_of: Any) -> None:
    """And whatever stands outside its answer stays a number."""
    scoring = scoring_of(f"[{{function: '{FUNCTIONS}:per_token', level: token}}, {{rule: exact_answer}}]")
    columns, statistics = scoring.score(sampled([1, 9], [1, 9]), [example_of(answer="yes"), example_of()])
    assert columns["token_scores"][0].tolist() == [0.0, 2.0, 0.0, 0.0]
    assert columns["token_scores"][1].isnan().tolist() == [True, True, False, False]
    assert columns["scores"].isnan().tolist() == [False, True]
    assert statistics["score_failed"].tolist()[1] == pytest.approx(1.0)


# --- several ranks, several responses


def test_the_first_rank_with_the_same_rows_scores_for_all(scoring_of: Any) -> None:
    scoring, silent = scoring_of("{rule: exact_answer}"), ExternalScorers({}, decode)
    batch, examples = sampled([1], [2], [1]), [example_of(answer="yes"), example_of(answer="yes"), example_of()]

    def work(rank: int, port: Port) -> tuple[Columns, Moments]:
        scorers = silent if rank else scoring.scorers
        return scorers.score(scoring.operator, batch, examples, Parts(port, rank == 0))  # type: ignore[arg-type]

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
    scoring_of: Any, suffix: str, writes: tuple[str, ...]
) -> None:
    scoring = scoring_of("{rule: exact_answer}")
    operator = Operator("scores", "score", "actor", (), writes, function="reward", suffix=suffix)
    columns, _ = scoring.scorers.score(operator, sampled([1]), [example_of(answer="yes")], ONE)
    assert tuple(f"{name}{suffix}" for name in columns) == writes
    assert all(len(column) == 1 for column in columns.values())


def test_only_sections_that_the_graph_asks_are_made() -> None:
    """Models of a section are not called here."""
    spec = spec_of(None, 1, "reward={model: reward, weight: 2}")
    assert make_external_scorers(make_graph(spec), spec, decode)._scorers == {}
    spec = spec_of(None, 1, "reward=[{model: reward}, {rule: gsm8k}]")
    assert set(make_external_scorers(make_graph(spec), spec, decode)._scorers) == {"reward"}
