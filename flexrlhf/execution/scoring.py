"""Ask functions, services and rules for the scores of this rank's answers."""

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


class Scoring:
    """What is asked from outside the models, by section of the YAML."""

    def __init__(self, scorers: Mapping[str, Scorer], decode: Decode) -> None:
        self._scorers = scorers
        self._decode = decode

    def score(
        self, operator: Operator, batch: Batch, examples: Sequence[Example], tp: RankGroup
    ) -> tuple[Columns, Moments]:
        """What ``operator`` writes for the answers to ``examples``, one a row.

        Of the ranks with the same rows the first one asks: two answers to one question may differ.
        """
        mask = batch["response_mask"].bool()
        totals = torch.zeros(len(batch), dtype=torch.float32)
        tokens = torch.zeros(mask.shape, dtype=torch.float32)
        failed = torch.zeros(1)
        if tp.is_first:
            found = self._scorers[operator.function].score(self._answers(batch, examples))
            totals, failed = torch.tensor(found.totals, dtype=torch.float32), torch.tensor([float(found.failed)])
            _fill(tokens, mask, found)
        totals, tokens, failed = (tp.sum(each.to(mask.device)) for each in (totals, tokens, failed))
        columns = {"scores": totals, "token_scores": tokens}
        share = failed.double() / max(len(batch), 1)
        statistics = {"score_failed": moments(share, torch.full_like(share, len(batch)))}
        wanted = [name.removesuffix(operator.suffix) for name in operator.writes]
        return {name: columns[plain(name)] for name in wanted}, statistics

    def _answers(self, batch: Batch, examples: Sequence[Example]) -> list[Sample]:
        mask = batch["response_mask"].bool()
        width = batch["tokens"].shape[1] - mask.shape[1]
        tokens = batch["tokens"].cpu()
        answers = []
        for row, example in enumerate(examples):
            response: list[int] = tokens[row, width:][mask[row].cpu()].tolist()
            answers.append(Sample(example.text, self._decode(response), len(response), example.columns))
        return answers

    def close(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()


def make_scoring(graph: Graph, spec: Spec, decode: Decode) -> Scoring:
    """Scorers of the sections that ``graph`` asks."""
    asked = {operator.function for operator in (*graph.operators, *graph.evaluation) if operator.kind == "score"}
    sections = {"reward": spec.reward or (), "cost": spec.cost or ()}
    scorers = {
        name: Scorer(
            [source for source in sections[name] if not isinstance(source, ModelSource)], name, spec.timeout_seconds / 2
        )
        for name in sorted(asked)
    }
    return Scoring(scorers, decode)


def _fill(tokens: Tensor, mask: Tensor, found: Scores) -> None:
    """Token scores into their places, which the mask tells; an answer without them is no number."""
    for row, values in enumerate(found.tokens or []):
        places = mask[row].cpu()
        tokens[row, places] = torch.tensor(values, dtype=torch.float32) if values else float("nan")
