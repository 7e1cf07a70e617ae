"""Run one operator on this rank's rows: read columns, call the engine or the mathematics, write columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.rows import RowStore
from flexrlhf.config.algorithms.base import SampledSpec
from flexrlhf.config.algorithms.grpo import GroupSpec
from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.spec import Spec
from flexrlhf.data.retokenized import TextEncoder
from flexrlhf.engines.base import Batch, Loss, Moments, Sampling, add_moments, moments
from flexrlhf.engines.non_finite import NonFiniteStep
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.functions import check_returned, combine_of, make_loss, settings_of
from flexrlhf.objectives.parity import naming_tokens
from flexrlhf.objectives.surrogates import staleness
from flexrlhf.operators.columns import FINAL_OUTCOME, GROUP_SCORES, PRESENT, column_of, plain
from flexrlhf.operators.outcomes import CODES
from flexrlhf.plan.plan import Plan
from flexrlhf.text import mini_batches_text
from flexrlhf.trainer.episode_rows import LOGPROBS, rows_before_turn
from flexrlhf.trainer.episode_turns import EnvironmentCaller
from flexrlhf.trainer.execution import OperatorRun
from flexrlhf.trainer.operator_guards import FiniteGuard, SampledCheck, make_sampled_check
from flexrlhf.trainer.prompt_attempts import replace_prompts, take_prompts
from flexrlhf.trainer.rank_context import RankContext
from flexrlhf.trainer.segment_rounds import carried_scores, earlier_scores, make_round, places_in, whole_columns
from flexrlhf.trainer.text_operators import ExternalScorers, make_text_encoders, retokenized

_SCORES = ("scores", "token_scores")
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

    def at(self, step: int) -> OperatorContext:
        """Return the context of ``step``."""
        return replace(self, sampling=replace(self.sampling, step=step))


def make_operator_context(rank: RankContext) -> OperatorContext:
    """Return the context of the operators of training on this rank, in step 0."""
    spec, world = rank.plan.spec, rank.world
    guard = FiniteGuard(spec.guards.non_finite, dist.PrefixStore(f"finite/{spec.name}", world.store), world.rank)
    check = make_sampled_check(rank.plan, rank.decode)
    encoders = make_text_encoders(rank.plan, rank.models)
    sampling = step_sampling(rank)
    return OperatorContext(
        spec, sampling, world.device, rank.scorers, rank.decode, guard, check, encoders, rank.environments
    )


def step_sampling(rank: RankContext) -> Sampling:
    """Return how responses are sampled in step 0; other steps differ in ``step`` alone."""
    algorithm, data = rank.plan.spec.algorithm, rank.data
    decode = partial(rank.decode, skip_special_tokens=True)
    sampling = Sampling(
        rank.plan.spec.seed, 0, rank.plan.temperature, data.eos_token_ids, data.pad_token_id, decode=decode
    )
    if not isinstance(algorithm, SampledSpec):
        return sampling
    return replace(
        sampling,
        top_p=algorithm.top_p,
        top_k=algorithm.top_k,
        min_tokens=algorithm.min_response_tokens,
        num_ids=rank.plan.sampled_ids,
        stop=algorithm.stop,
    )


def evaluation_sampling(plan: Plan, sampling: Sampling) -> Sampling:
    """Return how evaluations sample: as training does, at ``eval.temperature`` if it is given."""
    settings = plan.spec.eval
    if settings is not None and settings.temperature is not None:
        sampling = replace(sampling, temperature=settings.temperature)
    return replace(sampling, step=EVALUATION_STEP)


def run_operator(
    run: OperatorRun,
    store: RowStore,
    context: OperatorContext,
    ahead: Sequence[OperatorRun] = (),
    before: RowStore | None = None,
) -> Moments:
    """Execute ``run`` and put the columns that it writes into ``store``. Returns the moments of this rank's rows.

    ahead:   what this rank will generate next with the same weights.
    before:  rows of the step before, of which some are carried.
    """
    if run.operator.kind in _TRAINING:
        return _TRAINING[run.operator.kind](run, store, context)
    batch = run.batch(store, context.device)
    if run.operator.kind == "interact":
        _interact(run, batch, store, context)
        return {}
    if run.operator.kind == "generate":
        columns, statistics = _generate(run, store, context, ahead, before)
    else:
        columns, statistics = _computed(run, batch, store, context, before)
    written = {name: columns[name.removesuffix(run.operator.suffix)] for name in run.operator.writes}
    _check_finite(run, written, batch.rows, context)
    if context.check is not None and context.sampling.step == 0:
        context.check.after(run.operator, run.model, store, batch, columns)
    for name, values in written.items():
        store.put(name, run.rows, _of_all_rows(run, batch, values))
    return statistics


def _of_all_rows(run: OperatorRun, batch: Batch, values: Tensor) -> Tensor:
    """Return ``values`` (n, ...) of the rows of ``batch`` with zeros for the operator's other rows."""
    if len(values) == len(run.rows):
        return values
    return values.new_zeros(len(run.rows), *values.shape[1:]).index_copy_(0, places_in(run, batch), values)


