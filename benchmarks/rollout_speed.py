"""Speed of rollouts by transformers and by vLLM, and of a weight sync and a broadcast of the same bytes. Two CPU ranks.

``python benchmarks/rollout_speed.py``. Rank 0 has the trained actor and generates with transformers, rank 1 has the
vLLM engine; one works while the other waits, each with ``--threads`` threads. Same weights, prompts and noise, so both
sample the same responses, whose lengths differ much: many end tokens make them about geometric. Of several times in
turns, the best of each engine; CPU time, where the machine has other work.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.sync import SyncChannel, WeightMover
from flexrlhf.comm.world import World, open_world
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import RolloutSpec, SyncSpec
from flexrlhf.engines.base import Batch, Engine, EngineContext, Sampling
from flexrlhf.engines.model_ranks import ModelRanks, StageRanks
from flexrlhf.memory.states import kv_cache_bytes
from flexrlhf.operators.columns import Lengths
from flexrlhf.placement.groups import Group
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.weights.shapes import model_shape
from flexrlhf.weights.sync_plan import SyncPlan

VOCABULARY, LENGTHS, ROWS = 4096, Lengths(prompt=64, response=256), 64
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
MEAN_LENGTH = 48
END_TOKENS = tuple(range(VOCABULARY // MEAN_LENGTH))
"""End tokens; a random model samples each token about equally often."""
TIMEOUT, REPEATS = 600.0, 4


def wait(work: dist.Work, ranks: tuple[int, ...]) -> None:
    work.wait()


def models(kv_tokens: int) -> dict[str, PlacedModel]:
    actor = PlacedModel(ModelName("actor"), Layout((0,)), True, ModelSpec(init=MODEL))
    settings = ModelSpec(init=MODEL, engine="vllm", generate_tokens=kv_tokens)
    rollout = PlacedModel(ModelName("actor.rollout"), Layout((1,)), False, settings, RolloutSpec(engine="vllm"))
    return {model.name: model for model in (actor, rollout)}


def engine_of(model: PlacedModel, world: World) -> Engine:
    shape = model_shape("actor", model.settings)
    assert shape is not None
    alone = RankGroup(None, model.ranks, wait)
    return EngineContext(
        placed=model,
        lengths=LENGTHS,
        temperature=1.0,
        seed=0,
        num_updates=1,
        ranks=ModelRanks(alone, alone, stages=StageRanks(alone, alone, alone, alone)),
        device=world.device,
        kv_bytes=kv_cache_bytes(model, shape) if model.rollout is not None else 0,
        store=dist.PrefixStore(model.name, world.store),
    ).make_engine()


def prompts() -> Batch:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, LENGTHS.prompt + 1, (ROWS, 1), generator=generator)
    mask = (torch.arange(LENGTHS.prompt) >= LENGTHS.prompt - lengths).to(torch.uint8)
    tokens = torch.randint(VOCABULARY, mask.shape, generator=generator, dtype=torch.int32) * mask
    return Batch({"prompts": tokens, "prompt_mask": mask}, torch.arange(ROWS), 1)


def generated(engine: Engine) -> tuple[float, float, torch.Tensor]:
    """Return the tokens of a batch per second and per second of this process's CPU time, and its response lengths."""
    sampling = Sampling(seed=0, step=1, temperature=1.0, eos_token_ids=END_TOKENS, pad_token_id=0)
    start, computed = time.perf_counter(), time.process_time()
    columns = engine.generate(prompts(), sampling)
    seconds, computed = time.perf_counter() - start, time.process_time() - computed
    lengths = columns["response_mask"].sum(1)
    return float(lengths.sum()) / seconds, float(lengths.sum()) / computed, lengths


def in_turn(world: World, number: int, work: Callable[[], Any]) -> Any:
    """Run every rank's ``work``, one rank after the other, for the time ``number``; return this rank's result."""
    result = None
    for rank in range(world.size):
        if world.rank == rank:
            result = work()
        world.meet(f"turn {number} of {rank}", TIMEOUT)
    return result


