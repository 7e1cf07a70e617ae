"""Run one operator on this rank's rows: read columns, call the engine or the mathematics, write columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flexrlhf.comm.rows import RowStore
from flexrlhf.engines.base import Batch, Moments, Sampling, moments
from flexrlhf.objectives.context import Columns, CombineContext
from flexrlhf.objectives.functions import computed_columns, settings_of
from flexrlhf.operators.columns import Column, Lengths
from flexrlhf.operators.graph import SCORES
from flexrlhf.trainer.execution import OperatorRun
from flexrlhf.trainer.open_rows import OpenRows, carried_columns, earlier_scores, places_in, whole_responses
from flexrlhf.trainer.operator_context import OperatorContext
from flexrlhf.trainer.prompt_attempts import replace_prompts, take_prompts
from flexrlhf.trainer.run_training import TRAINING
from flexrlhf.trainer.text_operators import retokenized


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
    if run.operator.kind in TRAINING:
        return TRAINING[run.operator.kind](run, store, context)
    batch = run.batch(store, context.device)
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
    has_own_rule = context.spec.algorithm.SAMPLES
    checked = {n: values for n, values in columns.items() if not (has_own_rule and Column.plain(n) in SCORES)}
    context.guard.check_columns(context.where(run), context.sampling.step, checked, rows, run.model.dp)


def _computed(
    run: OperatorRun, batch: Batch, store: RowStore, context: OperatorContext, before: RowStore | None
) -> tuple[Columns, Moments]:
    """Return the columns that ``run`` writes, named without its suffix, and the moments of their statistics."""
    operator = run.operator
    match operator.kind:
        case "forward":
            written = [Column.of(name.removesuffix(operator.suffix)) for name in operator.writes]
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
            encoder, decode = context.encoders[operator.function], context.text
            return retokenized(operator, batch, run.examples_of(batch), encoder, decode, context.turns)
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
    late = None
    if run.operator.has_replies or run.operator.carries:
        columns, late = _continued([run, *ahead], batches, store.lengths, sampling, context, before)
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
    if late is not None:
        counts["late_replies"] = late
    return columns, {name: moments(torch.tensor(float(n), device=context.device)) for name, n in counts.items()}


def _continued(
    runs: Sequence[OperatorRun],
    batches: Sequence[Batch],
    lengths: Lengths,
    sampling: Sampling,
    context: OperatorContext,
    before: RowStore | None,
) -> tuple[Columns, int | None]:
    """Return the columns of the first of ``runs``, whose rows have replies or go on from step to step, and how many go
    on since their reply is late; None: none ever does. An engine may begin with the others' ``batches``."""
    run, spec = runs[0], context.spec
    most = spec.rollout.segment_tokens if run.operator.carries else None
    settings = sampling.step, lengths, sampling.pad_token_id, before, most, spec.rollout.carries_late
    late = None
    rows, *later = (OpenRows.begin(each, batch, *settings) for each, batch in zip(runs, batches, strict=True))
    if run.operator.has_replies:
        assert context.environments is not None, "an environment has a caller"
        late = context.environments.play(run, rows, sampling)
    else:
        places = rows.open_places
        ahead = [each.continued(each.open_places) for each in later]
        rows.add(places, run.model.engine.generate(rows.continued(places), sampling, ahead), run.model.version)
    trains_further = spec.environment is None or spec.environment.train_sequences == "all"
    return rows.columns(trains_further), late


def _combine(
    run: OperatorRun, batch: Batch, store: RowStore, context: OperatorContext, before: RowStore | None
) -> tuple[Columns, Moments]:
    """Return the columns and statistics of an attempt, or of a function of ``objectives/``."""
    sampling = context.sampling
    if run.operator.takes_prompts:
        settings = settings_of(run.operator.function, context.spec)
        alone = CombineContext((), run.model.dp, run.state, sampling.step, sampling.seed)
        if run.attempt is None:
            return replace_prompts(run, before, settings, alone, context.device)
        return take_prompts(run, store, settings, alone)
    if run.operator.joins_responses:
        return whole_responses(run, batch, sampling.step), {}
    carried = carried_columns(run, sampling.step, before, store)
    combine_context = CombineContext(
        run.parts(store),
        run.model.dp,
        run.state,
        sampling.step,
        sampling.seed,
        earlier_scores(run, batch, carried) if carried else None,
        has_surplus=context.spec.num_segments == 1,
    )
    columns, statistics = computed_columns(run.operator, context.spec, batch, combine_context, context.decode)
    for name, values in carried.items():
        # also of rows that are not trained on in this step
        columns[name] = values.index_copy(0, places_in(run, batch), columns[name])
    return columns, statistics
