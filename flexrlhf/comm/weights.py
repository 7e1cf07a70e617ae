"""Weights between shards and whole tensors: gather a bucket's shards once, cut the part that a rank holds.

``Part`` (weights/shards.py) says what lies where; engines hand over their local tensors and know nothing of this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.world import Wait, posted
from flexrlhf.weights.reshard import Parts, part_elements
from flexrlhf.weights.shards import Part

Weights = Mapping[str, Tensor]


def cut(tensor: Tensor, part: Part) -> Tensor:
    """The numbers of ``part`` of a whole ``tensor`` as a vector."""
    box = tensor[tuple(slice(side.start, side.stop) for side in part.box)].reshape(-1)
    return box if part.flat is None else box[part.flat.start : part.flat.stop]


def fill(tensor: Tensor, part: Part, values: Tensor) -> None:
    """Write the vector ``values`` of ``part`` into a whole ``tensor``."""
    box = tensor[tuple(slice(side.start, side.stop) for side in part.box)]
    if part.flat is None:
        box.copy_(values.view(box.shape))
    else:
        # ZeRO-3 cuts no dim, so the box is the tensor and its view shares the memory
        box.view(-1)[part.flat.start : part.flat.stop] = values


def flat(weights: Weights, names: Sequence[str], dtype: torch.dtype) -> Tensor:
    """A copy of the named local tensors as one vector."""
    return torch.cat([weights[name].detach().reshape(-1).to(dtype) for name in names])


@dataclass(frozen=True)
class Gather:
    """The ranks that hold a placed model's weights together. ``parts`` of each, in the group's order.

    ``group`` None: this rank holds whole tensors, and there is nothing to gather.
    """

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    parts: tuple[Parts, ...]
    wait: Wait

    def bytes_sent(self, names: Sequence[str], item_bytes: int) -> int:
        """Bytes that this rank hands to the others."""
        return 0 if self.group is None else (len(self.ranks) - 1) * self._longest(names) * item_bytes

    def whole(self, weights: Weights, names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
        """The named tensors, whole, on every rank of the group. A collective."""
        if self.group is None:
            return {name: weights[name].detach().to(dtype).view(self.parts[0][name].shape) for name in names}
        gathered = self._all_gather(flat(weights, names, dtype), self._longest(names))
        tensors = {name: gathered.new_empty(self.parts[0][name].shape) for name in names}
        for parts, values in zip(self.parts, gathered, strict=True):
            sizes = [parts[name].num_elements for name in names]
            for name, piece in zip(names, values[: sum(sizes)].split(sizes), strict=True):
                fill(tensors[name], parts[name], piece)
        return tensors

    def _longest(self, names: Sequence[str]) -> int:
        return max(part_elements(parts, names) for parts in self.parts)

    def _all_gather(self, mine: Tensor, longest: int) -> Tensor:
        out = mine.new_empty(len(self.ranks), longest)
        padded = torch.cat([mine, mine.new_zeros(longest - len(mine))])
        self.wait(posted(dist.all_gather(list(out.unbind(0)), padded, group=self.group, async_op=True)), self.ranks)
        return out
