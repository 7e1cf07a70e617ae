"""Columns of prompts and responses in the tokens of a model with another tokenizer, on the ranks of the responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexrlhf.data.examples import Example
from flexrlhf.data.retokenized import TextEncoder
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.objectives.context import Columns
from flexrlhf.operators.graph import Operator
from flexrlhf.placement.names import ModelName
from flexrlhf.plan.inputs import text_encoder
from flexrlhf.plan.plan import Plan
from flexrlhf.trainer.loaded_models import LoadedModel

Decode = Callable[..., str]


def make_text_encoders(plan: Plan, models: Mapping[ModelName, LoadedModel]) -> dict[str, TextEncoder]:
    """Return the encoder for each role that operators on ``models``, those of this rank, encode texts for."""
    here = {model.placed.role for model in models.values()}
    operators = [each for each in (*plan.graph.operators, *plan.graph.evaluation) if each.kind == "retokenize"]
    return {role: text_encoder(plan, role) for role in {each.function for each in operators if each.role in here}}


def retokenized(
    operator: Operator, batch: Batch, examples: Sequence[Example], encoder: TextEncoder, decode: Decode
) -> tuple[Columns, Moments]:
    """Return the columns that ``operator`` writes, left-padded, and the share of texts that were cut off.

    examples:  one for each row of ``batch``.
    decode:    tokens of the policy to text.
    """
    texts = [
        encoder.encode(example, _response(tokens, () if example.turns else prompt, decode), finished)
        for example, (prompt, tokens, finished) in zip(examples, _rows(batch), strict=True)
    ]
    ids = torch.zeros(len(texts), encoder.limit, dtype=torch.int32)
    mask = torch.zeros_like(ids, dtype=torch.uint8)
    for row, (tokens, _) in enumerate(texts):
        ids[row, -len(tokens) :] = torch.tensor(tokens, dtype=torch.int32)
        mask[row, -len(tokens) :] = 1
    columns = {"tokens": ids, "attention_mask": mask}
    device = batch.rows.device
    cut = torch.tensor([is_cut for _, is_cut in texts], dtype=torch.float32, device=device)
    written = [name.removesuffix(operator.suffix) for name in operator.writes]
    return {name: columns[name.partition(".")[0]].to(device) for name in written}, {"text_cut": moments(cut)}


def _rows(batch: Batch) -> list[tuple[list[int], list[int], bool]]:
    """Return the prompt, the response and whether that is finished, of each row."""
    tokens, text = batch["tokens"].cpu(), batch["attention_mask"].bool().cpu()
    response, width = batch["response_mask"].bool().cpu(), batch["tokens"].shape[1] - batch["response_mask"].shape[1]
    finished = batch["finished"].tolist()
    return [
        (_masked(tokens[row, :width], text[row, :width]), _masked(tokens[row, width:], response[row]), bool(done))
        for row, done in enumerate(finished)
    ]


def _masked(tokens: Tensor, mask: Tensor) -> list[int]:
    found: list[int] = tokens[mask].tolist()
    return found


def _response(tokens: Sequence[int], prompt: Sequence[int], decode: Decode) -> str:
    """Return a response as text, as it stands behind ``prompt``: some tokenizers drop a space in front of a text."""
    before = decode(prompt, skip_special_tokens=True)
    both: str = decode([*prompt, *tokens], skip_special_tokens=True)
    return both[len(before) :] if both.startswith(before) else decode(tokens, skip_special_tokens=True)
