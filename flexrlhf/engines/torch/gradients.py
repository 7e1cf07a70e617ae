"""Gradients of a mini-batch on this rank: reduce over ranks, global norm, scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.engines.optimizers import local
from flexrlhf.weights.shards import GRADIENT_BUCKET_BYTES, make_buckets


@dataclass(frozen=True)
class TrainedParameter:
    """One trained parameter of this rank and its gradient.

    parameter:   the float32 tensor that the optimizer updates.
    is_tp_shard: whether tensor-parallel ranks have different parts of it.
    is_partial:  whether the gradients of tensor-parallel ranks are summands of one gradient.
    """

    parameter: Tensor
    is_tp_shard: bool = False
    is_partial: bool = False

    @property
    def gradient(self) -> Tensor:
        """Part of the gradient on this rank; zeros where no row reached the parameter."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        return local(self.parameter.grad)


@dataclass(frozen=True)
class Gradients:
    """All gradients of one model on this rank.

    trained: the trained parameters, in the same order on all ranks.
    dp:      data-parallel group.
    tp:      tensor-parallel group.
    copies:  ranks of ``dp`` that store the same part of each parameter; FSDP2 has summed over the others already.
             None: this rank alone.
    """

    trained: Sequence[TrainedParameter]
    dp: RankGroup
    tp: RankGroup
    copies: RankGroup | None

    def reduce(self) -> Tensor:
        """Sum over all ranks that computed summands; return the global norm (), the same on all of them."""
        if self.copies is not None:
            self._sum_buckets([item.gradient for item in self.trained], self.copies)
        self._sum_buckets([item.gradient for item in self.trained if item.is_partial], self.tp)
        return self._norm()

    def scale(self, factor: Tensor | float) -> None:
        """Multiply all gradients, in place."""
        for item in self.trained:
            item.gradient.mul_(factor)

    def num_bytes(self) -> int:
        """Bytes of all gradients on this rank."""
        return sum(item.gradient.nbytes for item in self.trained)

    def clear(self) -> None:
        """Free all gradients."""
        for item in self.trained:
            item.parameter.grad = None

    @staticmethod
    def _sum_buckets(gradients: Sequence[Tensor], ranks: RankGroup) -> None:
        """Sum ``gradients`` over ``ranks``, in place, bucket by bucket."""
        if ranks.group is None:
            return
        for bucket in make_buckets([gradient.nbytes for gradient in gradients], GRADIENT_BUCKET_BYTES):
            members = [gradients[index] for index in bucket]
            total = ranks.sum(torch.cat([member.reshape(-1) for member in members]))
            for member, part in zip(members, total.split([member.numel() for member in members]), strict=True):
                member.copy_(part.view_as(member))

    def _norm(self) -> Tensor:
        """Global norm (), in which every element counts once, whatever ranks it is sharded over."""
        tp_shards = self._square_sum([item.gradient for item in self.trained if item.is_tp_shard])
        replicated = self._square_sum([item.gradient for item in self.trained if not item.is_tp_shard])
        total = self.tp.sum(tp_shards) + replicated
        copies = 1 if self.copies is None else len(self.copies.ranks)
        if copies < len(self.dp.ranks):
            # over all ranks, which so get the same bits
            total = self.dp.sum(total) / copies
        return total.sqrt().float()

    def _square_sum(self, gradients: Sequence[Tensor]) -> Tensor:
        """Sum of squares, float64 ()."""
        norms = [torch.linalg.vector_norm(gradient).double() ** 2 for gradient in gradients]
        like = self.trained[0].gradient
        return torch.stack(norms).sum() if norms else like.new_zeros((), dtype=torch.float64)
