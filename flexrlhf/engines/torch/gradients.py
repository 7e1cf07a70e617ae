"""From the gradients of micro-batches to those of the mini-batch: sum over replicas, global norm, clip, loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.engines.optimizers import local
from flexrlhf.weights.reshard import make_buckets

BUCKET_BYTES = 25_000_000
"""Gradients that travel together; DistributedDataParallel's default."""


@dataclass(frozen=True)
class TrainedParameter:
    """One trained parameter and how its gradient lies. ``parameter``: the float32 one that the optimizer updates.

    ``is_tp_shard``: tensor-parallel ranks hold different parts. ``is_partial``: they hold summands of one gradient.
    """

    parameter: Tensor
    is_tp_shard: bool = False
    is_partial: bool = False

    @property
    def gradient(self) -> Tensor:
        """What this rank holds of it; zeros where no row reached the parameter."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        return local(self.parameter.grad)


@dataclass(frozen=True)
class Gradients:
    """All gradients of one model on this rank. ``is_sharded``: FSDP2 has summed them over the replicas already."""

    trained: Sequence[TrainedParameter]
    dp: RankGroup
    tp: RankGroup
    is_sharded: bool

    def reduce(self) -> Tensor:
        """Sum over all ranks that computed parts of it; return the global norm, the same on all of them."""
        if not self.is_sharded:
            self._sum_buckets([item.gradient for item in self.trained], self.dp)
        self._sum_buckets([item.gradient for item in self.trained if item.is_partial], self.tp)
        return self._norm()

    def scale(self, factor: Tensor | float) -> None:
        for item in self.trained:
            item.gradient.mul_(factor)

    def num_bytes(self) -> int:
        return sum(item.gradient.nbytes for item in self.trained)

    def clear(self) -> None:
        for item in self.trained:
            item.parameter.grad = None

    @staticmethod
    def _sum_buckets(gradients: Sequence[Tensor], ranks: RankGroup) -> None:
        if ranks.group is None:
            return
        for bucket in make_buckets([gradient.nbytes for gradient in gradients], BUCKET_BYTES):
            members = [gradients[index] for index in bucket]
            total = ranks.sum(torch.cat([member.reshape(-1) for member in members]))
            for member, part in zip(members, total.split([member.numel() for member in members]), strict=True):
                member.copy_(part.view_as(member))

    def _norm(self) -> Tensor:
        """Every number counts once: cut ones over tensor-parallel ranks, sharded ones over replicas."""
        cut = self._square_sum([item.gradient for item in self.trained if item.is_tp_shard])
        whole = self._square_sum([item.gradient for item in self.trained if not item.is_tp_shard])
        total = self.tp.sum(cut) + whole
        return (self.dp.sum(total) if self.is_sharded else total).sqrt().float()

    def _square_sum(self, gradients: Sequence[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(gradient).double() ** 2 for gradient in gradients]
        like = self.trained[0].gradient
        return torch.stack(norms).sum() if norms else like.new_zeros((), dtype=torch.float64)


class LossScale:
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018): halve on overflow, double after a while."""

    GROWTH_INTERVAL = 2000

    def __init__(self, enabled: bool) -> None:
        self.factor = 2.0**16 if enabled else 1.0
        self.is_enabled = enabled
        self._good_steps = 0

    def allows(self, norm: Tensor) -> bool:
        """Whether the update may be made. Raises FloatingPointError when no smaller scale can help."""
        if torch.isfinite(norm):
            self._good_steps += 1
            if self.is_enabled and self._good_steps % self.GROWTH_INTERVAL == 0:
                self.factor *= 2
            return True
        if not self.is_enabled or self.factor <= 1:
            raise FloatingPointError("the gradient is not finite; the weights were left as they were")
        self.factor, self._good_steps = self.factor / 2, 0
        return False
