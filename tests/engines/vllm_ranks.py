"""One process: a rank of a job of four, of which pairs and then all generate, or the parent of a child engine."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.world import World, open_world
from flexrlhf.placement.groups import Group

SECONDS = 200


def run_rank(directory: Path, world: World) -> None:
    """Ranks 2 and 3 split layers, while 0 and 1 sum a tensor; then these have a stage each; then all have both."""
    from vllm_models import CUT, ONE_KEY_HEAD

    pairs, everyone = ((0, 1), (2, 3)), (0, 1, 2, 3)
    groups_of_plan = [*(Group("tp actor.rollout", pair) for pair in pairs), Group("replica actor.rollout", everyone)]
    groups = world.make_groups(groups_of_plan, SECONDS)
    mine = pairs[world.rank // 2]
    group = groups.get("tp actor.rollout", mine)
    pair = RankGroup(group, mine, wait)
    if mine == (0, 1):
        add(group, 500)
        found = generate(world, CUT, pair, pp=2)
    else:
        found = generate(world, ONE_KEY_HEAD, pair)
        add(group, 500)
    replica = RankGroup(groups.get("replica actor.rollout", everyone), everyone, wait)
    torch.save((found, generate(world, CUT, replica, pp=2)), directory / f"rank-{world.rank}.pt")
    # the job's groups are as they were
    add(group, 3)
    world.close_groups(groups, SECONDS)
    # rank 0 has the store
    world.meet("end", SECONDS)


def wait(work: dist.Work, ranks: tuple[int, ...]) -> None:
    work.wait()


def add(group: dist.ProcessGroup | None, times: int) -> None:
    for _ in range(times):
        number = torch.ones(1)
        dist.all_reduce(number, group=group)
        assert number == 2


def generate(
    world: World, init: dict[str, Any], replica: RankGroup, pp: int = 1
) -> tuple[list[dict[str, Tensor]], bool]:
    """Responses of two steps and of other weights; whether each tensor is as large as planned."""
    from vllm_models import engine_context, other_weights, placed, prompts, sampling

    from flexrlhf.engines.vllm.engine import VllmEngine
    from flexrlhf.runs.tensor_files import cut
    from flexrlhf.weights.shapes import model_shape

    model = placed(init, ranks=replica.ranks, kv_tokens=256, pp=pp)
    store = dist.PrefixStore(f"rollout/{replica.ranks}", world.store)
    engine = VllmEngine(engine_context(model, replica, store))
    shape = model_shape("actor", model.settings)
    assert shape is not None
    parts = shape.parts_on(model, world.rank)
    planned = {name: part.num_elements for name, part in parts.items()}
    is_as_planned = planned == {name: tensor.numel() for name, tensor in engine.weights().items()}
    batch = prompts(8)
    responses = [engine.generate(batch, sampling(step=step)) for step in range(2)]
    new = dict(other_weights(model).named_parameters())
    engine.load_weights({name: cut(new[name].detach(), part) for name, part in parts.items()})
    responses.append(engine.generate(batch, sampling()))
    engine.close()
    return responses, is_as_planned


def be_killed() -> None:
    """Print the process of a child engine while it decodes, and end without a word."""
    from vllm_models import engine_context, placed, prompts, sampling

    from flexrlhf.engines.vllm.engine import VllmEngine

    engine = VllmEngine(engine_context(placed(process="child")))
    engine.generate(prompts(1), sampling(), [prompts(64, first=1)])
    print(engine.child_pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        be_killed()
    else:
        with open_world("cpu", SECONDS) as opened:
            run_rank(Path(sys.argv[1]), opened)
