"""Layouts: how a placed model's ranks form replicas, and how the prompts of every mini-batch are split over these.

The unit is the prompt, because samples of one prompt are never separated: row = prompt * samples_per_prompt + sample.
A sample that is an episode of several sequences has a row for each: row = (prompt * samples + sample) * sequences +
sequence, and ``samples_per_prompt`` counts these rows.
Every mini-batch is split by itself, so that forward and training use the same rows on the same rank for any chunks.

A mini-batch is divided into blocks of consecutive prompts, whatever the placement. Passes are composed inside a block,
and a replica takes whole blocks if its layout allows: kernels round by the shape of a pass, so results of whole blocks
have the same bits on any number of replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Self, TypeVar

from flexrlhf.config.axes import INNER, OF_COPIES, OF_EXPERTS, OF_PARTS, OF_REPLICA, OUTER, ParallelDims
from flexrlhf.config.spec import Spec
from flexrlhf.placement.protocols import TransferProtocol


@dataclass(frozen=True)
class Layout:
    """Ranks of a placed model, which form replicas and along axes (``dims``) share the work on each.

    Neighbours differ along the first inner axis, then along the others, then by replica, then along the outer axes:
    tp, cp, dp, pp (Megatron's order). Ranks of a replica compute the same rows. Expert-parallel ranks are neighbouring
    copies of the weights, each of which stores a part of the experts.

    row_shares:  relative share of rows of each replica; empty: equal.
    protocol:    function of a user's own that splits the prompts of a mini-batch over replicas; None: by the shares.
    """

    ranks: tuple[int, ...]
    dims: ParallelDims = ParallelDims()
    row_shares: tuple[Fraction, ...] = ()
    protocol: TransferProtocol | None = None

    def __post_init__(self) -> None:
        dims = self.dims
        assert len(self.ranks) % dims.replica == 0, f"{len(self.ranks)} ranks, {dims.text()}"
        copies = len(self.ranks) // dims.parts
        assert copies % dims.expert_parts == 0, f"{dims.text()} of {copies} copies"
        assert not self.row_shares or len(self.row_shares) == self.dp, f"{self.row_shares} for dp {self.dp}"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash, computed once: layouts are keys of many tables, and may have ten thousand ranks."""
        return hash((self.ranks, self.dims, self.row_shares, self.protocol))

    @cached_property
    def places(self) -> dict[int, int]:
        """Position of each rank in ``ranks``."""
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def width(self) -> int:
        """Ranks of a replica in each stage."""
        return self.dims.width

    @cached_property
    def dp(self) -> int:
        """Number of replicas."""
        return len(self.ranks) // self.dims.replica

    @property
    def degrees(self) -> dict[str, int]:
        """Number of replicas and degrees of a replica's axes that are above 1, as texts name them."""
        several = {axis.name: self.dims.of(axis) for axis in self.dims.several(OF_REPLICA)}
        return {"dp": self.dp, **several} if self.dp > 1 else several

    @cached_property
    def of_weights(self) -> Layout:
        """Layout of the weights, for which ranks with parts of rows are further replicas."""
        return self if self.dims.row_parts == 1 else Layout(self.ranks, self.dims.without(OF_COPIES))

    def replica(self, rank: int) -> int:
        """Return the number of the replica that ``rank`` belongs to."""
        return self.places[rank] // self.width % self.dp

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        """Name of an axis → places from one of its ranks to the next, and its degree."""
        dims, spans, step = self.dims, dict[str, tuple[int, int]](), 1
        for axis in INNER:
            spans[axis.name] = step, dims.of(axis)
            step *= dims.of(axis)
        step *= self.dp
        for axis in OUTER:
            spans[axis.name] = step, dims.of(axis)
            step *= dims.of(axis)
        step = dims.without(OF_COPIES).width
        for axis in OF_EXPERTS:
            spans[axis.name] = step, dims.of(axis)
            step *= dims.of(axis)
        return spans

    def index(self, axis: str, rank: int) -> int:
        """Return the number of the part of ``axis`` that ``rank`` has."""
        step, degree = self._spans[axis]
        return self.places[rank] // step % degree

    def along(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks with the other parts of ``axis``, which have all else as ``rank`` has, and ``rank``."""
        step, degree = self._spans[axis]
        place = self.places[rank]
        first = place - place // step % degree * step
        return self.ranks[first : first + degree * step : step]

    def sets(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks ``along`` an axis, in the order of their first ranks."""
        return tuple(dict.fromkeys(self.along(axis, rank) for rank in self.ranks))

    @cached_property
    def _part_spans(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._spans[axis.name] for axis in OF_PARTS)

    def part(self, rank: int) -> tuple[int, ...]:
        """Return the number of the part of the weights on ``rank``, along each axis that splits a copy of them."""
        place = self.places[rank]
        return tuple(place // step % degree for step, degree in self._part_spans)

    def is_first_of_replica(self, rank: int) -> bool:
        """Whether ``rank`` is the one of its replica that acts for all of them, such as to write rows."""
        return not any(self.index(axis.name, rank) for axis in OF_REPLICA)

    @cached_property
    def replica_sets(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each replica, stage by stage."""
        width, dp = self.width, self.dp
        sets = [self.ranks[start : start + width] for start in range(0, len(self.ranks), width)]
        return tuple(sum(sets[replica::dp], ()) for replica in range(dp))

    def is_inside(self, other: Layout) -> bool:
        """Whether each replica is on ranks of one replica of ``other``."""
        return all(any(set(own) <= set(ranks) for ranks in other.replica_sets) for own in self.replica_sets)

    def dp_set(self, rank: int) -> tuple[int, ...]:
        """Return the data-parallel group of ``rank``: the ranks at the same position in every replica."""
        width = self.width * self.dp
        start = self.places[rank] // width * width
        return self.ranks[start + self.places[rank] % self.width : start + width : self.width]

    @cached_property
    def bounds(self) -> tuple[Fraction, ...]:
        """Upper bounds of the replicas' shares, in (0, 1]."""
        shares = self.row_shares or (Fraction(1),) * self.dp
        total, seen, bounds = sum(shares), Fraction(0), []
        for share in shares:
            seen += share
            bounds.append(seen / total)
        return tuple(bounds)

    def takes_whole(self, blocks: int) -> bool:
        """Whether every replica has a whole number of ``blocks`` equal parts of a mini-batch."""
        if not self.row_shares:
            return blocks % self.dp == 0
        return all((blocks * bound).denominator == 1 for bound in self.bounds)

    def slice(self, items: range, replica: int, turn: int = 0, blocks: int = 1) -> Sequence[int]:
        """Return the part of ``items`` of a replica, ascending: that of the protocol, or a contiguous one, of whole
        ``blocks`` if its layout allows. Parts are disjoint and cover ``items``; they may be empty.

        ``turn`` shifts the rounding of bounds, so that over several turns remainders go round the replicas. Raises
        UserError for a protocol that does not cover ``items``.
        """
        if self.protocol is not None:
            return self.protocol.parts(self.replica_sets, items)[replica]
        start, stop = self._starts(len(items), range(replica, replica + 2), turn, blocks)
        return items[start:stop]

    def sizes(self, size: int, turn: int = 0, blocks: int = 1) -> tuple[int, ...]:
        """Return the number of items in the ``slice`` of each replica, of ``size`` that no protocol splits."""
        starts = self._starts(size, range(self.dp + 1), turn, blocks)
        return tuple(stop - start for start, stop in pairwise(starts))

    def _starts(self, size: int, replicas: range, turn: int, blocks: int) -> list[int]:
        """Return the first of ``size`` items on each of ``replicas``, the last of which may be behind all."""
        parts = blocks if self.takes_whole(blocks) else self.dp
        if not self.row_shares:  # in whole numbers: called often for a thousand replicas
            each = parts // self.dp
            return [block_start(size, parts, each * replica, turn) for replica in replicas]
        shift = Fraction(turn % parts, parts)
        bounds = (self.bounds[replica - 1] if replica else Fraction(0) for replica in replicas)
        return [int(size * bound + shift) for bound in bounds]


def block_start(size: int, blocks: int, block: int, turn: int) -> int:
    """Return the first of ``size`` items in a block; ``turn`` as in ``Layout.slice``."""
    return (size * block + turn % blocks) // blocks


Numbers = TypeVar("Numbers", bound=Any)
"""A whole number, or a tensor of such."""


@dataclass(frozen=True)
class BatchShape:
    """Numbers of prompts, samples, mini-batches, chunks, and blocks of a mini-batch, of one step.

    ``segments``: steps over which a response may be generated (``rollout.segment_tokens``). A step's batch has a place
    for each prompt that may be under way, which a prompt keeps until it is trained on: the prompt that a step takes as
    number ``n`` of its own has place ``n * segments + step % segments``. Places of one number are never separated, so
    that rows are carried from step to step on one rank.
    ``attempts``: most times that dynamic sampling takes prompts. Prompt ``p`` is number ``p // attempts`` of attempt
    ``p % attempts``; a mini-batch has as many numbers as groups that it trains on. With segments a round has as many
    places for the prompts that it takes, in one attempt.
    ``is_by_row``: whether a row is trained on when it has ended, without the other samples of its prompt
    (``rollout.groups: as-ended``).
    ``sequences``: rows of an episode, for conversations that its program may begin (``environment.sequences``).
    """

    num_prompts: int
    samples_per_prompt: int = 1
    num_mini_batches: int = 1
    num_chunks: int = 1
    num_blocks: int = 1
    segments: int = 1
    attempts: int = 1
    is_by_row: bool = False
    sequences: int = 1

    @classmethod
    def of(cls, spec: Spec) -> Self:
        """Return the shape of a step of ``spec``."""
        algorithm, segments = spec.algorithm, spec.num_segments
        return cls(
            algorithm.num_prompts * segments,
            algorithm.samples_per_prompt * spec.num_sequences,
            algorithm.num_mini_batches,
            spec.schedule.num_chunks,
            spec.num_blocks,
            segments,
            algorithm.attempts,
            segments > 1 and spec.rollout.groups == "as-ended",
            spec.num_sequences,
        )

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.samples_per_prompt

    @property
    def unit_rows(self) -> int:
        """Neighbouring rows that are trained on in the same step: of a prompt, or of an episode."""
        return self.sequences if self.is_by_row else self.samples_per_prompt

    @property
    def alike_rows(self) -> int:
        """Rows that begin with the same prompt, on the average: further sequences have one of their own."""
        samples = self.samples_per_prompt // self.sequences
        return self.samples_per_prompt // (1 + samples * (self.sequences - 1))

    @property
    def mini_batches(self) -> range:
        return range(self.num_mini_batches)

    @property
    def num_new(self) -> int:
        """Prompts that a step takes from the data in one attempt."""
        return self.num_prompts // self.segments // self.attempts

    @property
    def num_taken(self) -> int:
        """Rows of the prompts that a step takes from the data: with all attempts, or in segments, on the average."""
        return self.num_new * self.samples_per_prompt * (self.attempts if self.segments == 1 else 1)

    @property
    def of_attempt(self) -> Self:
        """Shape of one attempt of a step."""
        return replace(self, num_prompts=self.num_prompts // self.attempts, attempts=1)

    @property
    def of_one_round(self) -> Self:
        """The shape of the prompts that a step takes from the data."""
        return replace(self, num_prompts=self.num_prompts // self.segments, segments=1)

    @property
    def num_places(self) -> int:
        """Places of a step's batch for each of the prompts that one attempt takes."""
        return self.segments * self.attempts

    @property
    def first_places(self) -> range:
        """Prompts of a step's batch that have the first place of their number: as many in each step, whatever ends."""
        return range(0, self.num_prompts, self.num_places)

    def as_taken(self, row: Numbers, step: int) -> tuple[Numbers, Numbers]:
        """Return the step that took the prompt of ``row`` in the batch of ``step``, and its row among those it took.

        In the first steps it may be before all of them: the place is empty.
        """
        prompt, sample = row // self.samples_per_prompt, row % self.samples_per_prompt
        age = (step - prompt) % self.segments
        return step - age, prompt // self.segments * self.samples_per_prompt + sample

    def place_of(self, taken: int, row: int) -> int:
        """Return the row of a batch that ``as_taken`` returns step ``taken`` and ``row`` for."""
        prompt, sample = divmod(row, self.samples_per_prompt)
        return (prompt * self.segments + taken % self.segments) * self.samples_per_prompt + sample

    def new_prompts(self, step: int) -> range:
        """Return the places of the prompts that a step takes."""
        return range(step % self.segments, self.num_prompts, self.segments)

    def prompts(self, mini_batch: int) -> range:
        """Return the contiguous prompts of one mini-batch; sizes differ by at most one (times ``segments``)."""
        return self._places(self.numbers(mini_batch))

    def prompts_of_attempt(self, mini_batch: int, attempt: int | None) -> range:
        """Return the prompts of one mini-batch, or those of one attempt."""
        prompts = self.prompts(mini_batch)
        return prompts if attempt is None else prompts[attempt :: self.attempts]

    def numbers(self, mini_batch: int) -> range:
        """Return the numbers of a mini-batch's prompts among those that one step takes."""
        start = mini_batch * self.num_new // self.num_mini_batches
        return range(start, (mini_batch + 1) * self.num_new // self.num_mini_batches)

    def _places(self, numbers: range) -> range:
        """Return the prompts of a step's batch that have ``numbers`` among those that one step takes."""
        return range(numbers.start * self.num_places, numbers.stop * self.num_places)

    def chunk(self, index: int) -> range:
        """Return the consecutive whole mini-batches of one chunk."""
        size = self.num_mini_batches // self.num_chunks
        return range(index * size, (index + 1) * size)

    def prompts_on(self, layout: Layout, rank: int, mini_batches: range, attempt: int | None = None) -> tuple[int, ...]:
        """Return the prompts of ``mini_batches`` that ``rank`` computes under ``layout``, ascending.

        ``attempt``: of this attempt alone.
        """
        if attempt is not None:
            return tuple(self.attempts * p + attempt for p in self.of_attempt.prompts_on(layout, rank, mini_batches))
        replica = layout.replica(rank)
        return tuple(prompt for m in mini_batches for prompt in self.part(layout, replica, m))

    def num_prompts_on(self, layout: Layout, rank: int, mini_batches: range, attempt: int | None = None) -> int:
        """Return the number of ``prompts_on``."""
        shape = self if attempt is None else self.of_attempt
        return _num_prompts(shape, layout, layout.replica(rank), mini_batches)

    def most_rows(self, layout: Layout) -> int:
        """Return the rows of a step on the replica with most."""
        if layout.protocol is not None:
            return self.samples_per_prompt * _most_of_step(self, layout)
        return self.samples_per_prompt * _most_prompts(self, layout.dp, layout.row_shares)

    def part(self, layout: Layout, replica: int, mini_batch: int) -> Sequence[int]:
        """Return the prompts of one mini-batch that a replica computes."""
        numbers = self.numbers_on(layout, replica, mini_batch)
        if isinstance(numbers, range):
            return self._places(numbers)
        return tuple(prompt for number in numbers for prompt in self._places(range(number, number + 1)))

    def numbers_on(self, layout: Layout, replica: int, mini_batch: int) -> Sequence[int]:
        """Return the ``numbers`` of one mini-batch that a replica computes."""
        return layout.slice(self.numbers(mini_batch), replica, turn=mini_batch, blocks=self.num_blocks)

    def counts(self, layout: Layout, mini_batch: int) -> tuple[int, ...]:
        """Return the number of prompts of one mini-batch on each replica."""
        if layout.protocol is not None:
            return tuple(len(self.part(layout, replica, mini_batch)) for replica in range(layout.dp))
        sizes = layout.sizes(len(self.numbers(mini_batch)), turn=mini_batch, blocks=self.num_blocks)
        return tuple(self.num_places * size for size in sizes)

    def blocks_on(self, layout: Layout, rank: int, mini_batches: range) -> tuple[tuple[int, ...], ...]:
        """Return ``prompts_on`` by block. A block that the layout cuts is on several ranks."""
        replica = layout.replica(rank)
        found = []
        for mini_batch in mini_batches:
            numbers, part = self.numbers(mini_batch), self.part(layout, replica, mini_batch)
            starts = [
                numbers.start + block_start(len(numbers), self.num_blocks, block, mini_batch)
                for block in range(self.num_blocks + 1)
            ]
            blocks = (self._places(range(start, stop)) for start, stop in zip(starts, starts[1:], strict=False))
            if isinstance(part, range):
                found += [tuple(common_range(part, block)) for block in blocks]
            else:
                found += [tuple(prompt for prompt in part if prompt in block) for block in blocks]
        return tuple(block for block in found if block)

    def takes_whole_blocks(self, layout: Layout) -> bool:
        """Whether no block of a step is cut by the replicas of ``layout``."""
        if layout.protocol is None:
            return layout.takes_whole(self.num_blocks)
        parts = [self.blocks_on(layout, ranks[0], self.mini_batches) for ranks in layout.replica_sets]
        sizes = (min(self.num_blocks, len(self.numbers(mini_batch))) for mini_batch in self.mini_batches)
        return sum(map(len, parts)) == sum(sizes)

    @cached_property
    def block_rows(self) -> int:
        """Most rows of a block."""
        largest = max(-(-len(self.numbers(m)) // self.num_blocks) for m in self.mini_batches)
        return self.samples_per_prompt * self.num_places * largest

    def rows(self, prompts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the rows of ``prompts``: all samples of each."""
        n = self.samples_per_prompt
        return tuple(prompt * n + sample for prompt in prompts for sample in range(n))

    def text_rows(self, prompts: Iterable[int]) -> tuple[int, ...]:
        """Return the rows of ``prompts`` that have a text of the data: the first one of each sample."""
        return self.rows(tuple(prompts))[:: self.sequences]


def generation_layout(training: Layout, dims: ParallelDims) -> Layout:
    """Return the layout of generation with the degrees ``dims`` of tp and pp on the ranks of ``training``.

    The part of the weights that a rank generates with contains the part that it trains: generation groups take one
    rank of every ``training.dims.tp / tp``. Raises ValueError if no such order exists.
    """
    training, tp, pp = training.of_weights, dims.tp, dims.pp
    trained = training.dims
    if trained.tp % tp or trained.pp % pp:
        raise ValueError(
            f"generation with tp {tp} and pp {pp} keeps no training part whole: they must divide tp {trained.tp} and "
            f"pp {trained.pp} of training"
        )
    merged_tp, merged_pp = trained.tp // tp, trained.pp // pp
    replicas = training.dp * merged_tp * merged_pp
    ranks = [-1] * len(training.ranks)
    for rank in training.ranks:
        stage, index = training.index("pp", rank), training.index("tp", rank)
        replica = (training.replica(rank) * merged_pp + stage % merged_pp) * merged_tp + index % merged_tp
        ranks[(stage // merged_pp * replicas + replica) * tp + index // merged_tp] = rank
    return Layout(tuple(ranks), dims)


def received_share(training: Layout, dims: ParallelDims) -> Fraction:
    """Return the share of all weights that a rank receives for generation in that order: HybridFlow, table 2.

    (t p - t_g p_g) / (t_g p_g t p), with t, p of training and t_g, p_g of generation.
    """
    trained, generating = training.dims.parts, dims.parts
    return Fraction(trained - generating, generating * trained)


@lru_cache(maxsize=4096)
def _num_prompts(shape: BatchShape, layout: Layout, replica: int, mini_batches: range) -> int:
    return sum(len(shape.part(layout, replica, m)) for m in mini_batches)


def common_range(first: range, second: range) -> range:
    """Return the common part of two ranges, such as of mini-batches."""
    return range(max(first.start, second.start), min(first.stop, second.stop))


@lru_cache(maxsize=1024)
def _most_prompts(batch: BatchShape, dp: int, row_shares: tuple[Fraction, ...]) -> int:
    """Return the prompts of a step on the replica with most."""
    return _most_of_step(batch, Layout(tuple(range(dp)), row_shares=row_shares))


def _most_of_step(batch: BatchShape, layout: Layout) -> int:
    return max(1, *map(sum, zip(*(batch.counts(layout, m) for m in batch.mini_batches), strict=True)))
