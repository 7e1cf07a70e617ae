"""Reward-model training on preference pairs: a graph with one train operator; a pair is two samples of one prompt."""

from __future__ import annotations

from flexrlhf.config.algorithms import RewardSpec
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Graph, Operator


def reward(spec: RewardSpec) -> Graph:
    """Return the graph of reward-model training: the chosen response scores above the rejected one."""
    return Graph(
        operators=(
            Operator(
                "train_reward",
                "train",
                "reward",
                (*TEXT, "response_mask"),
                function="pair_loss",
                quantities=("scores",),
                barrier=spec.epochs > 1,
            ),
        ),
        roles=("reward",),
        data="pairs",
        inputs=(*TEXT, "response_mask"),
        evaluation=(
            Operator("scores", "forward", "reward", TEXT, ("scores",)),
            Operator("accuracy", "combine", "reward", ("scores",), function="pair_accuracy"),
        ),
    )
