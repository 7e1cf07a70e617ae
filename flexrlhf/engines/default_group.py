"""Default process group of torch, in place of the sealed world, for libraries that take no group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupMember


@contextmanager
def as_world(group: dist.ProcessGroup) -> Iterator[None]:
    """Make ``group`` the default one; ranks are then numbers inside it."""
    world = GroupMember.WORLD
    GroupMember.WORLD = group
    try:
        yield
    finally:
        GroupMember.WORLD = world
