"""Log-probs and entropy of tokens under a causal language model, without rows x length x vocabulary of memory.

``token_logprobs`` walks over chunks of rows. A chunk's logits live only while its row sums are taken; backward computes
them again. So the peak is about two chunks in float32 (``chunk_elements`` each, or one row where a row is longer),
whatever the vocabulary. The weight is saved for backward as the very tensor that came in: ZeRO-3 and FSDP2 free its
storage in between and gather it anew, so a copy or a view made in forward would keep what they freed.

``LanguageHead`` takes the place of a model's ``lm_head`` and holds the same Parameter under the same name. It gives
logits, except inside ``scoring``: there it gives log-probs and entropies, which the model's own forward hands on as its
``logits``. The head is thus always called by the model, and hooks on both work as with ``nn.Linear``.

``group``: the vocabulary is split over its ranks; each holds as many consecutive rows of the weight, in the group's
order. Hidden states and targets (global ids) are the same on all of them; backward sums the gradient of the hidden
states over the group, so nothing in front of the head may sum it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear as linear_map

from flexrlhf.engines.base import EntropyUse

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_ELEMENTS = 2**24
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose forward applies nothing behind the head: no soft cap, no scale, no bias."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    entropy: EntropyUse = "none",
    chunk_elements: int = CHUNK_ELEMENTS,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs (N,) of ``targets`` and entropies (N,) of softmax(hidden @ weight.T / temperature).

    hidden (N, H) and weight (V, H) in the model's type, which is also the type of the logits; all behind them is
    float32 (float64 for a float64 model). targets int64 (N,): every one an id of the vocabulary, also where the
    caller masks the result. Entropies are 0 in mode "none" and carry a gradient in mode "gradient" alone.
    """
    result: tuple[Tensor, Tensor] = TokenLogprobs.apply(
        hidden, weight, targets, temperature, entropy, chunk_elements, group
    )
    return result


class TokenLogprobs(torch.autograd.Function):
    """The function behind ``token_logprobs``; arguments as there."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        entropy: EntropyUse,
        chunk_elements: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        places, mine = _places(targets, len(weight), group)
        sums = hidden.new_empty(4, len(hidden), dtype=_wide(hidden.dtype))
        for rows in _chunks(len(hidden), len(weight), chunk_elements):
            logits = _scaled_logits(hidden[rows], weight, temperature)
            sums[:, rows] = _row_sums(logits, places[rows], entropy != "none")
            del logits  # or it would stand beside the next chunk's
        largest, total, weighted, picked = _over_the_vocabulary(sums, mine, group)
        log_total = total.log()
        spread = torch.zeros_like(total) if entropy == "none" else log_total - weighted / total
        keep = entropy == "gradient"
        if not keep:
            ctx.mark_non_differentiable(spread)
        ctx.save_for_backward(hidden, weight, targets, largest + log_total, spread if keep else None)
        ctx.temperature, ctx.chunk_elements, ctx.group = temperature, chunk_elements, group
        return picked - log_total, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, logsumexp, spread = ctx.saved_tensors
        places, mine = _places(targets, len(weight), ctx.group)
        by_logprob, by_entropy = by_logprob / ctx.temperature, by_entropy / ctx.temperature
        by_target = by_logprob * mine
        for_hidden, for_weight = (
            torch.zeros_like(tensor, dtype=_wide(tensor.dtype)) if needed else None
            for tensor, needed in zip((hidden, weight), ctx.needs_input_grad[:2], strict=True)
        )
        for rows in _chunks(len(hidden), len(weight), ctx.chunk_elements):
            logprobs = _scaled_logits(hidden[rows], weight, ctx.temperature).sub_(logsumexp[rows, None])
            if spread is None:
                gradient = logprobs.exp_().mul_(-by_logprob[rows, None])
            else:
                gradient = _with_entropy(logprobs, by_logprob[rows], by_entropy[rows], spread[rows])
            gradient.scatter_add_(1, places[rows, None], by_target[rows, None])
            gradient = gradient.to(hidden.dtype)
            del logprobs  # where the model is 16-bit this frees the float32 chunk before the products
            if for_hidden is not None:
                for_hidden[rows] = (gradient @ weight).to(for_hidden.dtype)
            if for_weight is not None:
                _add_product(for_weight, gradient.t(), hidden[rows])
            del gradient
        if for_hidden is not None:
            if ctx.group is not None:
                dist.all_reduce(for_hidden, group=ctx.group)
            for_hidden = for_hidden.to(hidden.dtype)
        if for_weight is not None:
            for_weight = for_weight.to(weight.dtype)
        return for_hidden, for_weight, None, None, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """float32, but float64 stays."""
    return torch.promote_types(dtype, torch.float32)


def _chunks(num_rows: int, vocabulary: int, chunk_elements: int) -> Iterator[slice]:
    step = max(1, chunk_elements // vocabulary)
    for start in range(0, num_rows, step):
        yield slice(start, start + step)


def _places(targets: Tensor, vocabulary: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Where the targets stand in this rank's part of the vocabulary, and which of them do (0 for the others)."""
    if group is None:
        return targets, torch.ones_like(targets, dtype=torch.bool)
    local = targets - dist.get_rank(group) * vocabulary
    mine = (local >= 0) & (local < vocabulary)
    return local.where(mine, 0), mine


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """logits / T (rows, V), a fresh tensor."""
    return (hidden @ weight.t()).to(_wide(hidden.dtype)).div_(temperature)


