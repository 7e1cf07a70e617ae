"""Scores of steps: their ends, replies of sources, and the advantages of process supervision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from replicas import mask_of
from scored_batches import context_of, scored_batch
from small_runs import spec_of
from torch import Tensor

from flexrlhf.config.algorithms.grpo import GrpoSpec
from flexrlhf.config.reward_sources import FunctionSource, RuleSource
from flexrlhf.engines.base import Batch
from flexrlhf.metrics import METRICS
from flexrlhf.objectives.functions import COMBINES
from flexrlhf.operators.graph import Graph
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.rewards.base import (
    Sample,
    ScoreBatch,
    Scores,
    StepScores,
    make_batch,
    split_steps,
    step_end_tokens,
    step_ends,
)
from flexrlhf.rewards.replies import read_reply
from flexrlhf.rewards.scorer import Scorer
from flexrlhf.user_code.call_failures import BadReply

FUNCTIONS = str(Path(__file__).with_name("reward_functions.py"))


# --- where steps end


@pytest.mark.parametrize(
    ("response", "steps"),
    [
        ("", [""]),
        ("one", ["one"]),
        ("one|two", ["one|", "two"]),
        ("one|two|", ["one|", "two|"]),
        ("one|two| ", ["one|", "two| "]),
        ("| one", ["| one"]),
        ("one| ||two", ["one| ||", "two"]),
        (" ||", [" ||"]),
        ("|| a|b", ["|| a|", "b"]),
    ],
)
def test_steps_end_behind_separators(response: str, steps: list[str]) -> None:
    """A piece of blanks is no step of its own."""
    assert split_steps(response, "|") == steps
    assert split_steps(response.replace("|", "\n\n"), "\n\n") == [step.replace("|", "\n\n") for step in steps]


def test_a_step_ends_with_the_token_that_completes_it() -> None:
    """Tokens of 2, 3, 1 and no characters, the last the end token: a step that ends with the text ends with it."""
    characters = [0, 2, 5, 6, 6].__getitem__
    assert step_end_tokens([1, 2, 3, 5, 6], 4, characters) == [0, 0, 1, 1, 3]
    assert step_end_tokens([1], 0, characters) == []
    assert step_ends(["ab", "c", "def"]) == (2, 3, 6)


# --- replies


def steps_of(separator: str | None, *responses: str) -> ScoreBatch:
    return make_batch([Sample("", response, len(response), {}) for response in responses], separator)


def test_a_reply_of_one_number_a_step() -> None:
    batch = steps_of(".", "a.b.", "a.", "a.", "a.b")
    found = read_reply([[1, 2], [1, 2], None, [1, None]], batch, "step")
    assert found.scores == [StepScores((2, 4), (1.0, 2.0)), None, None, None]
    assert found.failure is not None and found.failure.text == "returned 2 numbers for a response of 1 steps"
    with pytest.raises(BadReply, match="numbers, one a step"):
        read_reply([1.0], steps_of(".", "a"), "step")


def test_a_reply_of_ends_and_scores() -> None:
    batch = steps_of(None, "abcd", "ab", "ab", "ab")
    found = read_reply([[(1, 0.5), [4, 1]], [], [(3, 1.0)], [(2, 1.0), (1, 1.0)]], batch, "step")
    assert found.scores == [StepScores((1, 4), (0.5, 1.0)), StepScores((), ()), None, None]
    assert found.failure is not None and found.failure.text == "returned step ends [3] in a response of 2 characters"
    with pytest.raises(BadReply, match="pairs of a step's end"):
        read_reply([[(1.5, 1.0)]], steps_of(None, "ab"), "step")


def scores(sources: list[Any], *responses: str) -> Scores:
    """Return samples of responses whose tokens are their characters, and an end token."""
    samples = [Sample("", text, len(text) + 1, {}, lambda n, text=text: min(n, len(text))) for text in responses]
    scorer = Scorer(sources, "reward", 1000)
    try:
        return scorer.score(samples)
    finally:
        scorer.close()


def test_scores_of_steps_stand_on_the_tokens_that_end_them() -> None:
    """The length of each step; the rule's score of the whole response is on its last token, no end of a step by it."""
    by_step = FunctionSource(function=f"{FUNCTIONS}:by_step", level="step", separator=".", weight=2.0)
    found = scores([by_step, RuleSource(rule="length", target_tokens=4)], "a.b", "ab.", "")
    assert found.tokens == [[0, 4, 0, 2 + 1], [0, 0, 0, 6 + 1], [0 + 0.25]]
    assert found.totals == [7, 7, 0.25]
    assert found.ends == [{1, 3}, {3}, {0}]
    by_end = FunctionSource(function=f"{FUNCTIONS}:by_end", level="step")
    found = scores([by_end], "a.b", "ab")
    assert found.tokens == [[0, 1, 0, 0], [0, 0, 0]] and found.ends == [{1}, set()]


