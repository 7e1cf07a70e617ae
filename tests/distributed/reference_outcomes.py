"""Outcomes of the reference's responses: trained on, or left out for the first reason that holds."""

from __future__ import annotations

import math
from collections import Counter

import torch
from reference_responses import Response
from reference_terms import Metric
from torch import Tensor

from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.spec import Spec
from flexrlhf.metrics import Outcome


def outcome_column(policy: PolicySpec, responses: list[Response]) -> Tensor:
    """Outcomes as far as the scores decide them."""
    return torch.tensor([Outcome(_by_scores(policy, response)).code for response in responses], dtype=torch.uint8)


def _by_scores(policy: PolicySpec, response: Response) -> str:
    if response.episode is not None and response.episode.outcome == "failed":
        return "failed_episode"
    if not all(math.isfinite(response.scores.get(section, 0.0)) for section in ("reward", "cost")):
        return "invalid_score"
    if not response.finished and policy.truncation == "mask":
        return "truncated"
    if response.greedy is not None and (reason := _by_scores(policy, response.greedy)) != "trained":
        return reason
    return "trained" if response.is_taken else response.reason


def row_metrics(spec: Spec, step: int, responses: list[Response], in_flight: int) -> dict[str, Metric]:
    """Rows by outcome, and the length of responses that a choice takes over the length of all."""
    policy = spec.algorithm
    assert isinstance(policy, PolicySpec)
    outcomes = [_by_scores(policy, response) for response in responses]
    for number, response in enumerate(responses):
        if step < policy.freeze_actor_steps:
            outcomes[number] = "frozen"
        elif outcomes[number] == "trained" and response.kept and not any(response.kept):
            outcomes[number] = "rejected"
    metrics = counted(outcomes, in_flight)
    # the choice is among groups, also with responses whose tokens are then out of the loss
    taken = [len(response.tokens) for response in responses if response.is_taken or response.reason == "truncated"]
    if taken and any(response.reason not in ("", "truncated") for response in responses):
        all_of_them = [len(response.tokens) for response in responses]
        ratio = (sum(taken) / len(taken)) / (sum(all_of_them) / len(all_of_them))
        metrics["kept_length_ratio"] = Metric(ratio, 1.0)
    return metrics


def counted(outcomes: list[str], in_flight: int) -> dict[str, Metric]:
    """Rows by outcome, and rows in flight."""
    counts = {**Counter(outcomes), "in_flight": in_flight}
    return {f"rows_{name}": Metric(count, 1.0) for name, count in counts.items()}
