"""Scores of this rank's responses from outside the models: functions, services and rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.config.reward_sources import ModelSource
from flexrlhf.config.spec import Spec
from flexrlhf.data.examples import Example
from flexrlhf.engines.base import Batch, Moments, moments
from flexrlhf.objectives.context import Columns
from flexrlhf.operators.columns import plain
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.rewards.base import Sample, Scores
from flexrlhf.rewards.scorer import Scorer

Decode = Callable[[Sequence[int]], str]
"""Tokens to text, without special tokens."""


class ExternalScorers:
    """Scorers of a run, by section of the YAML (reward, cost): tensors in, tensors out."""

    def __init__(self, scorers: Mapping[str, Scorer], decode: Decode) -> None:
        self._scorers = scorers
        self._decode = decode

    def score(
        self, operator: Operator, batch: Batch, examples: Sequence[Example], tp: RankGroup
    ) -> tuple[Columns, Moments]:
        """Return the columns that ``operator`` writes for the responses of ``batch``; ``examples`` has one for each.

        The first rank of the tensor-parallel group scores for all: two calls for one response may differ.
        """
        mask = batch["response_mask"].bool()
        totals = torch.zeros(len(batch), dtype=torch.float32)
        tokens = torch.zeros(mask.shape, dtype=torch.float32)
        failed = torch.zeros(1)
        if tp.is_first:
            scores = self._scorers[operator.function].score(self._samples(batch, examples))
            totals, failed = torch.tensor(scores.totals, dtype=torch.float32), torch.tensor([float(scores.failed)])
            _fill(tokens, mask, scores)
        totals, tokens, failed = (tp.sum(each.to(mask.device)) for each in (totals, tokens, failed))
        columns = {"scores": totals, "token_scores": tokens}
        share = failed.double() / max(len(batch), 1)
        statistics = {"score_failed": moments(share, torch.full_like(share, len(batch)))}
        written = [name.removesuffix(operator.suffix) for name in operator.writes]
        return {name: columns[plain(name)] for name in written}, statistics

    def _samples(self, batch: Batch, examples: Sequence[Example]) -> list[Sample]:
        """Return the responses of ``batch`` as text, each with the columns of its example."""
        mask = batch["response_mask"].bool()
        width = batch["tokens"].shape[1] - mask.shape[1]
        tokens = batch["tokens"].cpu()
        samples = []
        for row, example in enumerate(examples):
            response: list[int] = tokens[row, width:][mask[row].cpu()].tolist()
            samples.append(Sample(example.text, self._decode(response), len(response), example.columns))
        return samples

    def close(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()


def make_external_scorers(graph: Graph, spec: Spec, decode: Decode) -> ExternalScorers:
    """Make the scorers of the sections that operators of ``graph`` call."""
    called = {operator.function for operator in (*graph.operators, *graph.evaluation) if operator.kind == "score"}
    sections = {"reward": spec.reward or (), "cost": spec.cost or ()}
    scorers = {
        name: Scorer(
            [source for source in sections[name] if not isinstance(source, ModelSource)], name, spec.timeout_seconds / 2
        )
        for name in sorted(called)
    }
    return ExternalScorers(scorers, decode)


def _fill(tokens: Tensor, mask: Tensor, scores: Scores) -> None:
    """Write token scores to the places of the mask; a response without scores gets NaN there."""
    for row, values in enumerate(scores.tokens or []):
        places = mask[row].cpu()
        tokens[row, places] = torch.tensor(values, dtype=torch.float32) if values else float("nan")
