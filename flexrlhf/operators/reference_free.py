"""SimPO and ORPO: the actor trains on pairs without a reference model."""

from __future__ import annotations

from flexrlhf.config.algorithms import OrpoSpec, SimpoSpec
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.dpo import LOGPROBS
from flexrlhf.operators.graph import Graph, Operator


def reference_free(spec: SimpoSpec | OrpoSpec) -> Graph:
    """Return the graph of an algorithm on preference pairs whose loss reads the policy alone."""
    read = (*TEXT, "loss_mask")
    train = Operator("train_actor", "train", "actor", read, function=f"{spec.name}_loss", barrier=spec.epochs > 1)
    compared = ("logprobs", "loss_mask")
    accuracy = Operator("accuracy", "combine", "actor", compared, function="preference_accuracy")
    return Graph(
        operators=(train,),
        roles=("actor",),
        data="pairs",
        inputs=read,
        evaluation=(LOGPROBS, accuracy),
    )
