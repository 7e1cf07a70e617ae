"""Which rows a rank holds: a layout splits the prompts of every mini-batch over its replicas.

The unit is the prompt, because samples of one prompt never part: row = prompt * samples_per_prompt + sample. Every
mini-batch is split by itself, so that forward and training want the same rows on the same rank whatever the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Self

from flexrlhf.config.spec import Spec


@dataclass(frozen=True)
class Layout:
    """``dp * tp * pp`` ranks: tp fastest, then dp, pp (Megatron's order). Ranks of a replica hold the same rows."""

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
        """Computed once: layouts are keys of many tables, and may have ten thousand ranks."""
        return hash((self.ranks, self.tp, self.pp, self.row_shares))

    @cached_property
    def places(self) -> dict[int, int]:
        """Rank → its place among ``ranks``."""
        return {rank: place for place, rank in enumerate(self.ranks)}

    @property
    def dp(self) -> int:
        return len(self.ranks) // (self.tp * self.pp)

    def replica(self, rank: int) -> int:
        return self.places[rank] // self.tp % self.dp

    def tp_index(self, rank: int) -> int:
        """Which tensor-parallel part of its replica a rank holds."""
        return self.places[rank] % self.tp

    @property
    def tp_sets(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that together hold one replica's layers."""
        return tuple(self.ranks[i : i + self.tp] for i in range(0, len(self.ranks), self.tp))

    def dp_set(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold what ``rank`` holds, or its ZeRO shards, for other rows: one of each replica."""
        assert self.pp == 1, "no engine has pipeline stages yet"
        return self.ranks[self.tp_index(rank) :: self.tp]

    @cached_property
    def bounds(self) -> tuple[Fraction, ...]:
        """Where the replicas' shares end, in (0, 1]."""
        shares = self.row_shares or (Fraction(1),) * self.dp
        total, seen, bounds = sum(shares), Fraction(0), []
        for share in shares:
            seen += share
            bounds.append(seen / total)
        return tuple(bounds)

    def slice(self, items: range, replica: int, turn: int = 0) -> range:
        """The contiguous part of ``items`` that a replica holds. Exact: parts are disjoint and cover; may be empty.

        ``turn`` shifts where the bounds are rounded, so that over several turns what does not divide goes round.
        """
        if not self.row_shares:  # the same in whole numbers: a thousand replicas are asked often
            first = (len(items) * replica + turn % self.dp) // self.dp
            return items[first : (len(items) * (replica + 1) + turn % self.dp) // self.dp]
        shift = Fraction(turn % self.dp, self.dp)
        start = int(len(items) * (self.bounds[replica - 1] if replica else Fraction(0)) + shift)
        return items[start : int(len(items) * self.bounds[replica] + shift)]


@dataclass(frozen=True)
class BatchShape:
    """The prompts of one step, its mini-batches and its chunks."""

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
        """Contiguous prompts of one mini-batch; sizes differ by at most one."""
        start = mini_batch * self.num_prompts // self.num_mini_batches
        return range(start, (mini_batch + 1) * self.num_prompts // self.num_mini_batches)

    def chunk(self, index: int) -> range:
        """The consecutive whole mini-batches of one chunk."""
        size = self.num_mini_batches // self.num_chunks
        return range(index * size, (index + 1) * size)

    def prompts_on(self, layout: Layout, rank: int, mini_batches: range) -> tuple[int, ...]:
        """Prompts of ``mini_batches`` that ``rank`` holds, ascending."""
        replica = layout.replica(rank)
        return tuple(prompt for m in mini_batches for prompt in layout.slice(self.prompts(m), replica, turn=m))

    def rows(self, prompts: tuple[int, ...]) -> tuple[int, ...]:
        n = self.samples_per_prompt
        return tuple(prompt * n + sample for prompt in prompts for sample in range(n))
