"""KTO: responses to other prompts are forwarded, too; their log-ratios are the reference point of the losses."""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.config.algorithms import KtoSpec
from flexrlhf.operators.columns import TEXT, qualified
from flexrlhf.operators.dpo import LOGPROBS, REF_LOGPROBS, dpo_evaluation
from flexrlhf.operators.graph import Graph, Operator

MISMATCHED = "mismatched"
"""Qualifier of the columns of responses to other prompts than their own."""


def kto(spec: KtoSpec) -> Graph:
    """Return the graph of Kahneman-Tversky optimization (Ethayarajh et al. 2024)."""
    suffix = f".{MISMATCHED}"
    texts = qualified(TEXT, MISMATCHED)
    forwards = tuple(
        replace(
            each, name=f"mismatched_{each.name}", reads=texts, writes=qualified(each.writes, MISMATCHED), suffix=suffix
        )
        for each in (LOGPROBS, REF_LOGPROBS)
    )
    compared = qualified(("logprobs", "ref_logprobs", "loss_mask"), MISMATCHED)
    point = Operator(
        "reference_point", "combine", "actor", compared, ("reference_point",), function="reference_point", suffix=suffix
    )
    read = (*TEXT, "loss_mask", "ref_logprobs", "reference_point")
    train = Operator("train_actor", "train", "actor", read, function="kto_loss", barrier=spec.epochs > 1)
    return Graph(
        operators=(REF_LOGPROBS, *forwards, point, train),
        roles=("actor", "ref"),
        data="pairs",
        inputs=(*TEXT, "loss_mask", *texts, f"loss_mask{suffix}"),
        evaluation=dpo_evaluation(),
    )
