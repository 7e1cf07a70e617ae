"""ReMax: a second, greedy response to every prompt, whose score is the baseline."""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.config.algorithms import RemaxSpec
from flexrlhf.operators.columns import TEXT, qualified
from flexrlhf.operators.evaluation import GENERATE
from flexrlhf.operators.graph import Graph
from flexrlhf.operators.policy import SCORES, advantages, policy_graph, reference, sampled_and_scored, train_actor

GREEDY = qualified((*TEXT, "response_mask", "finished"), "greedy")


def remax(spec: RemaxSpec) -> Graph:
    """Return the graph of ReMax (Li et al. 2023). Both copies of the actor may generate the greedy responses."""
    greedy = replace(GENERATE, name="greedy", writes=GREEDY, suffix=".greedy", is_greedy=True, either_copy=True)
    scores = replace(SCORES, name="greedy_scores", reads=GREEDY[:2], writes=("scores.greedy",), suffix=".greedy")
    compared = advantages(spec, "remax_advantages", ("scores.greedy", *GREEDY[2:]), barrier=spec.whiten == "batch")
    operators = (*sampled_and_scored(spec), greedy, scores, compared, train_actor(spec))
    return policy_graph(spec, operators, ("actor", *reference(spec), "reward"))