# --- advantages


def compared(
    step_scores: Tensor, ends: Tensor, mask: Tensor, scores: list[float] | None = None, **settings: Any
) -> tuple[Tensor, dict[str, float]]:
    """Advantages of responses with scores of steps, and the metrics. ``scores``: None: their sums."""
    spec = GrpoSpec.model_validate({"samples_per_prompt": 2, "supervision": "process", **settings})
    totals = step_scores.sum(1).tolist() if scores is None else scores
    batch = scored_batch(mask, totals, token_scores=step_scores, step_ends=ends)
    batch = Batch(batch.columns, batch.rows, 2)
    columns, statistics = COMBINES["group_advantages"](spec, batch, context_of(spec, batch))
    return columns["advantages"], METRICS.evaluate({name: tuple(each.tolist()) for name, each in statistics.items()})


SCORES = torch.tensor([[0.0, 1.0, 0.0, 3.0], [0.0, 0.0, 2.0, 0.0]])
ENDS, WHOLE = mask_of("0101", "0010"), mask_of("1111", "1110")


def test_a_token_has_the_normalised_scores_of_the_steps_from_it_on() -> None:
    """DeepSeekMath, section 4.1.3: scores 1, 3 and 2 of the group have mean 2 and deviation 1."""
    advantages, metrics = compared(SCORES, ENDS, WHOLE)
    assert advantages.tolist() == [pytest.approx([0, 0, 1, 1], abs=1e-5), pytest.approx([0, 0, 0, 0], abs=1e-5)]
    assert metrics["response_steps"] == 1.5
    advantages, _ = compared(SCORES * torch.tensor([[1.0], [4.0]]), ENDS, WHOLE, scale="none")
    # scores 1, 3 and 8 have mean 4
    assert advantages.tolist() == [pytest.approx([-4, -4, -1, -1]), pytest.approx([4, 4, 4, 0])]


def test_a_penalty_belongs_to_the_last_step() -> None:
    """Of a truncated response: 3 - 1 on its last token; of one whose last token ends no step, the step before it."""
    settings = {"truncation": {"penalty": 1.0}, "scale": "none"}
    spec = GrpoSpec.model_validate({"samples_per_prompt": 2, "supervision": "process", **settings})
    batch = scored_batch(WHOLE, [4.0, 2.0], [0, 0], token_scores=SCORES, step_ends=mask_of("0101", "0100"))
    columns, _ = COMBINES["group_advantages"](spec, Batch(batch.columns, batch.rows, 2), context_of(spec, batch))
    # steps 1 and 3 - 1; the second response's score of 2, less 1, is on its step of the second token
    mean = (1 + 2 + 1) / 3
    first, second, third = 1 - mean, 2 - mean, 1 - mean
    assert columns["advantages"].tolist() == [
        pytest.approx([first + second] * 2 + [second] * 2),
        pytest.approx([third, third, 0, 0]),
    ]


