"""Replicas as threads of one process, and small batches, for tests of the mathematics."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from flexrlhf.engines.base import Batch


class Alone:
    """The network of a single replica."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, vector: Tensor) -> Tensor:
        return vector


@dataclass
class Network:
    """Joins threads, one for each replica."""

    size: int
    barrier: Barrier = field(init=False)
    posted: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size, timeout=20)

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.posted[rank] = tensor.clone()
        self.barrier.wait()
        parts = [self.posted[other] for other in range(self.size)]
        self.barrier.wait()
        return parts


@dataclass
class Port:
    network: Network
    rank: int

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self.network.exchange(self.rank, tensor)).sum(0))

    def gather(self, vector: Tensor) -> Tensor:
        """As the real one: int64 vectors of any length each, without negative numbers."""
        assert vector.dtype == torch.int64 and not (vector < 0).any()
        return torch.cat(self.network.exchange(self.rank, vector))


def on_replicas(size: int, work: Callable[[int, Port], Any]) -> list[Any]:
    network = Network(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(rank, Port(network, rank)), range(size)))


def mask_of(*rows: str) -> Tensor:
    return torch.tensor([[int(character) for character in row] for row in rows], dtype=torch.uint8)


def batch_of(samples_per_prompt: int = 1, **columns: Tensor) -> Batch:
    return Batch(columns, torch.arange(len(next(iter(columns.values())))), samples_per_prompt)
