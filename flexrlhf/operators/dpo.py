"""DPO: the reference computes log-probs of pairs, then the actor trains on them; nothing is generated."""

from __future__ import annotations

from flexrlhf.config.algorithms import DpoSpec
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Graph, Operator

LOGPROBS = Operator("logprobs", "forward", "actor", TEXT, ("logprobs",))
REF_LOGPROBS = Operator("ref_logprobs", "forward", "ref", TEXT, ("ref_logprobs",))


def dpo(spec: DpoSpec) -> Graph:
    """Return the graph of direct preference optimisation (Rafailov et al. 2023)."""
    read = (*TEXT, "loss_mask", "ref_logprobs")
    train = Operator("train_actor", "train", "actor", read, function="preference_loss", barrier=spec.epochs > 1)
    return Graph(
        operators=(REF_LOGPROBS, train),
        roles=("actor", "ref"),
        data="pairs",
        inputs=(*TEXT, "loss_mask"),
        evaluation=dpo_evaluation(),
    )


def dpo_evaluation() -> tuple[Operator, ...]:
    """Return the operators that compare the implicit rewards, to a reference, of evaluation pairs."""
    compared = ("logprobs", "ref_logprobs", "loss_mask")
    return (LOGPROBS, REF_LOGPROBS, Operator("accuracy", "combine", "actor", compared, function="preference_accuracy"))
