"""Run one operator on this rank's rows: read columns, call the engine or the mathematics, write columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.rows import RowStore
from flexrlhf.config.spec import Spec
from flexrlhf.data.examples import Example
from flexrlhf.engines.base import Batch, Engine, Loss, Moments, Sampling, add_moments, moments
from flexrlhf.execution.scoring import Scoring
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.functions import COMBINES, LOSSES, settings_of
from flexrlhf.operators.columns import column_of
from flexrlhf.operators.graph import Operator
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.shapes import ModelShape


@dataclass(frozen=True)
class LoadedModel:
    """A placed model on this rank. ``tp``: the ranks that hold the other parts of it for the same rows."""

    model: PlacedModel
    engine: Engine
    dp: RankGroup
    tp: RankGroup
    shape: ModelShape


@dataclass(frozen=True)
class OperatorRun:
    """An operator over whole mini-batches on this rank. ``rows`` of a mini-batch may be empty.

    ``version``: batches that the weights of the resident have been trained on. ``examples``: those of the prompts of
    ``shape``. ``state``: of the operator's controllers.
    """

    operator: Operator
    resident: LoadedModel
    shape: BatchShape
    mini_batches: range
    rank: int
    version: int = 0
    examples: Sequence[Example] = ()
    state: Mapping[str, float] = field(default_factory=dict)

    def rows_of(self, mini_batches: range) -> tuple[int, ...]:
        return self.shape.rows(self.shape.prompts_on(self.resident.model.layout, self.rank, mini_batches))

    @property
    def rows(self) -> tuple[int, ...]:
        return self.rows_of(self.mini_batches)

    def segments(self) -> list[slice]:
        """Where each mini-batch's rows lie among ``rows``."""
        ends = list(accumulate(len(self.rows_of(range(m, m + 1))) for m in self.mini_batches))
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def batch(self, store: RowStore, rows: Sequence[int], device: torch.device) -> Batch:
        """What the operator reads of ``rows``, without its suffix."""
        names = [name for name in self.operator.reads if name not in self.operator.extra_reads]
        return self._batch(store, names, self.operator.suffix, rows, device)

    def extra_batch(self, store: RowStore, rows: Sequence[int], device: torch.device) -> Batch:
        """The further texts of a train operator."""
        return self._batch(store, self.operator.extra_reads, f".{self.operator.extra_loss}", rows, device)

    def _batch(
        self, store: RowStore, names: Sequence[str], suffix: str, rows: Sequence[int], device: torch.device
    ) -> Batch:
        columns = {name.removesuffix(suffix): store.get(name, rows) for name in names}
        return Batch(columns, torch.tensor(rows, dtype=torch.int64, device=device), self.shape.samples_per_prompt)


@dataclass(frozen=True)
class OperatorContext:
    """What operators need of their rank besides rows and models."""

    spec: Spec
    sampling: Sampling
    device: torch.device
    scoring: Scoring


def run_operator(
    work: OperatorRun, store: RowStore, surroundings: OperatorContext, ahead: Sequence[OperatorRun] = ()
) -> Moments:
    """Execute ``work``; its columns are in ``store`` afterwards. Returns the moments of this rank's rows.

    ``ahead``: what this rank will generate next with the same weights.
    """
    operator, device = work.operator, surroundings.device
    if operator.kind == "train":
        return _train(work, store, surroundings)
    batch = work.batch(store, work.rows, device)
    statistics: Moments = {}
    match operator.kind:
        case "generate":
            later = [each.batch(store, each.rows, device) for each in ahead]
            columns, statistics = _generate(work, batch, surroundings.sampling, later)
        case "forward":
            wanted = [column_of(name.removesuffix(operator.suffix)) for name in operator.writes]
            columns = work.resident.engine.forward(batch, wanted, operator.adapters)
        case "score":
            answers = [work.examples[row // work.shape.samples_per_prompt] for row in work.rows]
            columns, statistics = surroundings.scoring.score(operator, batch, answers, work.resident.tp)
        case "combine":
            context = CombineContext(work.segments(), work.resident.dp, work.state)
            settings = settings_of(operator.function, surroundings.spec)
            columns, statistics = COMBINES[operator.function](settings, batch, context)
    for name in operator.writes:
        store.put(name, work.rows, columns[name.removesuffix(operator.suffix)])
    return statistics


def _generate(work: OperatorRun, batch: Batch, sampling: Sampling, later: Sequence[Batch]) -> tuple[Columns, Moments]:
    """Answers, the version of the policy that drew them, and how many the engine says that it has drawn."""
    engine = work.resident.engine
    before = engine.num_requests
    if work.operator.is_greedy:
        sampling = replace(sampling, temperature=0.0)
    columns = engine.generate(batch, sampling, later)
    columns["policy_version"] = torch.full_like(columns["finished"], work.version, dtype=torch.int32)
    # where nothing else tells them, an engine's log-probs are the policy's
    columns["logprobs"] = columns["rollout_logprobs"]
    if sampling.step < 0:
        return columns, {}  # an evaluation
    lag = sampling.step - columns["policy_version"].float()
    requests = lag.new_tensor(engine.num_requests - before)
    return columns, {"rollout_requests": moments(requests), "policy_lag": moments(lag)}


def _train(work: OperatorRun, store: RowStore, surroundings: OperatorContext) -> Moments:
    """One optimizer step per mini-batch, in order, ``epochs`` times over."""
    operator, algorithm, device = work.operator, surroundings.spec.algorithm, surroundings.device
    loss = LOSSES[operator.function](algorithm)
    extra_loss = LOSSES[operator.extra_loss](algorithm) if operator.extra_loss else None
    statistics: Moments = {}
    for _ in range(algorithm.epochs):
        for mini_batch in work.mini_batches:
            rows = work.rows_of(range(mini_batch, mini_batch + 1))
            parts: list[tuple[Batch, Loss]] = [(work.batch(store, rows, device), loss)]
            if extra_loss is not None:
                parts.append((work.extra_batch(store, rows, device), extra_loss))
            add_moments(statistics, work.resident.engine.train(parts))
    return statistics
