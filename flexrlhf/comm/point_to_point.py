"""Messages between two ranks. Gloo sends host memory alone, so that of a GPU passes through a copy there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.world import Waitable, posted


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


def send(tensor: Tensor, receiver: int, group: dist.ProcessGroup | None) -> Waitable:
    """Begin to send ``tensor``, which must not change until the message has arrived."""
    if not _is_staged(tensor, group):
        return posted(dist.isend(tensor, receiver, group=group))
    copy = tensor.cpu()
    return _Staged(posted(dist.isend(copy, receiver, group=group)), copy)


def receive(target: Tensor, sender: int, group: dist.ProcessGroup | None) -> Waitable:
    """Begin to receive into ``target``, which has the message once it is waited for."""
    if not _is_staged(target, group):
        return posted(dist.irecv(target, sender, group=group))
    copy = torch.empty_like(target, device="cpu")
    return _Staged(posted(dist.irecv(copy, sender, group=group)), copy, target)


def _is_staged(tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
    return tensor.device.type != "cpu" and dist.get_backend(group) == "gloo"