def _check_finite(run: OperatorRun, columns: Columns, rows: Tensor, context: OperatorContext) -> None:
    """Raise RunStopped for log-probs and values that are not finite; scores have ``algorithm.invalid_scores``."""
    if run.operator.kind not in ("generate", "forward"):
        return
    has_own_rule = isinstance(context.spec.algorithm, PolicySpec)
    checked = {n: values for n, values in columns.items() if not (has_own_rule and plain(n) in _SCORES)}
    context.guard.check_columns(_where(run, context), context.sampling.step, checked, rows, run.model.dp)


def _where(run: OperatorRun, context: OperatorContext) -> str:
    """Return step, operator and model in words."""
    step = context.sampling.step
    return f"{f'step {step}' if step >= 0 else 'evaluation'}, {run.operator.name} on {run.model.placed.name}"


def _computed(
    run: OperatorRun, batch: Batch, store: RowStore, context: OperatorContext, before: RowStore | None
) -> tuple[Columns, Moments]:
    """Return the columns that ``run`` writes, named without its suffix, and the moments of their statistics."""
    operator = run.operator
    match operator.kind:
        case "forward":
            written = [column_of(name.removesuffix(operator.suffix)) for name in operator.writes]
            columns = run.model.engine.forward(batch, written, operator.adapters)
            if "response_mask" in batch.columns:
                # of values there is one more, after the last token
                columns |= {
                    name: columns[name].where(batch["response_mask"] > 0, 0.0)
                    for name in columns
                    if name.endswith("logprobs")
                }
            return columns, {}
        case "score":
            return context.scorers.score(operator, batch, run.examples_of(batch), run.model.replica)
        case "retokenize":
            encoder, decode = context.encoders[operator.function], context.decode
            return retokenized(operator, batch, run.examples_of(batch), encoder, decode)
        case "combine":
            return _combine(run, batch, store, context, before)
    raise AssertionError(f"{operator.name} is no operator that computes columns of rows")


def _generate(
    run: OperatorRun,
    store: RowStore,
    context: OperatorContext,
    ahead: Sequence[OperatorRun],
    before: RowStore | None,
) -> tuple[Columns, Moments]:
    """Return responses with the weights version of their tokens, and how many the engine reports."""
    engine, sampling = run.model.engine, context.sampling
    num_requests = engine.num_requests
    if run.operator.is_greedy:
        sampling = replace(sampling, temperature=0.0)
    batches = [each.batch(store, context.device) for each in (run, *ahead)]
    if run.operator.turns:
        columns = _turn(run, batches[0], store, sampling, context)
    elif run.operator.carries:
        sampling = replace(sampling, most_tokens=context.spec.rollout.segment_tokens)
        rounds = [
            make_round(each, batch, before, sampling.step, context.spec.lengths)
            for each, batch in zip((run, *ahead), batches, strict=True)
        ]
        first, *later = rounds
        generated = engine.generate(first.continued, sampling, [each.continued for each in later])
        by_row = context.spec.rollout.groups == "as-ended"
        columns = whole_columns(run, first, generated, run.model.version, by_row)
    else:
        columns = engine.generate(batches[0], sampling, batches[1:])
        columns["policy_version"] = columns["response_mask"].int() * run.model.version
        # without a pass of the trained model, an engine's log-probs serve as the policy's
        columns["logprobs"] = columns["rollout_logprobs"]
    if sampling.step < 0:
        return columns, {}  # an evaluation
    counts = {"rollout_requests": engine.num_requests - num_requests}
    if (rollout := run.model.placed.rollout) is not None and rollout.process == "child":
        counts["rollout_restarts"] = run.model.take_restarts()
    return columns, {name: moments(torch.tensor(float(n), device=context.device)) for name, n in counts.items()}


