"""Supervised fine-tuning: a graph with one train operator."""

from __future__ import annotations

from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.spec import SftSpec

TEXT = ("tokens", "attention_mask")


def sft(spec: SftSpec) -> Graph:
    return Graph(
        operators=(
            Operator(
                "train_actor",
                "train",
                "actor",
                (*TEXT, "response_mask"),
                function="likelihood_loss",
                barrier=spec.epochs > 1,
            ),
        ),
        roles=("actor",),
        data="responses",
        inputs=("prompts", "prompt_mask", *TEXT, "response_mask", "finished"),
        evaluation=(
            Operator("logprobs", "forward", "actor", TEXT, ("logprobs",)),
            Operator("perplexity", "combine", "actor", ("logprobs", "response_mask"), function="likelihood"),
            Operator("generate", "generate", "actor", ("prompts", "prompt_mask"), (*TEXT, "response_mask", "finished")),
            Operator("diversity", "combine", "actor", ("tokens", "response_mask"), function="diversity"),
        ),
    )
