"""PPO with separate actor and critic (AC-NonShare)."""

from __future__ import annotations

from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.spec import PpoSpec

ROLES = ("actor", "critic", "ref", "reward")
TEXT = ("tokens", "attention_mask")


def ppo(spec: PpoSpec) -> Graph:
    several_epochs = spec.epochs > 1
    return Graph(
        operators=(
            Operator("generate", "generate", "actor", ("prompts", "prompt_mask"), (*TEXT, "response_mask", "finished")),
            Operator("logprobs", "forward", "actor", TEXT, ("logprobs",)),
            Operator("ref_logprobs", "forward", "ref", TEXT, ("ref_logprobs",)),
            Operator("scores", "forward", "reward", TEXT, ("scores",)),
            Operator("values", "forward", "critic", TEXT, ("values",)),
            Operator(
                "advantages",
                "combine",
                "actor",
                ("logprobs", "ref_logprobs", "scores", "values", "response_mask", "finished"),
                ("advantages", "returns"),
                function="gae",
                barrier=spec.whiten == "batch",
            ),
            Operator(
                "train_actor",
                "train",
                "actor",
                (*TEXT, "response_mask", "logprobs", "advantages"),
                function="policy_loss",
                barrier=several_epochs,
            ),
            Operator(
                "train_critic",
                "train",
                "critic",
                (*TEXT, "response_mask", "values", "returns"),
                function="value_loss",
                barrier=several_epochs,
            ),
        ),
        roles=ROLES,
        data="prompts",
        inputs=("prompts", "prompt_mask"),
        evaluation=(
            Operator("generate", "generate", "actor", ("prompts", "prompt_mask"), (*TEXT, "response_mask", "finished")),
            Operator("diversity", "combine", "actor", ("tokens", "response_mask"), function="diversity"),
        ),
        can_shadow=True,
    )
