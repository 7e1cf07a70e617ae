"""Measure the calls of a model through the same functions as a run: operators on rows of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.rows import RowStore
from flexrlhf.engines.base import Sampling
from flexrlhf.guideline.costs.measurements import ModelTimes, Point, Points
from flexrlhf.guideline.simulation.calls import TextLayout, reads_prompts_once
from flexrlhf.measure.profiled_models import LengthSample, MeasuredRows, ProfiledModel, RowCounts
from flexrlhf.measure.stopwatch import Estimate, Stopwatch, TimedCall, Timing
from flexrlhf.memory.packed_rows import PackedPass, TextGroup, packs_texts, shares_prompts
from flexrlhf.operators.columns import Column, Width, column_of
from flexrlhf.operators.graph import Operator
from flexrlhf.placement.layout import BatchShape
from flexrlhf.plan.plan import Plan
from flexrlhf.trainer.controllers import Controllers
from flexrlhf.trainer.execution import OperatorRun
from flexrlhf.trainer.loaded_models import LoadedModel
from flexrlhf.trainer.operator_guards import FiniteGuard
from flexrlhf.trainer.run_operator import OperatorContext, run_operator
from flexrlhf.trainer.text_operators import ExternalScorers

NO_TOKEN = -1
"""An end token that no response contains."""
FULL, FIRST = "generate", "first tokens"
"""Kinds of calls that generate full responses, and their first tokens alone."""


@dataclass(frozen=True)
class CallGroup:
    """Calls of one kind, by number of rows."""

    kind: str
    calls: Mapping[int, TimedCall]
    rows: MeasuredRows


@dataclass(frozen=True)
class ProfileContext:
    """Arguments of every measurement on this rank.

    plan:       with every model on all ranks
    lengths:    lengths of the rows that calls are made with
    stopwatch:  clock over all ranks
    rank:       this rank
    device:     device of this rank
    budget:     seconds for the repetitions of one measurement
    """

    plan: Plan
    lengths: LengthSample
    stopwatch: Stopwatch
    rank: int
    device: torch.device
    budget: float

    def call(self, operator: Operator, loaded: LoadedModel, rows: int, sampling: Sampling | None = None) -> TimedCall:
        """Return a call of ``operator`` on ``rows`` of each replica, whose columns are in the store."""
        run, store = self._prepare(operator, loaded, rows)
        context = self._operator_context(sampling or self.sampling((NO_TOKEN,)))
        return lambda: run_operator(run, store, context)

    def computed(self, loaded: LoadedModel, row_counts: Sequence[int]) -> tuple[int | None, dict[int, int]]:
        """Return the mean width of the rows that forward and training passes compute (None without any), and the tokens
        of all passes by number of sequences."""
        found = {rows: self._passes(loaded, rows) for rows in row_counts}
        tokens = {rows: sum(each.tokens for each in passes) for rows, passes in found.items()}
        pairs = sum(each.tokens * each.width for passes in found.values() for each in passes)
        return round(pairs / sum(tokens.values())) if tokens else None, tokens

    def read_tokens(self, loaded: LoadedModel, row_counts: Sequence[int]) -> dict[int, int]:
        """Return the tokens of the prompts that generation reads, by number of rows."""
        samples = self.plan.batch.samples_per_prompt
        step = samples if reads_prompts_once(loaded.placed) else 1
        return {rows: sum(prompt for prompt, _ in self.lengths.rows(rows, samples)[::step]) for rows in row_counts}

    def _passes(self, loaded: LoadedModel, rows: int) -> tuple[PackedPass, ...]:
        """Return the passes that the engine makes of ``rows`` sequences of a call."""
        model, samples = loaded.placed, self.plan.batch.samples_per_prompt
        settings, lengths = model.settings, self.lengths.rows(rows, samples)
        packs = packs_texts(settings, self.plan.shapes.get(model.role), self.plan.lengths.total)
        groups = [
            TextGroup(lengths[row][0], tuple(response for _, response in lengths[row : row + samples]))
            for row in range(0, rows, samples)
        ]
        return TextLayout(settings.micro_batch_tokens, packs, shares_prompts(settings)).passes(groups)

    def sampling(self, end_tokens: tuple[int, ...]) -> Sampling:
        """Return the run's sampling settings with other end tokens."""
        algorithm = self.plan.spec.algorithm
        # truncated sampling takes more time
        truncation = {key: getattr(algorithm, key) for key in ("top_p", "top_k") if hasattr(algorithm, key)}
        return Sampling(self.plan.spec.seed, 0, self.plan.temperature, end_tokens, 0, **truncation)

    def first_tokens(self, operator: Operator, loaded: LoadedModel, rows: int) -> tuple[int, ...]:
        """Return the first tokens of the responses; noise is a function of the row, so they are always the same."""
        run, store = self._prepare(operator, loaded, rows)
        run_operator(run, store, self._operator_context(self.sampling((NO_TOKEN,))))
        return tuple(sorted(set(store.get("tokens", run.rows)[:, self.plan.lengths.prompt].tolist())))

    def _operator_context(self, sampling: Sampling) -> OperatorContext:
        """Return the context of an operator, without scorers: no operator that is measured calls one."""
        guard = FiniteGuard("stop", dist.HashStore(), 0)
        return OperatorContext(self.plan.spec, sampling, self.device, ExternalScorers({}, str), str, guard)

    def _prepare(self, operator: Operator, loaded: LoadedModel, rows: int) -> tuple[OperatorRun, RowStore]:
        samples = self.plan.batch.samples_per_prompt
        shape = BatchShape(rows // samples * loaded.placed.layout.dp, samples)
        state = Controllers(self.plan).state(operator)
        run = OperatorRun(operator, loaded, loaded.placed.layout, shape, range(1), self.rank, state=state)
        store = RowStore(self.plan.lengths, self.device)
        for name in operator.reads:
            values = self._column(column_of(name), len(run.rows), loaded.engine.config.vocab_size)
            store.put(name, run.rows, values.to(self.device))
        return run, store

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
        return torch.ones(shape, dtype=torch.uint8) if width is None else self._mask(rows, column.width)

    def _mask(self, rows: int, width: Width) -> Tensor:
        """Return a mask of left-padded prompts, of right-padded responses, or of both."""
        lengths, sample = self.plan.lengths, torch.tensor(self.lengths.rows(rows, self.plan.batch.samples_per_prompt))
        prompt = torch.arange(lengths.prompt).flip(0) < sample[:, :1]
        response = torch.arange(lengths.response) < sample[:, 1:]
        parts = {"prompt": prompt, "response": response, "sequence": torch.cat([prompt, response], 1)}
        return parts[width].to(torch.uint8).contiguous()


def measure_calls(context: ProfileContext, model: ProfiledModel, loaded: LoadedModel, counts: RowCounts) -> ModelTimes:
    """Measure every call of the roles of a shape, with all ranks as replicas."""
    groups: list[CallGroup] = []
    for kind, operator in model.operators.items():
        match kind:
            case "forward" | "train":
                rows = counts.calls if kind == "forward" else counts.update
                groups.append(_group(context, operator, loaded, rows))
            case "generate":
                groups += _generate_groups(context, operator, loaded, counts.decode)
    timings = _time(context, groups)
    prompt, dp = max(context.lengths.prompts), loaded.placed.layout.dp
    row, tokens = context.computed(loaded, sorted({rows for kind, rows in timings if kind in ("forward", "train")}))
    return ModelTimes(
        model=model.transformer,
        engine=model.placed.engine,
        item=model.item,
        tp=model.placed.layout.tp,
        width=prompt + max(context.lengths.responses),
        prompt=prompt,
        row=row,
        forward=_points(timings, "forward", tokens),
        prefill=_points(timings, FIRST),
        step=_decode_steps(timings, context.plan.lengths.response),
        train={dp: _points(timings, "train", tokens)} if "train" in model.operators else {},
    )


def measure_operator(
    context: ProfileContext, operator: Operator, loaded: LoadedModel, measured_rows: MeasuredRows
) -> Points:
    """Measure an operator by the number of rows, of optimizer steps with the tokens of their passes."""
    timings = _time(context, [_group(context, operator, loaded, measured_rows)])
    is_trained = operator.kind == "train"
    tokens = context.computed(loaded, [rows for _, rows in timings])[1] if is_trained else {}
    return _points(timings, operator.kind, tokens)


def measure_contention(context: ProfileContext, operator: Operator, loaded: LoadedModel, rows: int) -> dict[int, float]:
    """Return the time of a forward pass by number of ranks that compute at once, relative to one rank alone."""
    ranks = context.stopwatch.all_ranks.ranks
    call = context.call(operator, loaded, rows)
    size = len(ranks)
    counts = sorted({min(2**power, size) for power in range(size.bit_length() + 1)})
    calls = {str(count): call for count in counts}
    skipped = frozenset(name for name in calls if ranks.index(context.rank) >= int(name))
    timings = context.stopwatch.time(calls, context.budget, skipped)
    # a ratio below 1 is noise
    return {int(name): max(1.0, timing.seconds / timings["1"].seconds) for name, timing in timings.items()}


def _group(context: ProfileContext, operator: Operator, loaded: LoadedModel, measured_rows: MeasuredRows) -> CallGroup:
    rows = (*measured_rows.needed, *measured_rows.further)
    return CallGroup(operator.kind, {each: context.call(operator, loaded, each) for each in rows}, measured_rows)


def _generate_groups(
    context: ProfileContext, operator: Operator, loaded: LoadedModel, measured_rows: MeasuredRows
) -> list[CallGroup]:
    """Return calls whose responses all have the maximum length, and calls whose responses end with the first token."""
    full = _group(context, operator, loaded, measured_rows)
    first = {rows: _EndingCall(context, operator, loaded, rows) for rows in full.calls}
    return [full, CallGroup(FIRST, dict(first), measured_rows)]


class _EndingCall:
    """Generation of the first token, which is found when it is called first."""

    def __init__(self, context: ProfileContext, operator: Operator, loaded: LoadedModel, rows: int) -> None:
        self._arguments = operator, loaded, rows
        self._context = context
        self._call: TimedCall | None = None

    def __call__(self) -> None:
        if self._call is None:
            end_tokens = self._context.first_tokens(*self._arguments)
            self._call = self._context.call(*self._arguments, self._context.sampling(end_tokens))
        self._call()


def _time(context: ProfileContext, groups: Sequence[CallGroup]) -> dict[tuple[str, int], Timing]:
    """Return timings by kind and number of rows."""
    names = {f"{group.kind}/{rows}": (group.kind, rows) for group in groups for rows in group.calls}
    calls = {f"{group.kind}/{rows}": call for group in groups for rows, call in group.calls.items()}
    further = {
        f"{group.kind}/{rows}": Estimate(f"{group.kind}/{group.rows.needed[-1]}", rows / group.rows.needed[-1])
        for group in groups
        for rows in group.rows.further
    }
    timings = context.stopwatch.time(calls, context.budget, further=further)
    return {names[name]: timing for name, timing in timings.items()}


def _points(
    timings: Mapping[tuple[str, int], Timing], kind: str, tokens: Mapping[int, int] = MappingProxyType({})
) -> Points:
    """Return the points of a kind of call. ``tokens``: computed by its passes, by number of rows."""
    by_rows = {rows: timing for (name, rows), timing in timings.items() if name == kind}
    return tuple(
        Point(rows=rows, seconds=each.seconds, spread=each.spread, tokens=tokens.get(rows))
        for rows, each in sorted(by_rows.items())
    )


def _decode_steps(timings: Mapping[tuple[str, int], Timing], longest: int) -> Points:
    """Return the time of one decoding step: full responses after the first token, over their other tokens."""
    first = {point.rows: point.seconds for point in _points(timings, FIRST)}
    full = _points(timings, FULL)
    both = [point for point in full if point.rows in first and longest > 1]
    steps = [(point, max(0.0, point.seconds - first[point.rows]) / (longest - 1)) for point in both]
    return tuple(point.model_copy(update={"seconds": seconds}) for point, seconds in steps)