def synced(
    world: World, engine: Engine, placed: dict[str, PlacedModel], group: dist.ProcessGroup, settings: SyncSpec
) -> list[float]:
    """Return the time of each sync of all weights, from the first bucket until they are loaded and checked."""
    shape = model_shape("actor", placed["actor"].settings)
    assert shape is not None
    trained, copy = placed["actor"], placed["actor.rollout"]
    plan = SyncPlan.of(trained, copy, shape, settings.bucket_bytes, world.rank)
    channel, mover = SyncChannel(plan, torch.float32, world.device, group), WeightMover(settings, wait)
    sides = (engine.weights(), None) if world.rank == 0 else (None, engine.weights())
    seconds = []
    for number in range(REPEATS):
        world.meet(f"sync {number}", TIMEOUT)
        start = time.perf_counter()
        mover.run(channel, *sides)
        mover.close()
        engine.weights_changed()
        seconds.append(time.perf_counter() - start)
    return seconds


def broadcast(world: World, num_bytes: int, group: dist.ProcessGroup) -> list[float]:
    """Return the time of each broadcast of one tensor of ``num_bytes``."""
    tensor = torch.ones(num_bytes, dtype=torch.uint8)
    seconds = []
    for number in range(REPEATS):
        world.meet(f"broadcast {number}", TIMEOUT)
        start = time.perf_counter()
        dist.broadcast(tensor, 0, group=group)
        seconds.append(time.perf_counter() - start)
    return seconds


def rank_main(rank: int, port: int, threads: int, kv_tokens: int, settings: SyncSpec) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(threads)
    placed = models(kv_tokens)
    mine = placed["actor" if rank == 0 else "actor.rollout"]
    with open_world("cpu", TIMEOUT) as world:
        groups = world.make_groups([Group("sync actor", (0, 1))], TIMEOUT)
        group = groups.get("sync actor", (0, 1))
        assert group is not None
        engine = engine_of(mine, world)
        world.meet("engines", TIMEOUT)
        # the first one warms up
        found = [in_turn(world, number, lambda: generated(engine)) for number in range(1 + REPEATS)]
        speed, computed, lengths = max(found[1:], key=itemgetter(1))
        syncs = synced(world, engine, placed, group, settings)
        num_bytes = sum(tensor.nbytes for tensor in engine.weights().values())
        raw = broadcast(world, num_bytes, group)
        report(rank, (speed, computed), lengths, syncs, raw, num_bytes)
        world.meet("reports", TIMEOUT)
        engine.close()
        groups.close()


def report(
    rank: int,
    speeds: tuple[float, float],
    lengths: torch.Tensor,
    syncs: Sequence[float],
    raw: Sequence[float],
    num_bytes: int,
) -> None:
    name = ("transformers", "vLLM")[rank]
    shown = (
        f"responses of {int(lengths.min())} to {int(lengths.max())} tokens, mean {float(lengths.float().mean()):.1f}"
    )
    print(f"{name:<13}{speeds[0]:>8.0f} tokens/s, {speeds[1]:.0f} per CPU second  {ROWS} rows, {shown}", flush=True)
    if rank == 1:
        sync, plain = (num_bytes / min(seconds) / 1e6 for seconds in (syncs, raw))
        print(f"weight sync  {sync:>8.0f} MB/s  {num_bytes / 1e6:.0f} MB sent, loaded, checked in {min(syncs):.3f} s")
        print(f"broadcast    {plain:>8.0f} MB/s  the same bytes in {min(raw):.3f} s; sync / it {sync / plain:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-tokens", type=int, default=ROWS * (LENGTHS.prompt + LENGTHS.response))
    parser.add_argument("--bucket-mb", type=float, default=SyncSpec().bucket_mb)
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(
        rank_main, (port, arguments.threads, arguments.kv_tokens, SyncSpec(bucket_mb=arguments.bucket_mb)), nprocs=2
    )


if __name__ == "__main__":
    main()
