"""ReMax: a second, greedy answer to every prompt, whose score is the baseline."""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.config.algorithms import RemaxSpec
from flexrlhf.operators.columns import TEXT, qualified
from flexrlhf.operators.evaluation import GENERATE
from flexrlhf.operators.graph import Graph
from flexrlhf.operators.policy import SCORES, advantages, drawn, policy_graph, reference, train_actor

GREEDY = qualified((*TEXT, "response_mask", "finished"), "greedy")


def remax(spec: RemaxSpec) -> Graph:
    greedy = replace(GENERATE, name="greedy", writes=GREEDY, suffix=".greedy", is_greedy=True, either_copy=True)
    scores = replace(SCORES, name="greedy_scores", reads=GREEDY[:2], writes=("scores.greedy",), suffix=".greedy")
    compared = advantages(spec, "remax_advantages", ("scores.greedy", *GREEDY[2:]), barrier=spec.whiten == "batch")
    operators = (*drawn(spec), greedy, scores, compared, train_actor(spec))
    return policy_graph(spec, operators, ("actor", *reference(spec), "reward"))
