"""Language head that returns log-probs and entropies of given tokens instead of logits.

``LanguageHead`` replaces a model's ``lm_head`` and has the same Parameter under the same name. It returns logits,
except inside ``scoring``: there it returns log-probs and entropies, which the model's own forward returns as its
``logits``. The head is thus always called by the model, and hooks on both work as with ``nn.Linear``.

``token_logprobs`` computes chunks of rows, without rows x length x vocabulary of memory. The logits of a chunk live
only until their row sums are taken; backward computes them again. So the peak is about two chunks in float32
(``chunk_elements`` each, or one row where a row is longer), whatever the vocabulary. The weight is saved for backward
as the very tensor that came in: ZeRO-3 and FSDP2 free its storage in between and gather it again, so a copy or a view
made in forward would keep what they freed.

``group``: the vocabulary is sharded over its ranks, each with as many consecutive rows of the weight, in the group's
order. Hidden states and targets (global ids) are the same on all of them; backward sums the gradient of the hidden
states over the group, so nothing in front of the head may sum it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear as linear_map

from flexrlhf.config.model_families import Families
from flexrlhf.engines.base import EntropyUse

if TYPE_CHECKING:
    from transformers import PreTrainedModel


CHUNK_ELEMENTS = 2**24


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    entropy: EntropyUse = "none",
    chunk_elements: int = CHUNK_ELEMENTS,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probs (N,) of ``targets`` and entropies (N,) under softmax(hidden @ weight.T / temperature).

    Both are float32 (float64 for a float64 model). Entropies are 0 in mode "none" and have a gradient only in mode
    "gradient".

    hidden:         (N, H), in the dtype of the model, which is also that of the logits.
    weight:         (V, H), in the same dtype.
    targets:        int64 (N,), ids of the vocabulary, also where the caller masks the result.
    chunk_elements: logits that are in memory at a time.
    group:          ranks that the vocabulary is sharded over; all of them call.
    """
    result: tuple[Tensor, Tensor] = TokenLogprobs.apply(
        hidden, weight, targets, temperature, entropy, chunk_elements, group
    )
    return result


class TokenLogprobs(torch.autograd.Function):
    """Autograd function behind ``token_logprobs``, with its arguments."""

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
        local_targets, is_local = _local_targets(targets, len(weight), group)
        sums = hidden.new_empty(4, len(hidden), dtype=_at_least_float32(hidden.dtype))
        for rows in _chunks(len(hidden), len(weight), chunk_elements):
            logits = _scaled_logits(hidden[rows], weight, temperature)
            sums[:, rows] = _row_sums(logits, local_targets[rows], entropy != "none")
            del logits  # frees it before the next chunk's are computed
        largest, total, weighted, picked = _merge_over_vocabulary(sums, is_local, group)
        log_total = total.log()
        entropies = torch.zeros_like(total) if entropy == "none" else log_total - weighted / total
        needs_gradient = entropy == "gradient"
        if not needs_gradient:
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(hidden, weight, targets, largest + log_total, entropies if needs_gradient else None)
        ctx.temperature, ctx.chunk_elements, ctx.group = temperature, chunk_elements, group
        return picked - log_total, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, logsumexp, entropies = ctx.saved_tensors
        local_targets, is_local = _local_targets(targets, len(weight), ctx.group)
        by_logprob, by_entropy = by_logprob / ctx.temperature, by_entropy / ctx.temperature
        by_target = by_logprob * is_local
        for_hidden, for_weight = (
            torch.zeros_like(tensor, dtype=_at_least_float32(tensor.dtype)) if needed else None
            for tensor, needed in zip((hidden, weight), ctx.needs_input_grad[:2], strict=True)
        )
        for rows in _chunks(len(hidden), len(weight), ctx.chunk_elements):
            logprobs = _scaled_logits(hidden[rows], weight, ctx.temperature).sub_(logsumexp[rows, None])
            if entropies is None:
                gradient = logprobs.exp_().mul_(-by_logprob[rows, None])
            else:
                gradient = _with_entropy(logprobs, by_logprob[rows], by_entropy[rows], entropies[rows])
            gradient.scatter_add_(1, local_targets[rows, None], by_target[rows, None])
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


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, float32 for all others."""
    return torch.promote_types(dtype, torch.float32)


def _chunks(num_rows: int, vocabulary: int, chunk_elements: int) -> Iterator[slice]:
    """Split the rows so that each slice has ``chunk_elements`` logits at most, but one row at least."""
    step = max(1, chunk_elements // vocabulary)
    for start in range(0, num_rows, step):
        yield slice(start, start + step)


def _local_targets(targets: Tensor, vocabulary: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the targets as ids in this rank's shard (0 for others), and bool (N,): which of them are in it."""
    if group is None:
        return targets, torch.ones_like(targets, dtype=torch.bool)
    local = targets - group.rank() * vocabulary
    is_local = (local >= 0) & (local < vocabulary)
    return local.where(is_local, 0), is_local


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """logits / T (rows, V), a new tensor."""
    return (hidden @ weight.t()).to(_at_least_float32(hidden.dtype)).div_(temperature)


