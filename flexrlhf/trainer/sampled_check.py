"""Comparison in the first step: log-probs as transformers sampled the tokens, and as the policy computes them of whole
texts. An architecture that decodes token by token by another function than it is trained by differs here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from flexrlhf.comm.rows import RowStore
from flexrlhf.config.algorithms import SampledSpec
from flexrlhf.config.spec import Dtype, ModelSpec
from flexrlhf.engines.base import Batch
from flexrlhf.errors import RunStopped
from flexrlhf.objectives.context import Columns
from flexrlhf.objectives.parity import LogprobDifferences, compare_logprobs
from flexrlhf.operators.graph import Operator
from flexrlhf.operators.old_logprobs import COMPARED
from flexrlhf.placement.names import ModelName
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Run
from flexrlhf.trainer.finite_guard import RareWarnings
from flexrlhf.trainer.loaded_models import LoadedModel

LIMIT, LIMIT_16_BITS = 1e-3, 0.05
"""Mean difference in nats at temperature 1 that rounding does not reach."""
SAMPLED, COMPUTED = "rollout_logprobs", "logprobs"
OF_WHOLE_TEXTS = frozenset({COMPUTED, COMPARED})
"""Columns of a forward that are compared; the second is computed for this alone."""


@dataclass(frozen=True)
class SampledCheck:
    """Comparison of the first step's log-probs.

    policy:      stop the run or report a difference.
    limit:       of the mean difference (nats); None: by dtype.
    temperature: of the log-probs.
    models:      placed models that sample responses and compute log-probs of them.
    decode:      tokens to text.
    sent:        ``sync.dtype``.
    """

    policy: Literal["stop", "warn"]
    limit: float | None
    temperature: float
    models: frozenset[ModelName]
    decode: Callable[[Sequence[int]], str]
    sent: Dtype | None = None
    warn: RareWarnings = field(default_factory=RareWarnings)

    def after(self, operator: Operator, model: LoadedModel, store: RowStore, batch: Batch, columns: Columns) -> None:
        """Keep the log-probs of responses that ``operator`` has sampled; compare those that it has computed of them.

        All data-parallel ranks of the model call this, and raise RunStopped alike.

        columns: what it has computed of ``batch``.
        """
        if model.placed.name not in self.models:
            return
        kept, rows = f"{SAMPLED}.{model.placed.name}", batch.rows.tolist()
        if samples(operator):
            store.put(kept, rows, columns[SAMPLED])
            return
        for name in OF_WHOLE_TEXTS.intersection(operator.writes):
            mask = batch["attention_mask"][:, -columns[name].shape[1] :]
            self._compare(model, batch, mask, store.get(kept, rows), columns[name])

    def before_training(self, model: LoadedModel, batch: Batch) -> None:
        """Compare the columns of both log-probs, where one copy has sampled the tokens and another is trained."""
        if {SAMPLED, COMPUTED} <= batch.columns.keys() and model.placed.name not in self.models:
            self._compare(model, batch, batch["loss_mask"], batch[SAMPLED], batch[COMPUTED])

    def _compare(self, model: LoadedModel, batch: Batch, mask: Tensor, sampled: Tensor, computed: Tensor) -> None:
        found = compare_logprobs(sampled, computed, batch, mask, model.dp)
        limit = self.limit or default_limit(model.placed.settings, self.temperature, self.sent)
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


def samples(operator: Operator) -> bool:
    """Whether ``operator`` samples the responses that are trained on."""
    return operator.kind == "generate" and not operator.is_greedy


def default_limit(settings: ModelSpec, temperature: float, sent: Dtype | None = None) -> float:
    """Return the limit of the mean difference in nats; log-probs at a low temperature magnify rounding.

    ``sent``: ``sync.dtype``.
    """
    is_exact = settings.dtype == settings.of_shadow.dtype == "float32" and sent is None
    return (LIMIT if is_exact else LIMIT_16_BITS) / min(1.0, temperature)


def make_sampled_check(plan: Plan, decode: Callable[[Sequence[int]], str]) -> SampledCheck | None:
    """Return the check of a run; None where nothing is sampled by transformers from the policy itself."""
    guards, algorithm = plan.spec.guards, plan.spec.algorithm
    if guards.sampled_logprobs == "off" or plan.spec.rollout.engine != "transformers":
        return None
    if not isinstance(algorithm, SampledSpec) or algorithm.is_cut:
        return None
    runs = [each for each in plan.schedule.instructions if isinstance(each, Run)]
    sampling = {run.model for run in runs if samples(run.operator)}
    forwards = [run for run in runs if run.operator.kind == "forward"]
    computing = {run.model for run in forwards if OF_WHOLE_TEXTS.intersection(run.operator.writes)}
    models = frozenset(sampling & computing)
    policy, limit, sent = guards.sampled_logprobs, guards.max_logprob_difference, plan.spec.sync.dtype
    return SampledCheck(policy, limit, plan.temperature, models, decode, sent)
