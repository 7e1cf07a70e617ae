"""Speed of weight syncs between two and two CPU ranks, next to a raw send of the bytes that have to cross.

    python -m benchmarks.weight_transfers

About 440 MB of float32 weights. In turns, for every pair of layouts: the sync with and without checksums, with the
buckets of ``sync.bucket_mb``; one message for each pair of ranks with as many bytes as the plan sends between them; and
all shards gathered on the source, then broadcast whole. Seconds are medians, from a meeting of all ranks to the last
of them. One thread a rank: four ranks share the machine's cores.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from flexrlhf.comm.sync import SyncChannel, WeightMover
from flexrlhf.comm.weights import WeightGather
from flexrlhf.comm.world import Groups, World, open_world
from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import RolloutSpec, SyncSpec
from flexrlhf.placement.groups import Group
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.shapes import model_shape
from flexrlhf.weights.sync_plan import SyncPlan, transfers_of

MODEL = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
}
SOURCE, DESTINATION = (0, 1), (2, 3)
RANKS = SOURCE + DESTINATION
TIMEOUT = 600.0


def wait(work: Any, ranks: tuple[int, ...]) -> None:
    work.wait()


def placed(name: str, ranks: tuple[int, ...], rollout: bool = False, **settings: Any) -> PlacedModel:
    model = ModelSpec(init=MODEL, **settings)
    spec = RolloutSpec(engine="vllm", tp=model.tp) if rollout else None
    return PlacedModel(ModelName(name), Layout(ranks, ParallelDims(tp=model.tp)), name == "actor", model, spec)


PAIRS = {
    "tp 2 -> dp 2": (placed("actor", SOURCE, tp=2), placed("actor.shadow", DESTINATION)),
    "ZeRO-3 -> tp 2": (
        placed("actor", SOURCE, engine="deepspeed", zero=3),
        placed("actor.shadow", DESTINATION, tp=2),
    ),
    "FSDP2 -> dp 2": (placed("actor", SOURCE, zero=3), placed("actor.shadow", DESTINATION)),
    "ZeRO-3 -> vLLM, tp 2": (
        placed("actor", SOURCE, engine="deepspeed", zero=3),
        placed("actor.rollout", DESTINATION, rollout=True, tp=2),
    ),
    "dp 2 -> vLLM": (placed("actor", SOURCE), placed("actor.rollout", DESTINATION, rollout=True)),
}


@dataclass(frozen=True)
class Bench:
    """One pair of layouts on this rank."""

    world: World
    groups: Groups
    source: PlacedModel
    destination: PlacedModel
    shape: ModelShape

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.groups.get("sync actor", RANKS)

    def weights(self, model: PlacedModel) -> dict[str, Tensor] | None:
        if self.rank not in model.ranks:
            return None
        return {name: torch.ones(part.num_elements) for name, part in self.shape.parts_on(model, self.rank).items()}

    def ways(self, settings: SyncSpec) -> dict[str, Callable[[], None]]:
        """Return the compared ways, by name."""
        weights, copy = self.weights(self.source), self.weights(self.destination)
        return {
            "sync": self._sync(settings, weights, copy),
            "no checksum": self._sync(settings.model_copy(update={"checksum": False}), weights, copy),
            "raw send": self._raw(settings),
            "gather, broadcast": self._whole(weights),
        }

    def _sync(self, settings: SyncSpec, weights: Mapping[str, Tensor] | None, copy: Any) -> Callable[[], None]:
        plan = SyncPlan.of(self.source, self.destination, self.shape, settings.bucket_bytes, self.rank)
        channel = SyncChannel(plan, torch.float32, self.world.device, self.group)
        mover = WeightMover(settings, wait)

        def run() -> None:
            mover.run(channel, weights, copy)
            mover.close()

        return run

    def _raw(self, settings: SyncSpec) -> Callable[[], None]:
        plan = transfers_of(self.source, self.destination, self.shape, settings.bucket_bytes)
        buffers = {link: torch.ones(size) for link, size in plan.links.items() if self.rank in link}

        def run() -> None:
            works = [
                dist.isend(buffer, to, group=self.group)
                if source == self.rank
                else dist.irecv(buffer, source, group=self.group)
                for (source, to), buffer in buffers.items()
            ]
            for work in works:
                assert work is not None
                work.wait()

        return run

    def _whole(self, weights: Mapping[str, Tensor] | None) -> Callable[[], None]:
        """Gather tensor by tensor on the source, and broadcast each from its first rank."""
        shards = tuple(self.shape.parts_on(self.source, rank) for rank in SOURCE)
        ranks = next((each for each in self.source.gather_sets if self.rank in each), (self.rank,))
        gather = WeightGather(self.groups.get("gather actor", ranks), ranks, shards[: len(ranks)], wait)

        def run() -> None:
            for name, size in self.shape.parameters:
                tensor = torch.empty(size) if weights is None else gather.whole(weights, [name], torch.float32)[name]
                dist.broadcast(tensor, SOURCE[0], group=self.group)

        return run


def rank_main(rank: int, port: int, settings: SyncSpec, rounds: int, names: list[str]) -> None:
    size = str(len(RANKS))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    shape = model_shape("actor", ModelSpec(init=MODEL))
    assert shape is not None
    with open_world("cpu", TIMEOUT) as world:
        groups = world.make_groups([Group("sync actor", RANKS), Group("gather actor", SOURCE)], TIMEOUT)
        for name in names:
            bench = Bench(world, groups, *PAIRS[name], shape)
            seconds = measure(bench, bench.ways(settings), rounds, name)
            if rank == 0:
                size_mb = SyncPlan.all_bytes(*PAIRS[name], shape) / 1e6
                print(line(name, size_mb, seconds), flush=True)
        world.meet("end", TIMEOUT)
        groups.close()


def measure(bench: Bench, ways: Mapping[str, Callable[[], None]], rounds: int, name: str) -> dict[str, float]:
    """Return the median time of each way; a first round is a warm-up."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(1 + rounds):
        for way, run in ways.items():
            bench.world.meet(f"{name} {way} {number}", TIMEOUT)
            start = time.perf_counter()
            run()
            bench.world.meet(f"{name} {way} {number} end", TIMEOUT)
            seconds[way].append(time.perf_counter() - start)
    return {way: median(each[1:]) for way, each in seconds.items()}


HEADER = f"{'':<22}{'MB':>6}" + "".join(
    f"{way:>19}" for way in ("sync", "no checksum", "raw send", "gather, broadcast")
)


def line(name: str, size_mb: float, seconds: Mapping[str, float]) -> str:
    """Return a line of the table: time of each way, and its speed relative to the raw send."""
    raw = seconds["raw send"]
    cells = "".join(f"{each:>11.2f} s {raw / each:>5.2f}" for each in seconds.values())
    return f"{name:<22}{size_mb:>6.0f}{cells}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument("--bucket-mb", type=float, default=SyncSpec().bucket_mb)
    parser.add_argument("--only", nargs="*", choices=list(PAIRS), default=list(PAIRS), help="pairs of layouts")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    print(HEADER)
    settings = SyncSpec(bucket_mb=options.bucket_mb)
    multiprocessing.spawn(rank_main, (port, settings, options.rounds, options.only), nprocs=len(RANKS))


if __name__ == "__main__":
    main()