def _turn(run: OperatorRun, batch: Batch, store: RowStore, sampling: Sampling, context: OperatorContext) -> Columns:
    """Return the responses with a further turn of the rows whose episode goes on; a turn that none has is left out."""
    environment = context.spec.environment
    assert environment is not None, "turns are of an environment's episodes"
    rows = rows_before_turn(run, store, context.spec.lengths, sampling.pad_token_id)
    continued = rows.continued(batch)
    if not _has_rows(run, continued):
        return rows.unchanged()
    generated = run.model.engine.generate(continued, replace(sampling, most_tokens=environment.turn_tokens))
    return rows.columns(generated, run.model.version)


def _interact(run: OperatorRun, batch: Batch, store: RowStore, context: OperatorContext) -> None:
    """Call the environments: their reset, or their reply to the last turn of each row."""
    assert context.environments is not None, "an environment has a caller"
    if not run.operator.turns:
        context.environments.reset(run, batch, store, context.sampling)
        return

    def check(columns: Columns) -> None:
        if context.check is not None and context.sampling.step == 0 and not run.goes_on:
            for sampled in [columns[name] for name in LOGPROBS if name in columns][:1]:
                context.check.after(run.operator, run.model, store, batch, {**columns, LOGPROBS[0]: sampled})

    context.environments.step(run, store, context.sampling, check)


def _combine(
    run: OperatorRun, batch: Batch, store: RowStore, context: OperatorContext, before: RowStore | None
) -> tuple[Columns, Moments]:
    """Return the columns and statistics of an attempt, or of a function of ``objectives/``."""
    function, sampling = run.operator.function, context.sampling
    if run.operator.takes_prompts:
        assert isinstance(context.spec.algorithm, GroupSpec), "only these sample dynamically"
        alone = CombineContext((), run.model.dp, run.state, sampling.step, sampling.seed)
        if run.attempt is None:
            return replace_prompts(run, before, context.spec.algorithm, alone, context.device)
        return take_prompts(run, store, context.spec.algorithm, alone)
    scores = carried_scores(run, before, context.device) if GROUP_SCORES in run.operator.carries else None
    combine_context = CombineContext(
        run.parts(store),
        run.model.dp,
        run.state,
        sampling.step,
        sampling.seed,
        None if scores is None else earlier_scores(run, batch, scores),
        has_surplus=context.spec.num_segments == 1,
    )
    with naming_tokens(context.decode, context.sampling.step):
        computed = combine_of(function)(settings_of(function, context.spec), batch, combine_context)
    check_returned(run.operator, computed, batch)
    columns, statistics = computed
    if scores is not None:
        # also of rows that are not trained on in this step
        columns[GROUP_SCORES] = scores.index_copy(0, places_in(run, batch), columns[GROUP_SCORES])
    if "policy_version" in batch.columns and columns.keys() & {"loss_mask", "kept_mask"}:
        statistics |= staleness(batch.with_columns(columns), combine_context)
    return columns, statistics


def _train(run: OperatorRun, store: RowStore, context: OperatorContext) -> Moments:
    """Make one optimizer step per mini-batch, in order, ``epochs`` times over. Outcomes of rows go into ``store``."""
    _check_sampled(run, store, context)
    epochs = context.spec.algorithm.epochs
    statistics: Moments = {}
    outcomes: dict[int, Tensor] = {}
    updated: set[int] = set()
    for epoch in range(epochs):
        for mini_batch in run.mini_batches:
            batch = run.batch(store, context.device, range(mini_batch, mini_batch + 1))
            outcomes[mini_batch] = _outcomes(batch)
            if PRESENT in run.operator.reads and not _has_rows(run, batch):
                continue
            parts = _loss_parts(run, mini_batch, batch, store, context)
            name = f"mini-batch {mini_batch}" + (f" of epoch {epoch}" if epochs > 1 else "")
            of_step = _optimizer_step(run, run.model.engine.train, parts, name, context)
            add_moments(statistics, of_step)
            if not _is_skipped(of_step):
                updated.add(mini_batch)
    _put_outcomes(run, outcomes, updated, store)
    return statistics


def _check_sampled(run: OperatorRun, store: RowStore, context: OperatorContext) -> None:
    """Compare log-probs before the first training."""
    if context.check is not None and context.sampling.step == 0:
        context.check.before_training(run.model, run.batch(store, context.device))


def _is_skipped(of_step: Moments) -> bool:
    return "skipped" in of_step and bool(of_step["skipped"][1])


