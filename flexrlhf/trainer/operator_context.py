"""Arguments of operators on a rank that are neither rows nor models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from flexrlhf.config.spec import Spec
from flexrlhf.data.retokenized import TextEncoder
from flexrlhf.data.turn_tokens import TurnTokens
from flexrlhf.engines.base import Sampling
from flexrlhf.plan.plan import Plan
from flexrlhf.trainer.episode_turns import EnvironmentCaller
from flexrlhf.trainer.execution import OperatorRun
from flexrlhf.trainer.operator_guards import FiniteGuard, SampledCheck, make_sampled_check
from flexrlhf.trainer.rank_context import RankContext
from flexrlhf.trainer.text_operators import ExternalScorers, make_text_encoders

EVALUATION_STEP = -1
"""Step that the sampling noise of evaluations is a function of; training has no such step."""


@dataclass(frozen=True)
class OperatorContext:
    """Arguments of operators that are neither rows nor models.

    spec:      settings of the run.
    sampling:  how responses are sampled.
    device:    of this rank.
    scorers:   functions, services and rules that score responses.
    decode:    tokens to text, special tokens included.
    guard:     rule for values that are not finite.
    check:     comparison of the first step's log-probs; None: there is none.
    encoders:  from text to tokens, by role, for models with a tokenizer of their own.
    environments: caller of the environments of episodes; None: there are none.
    text:      tokens of a response to the text that scores read.
    turns:     tokens around replies of environments; None: responses are no episodes.
    """

    spec: Spec
    sampling: Sampling
    device: torch.device
    scorers: ExternalScorers
    decode: Callable[..., str]
    guard: FiniteGuard
    check: SampledCheck | None = None
    encoders: Mapping[str, TextEncoder] = field(default_factory=dict)
    environments: EnvironmentCaller | None = None
    text: Callable[[Sequence[int]], str] = str
    turns: TurnTokens | None = None

    @classmethod
    def by_itself(cls, spec: Spec, sampling: Sampling, device: torch.device) -> OperatorContext:
        """Return the context of an operator that is executed outside a run and calls no scorer."""
        guard = FiniteGuard("stop", dist.HashStore(), 0)
        return cls(spec, sampling, device, ExternalScorers({}, str), str, guard)

    def at(self, step: int) -> OperatorContext:
        """Return the context of ``step``."""
        return replace(self, sampling=replace(self.sampling, step=step))

    def where(self, run: OperatorRun) -> str:
        """Return step, operator and model in words."""
        step = self.sampling.step
        return f"{f'step {step}' if step >= 0 else 'evaluation'}, {run.operator.name} on {run.model.placed.name}"


def make_operator_context(rank: RankContext) -> OperatorContext:
    """Return the context of the operators of training on this rank, in step 0."""
    spec, world = rank.plan.spec, rank.world
    guard = FiniteGuard(spec.guards.non_finite, dist.PrefixStore(f"finite/{spec.name}", world.store), world.rank)
    check = make_sampled_check(rank.plan, rank.decode)
    encoders = make_text_encoders(rank.plan, rank.models)
    sampling = step_sampling(rank)
    return OperatorContext(
        spec,
        sampling,
        world.device,
        rank.scorers,
        rank.decode,
        guard,
        check,
        encoders,
        rank.environments,
        rank.text,
        rank.turns,
    )


def step_sampling(rank: RankContext) -> Sampling:
    """Return how responses are sampled in step 0; other steps differ in ``step`` alone."""
    algorithm, data = rank.plan.spec.algorithm, rank.data
    return Sampling(
        rank.plan.spec.seed,
        0,
        algorithm.temperature,
        data.eos_token_ids,
        data.pad_token_id,
        decode=rank.text,
        has_kernel=rank.plan.spec.debug.noise_kernel,
        top_p=algorithm.top_p,
        top_k=algorithm.top_k,
        min_tokens=algorithm.min_response_tokens,
        num_ids=sampled_ids(rank) if algorithm.SAMPLES else None,
        stop=algorithm.stop,
    )


def sampled_ids(rank: RankContext) -> int | None:
    """Return the number of ids that generation chooses from: those that every model embeds and the tokenizer has.

    None: all of the actor's. A vocabulary may be padded, by rows that nothing trains.
    """
    plan, found = rank.plan, rank.data.num_ids
    # a model with code of its own has no shape
    shape = plan.shapes.get(plan.graph.generated or "")
    if shape is None or shape.sizes is None or found >= shape.sizes.vocabulary:
        return plan.sampled_ids
    return min(found, plan.sampled_ids or found)


def evaluation_sampling(plan: Plan, sampling: Sampling) -> Sampling:
    """Return how evaluations sample: as training does, at ``eval.temperature`` if it is given."""
    settings = plan.spec.eval
    if settings is not None and settings.temperature is not None:
        sampling = replace(sampling, temperature=settings.temperature)
    return replace(sampling, step=EVALUATION_STEP)
