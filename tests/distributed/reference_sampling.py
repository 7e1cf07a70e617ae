"""Sampling of the reference: token by token, with the noise that is part of the definition of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from reference_models import Policy
from reference_responses import Response, read_examples, text_of
from reference_terms import Terms
from torch import Tensor

from flexrlhf.config.algorithms.base import SampledSpec
from flexrlhf.config.spec import Spec
from flexrlhf.engines.sampling import gumbel_noise
from flexrlhf.verify.deviations import FLOAT32
from flexrlhf.weights.stored_model import StoredModel

TIE = FLOAT32.tie
"""Two perturbed logits nearer than this are a tie: rounding may decide either way."""
EVAL_STEP = -1
"""The step whose noise evaluations sample with."""


class NoTie(AssertionError):
    """A forced token that sampling would not have chosen."""


def ends_of(spec: Spec, tokenizer: Any) -> list[int]:
    """Tokens that end a response: the tokenizer's, and those that the actor's directory names."""
    actor = spec.models.actor
    assert actor is not None
    file = Path(str(StoredModel.of("actor", actor).whole.path)) / "generation_config.json"
    listed = json.loads(file.read_text())["eos_token_id"] if file.is_file() else []
    return [tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]


@dataclass
class Sampled:
    """A response that receives tokens.

    step, row:  of its noise.
    forced:     (R,), tokens to take at ties.
    """

    response: Response
    step: int
    row: int
    forced: Tensor | None = None


class Sampler:
    """Sampling of responses. ``temperature`` 0: always the likeliest token."""

    def __init__(self, spec: Spec, tokenizer: Any, temperature: float) -> None:
        settings = spec.algorithm if isinstance(spec.algorithm, SampledSpec) else SampledSpec()
        self.seed, self.temperature, self.tokenizer = spec.seed, temperature, tokenizer
        self.ends, self.longest = ends_of(spec, tokenizer), spec.data.max_response_tokens
        self.top_p, self.top_k = settings.top_p, settings.top_k
        self.shortest, self.stop = settings.min_response_tokens, settings.stop
        self.keeps = spec.rollout.caches == "kept"

    def scores(self, logits: Tensor, position: int) -> Tensor:
        """Logits of the allowed tokens, -inf elsewhere: their softmax is the distribution that is sampled from."""
        scores = logits / (self.temperature or 1.0)  # a copy
        if position < self.shortest:
            scores[self.ends] = -math.inf
        order = scores.argsort(descending=True)[: self.top_k or None]
        likely = scores[order].softmax(0)
        likelier = likely.cumsum(0) - likely
        allowed = order if self.top_p == 1 else order[likelier < self.top_p]
        out = torch.full_like(scores, -math.inf)
        out[allowed] = scores[allowed]
        return out

    def perturbed(self, scores: Tensor, step: int, row: int, position: int) -> Tensor:
        """Scores of which the largest is sampled."""
        if self.temperature == 0:
            return scores
        return scores + gumbel_noise(self.seed, step, torch.tensor([row]), position, len(scores))[0]

    @torch.no_grad()
    def extend(self, policy: Policy, sampled: Sequence[Sampled], most: int | None = None) -> None:
        """Add tokens to responses until each has ended, has R of them, or ``most`` further ones."""
        lengths = [min(self.longest, len(s.response.tokens) + (most or self.longest)) for s in sampled]
        limits = list(zip(sampled, lengths, strict=True))
        while left := [s for s, length in limits if len(s.response.tokens) < length and not s.response.finished]:
            for each, own in zip(left, self.next_logits(policy, [s.response for s in left]), strict=True):
                self._add_token(each, own)

    def next_logits(self, policy: Policy, responses: Sequence[Response]) -> Sequence[Tensor]:
        """Logits (vocabulary,) after each of the responses so far."""
        texts = [response.prompt + response.text for response in responses]
        if not self.keeps:
            return [*policy.next_logits(texts)]
        return [policy.next_logits_with(each.cache, text) for each, text in zip(responses, texts, strict=True)]

    def _add_token(self, sampled: Sampled, logits: Tensor) -> None:
        response, position = sampled.response, len(sampled.response.tokens)
        scores = self.scores(logits, position)
        perturbed = self.perturbed(scores, sampled.step, sampled.row, position)
        token, margin = self._choose(perturbed, sampled.step, sampled.row, position, sampled.forced)
        response.tokens.append(token)
        response.margins.append(margin)
        response.rollout_logprobs.append(float(scores.log_softmax(0)[token]))
        response.finished = self.finishes(response.tokens)

    @staticmethod
    def _choose(perturbed: Tensor, step: int, row: int, position: int, forced: Tensor | None) -> tuple[int, float]:
        best, second = perturbed.topk(2).values.tolist()
        if forced is None:
            return int(perturbed.argmax()), best - second
        token = int(forced[position])
        behind = best - float(perturbed[token])
        if behind > TIE:
            raise NoTie(f"step {step}, row {row}, position {position}: token {token} is {behind:.2g} behind the best")
        return token, best - second

    def finishes(self, response: list[int]) -> bool:
        """Whether the last token is an end token, or completes a stop string after the shortest length."""
        if response[-1] in self.ends:
            return True
        if len(response) <= self.shortest:
            return False
        text, early = self.text(response), self.text(response[: self.shortest])
        return any(text.find(stop, max(0, len(early) - len(stop) + 1)) >= 0 for stop in self.stop)

    def text(self, response: list[int]) -> str:
        return text_of(self.tokenizer, response)


def describe_responses(
    spec: Spec, policy: Policy, tokenizer: Any, terms: Terms, play: Callable[..., Any] | None = None
) -> list[list[Response]]:
    """Responses to each evaluation prompt, if there are any: their length, and how many of their bigrams differ.

    ``play``: from a sampler to a player of episodes.
    """
    if spec.eval is None:
        return []
    own = spec.eval.temperature
    sampler = Sampler(spec, tokenizer, policy.temperature if own is None else own)
    examples = read_examples(spec, tokenizer, spec.eval.path)
    # greedy responses to a prompt are all the same
    samples = spec.eval.samples_per_prompt or (1 if own == 0 else spec.algorithm.samples_per_prompt)
    bigrams: list[tuple[int, int]] = []
    responses = [[Response.empty(example) for _ in range(samples)] for example in examples]
    whole = [response for group in responses for response in group]
    if play is None:
        sampler.extend(policy, [Sampled(response, EVAL_STEP, row) for row, response in enumerate(whole)])
    else:
        for row, response in enumerate(whole):
            play(sampler).play(policy, response, EVAL_STEP, row)
    for response in whole:
        terms.add("eval_response_length", [len(response.tokens)])
        places = pairwise(zip(response.positions, response.tokens, strict=True))
        bigrams += [(one, other) for (first, one), (second, other) in places if second == first + 1]
    terms.add("eval_distinct_2", [len(set(bigrams)) / max(len(bigrams), 1)])
    return responses
