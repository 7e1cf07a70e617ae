"""Guards of the values that operators compute on this rank.

Log-probs, values, losses and gradients must be finite. In the first step, log-probs as transformers sampled the tokens
are compared with those that the policy computes of whole sequences: an architecture that decodes token by token by
another function than it is trained by differs there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.rows import RowStore
from flexrlhf.config.model_settings import Dtype, ModelSpec
from flexrlhf.engines.base import Batch, Loss, Moments, moments
from flexrlhf.engines.non_finite import NonFinite, NonFiniteStep
from flexrlhf.errors import RunStopped
from flexrlhf.objectives.context import Columns
from flexrlhf.objectives.parity import LogprobDifferences
from flexrlhf.operators.graph import Operator
from flexrlhf.placement.placed import ModelName
from flexrlhf.plan.old_logprobs import COMPARED
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Run
from flexrlhf.trainer.loaded_models import LoadedModel
from flexrlhf.trainer.step_warnings import RareWarnings

GRACE_SECONDS = 2.0
"""Time in which a rank that found such a value waits for the other ranks of the model in the same pass."""


@dataclass(frozen=True)
class FiniteGuard:
    """Rule for values that are not finite.

    policy: stop the run, or skip the optimizer steps that they spoil.
    store:  where ranks publish the values that they found.
    rank:   this rank.
    warn:   reports skipped steps.
    """

    policy: Literal["stop", "skip"]
    store: dist.Store
    rank: int
    warn: RareWarnings = field(default_factory=RareWarnings)

    def check_columns(
        self, where: str, step: int, columns: Mapping[str, Tensor], rows: Tensor, ranks: RankGroup
    ) -> None:
        """Raise RunStopped for a value in ``columns`` (n, ...) that is not finite; with ``skip`` report it.

        where: step, operator and model, in words.
        rows:  int64 (n,), numbers of the rows.
        ranks: data-parallel group of the model; those that found such a value name the first row of all.
        """
        first = NonFinite.first_in_columns(columns, rows)
        if first is None:
            return
        if self.policy == "skip":
            self.warn(first.what, step, f"{where}: NaN or infinity in {first.text}; no update will follow from it")
            return
        first = self._over_ranks(where, first, ranks.ranks)
        raise RunStopped(
            f"{where}: NaN or infinity in {first.text}; guards.non_finite: skip would go on without the "
            f"optimizer steps that it spoils"
        )

    def _over_ranks(self, where: str, own: NonFinite, ranks: Sequence[int]) -> NonFinite:
        """Return the first row that ``ranks`` found. No rank waits if all is well, so this one waits a little."""
        keys = [f"{where}/{rank}" for rank in ranks]
        self.store.set(f"{where}/{self.rank}", json.dumps(asdict(own)))
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and not self.store.check(keys):
            time.sleep(0.05)
        found = [NonFinite(**json.loads(self.store.get(key))) for key in keys if self.store.check([key])]
        return min(found, key=lambda each: each.row)

    def left_out(self, where: str, step: int, error: NonFiniteStep, losses: Sequence[Loss], reports: bool) -> Moments:
        """Return the statistics of an optimizer step that was left out; with ``stop`` raise RunStopped.

        where:   step, operator, model and mini-batch, in words.
        losses:  of the step, whose statistics count for nothing.
        reports: whether this rank reports it.
        """
        cause = "though every loss is" if error.first is None else f"first in {error.first.text}"
        text = f"{where}: the loss or its gradient is not finite, {cause}"
        if self.policy == "stop":
            raise RunStopped(
                f"{text}; the weights were left as they were; guards.non_finite: skip would go on without this "
                f"optimizer step"
            )
        if reports:
            self.warn(where.partition(", ")[2], step, f"{text}; this optimizer step is left out")
        nothing = torch.zeros_like(error.statistics["grad_norm"])
        return {name: nothing for loss in losses for name in loss.statistics} | error.statistics

    def counted(self, statistics: Moments) -> Moments:
        """Return the statistics of an optimizer step with whether it was skipped, if steps may be."""
        if self.policy == "stop" or "skipped" in statistics:
            return statistics
        norm = statistics["grad_norm"]
        return statistics | {"skipped": moments(torch.zeros(1, device=norm.device))}


LIMIT, LIMIT_16_BITS = 1e-3, 0.05
"""Mean difference in nats at temperature 1 that rounding does not reach."""
SAMPLED, COMPUTED = "rollout_logprobs", "logprobs"
OF_WHOLE_TEXTS = frozenset({COMPUTED, COMPARED})
"""Columns of a forward that are compared; the second is computed for this alone."""


@dataclass(frozen=True)
class SampledCheck:
    """Comparison of the first step's log-probs.

    policy:      stop the run or report a difference.
    temperature: of the log-probs.
    models:      placed models that sample responses and compute log-probs of them.
    decode:      tokens to text.
    sent:        ``sync.dtype``.
    """

    policy: Literal["stop", "warn"]
    temperature: float
    models: frozenset[ModelName]
    decode: Callable[[Sequence[int]], str]
    sent: Dtype | None = None
    warn: RareWarnings = field(default_factory=RareWarnings)

    def after(self, operator: Operator, model: LoadedModel, store: RowStore, batch: Batch, columns: Columns) -> None:
        """Keep the log-probs of responses that ``operator`` has sampled; compare those that it has computed of them.

        All data-parallel ranks of the model call this, and raise RunStopped alike.

        columns: that it has computed of ``batch``.
        """
        if model.placed.name not in self.models:
            return
        kept, rows = f"{SAMPLED}.{model.placed.name}", batch.rows.tolist()
        if operator.samples_responses:
            store.put(kept, rows, columns[SAMPLED])
            store.put(f"response_mask.{kept}", rows, columns["response_mask"])
            return
        for name in OF_WHOLE_TEXTS.intersection(operator.writes):
            self._compare(model, batch, store.get(f"response_mask.{kept}", rows), store.get(kept, rows), columns[name])

    def before_training(self, model: LoadedModel, batch: Batch) -> None:
        """Compare the columns of both log-probs, if one copy has sampled the tokens and another is trained."""
        if {SAMPLED, COMPUTED} <= batch.columns.keys() and model.placed.name not in self.models:
            self._compare(model, batch, batch["loss_mask"], batch[SAMPLED], batch[COMPUTED])

    def _compare(self, model: LoadedModel, batch: Batch, mask: Tensor, sampled: Tensor, computed: Tensor) -> None:
        found = LogprobDifferences.of(sampled, computed, batch, mask, model.dp)
        limit = mean_limit(model.placed.settings, self.temperature, self.sent)
        if found.mean <= limit:
            return
        sentence = self._sentence(model, found, limit)
        if self.policy == "stop":
            raise RunStopped(sentence)
        if model.dp.is_first and model.replica.is_first:
            self.warn(str(model.placed.name), 0, sentence)

    def _sentence(self, model: LoadedModel, found: LogprobDifferences, limit: float) -> str:
        worst = ", ".join(difference.text(self.decode) for difference in found.worst)
        return (
            f"step 0: {model.placed.name} ({model.engine.config.model_type}) computes other log-probs of whole texts "
            f"than it sampled their tokens by: mean difference {found.mean:.3g} nats, limit {limit:.3g}, largest "
            f"{found.largest:.3g}, so transformers does not decode this architecture as it is trained; use another "
            f"one, or guards.sampled_logprobs: warn; worst tokens: {worst}"
        )


def mean_limit(settings: ModelSpec, temperature: float, sent: Dtype | None = None) -> float:
    """Return the limit of the mean difference in nats; log-probs at a low temperature magnify rounding.

    ``sent``: ``sync.dtype``.
    """
    is_exact = settings.dtype == settings.of_shadow.dtype == "float32" and sent is None
    return (LIMIT if is_exact else LIMIT_16_BITS) / min(1.0, temperature)


def make_sampled_check(plan: Plan, decode: Callable[[Sequence[int]], str]) -> SampledCheck | None:
    """Return the check of a run; None unless transformers samples from the policy itself, and trains on its samples."""
    guards, algorithm = plan.spec.guards, plan.spec.algorithm
    if guards.sampled_logprobs == "off" or plan.spec.rollout.has_copy or plan.spec.debug.replay is not None:
        return None
    if not algorithm.SAMPLES or algorithm.is_cut:
        return None
    runs = [each for each in plan.schedule.instructions if isinstance(each, Run)]
    sampling = {(run.model, run.layout) for run in runs if run.operator.samples_responses}
    forwards = [run for run in runs if run.operator.kind == "forward"]
    computing = {(run.model, run.layout) for run in forwards if OF_WHOLE_TEXTS.intersection(run.operator.writes)}
    # a protocol may split the rows of both otherwise
    models = frozenset(model for model, _ in sampling & computing)
    return SampledCheck(guards.sampled_logprobs, plan.temperature, models, decode, plan.spec.sync.dtype)