def _row_sums(logits: Tensor, places: Tensor, with_entropy: bool) -> Tensor:
    """(4, rows): largest logit, sum of e = exp(logit - largest), sum of e * (logit - largest), logit at ``places``.

    ``logits`` (rows, V) is overwritten.
    """
    picked = logits.gather(1, places[:, None]).squeeze(1)
    largest = logits.amax(1)
    shifted = logits.sub_(largest[:, None])
    if not with_entropy:
        total = shifted.exp_().sum(1)
        return torch.stack([largest, total, torch.zeros_like(total), picked])
    exponentials = shifted.exp()
    return torch.stack([largest, exponentials.sum(1), exponentials.mul_(shifted).sum(1), picked])


def _over_the_vocabulary(sums: Tensor, mine: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
    """The row sums (4, N) of all ranks' parts as those of the whole vocabulary; the picked logit less the largest.

    Two collectives for all rows, not for every chunk: parts are merged by their own largest logits.
    """
    largest, total, weighted, picked = sums
    if group is None:
        return largest, total, weighted, picked - largest
    overall = largest.clone()
    dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=group)
    shift = largest - overall
    parts = torch.stack([total, weighted + shift * total, (picked - overall) * mine])
    parts[:2] *= shift.exp()
    dist.all_reduce(parts, group=group)
    return overall, *parts


def _with_entropy(logprobs: Tensor, by_logprob: Tensor, by_entropy: Tensor, entropy: Tensor) -> Tensor:
    """-p * (by_logprob + by_entropy * (log p + entropy)) (rows, V) in the place of ``logprobs``."""
    probabilities = logprobs.exp()
    gradient = logprobs.add_(entropy[:, None]).mul_(by_entropy[:, None]).add_(by_logprob[:, None])
    return gradient.mul_(probabilities).neg_()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in the type of ``total``."""
    if left.dtype != total.dtype and left.is_cuda:
        # 16-bit products with float32 sums: tensor cores, and no float32 copies. CUDA alone has it
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _has_bias(linear: nn.Linear) -> bool:
    # torch's annotation says that there always is one
    return "bias" in dict(linear.named_parameters(recurse=False))


@dataclass(frozen=True)
class _Request:
    """What ``scoring`` asked for; ``targets`` int64 (n, w)."""

    targets: Tensor
    temperature: float
    entropy: EntropyUse


class LanguageHead(nn.Module):
    """The head of a causal language model: hidden (n, l, H) to logits (n, l, V), or to scores inside ``scoring``.

    Put it in before anything that hooks into modules or parameters (FSDP2, DeepSpeed). With a group the weight is this
    rank's part, a plain tensor or a DTensor split along dimension 0.
    """

    weight: Tensor

    def __init__(
        self,
        linear: nn.Linear,
        chunk_elements: int = CHUNK_ELEMENTS,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        assert not _has_bias(linear), "the head has a bias"
        self.weight = linear.weight
        self.chunk_elements = chunk_elements
        self.group = group
        self._request: _Request | None = None
        self.train(linear.training)

    @contextmanager
    def scoring(self, targets: Tensor, temperature: float, entropy: EntropyUse = "none") -> Iterator[None]:
        """Inside, ``forward`` gives for hidden (n, w + 1, H) float32 (n, w, 2): log-probs of ``targets``, entropies.

        Position i predicts ``targets[:, i]``; the last position predicts nothing and is dropped. Call the model with
        ``logits_to_keep=w + 1`` and read ``logits``.
        """
        assert self._request is None, "scoring inside scoring"
        self._request = _Request(targets, temperature, entropy)
        try:
            yield
        finally:
            self._request = None

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self._local_weight()
        if self._request is not None:
            return self._scores(hidden, weight, self._request)
        if self.group is None:
            return linear_map(hidden, weight)
        return self._gathered_logits(hidden, weight, self.group)

    def _local_weight(self) -> Tensor:
        if not isinstance(self.weight, DTensor):
            return self.weight
        assert self.group is not None, "the head's weight is split over ranks, and the head has no group"
        local: Tensor = self.weight.to_local()
        return local

    def _scores(self, hidden: Tensor, weight: Tensor, request: _Request) -> Tensor:
        n, w = request.targets.shape
        assert hidden.shape[:2] == (n, w + 1), f"hidden {tuple(hidden.shape)} for targets {(n, w)}"
        scores = token_logprobs(
            hidden[:, :-1].reshape(n * w, hidden.shape[2]),
            weight,
            request.targets.reshape(-1),
            request.temperature,
            request.entropy,
            self.chunk_elements,
            self.group,
        )
        # made whole: FSDP2 warns of a module that returns a view
        return torch.stack([each.view(n, w) for each in scores], -1)

    @staticmethod
    @torch.no_grad()
    def _gathered_logits(hidden: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Logits over the whole vocabulary, for generation: without a gradient."""
        local = linear_map(hidden, weight)
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local, group=group)
        return torch.cat(parts, -1)

    def extra_repr(self) -> str:
        return f"weight={tuple(self.weight.shape)}, chunk_elements={self.chunk_elements}"


def use_language_head(
    model: PreTrainedModel, chunk_elements: int = CHUNK_ELEMENTS, group: dist.ProcessGroup | None = None
) -> LanguageHead | None:
    """Put a ``LanguageHead`` in the place of ``model.lm_head``; None, and the model as it was, where that is unsafe."""
    linear = getattr(model, "lm_head", None)
    if model.config.model_type not in FAMILIES or not isinstance(linear, nn.Linear) or _has_bias(linear):
        return None
    head = LanguageHead(linear, chunk_elements, group)
    model.lm_head = head
    return head
