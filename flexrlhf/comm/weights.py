"""Weights between shards and whole tensors: gathered once for a bucket, cut to the part that a rank stores.

``Part`` (weights/shards.py) says which elements of a tensor a rank stores; engines pass their local tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.world import Wait, posted
from flexrlhf.config.model_settings import LoraSpec
from flexrlhf.weights.boxes import Box, boxes_of, intersection
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.shards import Part, Parts, part_elements
from flexrlhf.weights.transfer_plan import Region

Weights = Mapping[str, Tensor]


def fill(tensor: Tensor, part: Part, values: Tensor) -> None:
    """Write the vector ``values`` of ``part`` into a whole ``tensor``."""
    box = tensor[tuple(slice(side.start, side.stop) for side in part.box)]
    if part.flat is None:
        box.copy_(values.view(box.shape))
    else:
        flattened = box.reshape(-1)
        flattened[part.flat.start : part.flat.stop] = values
        box.copy_(flattened.view(box.shape))


def flat(weights: Weights, names: Sequence[str], dtype: torch.dtype) -> Tensor:
    """Return a copy of the named local tensors as one vector."""
    return torch.cat([weights[name].detach().reshape(-1).to(dtype) for name in names])


@dataclass(frozen=True)
class WeightGather:
    """A collective that makes the tensors of a placed model whole on the ranks that store its shards.

    group:   of ``ranks``; None: this rank stores whole tensors, and there is nothing to gather.
    ranks:   ranks that store all weights together, in the group's order.
    shards:  parts that each of ``ranks`` stores.
    wait:    waits for the collective.
    """

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    shards: tuple[Parts, ...]
    wait: Wait

    def bytes_sent(self, names: Sequence[str], item_bytes: int) -> int:
        """Bytes that this rank sends to the others for the tensors ``names``."""
        return 0 if self.group is None else (len(self.ranks) - 1) * self._longest(names) * item_bytes

    def whole(self, weights: Weights, names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors ``names``, whole, on every rank of the group. A collective.

        ``weights``: local shards by name; a pipeline stage has shards of some of the tensors.
        """
        if self.group is None:
            return {name: weights[name].detach().to(dtype).view(self.shards[0][name].shape) for name in names}
        own = [name for name in names if name in weights]
        device = next(iter(weights.values())).device
        mine = flat(weights, own, dtype) if own else torch.empty(0, dtype=dtype, device=device)
        vectors = self._all_gather(mine, self._longest(names))
        tensors: dict[str, Tensor] = {}
        for parts, values in zip(self.shards, vectors, strict=True):
            stored = [name for name in names if name in parts]
            sizes = [parts[name].num_elements for name in stored]
            for name, piece in zip(stored, values[: sum(sizes)].split(sizes), strict=True):
                tensors.setdefault(name, vectors.new_empty(parts[name].shape))
                fill(tensors[name], parts[name], piece)
        return tensors

    def experts(self, weights: Weights, name: str, experts: range, dtype: torch.dtype, target: int = 0) -> Tensor:
        """Return ``experts`` of the parameter ``name``, on the rank of the group at index ``target``; on others it is
        not all there. A collective.

        The bytes of all ranks are added up, each of which only one has, so that every bit arrives.
        """
        part = next(parts[name] for parts in self.shards if name in parts)
        whole = (experts, *map(range, part.shape[1:]))
        if self.group is None:
            return view_of(weights[name].detach(), part, whole).to(dtype)
        index = dist.get_rank(self.group)
        own = self.shards[index].get(name)
        found = torch.zeros(tuple(map(len, whole)), dtype=dtype, device=next(iter(weights.values())).device)
        if own is not None and next(i for i, parts in enumerate(self.shards) if parts.get(name) == own) == index:
            for box in boxes_of(own):
                if (common := intersection(box, whole)) is not None:
                    values = view_of(weights[name].detach(), own, common)
                    view_of(found, Part(part.shape, whole), common).copy_(values)
        work = dist.reduce(found.view(torch.uint8), group_dst=target, group=self.group, async_op=True)
        self.wait(posted(work), self.ranks)
        return found

    def meet(self, device: torch.device) -> None:
        """Wait until all ranks of the group have called this. A collective."""
        work = dist.all_reduce(torch.zeros(1, device=device), group=self.group, async_op=True)
        self.wait(posted(work), self.ranks)

    def _longest(self, names: Sequence[str]) -> int:
        return max(part_elements(parts, [name for name in names if name in parts]) for parts in self.shards)

    def _all_gather(self, mine: Tensor, longest: int) -> Tensor:
        """Return the vectors of all ranks (ranks, longest), each padded with zeros."""
        out = mine.new_empty(len(self.ranks), longest)
        padded = torch.cat([mine, mine.new_zeros(longest - len(mine))])
        self.wait(posted(dist.all_gather(list(out.unbind(0)), padded, group=self.group, async_op=True)), self.ranks)
        return out


@dataclass(frozen=True)
class TrainedValues:
    """Weights on one rank.

    weights:   live local parts.
    parts:     of the tensors that they are, by the copy's names.
    lora:      adapters that the copy stores inside the weights that they change; None: none.
    adapters:  these, in float32, and
    merging:   the parts of them that change ``parts``.
    """

    weights: Weights
    parts: Parts
    lora: LoraSpec | None = None
    adapters: Weights = field(default_factory=dict)
    merging: Parts = field(default_factory=dict)

    def __getitem__(self, region: Region) -> Tensor:
        """Return the elements of ``region``; merged in float32, so that the sum is rounded once."""
        part = self.parts[region.name]
        if self.lora is None:
            return view_of(self.weights[region.name].detach(), part, region.box)
        base, a, b = ParameterName(region.name).merged_from
        *experts, rows, columns = region.box
        rank = self.merging[a].box[-2]
        values = view_of(self.weights[base].detach(), part, region.box).float()
        first = self._adapter(a, (*experts, rank, columns))
        return values + self.lora.scale * (self._adapter(b, (*experts, rows, rank)) @ first)

    def _adapter(self, name: str, box: Box) -> Tensor:
        return view_of(self.adapters[name], self.merging[name], box)


def view_of(local: Tensor, part: Part, box: Box) -> Tensor:
    """Return the elements of ``box``, which are within ``part``, as a view of ``local``: the tensor of that part.

    ``local`` has as many elements as ``part``; if this is a flat range, they are contiguous.
    """
    offsets = [side.start - whole.start for side, whole in zip(box, part.box, strict=True)]
    sizes = [len(whole) for whole in part.box]
    if part.flat is None:
        shaped = local.view(sizes)
        return shaped[tuple(slice(at, at + len(side)) for at, side in zip(offsets, box, strict=True))]
    strides = torch.empty(sizes, device="meta").stride()
    first = sum(at * stride for at, stride in zip(offsets, strides, strict=True)) - part.flat.start
    return local.as_strided(tuple(map(len, box)), strides, local.storage_offset() + first)