def _put_outcomes(run: OperatorRun, outcomes: Mapping[int, Tensor], updated: Collection[int], store: RowStore) -> None:
    """Put the outcomes of the rows of each mini-batch; rows of others than the ``updated`` ones are skipped."""
    final = [
        each if mini_batch in updated else each.where(each > 0, CODES["skipped"])
        for mini_batch, each in outcomes.items()
    ]
    store.put(FINAL_OUTCOME, run.present_rows(store, run.mini_batches), torch.cat(final))


def _losses(run: OperatorRun, store: RowStore, context: OperatorContext) -> Moments:
    """Compute the losses of a training on each of its mini-batches, without an optimizer step."""
    statistics: Moments = {}
    for parts in _parts_of_each(run, store, context):
        add_moments(statistics, run.model.engine.losses(parts))
    return statistics


def _backward(run: OperatorRun, store: RowStore, context: OperatorContext) -> Moments:
    """Add the gradients of the losses of mini-batches, for the next optimizer step."""
    _check_sampled(run, store, context)
    parts = [part for of_one in _parts_of_each(run, store, context) for part in of_one]
    run.model.added += parts
    return run.model.engine.backward(parts)


def _step(run: OperatorRun, store: RowStore, context: OperatorContext) -> Moments:
    """Make one optimizer step on the gradients that were added. Outcomes of their rows go into ``store``."""
    parts, run.model.added = run.model.added, []
    numbers = run.mini_batches
    outcomes = {number: _outcomes(run.batch(store, context.device, range(number, number + 1))) for number in numbers}
    statistics = _optimizer_step(run, run.model.engine.step, parts, mini_batches_text(numbers), context)
    _put_outcomes(run, outcomes, () if _is_skipped(statistics) else numbers, store)
    return statistics


LossParts = list[tuple[Batch, Loss]]
"""Losses that are added, each over its own mini-batch."""


def _parts_of_each(run: OperatorRun, store: RowStore, context: OperatorContext) -> Iterator[LossParts]:
    """Yield the losses of each mini-batch."""
    for number in run.mini_batches:
        batch = run.batch(store, context.device, range(number, number + 1))
        yield _loss_parts(run, number, batch, store, context)


def _loss_parts(
    run: OperatorRun, mini_batch: int, batch: Batch, store: RowStore, context: OperatorContext
) -> LossParts:
    """Return ``batch``, the rows of a mini-batch, with the loss, and further texts with the extra loss; these alone if
    that is the operator's loss."""
    operator, algorithm = run.operator, context.spec.algorithm
    parts: LossParts = []
    if operator.function != operator.extra_loss:
        parts.append((batch, make_loss(operator.function, algorithm)))
    if operator.extra_loss:
        extra = run.batch(store, context.device, range(mini_batch, mini_batch + 1), is_extra=True)
        parts.append((extra, make_loss(operator.extra_loss, algorithm)))
    return parts


def _outcomes(batch: Batch) -> Tensor:
    """Return uint8 (n,): codes of the outcomes of rows if the optimizer step on them is made."""
    outcomes = batch.columns.get("outcome", torch.zeros_like(batch.rows, dtype=torch.uint8))
    rejected = torch.where(batch.sampled_mask.bool().any(1), CODES["rejected"], CODES["no_tokens"]).to(outcomes.dtype)
    return outcomes.where((outcomes > 0) | batch.mask.bool().any(1), rejected)


def _has_rows(run: OperatorRun, batch: Batch) -> bool:
    """Whether any data-parallel rank has rows of a mini-batch, of which ``batch`` are this rank's."""
    number = torch.tensor(float(len(batch)), dtype=torch.float64, device=batch.rows.device)
    return bool(run.model.dp.sum(number) > 0)


def _optimizer_step(
    run: OperatorRun,
    update: Callable[[LossParts], Moments],
    parts: LossParts,
    mini_batch: str,
    context: OperatorContext,
) -> Moments:
    """Make one optimizer step by a method of the engine, or none if its gradient is not finite; return its
    statistics."""
    try:
        return context.guard.counted(update(parts))
    except NonFiniteStep as error:
        if error.first is not None:
            # whether the row is one of further texts, of which each mini-batch has some
            error.first = replace(error.first, part=error.first.part % (2 if run.operator.extra_loss else 1))
        where = f"{_where(run, context)}, {mini_batch}"
        is_reporter = run.rank == run.model.placed.ranks[0]
        return context.guard.left_out(where, context.sampling.step, error, [loss for _, loss in parts], is_reporter)


_TRAINING: Mapping[str, Callable[[OperatorRun, RowStore, OperatorContext], Moments]] = {
    "train": _train,
    "loss": _losses,
    "backward": _backward,
    "step": _step,
}
"""A train and parts of one, which write no columns."""