def test_a_response_without_steps_is_one_step_and_one_that_does_not_count_has_none() -> None:
    step_scores = torch.tensor([[0.0, 0.0, 0.0], [0.0, 4.0, 0.0], [5.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    advantages, metrics = compared(
        step_scores,
        mask_of("000", "010", "100", "010"),
        mask_of("111", "110", "100", "110"),
        scores=[0.0, 4.0, float("nan"), 1.0],
        scale="none",
    )
    assert advantages.tolist() == [[-2, -2, -2], [2, 2, 0], [0, 0, 0], [0, 0, 0]]
    assert metrics["response_steps"] == 1 and metrics["score_invalid"] == 0.25


# --- graphs and settings


def graph_of(*overrides: str) -> Graph:
    return make_graph(spec_of(None, 1, "algorithm.name=grpo", *overrides))


PROCESS = "algorithm.supervision=process"


def test_ends_of_steps_are_columns_where_they_are_read() -> None:
    function = "reward={function: 'a.py:f', level: step}"
    graph = graph_of(function, PROCESS)
    assert graph.producers["step_ends"].name == "scores" and graph.producers["step_ends"].kind == "score"
    assert {"step_ends", "token_scores"} <= set(graph.producers["advantages"].reads)
    assert "step_ends" not in graph_of(function).producers


def test_turns_of_an_environment_are_steps() -> None:
    graph = graph_of("environment={path: 'a.py:Game', max_turns: 2}", PROCESS)
    weighed = graph.producers["step_ends"]
    assert weighed.kind == "combine" and {"turn_ends", "token_scores.environment"} <= set(weighed.reads)
    rewards = torch.tensor([[0.0, 1.0, 0.0, 3.0], [0.0, 0.0, 2.0, 0.0]])
    columns = {"token_scores.environment": rewards, "turn_ends": ENDS, "scores.reward": torch.tensor([0.5, 0.0])}
    batch = scored_batch(WHOLE, [9.0, 9.0], **columns)
    found, _ = COMBINES["reward"](
        spec_of(None, 1, "reward={model: reward}").reward, batch, context_of(GrpoSpec(), batch)
    )
    assert found["step_ends"].equal(ENDS) and found["token_scores"].tolist() == [[0, 1, 0, 3.5], [0, 0, 2, 0]]
    advantages, _ = compared(rewards, found["step_ends"], WHOLE)
    assert advantages.tolist() == [pytest.approx([0, 0, 1, 1], abs=1e-5), pytest.approx([0, 0, 0, 0], abs=1e-5)]


def test_a_model_of_steps_has_its_ends_from_texts() -> None:
    graph = graph_of("reward={model: reward, level: step, separator: '.'}", PROCESS)
    names = [operator.name for operator in graph.operators]
    assert names[names.index("scores_reward") :][:3] == ["scores_reward", "scores_called", "scores"]
    operators = {operator.name: operator for operator in graph.operators}
    assert operators["scores_called"].writes == ("step_ends.reward",)
    assert operators["scores"].reads == ("token_scores.reward", "step_ends.reward", "response_mask")
    assert operators["scores"].writes == ("scores", "token_scores", "step_ends")


def test_a_model_counts_at_the_ends_of_its_steps_alone() -> None:
    spec = spec_of(None, 1, "reward=[{model: reward, level: step, separator: '.', weight: 0.5}, {rule: gsm8k}]")
    batch = scored_batch(
        WHOLE,
        [9.0, 9.0],
        **{
            "token_scores.reward": torch.arange(8.0).view(2, 4),
            "step_ends.reward": ENDS,
            "scores.called": torch.tensor([10.0, 20.0]),
        },
    )
    columns, _ = COMBINES["reward"](spec.reward, batch, context_of(GrpoSpec(), batch))
    assert columns["token_scores"].tolist() == [[0, 0.5, 0, 1.5 + 10], [0, 0, 3 + 20, 0]]
    assert columns["scores"].tolist() == [12, 23]
    assert columns["step_ends"].equal(ENDS)
