"""Messages between two ranks. Gloo sends host memory alone, so a GPU's passes through a copy there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.world import SINGLY, Waitable, posted

TensorMessage = tuple[Tensor, int]
"""Memory that is sent or arrives, not empty, and the rank at the other end."""
Begun = tuple[Waitable, tuple[int, ...]]
"""Messages under way, and the ranks at their other ends."""


@dataclass(frozen=True)
class _Staged:
    """A message under way between copies in host memory.

    work:   of the copy
    copy:   must live until the message has arrived
    target: where a received copy goes; None: it is sent
    """

    work: dist.Work
    copy: Tensor
    target: Tensor | None = None

    def wait(self) -> None:
        """Wait for the message; one that is received is then in ``target``."""
        self.work.wait()
        if self.target is not None:
            self.target.copy_(self.copy)


def exchange(
    sent: Sequence[TensorMessage], received: Sequence[TensorMessage], group: dist.ProcessGroup | None
) -> tuple[list[Begun], list[Begun]]:
    """Begin to send and to receive as one batch; return the messages that are then under way of both.

    Sent memory must not change, and received memory is not filled, before it is waited for. Messages between two ranks
    match in their order. NCCL starts a batch as one kernel over the communicator of the group, so no order of its
    messages blocks; single ones would make a communicator for each pair of ranks, at which both wait for each other.
    """
    messages = [*sent, *received]
    if not messages:
        return [], []
    if messages[0][0].device.type != "cpu" and dist.get_backend(group) == "gloo":
        return _staged(sent, received, group)
    works = _batch(sent, received, group)
    ranks = [rank for _, rank in messages]
    if len(works) < len(messages):
        # one of the whole batch
        whole: list[Begun] = [(works[0], tuple(dict.fromkeys(ranks)))]
        return whole if sent else [], whole if received else []
    begun: list[Begun] = [(work, (rank,)) for work, rank in zip(works, ranks, strict=True)]
    return begun[: len(sent)], begun[len(sent) :]


def _staged(
    sent: Sequence[TensorMessage], received: Sequence[TensorMessage], group: dist.ProcessGroup | None
) -> tuple[list[Begun], list[Begun]]:
    """Exchange copies in host memory."""
    away = [(tensor.cpu(), rank) for tensor, rank in sent]
    back = [(torch.empty_like(tensor, device="cpu"), rank) for tensor, rank in received]
    works = _batch(away, back, group)
    targets = [None] * len(sent) + [target for target, _ in received]
    begun: list[Begun] = [
        (_Staged(work, copy, target), (rank,))
        for work, (copy, rank), target in zip(works, [*away, *back], targets, strict=True)
    ]
    return begun[: len(sent)], begun[len(sent) :]


def _batch(
    sent: Sequence[TensorMessage], received: Sequence[TensorMessage], group: dist.ProcessGroup | None
) -> Sequence[dist.Work]:
    """Begin one batch; return torch's handles: one for each message, or one for all together."""
    sends = [dist.P2POp(dist.isend, tensor, rank, group) for tensor, rank in sent]
    messages = sends + [dist.P2POp(dist.irecv, tensor, rank, group) for tensor, rank in received]
    if group is None or not group.group_desc.endswith(SINGLY):
        return dist.batch_isend_irecv(messages)
    begun = {id(each): posted(each.op(each.tensor, each.peer, group)) for each in sorted(messages, key=_place)}
    return [begun[id(each)] for each in messages]


def _place(message: dist.P2POp) -> tuple[int, int, bool]:
    """Return the place of a message in one order on all ranks, in which no cycle of ranks waits for each other."""
    first, second = sorted((dist.get_rank(), message.peer))
    return first, second, (message.op is dist.isend) == (dist.get_rank() == first)
