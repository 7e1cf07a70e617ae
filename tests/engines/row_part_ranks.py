"""One process: one of four ranks that compare attention over parts of rows with that over whole rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.world import Groups, World, open_world
from flexrlhf.engines.attention import PassAttention
from flexrlhf.engines.context_parallel import shared_attention
from flexrlhf.engines.row_split import RowSplit
from flexrlhf.memory.attention_bytes import AttentionBytes
from flexrlhf.placement.groups import Group

SECONDS = 100.0
HEADS, KV_HEADS, WIDTH, DIM = 4, 2, 32, 8
PACKED = PassAttention.of(
    # a prompt with two responses, a text, and padding; in the next row a text behind another
    [(0, 8), (8, 6), (14, 5), (19, 9), (32, 11), (43, 21)],
    [(8, 11)],
    [(0, 8)],
)
WHOLE = PassAttention.of([(0, 28), (32, 32)], [], [])


def compare(rank: int, group: RankGroup, is_ring: bool, whole: PassAttention) -> None:
    """Outputs and gradients of this rank's part of the tokens, and the bytes that autograd keeps of it."""
    split = RowSplit(group, group.ranks.index(rank), is_ring)
    torch.manual_seed(0)
    states = [torch.randn(2, heads, WIDTH, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    expected = whole.attend(states[0], states[1], states[2], None)
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weight).sum(), states)

    columns = torch.from_numpy(split.columns(WIDTH, split.index))
    own = [state.detach()[:, :, columns].requires_grad_() for state in states]
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        found = shared_attention(whole, split, WIDTH).attend(own[0], own[1], own[2], None)
    # the next product saves its input
    keep(found)
    planned = AttentionBytes(HEADS, KV_HEADS, DIM, own[0].itemsize, split.num_parts, is_ring).saved
    assert sum(kept.values()) == planned * 2 * len(columns)
    assert_close(found, expected[:, columns], rtol=1e-5, atol=2e-6)
    for gradient, of_all in zip(torch.autograd.grad((found * weight[:, columns]).sum(), own), gradients, strict=True):
        assert_close(gradient, of_all[:, :, columns], rtol=1e-5, atol=2e-6)


def run_rank(world: World) -> None:
    def wait(work: dist.Work, ranks: tuple[int, ...]) -> None:
        work.wait()

    sets = ((0, 1), (2, 3), (0, 1, 2, 3))
    groups: Groups = world.make_groups([Group("cp", ranks) for ranks in sets], SECONDS)
    for ranks in (each for each in sets if world.rank in each):
        group = RankGroup(groups.get("cp", ranks), ranks, wait)
        for is_ring in (False, True):
            for whole in (PACKED, WHOLE):
                compare(world.rank, group, is_ring, whole)
    world.close_groups(groups, SECONDS)
    world.meet("end", SECONDS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open_world("cpu", SECONDS) as opened:
        run_rank(opened)
