"""Measure the calls of a model through the same functions as a run: operators on rows of a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.comm.rows import RowStore
from flexrlhf.engines.base import Sampling
from flexrlhf.execution.controller_states import make_controller_states
from flexrlhf.execution.external_scores import ExternalScorers
from flexrlhf.execution.loaded_models import LoadedModel
from flexrlhf.execution.run_operator import OperatorContext, OperatorRun, run_operator
from flexrlhf.guideline.costs.measurements import ModelTimes, Point, Points
from flexrlhf.operators.columns import Column, Width, column_of
from flexrlhf.operators.graph import Operator
from flexrlhf.placement.layout import BatchShape
from flexrlhf.plan.plan import Plan
from flexrlhf.profiling.stopwatch import Stopwatch, Timed, Work
from flexrlhf.profiling.subjects import RowCounts, Subject, TextSample, settings_of

NEVER = -1
"""An end token that no answer has."""
FULL, FIRST = "whole answers", "first tokens"


@dataclass(frozen=True)
class Bench:
    """Where a rank measures. ``budget``: seconds for the repetitions of one model."""

    plan: Plan
    texts: TextSample
    stopwatch: Stopwatch
    rank: int
    device: torch.device
    budget: float

    def work(self, operator: Operator, loaded: LoadedModel, rows: int, sampling: Sampling | None = None) -> Work:
        """``operator`` on ``rows`` of each replica, the columns already there."""
        run, store = self._prepared(operator, loaded, rows)
        drawn = sampling or self.sampling((NEVER,))
        return lambda: run_operator(run, store, self._context(drawn))

    def sampling(self, ends: tuple[int, ...]) -> Sampling:
        """As the run draws, but answers that end with other tokens."""
        return Sampling(self.plan.spec.seed, 0, self.plan.temperature, ends, 0, **settings_of(self.plan))

    def first_tokens(self, operator: Operator, loaded: LoadedModel, rows: int) -> tuple[int, ...]:
        """What whole answers begin with: noise is a function of the rows, so they always do."""
        run, store = self._prepared(operator, loaded, rows)
        run_operator(run, store, self._context(self.sampling((NEVER,))))
        return tuple(sorted(set(store.get("tokens", run.rows)[:, self.plan.lengths.prompt].tolist())))

    def _context(self, sampling: Sampling) -> OperatorContext:
        """Nothing is asked from outside the models."""
        return OperatorContext(self.plan.spec, sampling, self.device, ExternalScorers({}, str), str)

    def _prepared(self, operator: Operator, loaded: LoadedModel, rows: int) -> tuple[OperatorRun, RowStore]:
        samples = self.plan.batch.samples_per_prompt
        shape = BatchShape(rows // samples * loaded.placed.layout.dp, samples)
        state = make_controller_states(self.plan).state(operator)
        run = OperatorRun(operator, loaded, shape, range(1), self.rank, state=state)
        store = RowStore(self.plan.lengths, self.device)
        for name in operator.reads:
            values = self._column(column_of(name), len(run.rows), loaded.engine.config.vocab_size)
            store.put(name, run.rows, values.to(self.device))
        return run, store

    def _column(self, column: Column, rows: int, vocabulary: int) -> Tensor:
        """Text of many lengths, as a run has it: attention is slower where there is padding."""
        width = self.plan.lengths.width(column)
        shape = (rows,) if width is None else (rows, width)
        generator = torch.Generator().manual_seed(rows)
        match column.dtype:
            case "float32":
                return torch.randn(shape, generator=generator)
            case "int32":
                return torch.randint(0, vocabulary, shape, generator=generator, dtype=torch.int32)
        return torch.ones(shape, dtype=torch.uint8) if width is None else self._mask(rows, column.width)

    def _mask(self, rows: int, width: Width) -> Tensor:
        """Left-padded prompts, right-padded answers."""
        lengths, texts = self.plan.lengths, torch.tensor(self.texts.of_rows(rows))
        prompt = torch.arange(lengths.prompt).flip(0) < texts[:, :1]
        response = torch.arange(lengths.response) < texts[:, 1:]
        parts = {"prompt": prompt, "response": response, "sequence": torch.cat([prompt, response], 1)}
        return parts[width].to(torch.uint8).contiguous()


def measure_calls(bench: Bench, subject: Subject, loaded: LoadedModel, counts: RowCounts) -> ModelTimes:
    """Everything that the roles of a shape do, with all ranks as replicas."""
    works: dict[tuple[str, int], Work] = {}
    for kind, operator in subject.operators.items():
        match kind:
            case "forward":
                works |= {(kind, rows): bench.work(operator, loaded, rows) for rows in counts.calls}
            case "train":
                works |= {(kind, rows): bench.work(operator, loaded, rows) for rows in counts.update}
            case "generate":
                works |= _generating(bench, operator, loaded, counts)
    timed = _timed(bench, works)
    prompt, dp = max(bench.texts.prompts), loaded.placed.layout.dp
    return ModelTimes(
        model=subject.transformer,
        engine=subject.engine,
        item=subject.item,
        tp=subject.tp,
        width=prompt + max(bench.texts.answers),
        prompt=prompt,
        forward=_points(timed, "forward"),
        prefill=_points(timed, FIRST),
        step=_steps(timed, bench.plan.lengths.response),
        train={dp: _points(timed, "train")} if "train" in subject.operators else {},
    )


def measure_alone(bench: Bench, subject: Subject, loaded: LoadedModel, counts: RowCounts) -> Points:
    """Optimizer steps without another replica."""
    operator = subject.operators["train"]
    works = {("train", rows): bench.work(operator, loaded, rows) for rows in counts.update}
    return _points(_timed(bench, works), "train")


def measure_combine(bench: Bench, operator: Operator, loaded: LoadedModel, counts: RowCounts) -> Points:
    works = {("combine", rows): bench.work(operator, loaded, rows) for rows in counts.calls}
    return _points(_timed(bench, works), "combine")


def measure_contention(bench: Bench, operator: Operator, loaded: LoadedModel, rows: int) -> dict[int, float]:
    """How much longer a forward takes with so many ranks at work as with the first one alone."""
    ranks = bench.stopwatch.everyone.ranks
    work = bench.work(operator, loaded, rows)
    works = {str(count): work for count in _doubling(len(ranks))}
    idle = frozenset(name for name in works if ranks.index(bench.rank) >= int(name))
    timed = bench.stopwatch.time(works, bench.budget, idle)
    # company makes nothing faster: what looks so is noise
    return {int(name): max(1.0, each.seconds / timed["1"].seconds) for name, each in timed.items()}


def _doubling(most: int) -> list[int]:
    """1, 2, 4 ... and ``most``."""
    return sorted({min(2**power, most) for power in range(most.bit_length() + 1)})


def _generating(
    bench: Bench, operator: Operator, loaded: LoadedModel, counts: RowCounts
) -> dict[tuple[str, int], Work]:
    """Whole answers, none of which ends early, and such as end with the first token."""
    works: dict[tuple[str, int], Work] = {}
    for rows in counts.decode:
        works[FULL, rows] = bench.work(operator, loaded, rows)
        ends = bench.first_tokens(operator, loaded, rows)
        works[FIRST, rows] = bench.work(operator, loaded, rows, bench.sampling(ends))
    return works


def _timed(bench: Bench, works: Mapping[tuple[str, int], Work]) -> dict[tuple[str, int], Timed]:
    named: dict[str, Callable[[], object]] = {f"{what}/{rows}": work for (what, rows), work in works.items()}
    timed = bench.stopwatch.time(named, bench.budget)
    return dict(zip(works, timed.values(), strict=True))


def _points(timed: Mapping[tuple[str, int], Timed], what: str) -> Points:
    found = [(rows, each) for (name, rows), each in timed.items() if name == what]
    return tuple(Point(rows=rows, seconds=each.seconds, spread=each.spread) for rows, each in sorted(found))


def _steps(timed: Mapping[tuple[str, int], Timed], longest: int) -> Points:
    """Of one decoding step behind the first token: what whole answers take in addition, shared out."""
    first = {point.rows: point.seconds for point in _points(timed, FIRST)}
    whole = _points(timed, FULL)
    steps = [(point, max(0.0, point.seconds - first[point.rows]) / (longest - 1)) for point in whole if longest > 1]
    return tuple(point.model_copy(update={"seconds": seconds}) for point, seconds in steps)