def _row_sums(logits: Tensor, targets: Tensor, with_entropy: bool) -> Tensor:
    """Return (4, rows): largest logit, sum of e = exp(logit - largest), sum of e * (logit - largest), target's logit.

    Overwrites ``logits`` (rows, V).
    """
    picked = logits.gather(1, targets[:, None]).squeeze(1)
    largest = logits.amax(1)
    shifted = logits.sub_(largest[:, None])
    if not with_entropy:
        total = shifted.exp_().sum(1)
        return torch.stack([largest, total, torch.zeros_like(total), picked])
    exponentials = shifted.exp()
    return torch.stack([largest, exponentials.sum(1), exponentials.mul_(shifted).sum(1), picked])


def _merge_over_vocabulary(sums: Tensor, is_local: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
    """Merge the row sums (4, N) of all shards of the vocabulary; the fourth becomes target's logit less largest.

    Two collectives for all rows, instead of two for every chunk: shards are merged by their own largest logits.
    """
    largest, total, weighted, picked = sums
    if group is None:
        return largest, total, weighted, picked - largest
    overall = largest.clone()
    dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=group)
    shift = largest - overall
    parts = torch.stack([total, weighted + shift * total, (picked - overall) * is_local])
    parts[:2] *= shift.exp()
    dist.all_reduce(parts, group=group)
    return overall, *parts


def _with_entropy(logprobs: Tensor, by_logprob: Tensor, by_entropy: Tensor, entropy: Tensor) -> Tensor:
    """-p * (by_logprob + by_entropy * (log p + entropy)) (rows, V), in the memory of ``logprobs``."""
    probabilities = logprobs.exp()
    gradient = logprobs.add_(entropy[:, None]).mul_(by_entropy[:, None]).add_(by_logprob[:, None])
    return gradient.mul_(probabilities).neg_()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in the dtype of ``total``."""
    if left.dtype != total.dtype and left.is_cuda:
        # 16-bit products with float32 sums: tensor cores, and no float32 copies; only CUDA supports it
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


_ScoringArguments = tuple[Tensor, Tensor, float, EntropyUse]
"""Places, targets, temperature and entropy of ``LanguageHead.scoring``."""


class LanguageHead(nn.Module):
    """Head of a causal language model: hidden (n, l, H) to logits (n, l, V), or to scores inside ``scoring``.

    It must replace the model's own head before anything hooks into modules or parameters (FSDP2, DeepSpeed).

    weight:         the Parameter of the replaced head; with a group this rank's rows of it.
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
        self._scoring = places, targets, temperature, entropy
        try:
            yield
        finally:
            self._scoring = None

    def forward(self, hidden: Tensor) -> Tensor:
        if self._scoring is not None:
            return self._scores(hidden, self._scoring)
        if self.group is None:
            return linear_map(hidden, self.weight)
        return self._gathered_logits(hidden, self.weight, self.group)

    def _scores(self, hidden: Tensor, scoring: _ScoringArguments) -> Tensor:
        """Log-probs and entropies (k, 2)."""
        places, targets, temperature, entropy = scoring
        vectors = hidden.flatten(0, 1)[places]
        scores = token_logprobs(vectors, self.weight, targets, temperature, entropy, self.chunk_elements, self.group)
        # a new tensor: FSDP2 warns of a module that returns a view
        return torch.stack(list(scores), -1)

    @staticmethod
    @torch.no_grad()
    def _gathered_logits(hidden: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Logits (n, l, V) over the whole vocabulary, for generation: without a gradient."""
        local = linear_map(hidden, weight)
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local, group=group)
        return torch.cat(parts, -1)

    def extra_repr(self) -> str:
        return f"weight={tuple(self.weight.shape)}, chunk_elements={self.chunk_elements}"


def use_language_head(
    model: PreTrainedModel, chunk_elements: int = CHUNK_ELEMENTS, group: dist.ProcessGroup | None = None
) -> LanguageHead | None:
    """Replace ``model.lm_head`` by a ``LanguageHead`` and return it.

    Returns None and leaves the model as it is where that may change its output: for a bias, and for families whose
    forward may do more after the head, such as a soft cap or a scale.
    """
    linear = getattr(model, "lm_head", None)
    if model.config.model_type not in Families.KNOWN or not isinstance(linear, nn.Linear) or _has_bias(linear):
        return None
    head = LanguageHead(linear.weight, chunk_elements, group)
    head.train(linear.training)
    model.lm_head = head
    return head


def _has_bias(linear: nn.Linear) -> bool:
    # torch's annotation claims that there always is one
    return "bias" in dict(linear.named_parameters(recurse=False))
