"""The largest batch and the longest text of a placement: the most prompts a step, and the most tokens of a prompt and
its response, that memory has room for at the settings of its plan.

FlexRLHF compares placements by the batch (Fig. 9), and its guideline lets it grow until memory is full (section IV-C).
Rows of a step pass through a model in micro-batches, so what grows without end are their columns. A text is in one
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from flexrlhf.config.spec import Spec
from flexrlhf.placement.layout import BatchShape
from flexrlhf.weights.shapes import read_config

if TYPE_CHECKING:
    from flexrlhf.plan.plan import Plan

MOST_TOKENS = 2**24
"""Most tokens of a text that are tried."""


@dataclass(frozen=True)
class LargestBatch:
    """Most prompts of a step.

    prompts:           ``prompts_per_step``, a multiple of the mini-batches; 0: memory has room for none.
    is_memory_filled:  whether memory limits it, else the rows of a plan (``MAX_ROWS``).
    """

    prompts: int
    is_memory_filled: bool


@dataclass(frozen=True)
class LongestText:
    """Most tokens of a response to prompts of the run's length.

    response:  tokens; 0: memory has room for none.
    limit:     what limits it.
    """

    response: int
    limit: str


@dataclass(frozen=True)
class BatchLimits:
    """Largest batch and longest text under ``plan``."""

    plan: Plan

    def largest_batch(self) -> LargestBatch | None:
        """Return the largest batch with the instructions and the cache of ``plan``; None for devices of unknown size.

        The columns of the newest batch count, which a plan leaves out. Not counted: idle models that a larger batch
        would move to host memory, or a smaller cache, as another plan may have.
        """
        sizes = self._device_sizes()
        if sizes is None:
            return None
        own, unit = self.plan.spec.algorithm.prompts_per_step, self.plan.spec.algorithm.num_mini_batches
        of_prompt = {rank: Fraction(self.plan.row_bytes(rank, self._num_kept()), own) for rank in sizes}

        def lacking(prompts: int) -> dict[int, int]:
            batch = BatchShape.of(self.plan.spec.with_prompts(prompts))
            peaks = {
                rank: self.plan.memory_of(rank, batch, int(prompts * of_prompt[rank])).peak_bytes for rank in sizes
            }
            return {rank: peaks[rank] - sizes[rank] for rank in sizes if peaks[rank] > sizes[rank]}

        most = own * Spec.MAX_ROWS // self.plan.batch.num_rows // unit * unit
        short = lacking(most)
        if not short:
            return LargestBatch(most, is_memory_filled=False)
        # a batch of so many prompts fits; if passes are then as large as those of the larger one, it is the largest
        room = min((most - lack / of_prompt[rank] if of_prompt[rank] else 0) for rank, lack in short.items())
        low, high = max(0, int(room) // unit), most // unit
        if lacking((low + 1) * unit):
            high = low + 1
        return LargestBatch(_last(low, high, lambda middle: not lacking(middle * unit)) * unit, is_memory_filled=True)

    def longest_text(self) -> LongestText | None:
        """Return the longest text with the instructions and the cache of ``plan``; None for devices of unknown size.

        It counts and leaves out what ``largest_batch`` does. Texts of a model's own tokenizer stay as long as they are.
        """
        sizes = self._device_sizes()
        if sizes is None:
            return None

        ranks, kept = list(sizes), self._num_kept()

        def fits(response: int) -> bool:
            longer = replace(self.plan, lengths=replace(self.plan.lengths, response=response))
            for rank in ranks:
                memory = longer.memory_of(rank, longer.batch, self.plan.row_bytes(rank, kept, longer.lengths))
                if memory.peak_bytes > sizes[rank]:
                    # it is likely to lack memory for other lengths, too
                    ranks.insert(0, ranks.pop(ranks.index(rank)))
                    return False
            return True

        total, limit = min(self._token_limits())
        most = total - self.plan.lengths.prompt
        if fits(most):
            return LongestText(most, limit)
        return LongestText(_last(0, most, fits), "by memory")

    def text_lines(self) -> Iterator[str]:
        """Yield a line on the longest text, where the memory of the devices is known."""
        found, prompt = self.longest_text(), self.plan.lengths.prompt
        if found is not None:
            total = prompt + found.response if found.response else 0
            longest = f"{prompt} prompt + at most {found.response} response at these settings, {found.limit}"
            yield f"longest text         {total:>8} = {longest if total else 'none fits'}"

    def _token_limits(self) -> list[tuple[int, str]]:
        """Return limits of a text's tokens other than memory, each with its name."""
        limits = [(MOST_TOKENS, "the limit of a plan")]
        for role in self.plan.shapes:
            model = self.plan.model(role)
            positions = None if model.retokenize else read_config(role, model).get("max_position_embeddings")
            if isinstance(positions, int):
                limits.append((positions, f"the positions of {role}"))
        for placed in self.plan.placement.models:
            if placed.has_cache:
                block = placed.facts.cache_block
                limits.append((placed.settings.generate_tokens // block * block, f"the cache of {placed.name}"))
        return limits

    def _device_sizes(self) -> Mapping[int, int] | None:
        """Return the bytes of the devices of ranks with different work; None if one is unknown."""
        sizes = {rank: self.plan.device_bytes(rank) for rank in sorted(set(self.plan.alike.values()))}
        known = {rank: size for rank, size in sizes.items() if size is not None}
        return known if len(known) == len(sizes) else None

    def _num_kept(self) -> int:
        """Return the number of batches whose columns exist at a time."""
        return self.plan.num_steps_kept + 1


def _last(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits between ``low``, which does, and ``high``, which does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
