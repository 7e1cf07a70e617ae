"""Scalar head next to the language head of a causal model: a policy and its critic on one trunk.

The model keeps its class and so its parameter names; the head is one more module, ``score``. Files contain it as
``score.weight``, which transformers ignores where it loads them as a causal model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from flexrlhf.engines.weight_files import TORCH_TYPES, PartReader
from flexrlhf.weights.model_files import ADAPTER_WEIGHTS, SAVED_HEAD, SCALAR_HEAD, has_adapters, stored_tensors
from flexrlhf.weights.shards import whole


@dataclass
class HeadsOutput(CausalLMOutputWithPast):
    """Output of a model with both heads. ``scores``: float32 (n, kept). Heads that were not requested are None."""

    scores: Tensor | None = None


def add_value_head(model: PreTrainedModel, path: str | None) -> None:
    """Add a scalar head to the causal ``model``: that of the files in ``path``, else a random one as transformers'."""
    # without torch's own initialisation, which would be overwritten
    head = nn.Linear(model.config.hidden_size, 1, bias=False, device="meta").to_empty(device="cpu")
    saved = None if path is None else saved_value_head(path)
    with torch.no_grad():
        if saved is None:
            head.weight.normal_(0.0, model.config.initializer_range)
        else:
            head.weight.copy_(saved)
    model.score = head
    model.forward = MethodType(_both_heads, model)


def saved_value_head(directory: str) -> Tensor | None:
    """Return the scalar head (1, hidden) in the safetensors files of a model; None where they have none."""
    if has_adapters(directory):
        with safe_open(Path(directory) / ADAPTER_WEIGHTS, "pt") as tensors:
            found = tensors.keys()  # not a mapping, it has only keys()
            return next((tensors.get_tensor(name) for name in (SCALAR_HEAD, SAVED_HEAD) if name in found), None)
    stored = stored_tensors("model", Path(directory)).get(SCALAR_HEAD)
    if stored is None:
        return None
    weight = torch.empty(stored.shape, dtype=TORCH_TYPES[stored.dtype])
    PartReader().read(stored, whole(stored.shape), weight)
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
        past_key_values=out.past_key_values,
    )
