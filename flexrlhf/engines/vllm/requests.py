"""Rows as requests to vLLM: what is new, what has come back, and the columns made of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flexrlhf.engines.base import Batch, Sampling
from flexrlhf.engines.decoding import completes_stop
from flexrlhf.operators.columns import Lengths

RequestKey = tuple[Sampling, int]
"""How a row is drawn, and its number: a row of another step is another request."""


@dataclass
class PartialResponse:
    """What has come back of one row. ``finished``: by an end token or a stop string; ``done``: anyhow."""

    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False
    done: bool = False


@dataclass(frozen=True)
class NewRequest:
    """One row that is not with vLLM yet."""

    key: RequestKey
    prompt: list[int]


def request_keys(batch: Batch, sampling: Sampling) -> list[RequestKey]:
    drawn = replace(sampling, decode=None)
    return [(drawn, row) for row in batch.rows.tolist()]


def new_requests(batch: Batch, sampling: Sampling, known: Mapping[RequestKey, Any]) -> list[NewRequest]:
    """The rows of ``batch`` that are not ``known``, their prompts without padding."""
    prompts, masks = batch["prompts"].tolist(), batch["prompt_mask"].tolist()
    rows = zip(request_keys(batch, sampling), prompts, masks, strict=True)
    return [
        NewRequest(key, [token for token, real in zip(prompt, mask, strict=True) if real])
        for key, prompt, mask in rows
        if key not in known
    ]


def sampling_params(key: RequestKey, lengths: Lengths, vocabulary: int, is_exact: bool) -> Any:
    """The settings of one request. Its end tokens are those of the run alone, never of the model's directory."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling, row = key
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_tokens=sampling.min_tokens,
        max_tokens=lengths.response,
        ignore_eos=True,
        # a tokenizer may have more tokens than the model
        stop_token_ids=[token for token in sampling.eos_token_ids if token < vocabulary],
        logprobs=0,
        detokenize=False,
        seed=None if is_exact else _seed(sampling.seed, sampling.step, row),
        extra_args={"seed": sampling.seed, "step": sampling.step, "row": row},
        # texts that end an answer are looked for after every token
        output_kind=RequestOutputKind.DELTA if sampling.stop else RequestOutputKind.FINAL_ONLY,
    )


def _seed(*parts: int) -> int:
    """Of one request, so that what is drawn for a row does not depend on the rows beside it."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def add_output(answer: PartialResponse, output: Any) -> bool:
    """Add what vLLM tells of a request. True: a stop string ended it, which vLLM does not know."""
    told, sampling = output.outputs[0], answer.sampling
    for token, logprobs in zip(told.token_ids, told.logprobs, strict=True):
        answer.tokens.append(token)
        answer.logprobs.append(logprobs[token].logprob)
        answer.finished = token in sampling.eos_token_ids
        if sampling.stop and not answer.finished and completes_stop(answer.tokens, sampling):
            answer.finished = answer.done = True
            return not output.finished
    answer.done = output.finished
    return False


def response_columns(
    batch: Batch, answers: Iterable[PartialResponse], sampling: Sampling, lengths: Lengths
) -> dict[str, Tensor]:
    """The columns of the engine contract, of one answer a row."""
    prompts, mask = batch["prompts"].cpu(), batch["prompt_mask"].cpu()
    tokens = torch.full((len(batch), lengths.response), sampling.pad_token_id, dtype=torch.int32)
    response_mask = torch.zeros(tokens.shape, dtype=torch.uint8)
    logprobs = torch.zeros(tokens.shape)
    finished = torch.zeros(len(batch), dtype=torch.uint8)
    for number, answer in enumerate(answers):
        length = len(answer.tokens)
        tokens[number, :length] = torch.tensor(answer.tokens, dtype=torch.int32)
        logprobs[number, :length] = torch.tensor(answer.logprobs)
        response_mask[number, :length] = 1
        finished[number] = answer.finished
    made = {
        "tokens": torch.cat([prompts.int(), tokens], 1),
        "attention_mask": torch.cat([mask, response_mask], 1),
        "response_mask": response_mask,
        "finished": finished,
        "rollout_logprobs": logprobs,
    }
    return {name: tensor.to(batch.rows.device) for name, tensor in made.items()}
