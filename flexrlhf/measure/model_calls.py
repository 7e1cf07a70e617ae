"""Measure the calls of models of few layers through the same functions as a run: operators on rows of a store."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flexrlhf.api import BatchShape, Column, Operator, PackedPass, PlacedModel, Plan, TextGroup, TextPacking
from flexrlhf.api.engine import BareRank, LoadedModel, Sampling
from flexrlhf.guideline.costs.measurements import Point, Points
from flexrlhf.guideline.simulation.calls import TextLayout, reads_prompts_once
from flexrlhf.measure.profiled_models import LengthSample, MeasuredRows
from flexrlhf.measure.stopwatch import Estimate, Stopwatch, TimedCall

NO_TOKEN = -1
"""An end token that no response contains."""


@dataclass(frozen=True)
class ProfileContext:
    """Arguments of every measurement on this rank.

    plan:       with every model on all ranks
    lengths:    lengths of the rows that calls are made with
    rank:       this rank
    stopwatch:  clock over all ranks
    budget:     seconds for the repetitions of one measurement
    """

    plan: Plan
    lengths: LengthSample
    rank: BareRank
    stopwatch: Stopwatch
    budget: float

    def call(self, operator: Operator, loaded: LoadedModel, rows: int, passes: int = 1) -> TimedCall:
        """Return a call of ``operator`` on ``rows`` of each replica, whose columns are in the store. ``passes``: parts
        of the rows with the same sequences, each of which is computed by itself."""
        operator, shape, columns = self._arguments(operator, loaded, rows, passes)
        return self.rank.operator_call(self.plan, operator, loaded, shape, columns, self.sampling)

    def generation(self, operator: Operator, loaded: LoadedModel, rows: int, given: int, tokens: int) -> TimedCall:
        """Return a call that continues responses of ``given`` tokens by as many ``tokens``."""
        operator, shape, columns = self._arguments(operator, loaded, rows)
        batch = self.rank.batch(self.plan, operator, loaded, shape, columns)
        batch = batch.with_columns({"most_tokens": torch.full_like(batch.rows, tokens)})
        if given:
            response, device = self.plan.lengths.response, self.rank.world.device
            mask = torch.zeros(len(batch), response, dtype=torch.uint8, device=device)
            mask[:, :given] = 1
            responses = torch.randint_like(mask, 0, loaded.engine.config.vocab_size, dtype=torch.int32)
            batch = batch.with_columns({"responses": responses, "response_mask": mask})
        return partial(loaded.engine.generate, batch, self.sampling)

    def equal_passes(self, model: PlacedModel, measured: MeasuredRows) -> tuple[int, dict[int, int]]:
        """Return the passes of calls that have equally many, one if possible, and the tokens of each by the rows of its
        call."""
        found = {rows: self.passes(model, rows) for rows in measured.all}
        fewest = min(map(len, found.values()))
        alike = {rows: passes for rows, passes in found.items() if len(passes) == fewest}
        return fewest, {rows: sum(each.tokens for each in passes) // fewest for rows, passes in alike.items()}

    def row_width(self, model: PlacedModel, measured: MeasuredRows) -> int:
        """Return the mean width of the rows of forward and training passes."""
        layout = self._layout(model)
        units = [unit for rows in measured.all for group in self._groups(rows) for unit in layout.units(group)]
        passes = [each for rows in measured.all for each in self.passes(model, rows)]
        return round(layout.reach(passes, units))

    def read_tokens(self, model: PlacedModel, rows: int) -> int:
        """Return the tokens of the prompts that generation reads for so many rows, all as long as the longest."""
        prompts = rows // self.plan.batch.samples_per_prompt if reads_prompts_once(model) else rows
        return prompts * max(self.lengths.prompts)

    def passes(self, model: PlacedModel, rows: int) -> tuple[PackedPass, ...]:
        """Return the passes that the engine makes of ``rows`` sequences of a call."""
        return self._layout(model).passes(self._groups(rows))

    def _layout(self, model: PlacedModel) -> TextLayout:
        settings, shape, longest = model.settings, self.plan.shapes.get(model.role), self.plan.lengths.total
        packing = TextPacking.of(model, shape, longest)
        return TextLayout(settings.micro_batch_tokens, packing.packs, settings.shares_in_passes, masks=packing.masks)

    def _groups(self, rows: int) -> list[TextGroup]:
        samples = self.plan.batch.samples_per_prompt
        lengths = self.lengths.rows(rows, samples)
        return [
            TextGroup(lengths[row][0], tuple(response for _, response in lengths[row : row + samples]))
            for row in range(0, rows, samples)
        ]

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of the run, with an end token that no response has."""
        spec = self.plan.spec
        temperature, top_p, top_k = spec.algorithm.temperature, spec.algorithm.top_p, spec.algorithm.top_k
        return Sampling(spec.seed, 0, temperature, (NO_TOKEN,), 0, top_p=top_p, top_k=top_k)

    def _arguments(
        self, operator: Operator, loaded: LoadedModel, rows: int, passes: int = 1
    ) -> tuple[Operator, BatchShape, dict[str, Tensor]]:
        """Return the operator, the rows of all replicas, and the columns that it reads of those on this rank."""
        samples, dp = self.plan.batch.samples_per_prompt, loaded.placed.layout.dp
        # random experts would compute other numbers of tokens than the routers' own
        operator = operator.with_own_routers
        shape = BatchShape(rows // samples * dp, samples, num_blocks=passes * dp)
        vocabulary = loaded.engine.config.vocab_size
        values = {name: self._column(Column.of(name), rows // passes, vocabulary) for name in operator.reads}
        return operator, shape, {name: torch.cat([each] * passes) for name, each in values.items()}

    def _column(self, column: Column, rows: int, vocab_size: int) -> Tensor:
        """Return random values of a column; masks have several lengths, as padding makes attention slower."""
        width = self.plan.lengths.width(column)
        shape = (rows,) if width is None else (rows, width)
        generator = torch.Generator().manual_seed(rows)
        match column.dtype:
            case "float32":
                return torch.randn(shape, generator=generator)
            case "int32":
                values = torch.randint(0, vocab_size, shape, generator=generator, dtype=torch.int32)
                if column.width in ("prompt", "sequence"):
                    # all samples of a prompt have the same one, as passes may share its copy
                    samples, prompt = self.plan.batch.samples_per_prompt, self.plan.lengths.prompt
                    values[:, :prompt] = values[::samples, :prompt].repeat_interleave(samples, 0)
                return values
        return torch.ones(shape, dtype=torch.uint8) if width is None else self._mask(rows, column)

    def _mask(self, rows: int, column: Column) -> Tensor:
        """Return a mask of left-padded prompts, of right-padded responses, or of both."""
        lengths, sample = self.plan.lengths, torch.tensor(self.lengths.rows(rows, self.plan.batch.samples_per_prompt))
        prompt = torch.arange(lengths.prompt).flip(0) < sample[:, :1]
        response = torch.arange(lengths.response) < sample[:, 1:]
        parts = {"prompt": prompt, "response": response, "sequence": torch.cat([prompt, response], 1)}
        return parts[column.width].to(torch.uint8).contiguous()


def measure_combine(
    context: ProfileContext, operator: Operator, loaded: LoadedModel, measured_rows: MeasuredRows
) -> Points:
    """Measure an operator that runs no model by the number of rows."""
    calls = {str(each): context.call(operator, loaded, each) for each in measured_rows.all}
    last = measured_rows.needed[-1]
    further = {str(each): Estimate(str(last), each / last) for each in measured_rows.further}
    timings = context.stopwatch.time(calls, context.budget, further=further)
    return tuple(Point(rows=int(each), seconds=t.seconds, spread=t.spread) for each, t in timings.items())


def measure_contention(context: ProfileContext, operator: Operator, loaded: LoadedModel, rows: int) -> dict[int, float]:
    """Return the time of a forward pass by number of ranks that compute at once, relative to one rank alone."""
    ranks = context.stopwatch.all_ranks.ranks
    call = context.call(operator, loaded, rows)
    size = len(ranks)
    counts = sorted({min(2**power, size) for power in range(size.bit_length() + 1)})
    calls = {str(count): call for count in counts}
    skipped = frozenset(name for name in calls if ranks.index(context.rank.world.rank) >= int(name))
    timings = context.stopwatch.time(calls, context.budget, skipped)
    # a ratio below 1 is noise
    return {int(name): max(1.0, timing.seconds / timings["1"].seconds) for name, timing in timings.items()}
