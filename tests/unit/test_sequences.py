"""Episodes of several sequences (``environment.sequences``): rows, their scores and advantages, and what passes compute
of them. Expected values are those of episodes with one sequence, and plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from replicas import Alone, batch_of, on_replicas
from scored_batches import context_of
from small_runs import plan_of

from flexrlhf.config.algorithms import AnyAlgorithm
from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.engines.base import Batch, Totals
from flexrlhf.engines.micro_batch import MicroBatch
from flexrlhf.engines.pass_settings import PassSettings
from flexrlhf.memory.packed_rows import largest_pass
from flexrlhf.metrics import METRICS, Outcome
from flexrlhf.objectives.context import Columns, CombineContext, EarlierScores, Reducer
from flexrlhf.objectives.episodes import episodes as statistics_of_episodes
from flexrlhf.objectives.functions import COMBINES
from flexrlhf.objectives.group_advantages import group_advantages
from flexrlhf.operators.columns import Column, Lengths
from flexrlhf.operators.outcomes import EpisodeState
from flexrlhf.placement.layout import BatchShape
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.trainer.open_rows import OpenRows
from flexrlhf.trainer.samples import sample_rows

K, SAMPLES, PROMPTS, R = 3, 4, 5, 6
"""Sequences of an episode, samples of a prompt, prompts, response tokens."""
NO_KL: dict[str, Any] = {"kl": None}
KL: dict[str, Any] = {"kl": {"coefficient": 0.3, "place": "reward"}}
GROUPS: list[tuple[str, str, dict[str, Any]]] = [
    ("group_advantages", "grpo", NO_KL),
    ("group_advantages", "grpo", {**NO_KL, "scale": "none", "truncation": "mask"}),
    ("group_advantages", "grpo", KL),
    ("group_advantages", "grpo", {**NO_KL, "truncation": "mask-loss", "loss_aggregation": "seq-mean-token-mean"}),
    ("group_advantages", "grpo", {**NO_KL, "dynamic_sampling": {"rounds": 2}}),
    ("group_advantages", "rloo", KL),
    ("best_of_group", "raft", NO_KL),
]
OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("reinforce_advantages", "reinforce++", {**KL, "normalise_scores": "batch", "whiten": "none"}),
    ("reinforce_advantages", "reinforce++", {**KL, "baseline": "group", "whiten": "none"}),
    ("ppo_advantages", "ppo", {**KL, "whiten": "none", "gae_lambda": 0.9, "gamma": 0.95, "truncation": "bootstrap"}),
]


def settings(name: str, changes: dict[str, Any]) -> PolicySpec:
    sizes = {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES}
    spec = TypeAdapter(AnyAlgorithm).validate_python({"name": name, **sizes, **changes})
    assert isinstance(spec, PolicySpec)
    return spec


def episodes(seed: int = 0, few_scores: bool = False) -> Batch:
    """Episodes that have used one to K of their rows; scores and the first sequences' ends are of rows 0, K, 2K ..."""
    generator = torch.Generator().manual_seed(seed)
    number = K * SAMPLES * PROMPTS
    used = torch.randint(1, K + 1, (number // K,), generator=generator).repeat_interleave(K)
    lengths = torch.randint(1, R + 1, (number,), generator=generator) * (torch.arange(number) % K < used)
    mask = (torch.arange(R) < lengths[:, None]).to(torch.uint8)
    is_first = torch.arange(number) % K == 0
    scores = torch.randn(number, generator=generator).round(decimals=0 if few_scores else 3)
    # an episode without a score, and one whose environment failed
    scores[K] = math.nan
    state = torch.ones(number, dtype=torch.uint8)
    state[3 * K] = EpisodeState.FAILED
    return batch_of(
        SAMPLES * K,
        response_mask=mask,
        scores=scores.where(is_first, 0.0),
        finished=(torch.rand(number, generator=generator) < 0.7).to(torch.uint8),
        episode=state,
        logprobs=torch.randn(number, R, generator=generator) * mask,
        ref_logprobs=torch.randn(number, R, generator=generator) * mask,
        values=torch.randn(number, R + 1, generator=generator),
    )


def computed(batch: Batch, function: str, spec: PolicySpec) -> tuple[Columns, dict[str, float]]:
    context = replace(context_of(spec, batch), has_surplus=False)
    columns, statistics = COMBINES[function](spec, batch, context)
    return columns, METRICS.evaluate({name: tuple(value.tolist()) for name, value in statistics.items()})


def with_sequences(batch: Batch) -> Batch:
    return replace(batch, sequences=K)


@pytest.mark.parametrize(("function", "name", "changes"), [*GROUPS, *OTHERS])
def test_unused_rows_change_nothing(function: str, name: str, changes: dict[str, Any]) -> None:
    """To the bit: columns of first sequences and all statistics are those of episodes with one row each."""
    batch, spec = with_sequences(episodes(few_scores=True)), settings(name, changes)
    unused = {
        each: values.where((batch.rows % K == 0).view(-1, *[1] * (values.dim() - 1)), 0)
        for each, values in batch.columns.items()
    }
    batch = replace(batch, columns=unused)
    found, statistics = computed(batch, function, spec)
    expected, others = computed(batch.episodes, function, spec)
    assert statistics.keys() == others.keys() and statistics == pytest.approx(others, nan_ok=True, rel=1e-12)
    for each, values in expected.items():
        assert torch.equal(found[each][::K], values), each
    is_unused = found["outcome"] == Outcome.UNUSED.code
    assert torch.equal(is_unused, batch.rows % K > 0) and not found["loss_mask"][is_unused].any()


@pytest.mark.parametrize(("function", "name", "changes"), GROUPS)
def test_all_sequences_have_the_advantage_of_their_episode(function: str, name: str, changes: dict[str, Any]) -> None:
    """The score of the first one, less the penalties of all tokens of the episode, compared among the samples."""
    batch, spec = with_sequences(episodes(few_scores=True)), settings(name, changes)
    columns, statistics = computed(batch, function, spec)
    expected, outcomes = by_loops(spec, batch)
    np.testing.assert_allclose(columns["advantages"].numpy(), expected, atol=2e-6)
    assert [tuple(Outcome)[code] for code in columns["outcome"].tolist()] == outcomes
    trained = [row for row, outcome in enumerate(outcomes) if outcome == "trained"]
    assert columns["loss_mask"].sum(1).tolist() == [
        int(batch["response_mask"][row].sum()) if row in trained else 0 for row in range(len(batch))
    ]
    first = batch["scores"][::K]
    is_counted = first.isfinite() & (batch["episode"][::K] < EpisodeState.FAILED)
    assert statistics["reward_mean"] == pytest.approx(float(first[is_counted].mean()))
    assert statistics["response_length"] == pytest.approx(float(batch["response_mask"][::K].float().sum(1).mean()))


def by_loops(spec: PolicySpec, batch: Batch) -> tuple[np.ndarray[Any, Any], list[str]]:
    """Advantages (n, R) and outcomes, episode by episode and group by group."""
    mask, scores = batch["response_mask"].numpy(), batch["scores"].double().numpy()
    ratios = (batch["logprobs"] - batch["ref_logprobs"]).double().numpy() * mask
    penalty = 0.0 if spec.kl is None else spec.kl.coefficient
    advantages, outcomes = np.zeros(mask.shape), [""] * len(mask)
    for first in range(0, len(mask), SAMPLES * K):
        starts, reasons, totals = range(first, first + SAMPLES * K, K), dict[int, str](), dict[int, float]()
        for start in starts:
            is_cut = not batch["finished"][start]
            if batch["episode"][start] >= EpisodeState.FAILED:
                reasons[start] = "failed_episode"
            elif not np.isfinite(scores[start]):
                reasons[start] = "invalid_score"
            elif is_cut and spec.truncation == "mask":
                reasons[start] = "truncated"
            else:
                totals[start] = scores[start] - penalty * sum(ratios[start + each].sum() for each in range(K))
        raw = [scores[start] for start in totals]
        mean, number = sum(totals.values()) / max(len(totals), 1), len(totals)
        deviation = math.sqrt(sum((each - mean) ** 2 for each in totals.values()) / max(number - 1, 1))
        for start, total in totals.items():
            advantage = 0.0 if max(raw) == min(raw) and spec.kl is None else total - mean
            if spec.name == "rloo":
                advantage *= number / max(number - 1, 1)
            elif getattr(spec, "scale", "none") == "group":
                advantage /= deviation + 1e-6
            if spec.truncation == "mask-loss" and not batch["finished"][start]:
                reasons[start] = "truncated"
            elif getattr(spec, "dynamic_sampling", None) is not None and max(raw) == min(raw):
                reasons[start] = "alike"
            elif spec.name == "raft":
                best = max(totals, key=lambda each: (totals[each], -each))
                advantage, reasons[start] = 1.0, "trained" if start == best else "not_best"
            for row in range(start, start + K):
                if reasons.get(start, "trained") == "trained":
                    advantages[row] = advantage * mask[row]
        for start in starts:
            for row in range(start, start + K):
                is_used = row == start or mask[row].any()
                outcomes[row] = reasons.get(start, "trained") if is_used else "unused"
    return advantages, outcomes


def test_the_score_is_on_the_last_token_of_each_sequence() -> None:
    """PPO's advantages of a further sequence are those of a response of its own with the episode's score and end."""
    batch = with_sequences(episodes())
    spec = settings("ppo", OTHERS[-1][-1])
    columns, _ = computed(batch, "ppo_advantages", spec)
    own = {name: batch.of_rows(batch[name][::K]) for name in ("scores", "finished", "episode")}
    alone = replace(batch.with_columns(own), samples_per_prompt=1, sequences=1)
    expected, _ = computed(alone, "ppo_advantages", spec)
    for name in ("advantages", "returns", "loss_mask"):
        assert torch.equal(columns[name], expected[name]), name


def test_steps_of_an_episode_are_those_of_its_first_sequence() -> None:
    """Further ones have the normalised rewards of all of them, as the first token has."""
    batch, spec = with_sequences(episodes()), settings("grpo", {**NO_KL, "supervision": "process"})
    ends = torch.zeros_like(batch["response_mask"])
    ends[::K, 1] = 1
    rewards = torch.randn(len(batch), R, generator=torch.Generator().manual_seed(5)) * (batch.rows % K == 0)[:, None]
    batch = batch.with_columns({"step_ends": ends, "token_scores": rewards})
    columns, _ = computed(batch, "group_advantages", spec)
    expected, _ = computed(batch.episodes, "group_advantages", spec)
    assert torch.equal(columns["advantages"][::K], expected["advantages"])
    for row in range(len(batch)):
        if row % K and columns["loss_mask"][row].any():
            values = columns["advantages"][row][batch["response_mask"][row].bool()]
            assert set(values.tolist()) == {columns["advantages"][row - row % K, 0].item()}


def test_greedy_episodes_are_baselines_of_all_sequences() -> None:
    batch, spec = with_sequences(episodes(1)), settings("remax", {**NO_KL, "samples_per_prompt": 1, "whiten": "none"})
    greedy = {f"{name}.greedy": values for name, values in episodes(2).columns.items()}
    greedy["response_mask.greedy"][1::K] = 0
    columns, _ = computed(batch.with_columns(greedy), "remax_advantages", spec)
    baselines = batch.with_columns({name.removesuffix(".greedy"): values for name, values in greedy.items()})
    for row, mask in enumerate(batch["response_mask"].float()):
        first = row - row % K
        scores = [each["scores"][first].item() for each in (batch, baselines)]
        has_failed = any(each["episode"][first] >= EpisodeState.FAILED for each in (batch, baselines))
        difference = 0.0 if has_failed or math.isnan(sum(scores)) else scores[0] - scores[1]
        assert columns["advantages"][row].tolist() == pytest.approx((difference * mask).tolist(), abs=1e-6), row


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_episodes_that_end_by_themselves_are_compared_with_earlier_ones(name: str) -> None:
    """As ended: each episode is trained on alone, with all its sequences; the scores before are of first sequences."""
    spec, rows = settings(name, NO_KL), torch.arange(K * SAMPLES * PROMPTS).view(-1, K)[1::3].flatten()
    batch = replace(with_sequences(episodes().select(rows)), samples_per_prompt=K)
    earlier = torch.full((PROMPTS, SAMPLES), math.nan)
    earlier[:, 0] = torch.arange(PROMPTS) / 3
    known = EarlierScores({Column.GROUP_SCORES: earlier}, batch.rows[::K] // K)
    found, expected = (
        group_advantages(spec, each, replace(context_of(spec, each), earlier=known))[0]
        for each in (batch, batch.episodes)
    )
    mask, values = batch["response_mask"], expected["advantages"].sum(1) / expected["loss_mask"].sum(1).clamp(min=1)
    torch.testing.assert_close(found["advantages"], mask * batch.of_rows(values)[:, None])
    assert torch.equal(found[Column.GROUP_SCORES][::K].nan_to_num(9), expected[Column.GROUP_SCORES].nan_to_num(9))
    assert values.any()


@pytest.mark.parametrize(("function", "name", "changes"), [GROUPS[2], *OTHERS])
def test_replicas_have_the_advantages_of_the_whole_batch(function: str, name: str, changes: dict[str, Any]) -> None:
    batch, spec, rows = with_sequences(episodes()), settings(name, changes), 2 * SAMPLES * K
    whole, _ = computed(batch, function, spec)

    def work(rank: int, port: Reducer) -> torch.Tensor:
        part = batch.select(slice(0, rows) if rank == 0 else slice(rows, None))
        return COMBINES[function](spec, part, context_of(spec, part, port))[0]["advantages"]

    torch.testing.assert_close(torch.cat(on_replicas(2, work)), whole["advantages"])


def test_means_over_responses_count_the_sequences_that_are_used() -> None:
    batch, spec = with_sequences(episodes()), settings("grpo", GROUPS[3][2])
    columns, _ = computed(batch, "group_advantages", spec)
    totals = Totals.of(batch.with_columns(columns), Alone())  # type: ignore[arg-type]
    used = int(batch["response_mask"].any(1).sum())
    assert (totals.unused, totals.prompts) == (len(batch) - used, PROMPTS) and totals.taken <= used
    assert totals.sequences == columns["loss_mask"].any(1).sum()


def test_turns_of_an_episode_are_those_of_all_its_sequences() -> None:
    """Failures count it once, by its first row; rows that no conversation has used have no turns."""
    batch = with_sequences(episodes())
    used = batch["response_mask"].any(1)
    numbers = {name: (used * 2).int() for name in ("turns", "tool_calls", "failed_tool_calls")}
    mask = torch.cat([batch["response_mask"][:, :2], batch["response_mask"]], 1)
    batch = batch.with_columns({"attention_mask": mask, **numbers})
    game = EnvironmentSpec(path="game.py:Game", max_failures=2)
    _, statistics = statistics_of_episodes(game, batch, CombineContext([slice(0, len(batch))], Alone(), {}))
    number = SAMPLES * PROMPTS
    has_failed = batch["episode"][::K] >= EpisodeState.FAILED
    of_episodes = used.view(-1, K).sum(1)
    assert statistics["episode_failed"].tolist() == [number, 1, 1]
    assert statistics["sequences"].tolist()[:2] == [number - 1, of_episodes[~has_failed].sum()]
    assert statistics["turns"].tolist()[:2] == [number - 1, 2 * of_episodes[~has_failed].sum()]
    assert statistics["tool_calls"].tolist()[:2] == [number, 2 * of_episodes.sum()]


# --- rows


def test_rows_of_a_prompt_are_those_of_all_its_sequences() -> None:
    game = "environment={path: game.py:Game, max_turns: 2, sequences: 3}"
    plan = plan_of(None, 2, "algorithm={name: grpo, prompts_per_step: 4, samples_per_prompt: 2}", game)
    one = plan_of(None, 2, "algorithm={name: grpo, prompts_per_step: 4, samples_per_prompt: 2}", game[:-15] + "}")
    assert (plan.batch.samples_per_prompt, plan.batch.num_rows, plan.batch.num_blocks) == (6, 24, one.batch.num_blocks)
    assert plan.row_bytes(0, 1) == 3 * one.row_bytes(0, 1)
    assert [row % 3 for row in sample_rows(plan.batch, 4)] == [0, 0, 0, 0]
    assert "= 4 prompts x 2 samples x 3 sequences of an episode, at most" in format_plan(plan)


def test_a_sequence_keeps_its_place_from_step_to_step() -> None:
    shape = BatchShape(12, 6, num_mini_batches=2, segments=3, sequences=3)
    for row in range(shape.num_rows):
        taken, own = shape.as_taken(row, 7)
        assert shape.place_of(taken, own) == row and own % 3 == row % 3
        assert 5 <= taken <= 7 and own // 6 == row // 6 // 3


def open_rows(shape: BatchShape, exists: str, states: str) -> OpenRows:
    """Rows of a step with one token each; ``states``: of their episodes."""
    number = len(exists)
    rows = torch.arange(number)
    state: Columns = {
        "tokens": torch.ones(number, 4, dtype=torch.int32),
        "attention_mask": torch.ones(number, 4, dtype=torch.uint8),
        "response_mask": torch.ones(number, 2, dtype=torch.uint8),
        "finished": torch.ones(number, dtype=torch.uint8),
        "episode": torch.tensor([int(each) for each in states], dtype=torch.uint8),
    }
    steps, taken = shape.as_taken(rows, 2)
    batch = Batch({}, rows, shape.samples_per_prompt, sequences=shape.sequences)
    there = torch.tensor([each == "x" for each in exists])
    return OpenRows(batch, shape, 2, steps, taken, there, state, torch.ones(number, dtype=torch.int64))


def test_an_episode_is_trained_on_with_all_its_sequences() -> None:
    """One with a sequence that goes on is carried, and the others of its prompt are not trained on before it."""
    shape = BatchShape(6, 4, segments=2, sequences=2)
    exists = "x.xx" + "x.x." + "xxxx" + "...." + "x.xx" + "x..."
    states = "1010" + "1010" + "1010" + "0000" + "1111" + "1000"
    found = open_rows(shape, exists, states).columns()
    assert found[Column.PRESENT].tolist() == [int(each) for each in "000011110000000011110000"]
    assert found["attention_mask"].any(1).tolist() == [each == "x" for each in exists]
    alone = open_rows(replace(shape, is_by_row=True), exists, states).columns()
    assert alone[Column.PRESENT].tolist() == [int(each) for each in "110011110000000011111100"]


def test_further_sequences_are_left_out_once_their_episode_has_ended() -> None:
    shape = BatchShape(2, 4, segments=1, sequences=2)
    found = open_rows(shape, "x.xxx.xx", "10111011").columns(trains_further=False)
    assert found["attention_mask"].any(1).tolist() == [each == "x" for each in "x.x.x.x."]
    # the next segment goes on with them
    going = open_rows(BatchShape(4, 4, segments=2, sequences=2), "xxxx" + "...." * 3, "0010" + "0000" * 3)
    assert going.columns(trains_further=False)["attention_mask"].any(1).tolist()[:4] == [True] * 4


# --- passes

LENGTHS = Lengths(prompt=4, response=6)
TEXTS = [(2, 1), (3, 2), (2, 3), (0, 0), (2, 2), (4, 4), (2, 1), (0, 0)]
"""Tokens of the prompt and the response of the rows of two prompts, two sequences each."""


def texts(sequences: int) -> Batch:
    columns = torch.arange(10)
    prompts, responses = (torch.tensor([text[i] for text in TEXTS]).view(-1, 1) for i in range(2))
    mask = ((columns >= 4 - prompts) & (columns < 4 + responses)).to(torch.uint8)
    rows = torch.arange(len(TEXTS))
    tokens = (rows[:, None] * 100 + columns).int()
    # samples of a prompt share it, further sequences do not
    tokens[::2, :4] = (rows[::2, None] // 4 * 1000 + columns[:4]).int()
    return Batch({"tokens": tokens, "attention_mask": mask}, rows, 4, sequences=sequences)


@pytest.mark.parametrize("shares", [True, False])
def test_passes_compute_no_token_of_unused_rows(shares: bool) -> None:
    """With all further rows unused they are the passes of the first sequences; first sequences share their prompt."""
    settings = replace(PassSettings(LENGTHS, 30), packs=True, shares=shares)
    batch = texts(2)
    unused = {name: values * (1 - batch.rows % 2)[:, None].to(values.dtype) for name, values in batch.columns.items()}
    with_unused = [*MicroBatch.split(replace(batch, columns=unused), settings)]
    alone = [*MicroBatch.split(batch.episodes, settings)]
    assert [piece.tokens.tolist() for piece in with_unused] == [piece.tokens.tolist() for piece in alone]
    assert sorted(row for piece in with_unused for row in piece.order.tolist()) == [*range(8)]
    used = sum(prompt + response for prompt, response in TEXTS)
    once = 2 + 2 if shares else 0
    assert sum(int(length) for piece in alone for length in piece.text_lengths) == 3 + 5 + 4 + 3
    found = [*MicroBatch.split(batch, settings)]
    assert sum(int((piece.numbers[0] >= 0).sum()) for piece in found if piece.numbers is not None) == used - once
    for piece in found:
        for row, tokens, mask in zip(piece.order.tolist(), piece.text_tokens, piece.text_mask, strict=True):
            own = batch["tokens"][row][batch["attention_mask"][row].bool()].tolist()
            assert not own or tokens[mask].tolist() == own


@pytest.mark.parametrize("seed", range(20))
def test_no_pass_is_above_the_planned_bounds(seed: int) -> None:
    """Of tokens, of the width of a row, and of tokens of responses; also if no or all further rows are used."""
    rng, k, samples = Random(seed), 3, 2
    number, used, budget = 4 * k * samples, rng.choice((0.0, 0.5, 1.0)), rng.choice((12, 20, 60))
    columns, rows = torch.arange(10), torch.arange(number)
    is_used = [row % k == 0 or rng.random() < used for row in range(number)]
    prompts = torch.tensor([4 if row % k == 0 else rng.randint(1, 4) for row in range(number)]) * torch.tensor(is_used)
    responses = torch.tensor([rng.randint(1, 6) for _ in range(number)]) * torch.tensor(is_used)
    mask = ((columns >= 4 - prompts[:, None]) & (columns < 4 + responses[:, None])).to(torch.uint8)
    tokens = (rows[:, None] * 100 + columns).int()
    tokens[::k, :4] = (rows[::k, None] // (k * samples) * 1000 + columns[:4]).int()
    batch = Batch({"tokens": tokens, "attention_mask": mask}, rows, k * samples, sequences=k)
    settings = replace(PassSettings(LENGTHS, budget), packs=True, shares=True)
    shared, apart = (largest_pass(4, 6, k * samples, budget, number, packs=True, shares=s) for s in (True, False))
    most = shared.or_larger(apart)
    pieces = [*MicroBatch.split(batch, settings)]
    assert max(piece.tokens.numel() for piece in pieces) <= most.tokens
    assert max(piece.width for piece in pieces) <= most.width
    assert max(len(piece.scored) for piece in pieces) <= most.responses
    assert most.total is not None and sum(piece.tokens.numel() for piece in pieces) <= most.total
