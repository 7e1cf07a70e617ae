"""A scalar head beside the language head of a causal model: a policy and its critic on one trunk.

The model keeps its class and so its names; the head is one more module, ``score``, and files hold it as
``score.weight``, which transformers passes over where it reads them as a causal model.
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

from flexrlhf.weights.shapes import SCALAR_HEAD


@dataclass
class HeadsOutput(CausalLMOutputWithPast):
    """``logits`` as of a causal model; ``scores`` (n, kept) float32. What nobody asked for is None."""

    scores: Tensor | None = None


def add_value_head(model: PreTrainedModel, path: str | None) -> None:
    """Give the causal ``model`` a scalar head: that of the files in ``path``, else drawn as transformers draws one."""
    # made without numbers: torch's own draw would be thrown away
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
    """The scalar head (1, hidden) that the files of a model hold."""
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            if SCALAR_HEAD in tensors.keys():  # noqa: SIM118 - no mapping, it has nothing but keys()
                found: Tensor = tensors.get_tensor(SCALAR_HEAD)
                return found
    return None


def _both_heads(
    self: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    logits_to_keep: int = 0,
    with_logits: bool = True,
    with_scores: bool = False,
    **further: Any,
) -> HeadsOutput:
    """A causal model's forward with a second head, for families whose first one does nothing but multiply.

    Both are applied to the last ``logits_to_keep`` positions, 0: to all.
    """
    base = getattr(self, self.base_model_prefix)
    out = base(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **further)
    hidden = out.last_hidden_state
    # of all positions: a slice is multiplied in another way where the weight is trained than where it is not
    scores = self.score(hidden).squeeze(-1)[:, -logits_to_keep:] if with_scores else None
    return HeadsOutput(
        logits=self.lm_head(hidden[:, -logits_to_keep:]) if with_logits else None,
        # made whole: FSDP2 warns of a module that returns a view
        scores=None if scores is None else scores.float().clone(),
        past_key_values=out.past_key_values,
    )
