"""Scalar heads: one next to the language head of a causal model, and the token at which a score is read.

With both heads a policy and its critic are on one trunk. The model keeps its class and so its parameter names; the head
is one more module, ``score``. Files contain it as ``score.weight``, which transformers ignores where it loads them as a
causal model.

A sequence is scored where the library that trained the model reads it. transformers and TRL read the head at the last
token that is not ``pad_token_id`` of the model's config, so before a final end token where both are the same token.
OpenRLHF, and libraries with a head of another name, read it at the last token of the sequence, which they find by the
mask. A sequence is all tokens of the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from flexrlhf.engines.weight_files import TORCH_TYPES, PartReader
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.shards import Part
from flexrlhf.weights.stored_model import StoredModel


@dataclass
class HeadsOutput(CausalLMOutputWithPast):
    """Output of a model with both heads. ``scores``: float32 (n, kept). Heads that were not requested are None."""

    scores: Tensor | None = None


def add_value_head(model: PreTrainedModel, path: str | None) -> None:
    """Add a scalar head to the causal ``model``: that of the files in ``path``, else a random one as transformers'."""
    # without torch's own initialisation, which would be overwritten
    head = nn.Linear(model.config.hidden_size, 1, bias=False, device="meta").to_empty(device="cpu")
    saved = saved_value_head(path)
    with torch.no_grad():
        if saved is None:
            head.weight.normal_(0.0, model.config.initializer_range)
        else:
            head.weight.copy_(saved)
    model.score = head
    model.forward = MethodType(_both_heads, model)


def saved_value_head(directory: str | None) -> Tensor | None:
    """Return the scalar head (1, hidden) in the safetensors files of a model; None where they have none."""
    files = StoredModel(directory)
    stored = (files.adapter_tensors if files.has_adapters else files.tensors).get(ParameterName.SCALAR_HEAD)
    if stored is None:
        return None
    weight = torch.empty(stored.shape, dtype=TORCH_TYPES[stored.dtype])
    PartReader().read(stored, Part.whole(stored.shape), weight)
    return weight


def _both_heads(
    self: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    logits_to_keep: int = 0,
    with_logits: bool = True,
    with_scores: bool = False,
    **arguments: Any,
) -> HeadsOutput:
    """Forward of a causal model with two heads, for families whose language head only multiplies.

    Both heads are applied to the last ``logits_to_keep`` positions; 0: to all.
    """
    base = getattr(self, self.base_model_prefix)
    out = base(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **arguments)
    hidden = out.last_hidden_state
    # of all positions: the kernel for a slice would depend on whether the weight is trained
    scores = self.score(hidden).squeeze(-1)[:, -logits_to_keep:] if with_scores else None
    return HeadsOutput(
        logits=self.lm_head(hidden[:, -logits_to_keep:]) if with_logits else None,
        # a new tensor: FSDP2 warns of a module that returns a view
        scores=None if scores is None else scores.float().clone(),
    )


OPENRLHF_KEYS = ("normalize_reward", "value_head_prefix")
"""Settings that OpenRLHF writes into the config of a reward model."""


@dataclass(frozen=True)
class ScoreRule:
    """Rule by which the score of a sequence follows from the outputs of the head at its tokens.

    padding:  token that a score is never read at; None: it is read at the last token, whatever that is.
    mean:     subtracted from it.
    std:      what it is then divided by.
    """

    padding: int | None = None
    mean: float = 0.0
    std: float = 1.0

    def scores(self, outputs: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the scores (n,) of sequences. ``outputs``: of the head (n, w); ``tokens`` and ``mask``: (n, w).

        A sequence of nothing but padding is read at its first token, as in transformers.
        """
        at = self._places(tokens, mask.bool())
        scores = outputs.gather(1, at[:, None]).squeeze(1)
        return scores if (self.mean, self.std) == (0.0, 1.0) else (scores - self.mean) / self.std

    def _places(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the place of the token that is read, int64 (n,)."""
        counted = mask if self.padding is None else mask & (tokens != self.padding)
        counted = torch.where(counted.any(1, keepdim=True), counted, mask & (mask.cumsum(1) == 1))
        return mask.shape[1] - 1 - counted.flip(1).int().argmax(1)


def score_rule(config: Any, is_trained: bool) -> ScoreRule:
    """Return the rule of a model with this Hugging Face config, after ``settle_padding``.

    OpenRLHF normalises the scores of a finished reward model by the mean and deviation in its config.
    """
    padding = config.get_text_config().pad_token_id
    if is_trained or not getattr(config, "normalize_reward", False):
        return ScoreRule(padding)
    return ScoreRule(padding, float(getattr(config, "mean", 0.0)), float(getattr(config, "std", 1.0)))


def settle_padding(config: Any, reads_last: bool, is_trained: bool, pad_token_id: int | None) -> None:
    """Set ``pad_token_id`` of a config such that transformers reads the scores of the saved model as they are here.

    reads_last:    whether the model's library reads the last token of a sequence.
    is_trained:    whether the model is trained, so saved.
    pad_token_id:  of the run, for a trained model without one, as TRL sets it.
    """
    text = config.get_text_config()
    if reads_last:
        ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
        if not is_trained or text.pad_token_id in ends:
            text.pad_token_id = None
    elif is_trained and text.pad_token_id is None:
        text.pad_token_id = pad_token_id
    if is_trained and is_of_openrlhf(config):
        config.normalize_reward, config.value_head_prefix = False, "score"


def is_of_openrlhf(config: Any) -> bool:
    """Whether OpenRLHF has written ``config``, whose classes read the last token of a sequence."""
    return any(hasattr(config, key) for key in OPENRLHF_KEYS)
