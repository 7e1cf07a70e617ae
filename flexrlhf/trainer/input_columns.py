"""Columns of the data set: examples as padded tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexrlhf.data.examples import Example
from flexrlhf.operators.columns import Lengths


def input_columns(
    examples: Sequence[Example], rows: Sequence[int], samples_per_prompt: int, lengths: Lengths, pad_token_id: int
) -> dict[str, Tensor]:
    """Return the columns of ``rows``; a row has example row // samples_per_prompt and its response of the remainder.

    Prompts are left-padded to P, responses right-padded to R. Without responses there are the prompt columns alone.
    """
    chosen = [(examples[row // samples_per_prompt], row % samples_per_prompt) for row in rows]
    prompts = torch.full((len(rows), lengths.prompt), pad_token_id, dtype=torch.int32)
    prompt_mask = torch.zeros_like(prompts, dtype=torch.uint8)
    for i, (example, _) in enumerate(chosen):
        prompts[i, -len(example.prompt) :] = torch.tensor(example.prompt, dtype=torch.int32)
        prompt_mask[i, -len(example.prompt) :] = 1
    columns = {"prompts": prompts, "prompt_mask": prompt_mask}
    if examples and examples[0].responses:
        columns |= _with_responses(columns, chosen, lengths, pad_token_id)
    return columns


def _with_responses(
    prompts: dict[str, Tensor], chosen: Sequence[tuple[Example, int]], lengths: Lengths, pad_token_id: int
) -> dict[str, Tensor]:
    """Return the columns of prompts with responses, each given as its example and its number in that."""
    padded = torch.full((len(chosen), lengths.response), pad_token_id, dtype=torch.int32)
    mask = torch.zeros_like(padded, dtype=torch.uint8)
    trained = torch.zeros_like(mask)
    for i, (example, number) in enumerate(chosen):
        tokens = example.responses[number]
        padded[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        mask[i, : len(tokens)] = 1
        trained[i, : len(tokens)] = torch.tensor(example.is_trained(number), dtype=torch.uint8)
    return {
        "tokens": torch.cat([prompts["prompts"], padded], 1),
        "attention_mask": torch.cat([prompts["prompt_mask"], mask], 1),
        "response_mask": mask,
        "loss_mask": trained,
        "finished": torch.tensor([example.finished[number] for example, number in chosen], dtype=torch.uint8),
    }
