"""Sampling: noise is a function of (seed, step, row, position), and responses do not depend on their batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_runs import TINY, placed_model
from torch import Tensor
from torch.distributed import HashStore

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.engines.base import Batch, EngineContext, Sampling
from flexrlhf.engines.model_ranks import ModelRanks
from flexrlhf.engines.sampling import gumbel_noise, sample_tokens
from flexrlhf.engines.torch.engine import TorchEngine
from flexrlhf.operators.columns import COLUMNS, Lengths

LENGTHS = Lengths(prompt=5, response=6)
SAMPLING = Sampling(seed=3, step=2, temperature=1.0, eos_token_ids=(1,), pad_token_id=0)


def rows(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


# --- noise


def test_noise_depends_on_the_row_number_and_not_on_the_batch() -> None:
    numbers = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    whole = gumbel_noise(1, 2, numbers, 3, 50)
    for parts in (1, 2, 64):
        pieces = [gumbel_noise(1, 2, part, 3, 50) for part in numbers.chunk(parts)]
        assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(gumbel_noise(1, 2, numbers.sort().values, 3, 50), whole[numbers.argsort()])


@pytest.mark.parametrize(
    "other", [(2, 2, 7, 3), (1, 3, 7, 3), (1, 2, 8, 3), (1, 2, 7, 4), (2, 1, 7, 3), (1, 3, 7, 2), (1, 7, 2, 3)]
)
def test_noise_differs_by_seed_step_row_and_position(other: tuple[int, int, int, int]) -> None:
    def noise(seed: int, step: int, row: int, position: int) -> Tensor:
        return gumbel_noise(seed, step, rows(row), position, 100)

    assert (noise(1, 2, 7, 3) != noise(*other)).all()


def test_noise_of_the_first_tokens_does_not_depend_on_the_vocabulary() -> None:
    assert torch.equal(gumbel_noise(0, 0, rows(5), 0, 100)[:, :32], gumbel_noise(0, 0, rows(5), 0, 32))


def test_seeds_of_any_size_and_sign_give_finite_noise() -> None:
    for seed in (0, -1, 2**62, -(2**63), 2**63 - 1):
        noise = gumbel_noise(seed, 10**6, rows(0, 2**40), 4095, 1000)
        assert noise.isfinite().all()
        assert noise.dtype == torch.float64


def test_noise_has_the_moments_of_the_gumbel_distribution() -> None:
    """Mean 0.5772 and variance pi^2 / 6, within four standard errors (fourth central moment 14.6)."""
    noise = torch.cat([gumbel_noise(0, step, torch.arange(100), step % 7, 100) for step in range(40)]).flatten()
    variance = math.pi**2 / 6
    assert float(noise.mean()) == pytest.approx(0.5772157, abs=4 * math.sqrt(variance / len(noise)))
    assert float(noise.var()) == pytest.approx(variance, abs=4 * math.sqrt((14.6 - variance**2) / len(noise)))


def test_noise_of_neighbours_is_uncorrelated() -> None:
    noise = gumbel_noise(0, 0, torch.arange(200), 0, 200)
    next_position = gumbel_noise(0, 0, torch.arange(200), 1, 200)
    for a, b in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:]), (noise, next_position)):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(float(correlation)) < 4 / math.sqrt(a.numel())


def test_every_row_may_be_at_its_own_position() -> None:
    numbers, positions = rows(4, 9, 4, 2**40), torch.tensor([0, 7, 7, 4095])
    alone = [gumbel_noise(1, 2, number, int(at), 50) for number, at in zip(numbers.split(1), positions, strict=True)]
    assert torch.equal(gumbel_noise(1, 2, numbers, positions, 50), torch.cat(alone))


# --- one token

LOGITS = torch.tensor([0.0, 1.0, 2.0, -1.0, 1.5])


def shares(sampling: Sampling, kept: list[int]) -> Tensor:
    """The distribution to sample from, where only ``kept`` have a probability."""
    scores = torch.full_like(LOGITS, -torch.inf)
    scores[kept] = LOGITS[kept] / (sampling.temperature or 1.0)
    return scores.softmax(0)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.01}], ids=str)
def test_padding_is_never_sampled(changes: dict[str, Any]) -> None:
    """The likeliest ids are excluded, and log-probs still are of all ids, but of those that a cut leaves."""
    tokens, logprobs = sample_tokens(
        LOGITS.expand(200, -1).clone(), replace(SAMPLING, num_ids=2, **changes), torch.arange(200), 0
    )
    assert set(tokens.tolist()) == ({1} if changes else {0, 1})
    is_cut = "top_k" in changes or "top_p" in changes
    assert torch.allclose(logprobs, torch.zeros(200) if is_cut else LOGITS.log_softmax(0)[tokens], atol=1e-6)


# softmax(LOGITS): 0.06, 0.17, 0.45, 0.02, 0.28
@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [2, 4]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.7}, [2, 4]),
        ({"top_p": 0.75}, [1, 2, 4]),
        ({"top_p": 0.01}, [2]),
        ({"top_p": 0.7, "top_k": 2}, [2, 4]),
        ({"top_p": 0.6, "top_k": 2}, [2]),
        ({"top_p": 0.75, "temperature": 0.5}, [2, 4]),
        ({"min_tokens": 8, "eos_token_ids": (2, 10**6)}, [0, 1, 3, 4]),
        ({"min_tokens": 8, "eos_token_ids": (2,), "top_k": 2}, [1, 4]),
        ({"min_tokens": 7, "eos_token_ids": (2,)}, [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_tokens_are_a_sample_and_log_probs_those_of_their_distribution(
    changes: dict[str, Any], kept: list[int]
) -> None:
    """Of the token at position 7, so that a least number of 8 forbids it to end the response."""
    count, sampling = 20_000, replace(SAMPLING, **changes)
    tokens, logprobs = sample_tokens(LOGITS.expand(count, 5), sampling, torch.arange(count), 7)
    expected = shares(sampling, kept)
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-6, rtol=0) and logprobs.dtype == torch.float32
    for token, share in enumerate(expected.tolist()):
        sigma = math.sqrt(share * (1 - share) / count)
        assert float((tokens == token).float().mean()) == pytest.approx(share, abs=3 * sigma)


def test_temperature_0_takes_the_likeliest_and_returns_its_log_prob() -> None:
    greedy = replace(SAMPLING, temperature=0.0, eos_token_ids=(2,), min_tokens=4, top_p=0.5, top_k=1)
    for position, kept, best in ((3, [0, 1, 3, 4], 4), (4, [0, 1, 2, 3, 4], 2)):
        tokens, logprobs = sample_tokens(LOGITS.expand(3, 5), greedy, rows(1, 2, 3), position)
        assert tokens.tolist() == [best] * 3
        assert logprobs.tolist() == pytest.approx([float(shares(greedy, kept).log()[best])] * 3)


def test_rows_at_different_positions_sample_as_alone() -> None:
    sampling = replace(SAMPLING, min_tokens=5, eos_token_ids=(1, 2), top_p=0.9)
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    numbers, positions = torch.arange(6), torch.tensor([0, 4, 5, 6, 4, 5])
    together = sample_tokens(logits, sampling, numbers, positions)
    alone = [sample_tokens(logits[i : i + 1], sampling, numbers[i : i + 1], int(positions[i])) for i in range(6)]
    for values, pieces in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(values, torch.cat(pieces))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_read_as_float32_and_left_as_they_are(dtype: torch.dtype) -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    before, numbers = logits.clone(), torch.arange(50)
    sampling = replace(SAMPLING, temperature=0.7, min_tokens=3, top_k=9, top_p=0.9)
    for values, wide in zip(
        sample_tokens(logits, sampling, numbers, 2), sample_tokens(logits.float(), sampling, numbers, 2), strict=True
    ):
        assert torch.equal(values, wide)
    assert torch.equal(logits, before)


# --- responses


def engine_of(temperature: float = 1.0) -> TorchEngine:
    """A frozen model with weights so large that its distributions are far from flat."""
    one_rank = RankGroup(None, (0,), lambda work, ranks: None)
    engine = TorchEngine(
        EngineContext(
            placed=placed_model("ref", (0,), init=TINY),
            lengths=LENGTHS,
            temperature=temperature,
            seed=0,
            num_updates=1,
            ranks=ModelRanks(one_rank, one_rank),
            device=torch.device("cpu"),
            kv_bytes=0,
            store=HashStore(),
        )
    )
    engine.load_weights({name: weight * 8 for name, weight in engine.weights().items()})
    return engine


@pytest.fixture(scope="module")
def prompts() -> Batch:
    """12 rows with prompts of 1 to 5 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([1, 2, 3, 4, 5, 5, 1, 3, 2, 4, 1, 1])
    mask = (torch.arange(5) >= 5 - lengths[:, None]).to(torch.uint8)
    tokens = torch.randint(2, 32, (12, 5), generator=generator, dtype=torch.int32) * mask
    return Batch({"prompts": tokens, "prompt_mask": mask}, torch.arange(20, 32), 1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_are_those_that_the_forward_pass_makes_likeliest(temperature: float, prompts: Batch) -> None:
    """Generation and forward have the same distribution: with noise, the sampled token has the largest logit."""
    engine = engine_of(temperature)
    columns = engine.generate(prompts, replace(SAMPLING, temperature=temperature))
    batch = Batch(columns, prompts.rows, 1)
    logprobs = engine.forward(batch, [COLUMNS["logprobs"]])["logprobs"]
    mask, responses = columns["response_mask"].bool(), columns["tokens"][:, 5:].long()
    assert (logprobs[mask] < 0).all() and not logprobs[~mask].any()
    assert torch.allclose(columns["rollout_logprobs"], logprobs, atol=1e-4, rtol=0)
    texts = columns["tokens"].repeat_interleave(32, 0)
    repeated = {name: column.repeat_interleave(32, 0) for name, column in columns.items()}
    for position in range(6):
        others = texts.clone()
        others[:, 5 + position] = torch.arange(32, dtype=torch.int32).repeat(12)
        candidates = Batch(repeated | {"tokens": others}, torch.arange(len(others)), 1)
        scores = engine.forward(candidates, [COLUMNS["logprobs"]])["logprobs"][:, position].view(12, 32)
        perturbed = scores + gumbel_noise(SAMPLING.seed, SAMPLING.step, prompts.rows, position, 32)
        chosen = perturbed.gather(1, responses[:, position : position + 1]).squeeze(1)
        inside = mask[:, position]
        assert (chosen >= perturbed.max(1).values - 1e-4)[inside].all()
