"""Language head that returns log-probs and entropies of given tokens instead of logits.

``LanguageHead`` replaces a model's ``lm_head`` and has the same Parameter under the same name. It returns logits,
except inside ``scoring``: there it returns log-probs and entropies, which the model's own forward returns as its
``logits``. The head is thus always called by the model, and hooks on both work as with ``nn.Linear``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear as linear_map

from flexrlhf.engines.base import EntropyUse
from flexrlhf.engines.token_logprobs import CHUNK_ELEMENTS, token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose forward applies nothing after the head: no soft cap, no scale, no bias."""


@dataclass(frozen=True)
class _ScoringArguments:
    """Arguments of ``LanguageHead.scoring``."""

    places: Tensor
    targets: Tensor
    temperature: float
    entropy: EntropyUse


class LanguageHead(nn.Module):
    """Head of a causal language model: hidden (n, l, H) to logits (n, l, V), or to scores inside ``scoring``.

    It must replace the model's own head before anything hooks into modules or parameters (FSDP2, DeepSpeed).

    weight:         the Parameter of the replaced head; with a group this rank's shard of it, a plain tensor or a
                    DTensor sharded along dimension 0.
    chunk_elements: logits that ``scoring`` has in memory at a time.
    group:          ranks that the vocabulary is sharded over.
    """

    weight: Tensor

    def __init__(
        self,
        weight: Tensor,
        chunk_elements: int = CHUNK_ELEMENTS,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.chunk_elements = chunk_elements
        self.group = group
        self._scoring: _ScoringArguments | None = None

    @contextmanager
    def scoring(
        self, places: Tensor, targets: Tensor, temperature: float, entropy: EntropyUse = "none"
    ) -> Iterator[None]:
        """Make ``forward`` map hidden (m, W, H) to float32 (k, 2): log-probs of ``targets`` (k,), and entropies.

        ``places``: int64 (k,), positions that predict the targets, in the flattened m x W. Call the model for all
        logits, of which no other is computed, and read ``logits``.
        """
        assert self._scoring is None, "scoring inside scoring"
        self._scoring = _ScoringArguments(places, targets, temperature, entropy)
        try:
            yield
        finally:
            self._scoring = None

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self._local_weight()
        if self._scoring is not None:
            return self._scores(hidden, weight, self._scoring)
        if self.group is None:
            return linear_map(hidden, weight)
        return self._gathered_logits(hidden, weight, self.group)

    def _local_weight(self) -> Tensor:
        if not isinstance(self.weight, DTensor):
            return self.weight
        assert self.group is not None, "the head's weight is sharded over ranks, and the head has no group"
        local: Tensor = self.weight.to_local()
        return local

    def _scores(self, hidden: Tensor, weight: Tensor, scoring: _ScoringArguments) -> Tensor:
        """Log-probs and entropies (k, 2)."""
        scores = token_logprobs(
            hidden.flatten(0, 1)[scoring.places],
            weight,
            scoring.targets,
            scoring.temperature,
            scoring.entropy,
            self.chunk_elements,
            self.group,
        )
        # a new tensor: FSDP2 warns of a module that returns a view
        return torch.stack(list(scores), -1)

    @staticmethod
    @torch.no_grad()
    def _gathered_logits(hidden: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Logits (n, l, V) over the whole vocabulary, for generation: without a gradient."""
        local = linear_map(hidden, weight)
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local, group=group)
        return torch.cat(parts, -1)

    def extra_repr(self) -> str:
        return f"weight={tuple(self.weight.shape)}, chunk_elements={self.chunk_elements}"


def use_language_head(
    model: PreTrainedModel, chunk_elements: int = CHUNK_ELEMENTS, group: dist.ProcessGroup | None = None
) -> LanguageHead | None:
    """Replace ``model.lm_head`` by a ``LanguageHead`` and return it.

    Returns None and leaves the model as it is where that would change its output: other families, or a bias.
    """
    linear = getattr(model, "lm_head", None)
    if model.config.model_type not in FAMILIES or not isinstance(linear, nn.Linear) or _has_bias(linear):
        return None
    head = LanguageHead(linear.weight, chunk_elements, group)
    head.train(linear.training)
    model.lm_head = head
    return head


def _has_bias(linear: nn.Linear) -> bool:
    # torch's annotation claims that there always is one
    return "bias" in dict(linear.named_parameters(recurse=False))
