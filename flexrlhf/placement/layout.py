"""Layouts: how a placed model's ranks form replicas, and how the prompts of every mini-batch are split over these.

The unit is the prompt, because samples of one prompt are never separated: row = prompt * samples_per_prompt + sample.
Every mini-batch is split by itself, so that forward and training use the same rows on the same rank for any chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Self

from flexrlhf.config.spec import Spec


@dataclass(frozen=True)
class Layout:
    """``dp * tp * pp`` ranks: tp fastest, then dp, pp (Megatron's order). Ranks of a replica compute the same rows.

    row_shares:  relative share of rows of each replica; empty: equal.
    """

    ranks: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    row_shares: tuple[Fraction, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.ranks) % (self.tp * self.pp) == 0, f"{len(self.ranks)} ranks, tp {self.tp}, pp {self.pp}"
        assert not self.row_shares or len(self.row_shares) == self.dp, f"{self.row_shares} for dp {self.dp}"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash, computed once: layouts are keys of many tables, and may have ten thousand ranks."""
        return hash((self.ranks, self.tp, self.pp, self.row_shares))

    @cached_property
    def places(self) -> dict[int, int]:
        """Position of each rank in ``ranks``."""
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def dp(self) -> int:
        """Number of replicas."""
        return len(self.ranks) // (self.tp * self.pp)

    def replica(self, rank: int) -> int:
        """Return the number of the replica that ``rank`` belongs to."""
        return self.places[rank] // self.tp % self.dp

    def tp_index(self, rank: int) -> int:
        """Return the number of the tensor-parallel part on ``rank``."""
        return self.places[rank] % self.tp

    def stage(self, rank: int) -> int:
        """Return the number of the pipeline stage on ``rank``."""
        return self.places[rank] // (self.tp * self.dp)

    def is_first_of_replica(self, rank: int) -> bool:
        """Whether ``rank`` is the one of its replica that acts for all of them, such as to write rows."""
        return self.tp_index(rank) == self.stage(rank) == 0

    @property
    def tp_sets(self) -> tuple[tuple[int, ...], ...]:
        """Tensor-parallel groups: ranks that share one replica's tensors."""
        return tuple(self.ranks[i : i + self.tp] for i in range(0, len(self.ranks), self.tp))

    @cached_property
    def replica_sets(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each replica, stage by stage."""
        sets, dp = self.tp_sets, self.dp
        return tuple(sum(sets[replica::dp], ()) for replica in range(dp))

    def dp_set(self, rank: int) -> tuple[int, ...]:
        """Return the data-parallel group of ``rank``: the ranks at the same position in every replica."""
        width = self.tp * self.dp
        start = self.stage(rank) * width
        return self.ranks[start + self.tp_index(rank) : start + width : self.tp]

    def pp_set(self, rank: int) -> tuple[int, ...]:
        """Return the pipeline of ``rank``: the ranks at the same position in every stage of its replica."""
        width = self.tp * self.dp
        return self.ranks[self.places[rank] % width :: width]

    @cached_property
    def bounds(self) -> tuple[Fraction, ...]:
        """Upper bounds of the replicas' shares, in (0, 1]."""
        shares = self.row_shares or (Fraction(1),) * self.dp
        total, seen, bounds = sum(shares), Fraction(0), []
        for share in shares:
            seen += share
            bounds.append(seen / total)
        return tuple(bounds)

    def slice(self, items: range, replica: int, turn: int = 0) -> range:
        """Return the contiguous part of ``items`` of a replica. Parts are disjoint and cover ``items``; they may be
        empty.

        ``turn`` shifts the rounding of bounds, so that over several turns remainders go round the replicas.
        """
        if not self.row_shares:  # in whole numbers: called often for a thousand replicas
            first = (len(items) * replica + turn % self.dp) // self.dp
            return items[first : (len(items) * (replica + 1) + turn % self.dp) // self.dp]
        shift = Fraction(turn % self.dp, self.dp)
        start = int(len(items) * (self.bounds[replica - 1] if replica else Fraction(0)) + shift)
        return items[start : int(len(items) * self.bounds[replica] + shift)]


@dataclass(frozen=True)
class BatchShape:
    """Numbers of prompts, samples, mini-batches and chunks of one step."""

    num_prompts: int
    samples_per_prompt: int = 1
    num_mini_batches: int = 1
    num_chunks: int = 1

    @classmethod
    def of(cls, spec: Spec) -> Self:
        """Return the shape of a step of ``spec``."""
        algorithm = spec.algorithm
        return cls(
            algorithm.num_prompts,
            algorithm.samples_per_prompt,
            algorithm.num_mini_batches,
            spec.schedule.num_chunks,
        )

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.samples_per_prompt

    @property
    def mini_batches(self) -> range:
        return range(self.num_mini_batches)

    def prompts(self, mini_batch: int) -> range:
        """Return the contiguous prompts of one mini-batch; sizes differ by at most one."""
        start = mini_batch * self.num_prompts // self.num_mini_batches
        return range(start, (mini_batch + 1) * self.num_prompts // self.num_mini_batches)

    def chunk(self, index: int) -> range:
        """Return the consecutive whole mini-batches of one chunk."""
        size = self.num_mini_batches // self.num_chunks
        return range(index * size, (index + 1) * size)

    def prompts_on(self, layout: Layout, rank: int, mini_batches: range) -> tuple[int, ...]:
        """Return the prompts of ``mini_batches`` that ``rank`` computes under ``layout``, ascending."""
        replica = layout.replica(rank)
        return tuple(prompt for m in mini_batches for prompt in layout.slice(self.prompts(m), replica, turn=m))

    def rows(self, prompts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the rows of ``prompts``: all samples of each."""
        n = self.samples_per_prompt
        return tuple(prompt * n + sample for prompt in prompts for sample in range(n))


def common_range(first: range, second: range) -> range:
    """Return the common part of two ranges, such as of mini-batches."""
    return range(max(first.start, second.start), min(first.stop, second.stop))


def generation_layout(training: Layout, tp: int, pp: int = 1) -> Layout:
    """Return the layout of generation with ``tp`` x ``pp`` ranks a replica on the ranks of ``training``.

    The part of the weights that a rank generates with contains the part that it trains: generation groups take one
    rank of every ``training.tp / tp``. Raises ValueError if no such order exists.
    """
    if training.tp % tp or training.pp % pp:
        raise ValueError(
            f"generation with tp {tp} and pp {pp} keeps no training part whole: they must divide tp {training.tp} and "
            f"pp {training.pp} of training"
        )
    merged_tp, merged_pp = training.tp // tp, training.pp // pp
    replicas = training.dp * merged_tp * merged_pp
    ranks = [-1] * len(training.ranks)
    for rank in training.ranks:
        stage, index = training.stage(rank), training.tp_index(rank)
        replica = (training.replica(rank) * merged_pp + stage % merged_pp) * merged_tp + index % merged_tp
        ranks[(stage // merged_pp * replicas + replica) * tp + index // merged_tp] = rank
    return Layout(tuple(ranks), tp, pp)


def received_share(training: Layout, tp: int, pp: int = 1) -> Fraction:
    """Return the share of all weights that a rank receives for generation in that order: HybridFlow, table 2.

    (t p - t_g p_g) / (t_g p_g t p), with t, p of training and t_g, p_g of generation.
    """
    trained, generating = training.tp * training.pp, tp * pp
    return Fraction(trained - generating, generating * trained)
