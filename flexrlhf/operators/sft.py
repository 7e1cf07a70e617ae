"""Supervised fine-tuning: a graph with one train operator."""

from __future__ import annotations

from flexrlhf.config.algorithms import SftSpec
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.evaluation import DIVERSITY, GENERATE, next_to_data
from flexrlhf.operators.graph import Graph, Operator


def sft(spec: SftSpec) -> Graph:
    """Return the graph of supervised fine-tuning: likelihood of the data set's responses."""
    return Graph(
        operators=(
            Operator(
                "train_actor",
                "train",
                "actor",
                (*TEXT, "loss_mask"),
                function="likelihood_loss",
                barrier=spec.epochs > 1,
            ),
        ),
        roles=("actor",),
        data="responses",
        inputs=("prompts", "prompt_mask", *TEXT, "loss_mask"),
        evaluation=(
            Operator("logprobs", "forward", "actor", TEXT, ("logprobs",)),
            Operator("perplexity", "combine", "actor", ("logprobs", "loss_mask"), function="likelihood"),
            next_to_data(GENERATE),
            next_to_data(DIVERSITY),
        ),
    )
