"""Algorithms without a critic that compare the responses to one prompt: GRPO, RLOO, GSPO."""

from __future__ import annotations

from flexrlhf.config.algorithms import GroupSpec
from flexrlhf.operators.graph import Graph
from flexrlhf.operators.policy import advantages, policy_graph, reference, sampled_and_scored, train_actor
from flexrlhf.operators.sources import STEP_ENDS


def group(spec: GroupSpec) -> Graph:
    """Return the graph of an algorithm whose advantages are relative to the group of a prompt."""
    ends = (STEP_ENDS,) if spec.supervision == "process" else ()
    operators = (*sampled_and_scored(spec), advantages(spec, "group_advantages", ends), train_actor(spec))
    return policy_graph(spec, operators, ("actor", *reference(spec), "reward"))
