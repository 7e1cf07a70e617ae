"""PPO with actor and critic on one trunk (AC-Share)."""

from __future__ import annotations

from flexrlhf.config.algorithms import AcShareSpec
from flexrlhf.operators.graph import Graph
from flexrlhf.operators.policy import advantages, policy_graph, reference, sampled_and_scored, train_actor


def ac_share(spec: AcShareSpec) -> Graph:
    """Return the graph of PPO whose actor and critic share one trunk, trained by one loss."""
    estimated = advantages(spec, "ppo_advantages", ("values",), ("returns",), barrier=spec.whiten == "batch")
    train = train_actor(spec, "shared_loss", ("values", "returns"), quantities=("logprobs", "values"))
    operators = (*sampled_and_scored(spec, forwarded=("logprobs", "values")), estimated, train)
    return policy_graph(spec, operators, ("actor", *reference(spec), "reward"))
