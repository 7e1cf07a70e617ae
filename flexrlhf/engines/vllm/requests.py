"""Rows as requests to vLLM, and responses as columns."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flexrlhf.api import Lengths
from flexrlhf.api.engine import Batch, Sampling, completes_stop

RequestKey = tuple[Sampling, int]
"""Sampling and row number of a request: the same row of another step is another request."""


@dataclass(frozen=True)
class NewRequest:
    """Tokens that a request continues.

    prompt:   without padding.
    response: tokens of it so far.
    most:     new tokens at most.
    searched_from: response tokens that stop strings are not searched in.
    stops:    these strings.
    """

    prompt: list[int]
    response: list[int]
    most: int
    searched_from: int = 0
    stops: tuple[str, ...] = ()


@dataclass
class PartialResponse:
    """Response of one row, as far as vLLM has generated it.

    request:  that it responds to.
    sampling: of the request.
    tokens:   response tokens so far.
    logprobs: their log-probs; 0 of tokens that the request continues.
    finished: whether an end token or a stop string ended it.
    done:     whether it has ended, also at the largest length.
    """

    request: NewRequest
    sampling: Sampling
    tokens: list[int] = field(init=False)
    logprobs: list[float] = field(init=False)
    finished: bool = False
    done: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.request.response)
        self.logprobs = [0.0] * len(self.tokens)


def request_keys(batch: Batch, sampling: Sampling) -> list[RequestKey]:
    """Return the key of each row: its number in the noise, and the sampling with the step of that."""
    rows = batch.columns.get("noise_row", batch.rows).tolist()
    steps = batch.columns["noise_step"].tolist() if "noise_step" in batch.columns else [sampling.step] * len(rows)
    hashable = {step: replace(sampling, decode=None, step=step) for step in set(steps)}
    return [(hashable[step], row) for step, row in zip(steps, rows, strict=True)]


def new_requests(
    batch: Batch, sampling: Sampling, lengths: Lengths, submitted: Container[RequestKey]
) -> dict[RequestKey, NewRequest]:
    """Return the tokens of the rows of ``batch`` that are not in ``submitted``."""
    prompts = _without_padding(batch["prompts"], batch["prompt_mask"])
    responses: list[list[int]] = [[] for _ in prompts]
    if "responses" in batch.columns:
        responses = _without_padding(batch["responses"], batch["response_mask"])
    most = batch.new_tokens(lengths.response).tolist()
    requests = map(NewRequest, prompts, responses, most, batch.searched_from, batch.stops_of(sampling))
    keyed = zip(request_keys(batch, sampling), requests, strict=True)
    return {key: request for key, request in keyed if key not in submitted}


def _without_padding(tokens: Tensor, masks: Tensor) -> list[list[int]]:
    rows = zip(tokens.tolist(), masks.tolist(), strict=True)
    return [[token for token, real in zip(row, mask, strict=True) if real] for row, mask in rows]


def sampling_params(key: RequestKey, request: NewRequest, vocabulary: int, is_exact: bool) -> Any:
    """Return vLLM's SamplingParams of one request. Its end tokens are the run's, never the model directory's.

    is_exact: whether ``RolloutSampler`` adds the noise (engines/sampling.py) instead of vLLM.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    (sampling, row), first = key, len(request.response)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_tokens=min(request.most, max(0, sampling.min_tokens - first)),
        max_tokens=request.most,
        ignore_eos=True,
        # a tokenizer may have more tokens than the model
        stop_token_ids=[token for token in sampling.eos_token_ids if token < vocabulary],
        logprobs=0,
        detokenize=False,
        seed=None if is_exact else _seed(sampling.seed, sampling.step, row, *([first] if first else [])),
        extra_args={"seed": sampling.seed, "step": sampling.step, "row": row, "first": first, "ids": sampling.num_ids},
        # stop strings are searched after every token
        output_kind=RequestOutputKind.DELTA if request.stops else RequestOutputKind.FINAL_ONLY,
    )


def _seed(*parts: int) -> int:
    """Return a seed of one request, so that its samples do not depend on other rows in its batch."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def add_output(response: PartialResponse, output: Any) -> bool:
    """Add the tokens of vLLM's RequestOutput to ``response``.

    Returns whether the request must be aborted, because a stop string ended the response, which vLLM does not search.
    """
    completion, sampling = output.outputs[0], response.sampling
    for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
        response.tokens.append(token)
        response.logprobs.append(logprobs[token].logprob)
        response.finished = token in sampling.eos_token_ids
        request = response.request
        is_searched = request.stops and not response.finished
        if is_searched and completes_stop(response.tokens, sampling, request.searched_from, request.stops):
            response.finished = response.done = True
            return not output.finished
    response.done = output.finished
    return False


def response_columns(
    batch: Batch, responses: Iterable[PartialResponse], sampling: Sampling, lengths: Lengths
) -> dict[str, Tensor]:
    """Return the columns of ``Engine.generate``. ``responses``: one for each row of ``batch``, in order."""
    prompts, mask = batch["prompts"].cpu(), batch["prompt_mask"].cpu()
    tokens = torch.full((len(batch), lengths.response), sampling.pad_token_id, dtype=torch.int32)
    response_mask = torch.zeros(tokens.shape, dtype=torch.uint8)
    logprobs = torch.zeros(tokens.shape)
    finished = torch.zeros(len(batch), dtype=torch.uint8)
    for number, response in enumerate(responses):
        length = len(response.tokens)
        tokens[number, :length] = torch.tensor(response.tokens, dtype=torch.int32)
        logprobs[number, :length] = torch.tensor(response.logprobs)
        response_mask[number, :length] = 1
        finished[number] = response.finished
    columns = {
        "tokens": torch.cat([prompts.int(), tokens], 1),
        "attention_mask": torch.cat([mask, response_mask], 1),
        "response_mask": response_mask,
        "finished": finished,
        "rollout_logprobs": logprobs,
    }
    return {name: tensor.to(batch.rows.device) for name, tensor in columns.items()}
