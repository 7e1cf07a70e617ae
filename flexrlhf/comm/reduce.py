"""Sums and gathers over ranks that compute one placed model together: a data-parallel or tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from flexrlhf.comm.world import InOrder, Queued, Wait, posted


@dataclass(frozen=True)
class RankGroup:
    """Ranks that compute together.

    group:  None: this rank is alone, and every result is its own.
    ranks:  in the group's order.
    wait:   waits for a collective.
    """

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    wait: Wait

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the group."""
        return self.group is None or dist.get_rank(self.group) == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks, in place, and wait for the sum; all get the same bits."""
        if self.group is not None:
            self._done(dist.all_reduce(tensor, group=self.group, async_op=True))
        return tensor

    def sum_in_order(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` as ``sum``, without a wait of the host, which does not read it before another wait."""
        if self.group is not None:
            self.wait(InOrder(posted(dist.all_reduce(tensor, group=self.group, async_op=True))), self.ranks)
        return tensor

    def await_device(self, device: torch.device, ranks: tuple[int, ...]) -> None:
        """Wait until ``device`` has done what it was given, with a deadline that names ``ranks``."""
        self.wait(Queued(device), ranks)

    def largest(self, number: int, device: torch.device) -> int:
        """Return the largest of the ranks' numbers."""
        if self.group is None:
            return number
        tensor = torch.tensor([number], device=device)
        self._done(dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group, async_op=True))
        return int(tensor)

    def gather(self, vector: Tensor) -> Tensor:
        """Concatenate the ranks' int64 vectors, each of any length and without negative numbers."""
        if self.group is None:
            return vector
        longest = self.largest(len(vector), vector.device)
        padded = torch.cat([vector, vector.new_full((longest - len(vector),), -1)])
        out = vector.new_empty(len(self.ranks), longest)
        self._done(dist.all_gather(list(out.unbind(0)), padded, group=self.group, async_op=True))
        return out[out >= 0]

    def _done(self, work: dist.Work | None) -> None:
        self.wait(posted(work), self.ranks)


class Summed(Function):
    """The sum over a group, in place, whose gradient all ranks have."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(values)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
