"""Model calls of a plan: the rows of replicas, and the passes over a sample of texts, by the engines' own function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from math import gcd
from typing import TypeVar

from flexrlhf.api import (
    BatchShape,
    CallKind,
    Layout,
    Lengths,
    ModelShape,
    Operator,
    PackedPass,
    PagedCache,
    PlacedModel,
    Run,
    SequenceLengths,
    TextGroup,
    TextPacking,
    Unit,
)
from flexrlhf.guideline.costs.cost_model import Call, MeanPass, Pages, transformer_of
from flexrlhf.guideline.simulation.inputs import TextLengths

Value = TypeVar("Value")
MOST_TEXTS = 256
"""Texts that are laid out for a price; of more, passes are in proportion."""


@dataclass(frozen=True)
class TextLayout:
    """Settings by which an engine lays texts out (``engines/micro_batch.py``).

    budget:    computed tokens of a pass
    packs:     whether several texts are in a row
    shares:    whether samples of a prompt share a copy of it
    compares:  whether all texts of a prompt are in one pass, because a loss compares them
    masks:     whether attention over a row is computed under a mask, else by the lengths of texts
    """

    budget: int
    packs: bool
    shares: bool
    compares: bool = False
    masks: bool = True

    def passes(self, groups: Sequence[TextGroup]) -> tuple[PackedPass, ...]:
        """Return the passes over ``groups``, each of one prompt."""
        return self.passes_of(tuple(chain(*map(self.units, groups))))

    def units(self, group: TextGroup) -> tuple[Unit, ...]:
        """Return the texts of a prompt in units, each of which is in one pass."""
        return group.units(self.budget, self.packs and self.shares, self.compares, self.masks)

    def passes_of(self, units: Sequence[Unit]) -> tuple[PackedPass, ...]:
        """Return the passes over ``units``."""
        return PackedPass.all_of(tuple(units), self.budget, self.packs, self.masks)

    def reach(self, passes: Sequence[PackedPass], units: Sequence[Unit]) -> float:
        """Return the width of rows of one causal text each with as many pairs a token as ``passes`` compute.

        A mask skips no pair: over a row, attention computes both halves of the square.
        """
        tokens = sum(each.tokens for each in passes)
        if not self.masks:
            return sum(group.pairs for unit in units for group in unit) / tokens
        return (1 + self.packs) * sum(each.tokens * each.width for each in passes) / tokens


def text_groups(prompts: Sequence[float], responses: Sequence[float], count: int, samples: int) -> list[TextGroup]:
    """Return ``count`` prompts with ``samples`` responses each, whose lengths are spread over the given samples.

    As many prompts as there are lengths have each length once.
    """
    each_prompt, each_response = _whole(spread(prompts, count)), _whole(mixed(spread(responses, count * samples)))
    return [
        TextGroup(prompt, tuple(each_response[index * samples : (index + 1) * samples]))
        for index, prompt in enumerate(each_prompt)
    ]


def _whole(lengths: Sequence[float]) -> list[int]:
    return [max(1, round(length)) for length in lengths]


def spread(values: Sequence[float], count: int) -> list[float]:
    """Return the middles of ``count`` equal shares of the sorted ``values``."""
    ordered = sorted(values)
    return [ordered[(2 * index + 1) * len(ordered) // (2 * count)] for index in range(count)]


def mixed(values: Sequence[Value]) -> list[Value]:
    """Return ``values`` in an order that has little to do with their size: every so many of them, a golden section."""
    total = len(values)
    stride = next(step for step in range(max(1, round(0.618 * total)), 2 * total + 1) if gcd(step, total) == 1)
    return [values[index * stride % total] for index in range(total)]


@lru_cache(maxsize=4096)
def mean_pass(
    prompts: tuple[float, ...], responses: tuple[float, ...], count: int, samples: int, layout: TextLayout
) -> MeanPass:
    """Return the passes over ``count`` prompts with ``samples`` responses each, whose lengths are like the given ones.

    Where all have one length, in units of as many texts each, and of few texts, the number of passes is exact.
    """
    if len(set(prompts)) == len(set(responses)) == 1:
        units = layout.units(TextGroup(round(prompts[0]), (round(responses[0]),) * samples))
        if len(set(units)) == 1:
            return _of_equal_units(units[0], count * len(units), layout)
    most = max(1, min(count, MOST_TEXTS // samples))
    laid_out = [unit for group in text_groups(prompts, responses, most, samples) for unit in layout.units(group)]
    return _mean(layout.passes_of(laid_out), laid_out, layout, count / most)


def _of_equal_units(unit: Unit, count: int, layout: TextLayout) -> MeanPass:
    """Return the passes over ``unit``, ``count`` times: full ones and the rest."""
    few = min(count, 1 + layout.budget // sum(group.tokens for group in unit))
    first = layout.passes_of([unit] * few)[0]
    at_once = len(first.units)
    full, rest = divmod(count, at_once)
    parts = [(full, _mean([first], [unit] * at_once, layout))]
    if rest:
        parts.append((1, _mean(layout.passes_of([unit] * rest), [unit] * rest, layout)))
    return all_passes(parts)


def _mean(passes: Sequence[PackedPass], units: Sequence[Unit], layout: TextLayout, scale: float = 1.0) -> MeanPass:
    """Return the mean of ``passes`` over ``units``, or of those over ``scale`` times as many texts: these are as full
    as all but the last, and where there is but one, as the budget allows."""
    tokens = sum(each.tokens for each in passes)
    groups = list(chain(*units))
    answered = sum(sum(group.responses) for group in groups)
    real = answered + sum(len(group.responses) * group.prompt for group in groups)
    count: float = len(passes)
    if scale > 1:
        full = [each.tokens for each in passes[:-1]] or [max(tokens, layout.budget)]
        count = max(1.0, scale * tokens / (sum(full) / len(full)))
    width = layout.reach(passes, units)
    return MeanPass(
        count=count,
        rows=scale * tokens / count / width,
        width=width,
        responses=scale * answered / count,
        texts=scale * real,
    )


def all_passes(parts: Iterable[tuple[float, MeanPass]]) -> MeanPass:
    """Return the passes of several mini-batches as one, each so many times."""
    counted = list(parts)
    count = sum(times * each.count for times, each in counted)
    tokens = sum(times * each.tokens for times, each in counted)
    width = sum(times * each.tokens * each.width for times, each in counted) / tokens
    return MeanPass(
        count=count,
        rows=tokens / count / width,
        width=width,
        responses=sum(times * each.count * each.responses for times, each in counted) / count,
        texts=sum(times * each.texts for times, each in counted),
    )


@dataclass(frozen=True)
class CallMaker:
    """Maker of the model calls of a plan.

    batch:    rows of a step
    longest:  maximum lengths, for which memory is reserved
    lengths:  expected lengths
    epochs:   passes of training over the rows
    """

    batch: BatchShape
    longest: Lengths
    lengths: TextLengths
    epochs: int

    def call(
        self,
        kind: CallKind,
        model: PlacedModel,
        shape: ModelShape,
        rows: Sequence[Sequence[int]],
        texts: int = 1,
        compares: bool = False,
    ) -> Call:
        """Return the call of the fullest of some replicas.

        rows:      rows of each replica, by mini-batch.
        texts:     texts of a row, each in passes of its own.
        compares:  whether all texts of a prompt are in one pass.
        """
        settings, trains = model.settings, kind == "train"
        epochs = self.epochs if trains else 1
        # replicas wait for each other at every update, else at the end
        fullest = list(map(max, zip(*rows, strict=True))) if trains else max(rows, key=sum)
        parts = model.layout.dims.row_parts
        if kind == "generate":  # of prompts that ranks with parts of rows share
            fullest = [-(-number // parts) for number in fullest]
        most = sum(fullest)
        # decoding reserves memory for responses of full length
        reserved = SequenceLengths(self.longest.prompt, self.longest.response)
        at_once, pages = reserved.rows_decoded(model, max(fullest) if trains else most), None
        if kind == "generate" and model.has_cache:
            pages = Pages(settings.generate_tokens, at_once, PagedCache.FREE, model.facts.cache_block / 2)
        if pages is not None and any(self.lengths.responses):
            at_once = pages.rows(self.lengths.prompt, self.lengths.responses)
        return Call(
            kind=kind,
            model=transformer_of(shape, model.head, is_adapted=settings.lora is not None),
            engine=engine_of(model),
            rows=epochs * most * texts,
            prompt=self.lengths.prompt,
            responses=self.lengths.responses,
            width=self.lengths.width,
            updates=epochs * len(rows[0]),
            decode_rows=max(1, at_once),
            item=model.item_bytes,
            cache_item=model.item_bytes,
            recompute="full" if trains and settings.activation_checkpointing else "none",
            tiled_mlp=settings.tiled_mlp,
            counts_experts=trains and settings.router_aux_loss_coef > 0,
            offload_activations=trains and settings.offload_activations,
            offload_optimizer=settings.offload_optimizer,
            offload_parameters=settings.offload_parameters,
            passes=None
            if kind == "generate"
            else self._passes(model, shape, fullest, epochs * texts, compares).of_part(parts),
            adapters_apart=shape.num_adapters_in_vllm(model.role, settings.lora) if model.rollout else 0,
            prompt_samples=self.batch.alike_rows if kind == "generate" and reads_prompts_once(model) else 1,
            pages=pages,
        )

    def _passes(
        self, model: PlacedModel, shape: ModelShape, rows: Sequence[int], times: int, compares: bool
    ) -> MeanPass:
        """Return the passes of a replica with ``rows`` of each mini-batch, ``times`` over."""
        settings, samples = model.settings, self.batch.samples_per_prompt
        longest = self.longest.of_role(model.role).total
        packing = TextPacking.of(model, shape, longest)
        shares = settings.shares_in_passes and self.batch.alike_rows > 1
        layout = TextLayout(settings.micro_batch_tokens, packing.packs, shares, compares, packing.masks)
        most = self.batch.block_rows // samples
        prompts, responses = self.lengths.all_prompts, self.lengths.responses
        return _passes_of(prompts, responses, tuple(rows), most, samples, times, layout)


@lru_cache(maxsize=4096)
def _passes_of(
    prompts: tuple[float, ...],
    responses: tuple[float, ...],
    rows: tuple[int, ...],
    most: int,
    samples: int,
    times: int,
    layout: TextLayout,
) -> MeanPass:
    """Return the passes over mini-batches of ``rows``, in blocks of at most ``most`` prompts, ``times`` over."""
    blocks = Counter(block for each in rows if each for block in _blocks(each // samples, most))
    return all_passes(
        (times * number, mean_pass(prompts, responses, block, samples, layout)) for block, number in blocks.items()
    )


def _blocks(prompts: int, most: int) -> Iterator[int]:
    """Yield the prompts of each of the fewest equal blocks of at most so many."""
    count = -(-prompts // most)
    yield from ((prompts * (block + 1)) // count - prompts * block // count for block in range(count))


def engine_of(model: PlacedModel) -> str:
    """Return the name of the engine profile that a call of ``model`` runs on."""
    return model.engine if model.rollout is None else model.rollout.engine


def reads_prompts_once(model: PlacedModel) -> bool:
    """Whether generation reads a prompt once for all of its samples."""
    return model.facts.by_requests or model.settings.share_prompts


def texts_per_row(operator: Operator) -> int:
    """Return the texts of a row; a pretraining text (``ptx``) is counted as long as the row."""
    return 2 if operator.extra_loss else 1


def attempt_shape(batch: BatchShape, run: Run) -> BatchShape:
    """Return the shape of the rows of ``run``: of all, or of an attempt of dynamic sampling as if it were needed."""
    return batch if run.attempt is None else batch.of_attempt


def replica_rows(batch: BatchShape, layout: Layout, mini_batches: range) -> Mapping[int, tuple[int, ...]]:
    """Return each replica's rows of each of ``mini_batches``."""
    if layout.protocol is not None:
        return _counted_rows(batch, layout, mini_batches)
    return _replica_rows(batch, layout.dp, layout.row_shares, mini_batches)


@lru_cache(maxsize=1024)
def _replica_rows(
    batch: BatchShape, dp: int, row_shares: tuple[Fraction, ...], mini_batches: range
) -> Mapping[int, tuple[int, ...]]:
    return _counted_rows(batch, Layout(tuple(range(dp)), row_shares=row_shares), mini_batches)


def _counted_rows(batch: BatchShape, layout: Layout, mini_batches: range) -> Mapping[int, tuple[int, ...]]:
    samples = batch.samples_per_prompt
    counts = zip(*(batch.counts(layout, m) for m in mini_batches), strict=True)
    return {replica: tuple(samples * number for number in each) for replica, each in enumerate(counts)}


@lru_cache(maxsize=1024)
def row_patterns(batch: BatchShape, layout: Layout, mini_batches: range) -> tuple[tuple[int, ...], ...]:
    """Return the distinct rows that replicas have of ``mini_batches``: ten thousand replicas differ by rounding."""
    return tuple(dict.fromkeys(replica_rows(batch, layout, mini_batches).values()))
