"""A graph of one's own: GRPO whose scores are the mean of two reward models less their disagreement."""

import torch

from flexrlhf.config.algorithms.policy import policy_graph, reference, sampled_and_scored, train_actor
from flexrlhf.engines.base import moments
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Operator


def make_graph(spec):
    """Return the operators of a step. A second model scores next to the first; the vector has an entry for it."""
    second = Operator("second_scores", "forward", "reward_second", TEXT, ("scores.second",))
    reads = ("scores", "scores.second", "response_mask")
    compared = Operator("advantages", "combine", "actor", reads, ("loss_mask", "advantages"), "cautious_advantages")
    operators = (*sampled_and_scored(spec), second, compared, train_actor(spec))
    return policy_graph(spec, operators, ("actor", *reference(spec), "reward", "reward_second"))


def cautious_advantages(spec, batch, context):
    """Return the columns that the operator writes, (n, R), and statistics, which become metrics; n rows of a rank."""
    both = torch.stack([batch["scores"], batch["scores.second"]])
    spread = both.std(0, correction=0)
    groups = (both.mean(0) - spec.settings["caution"] * spread).view(-1, batch.samples_per_prompt)
    relative = (groups - groups.mean(1, keepdim=True)).flatten()
    mask = batch["response_mask"]
    columns = {"loss_mask": mask, "advantages": relative[:, None] * mask}
    return columns, {"reward": moments(both.mean(0)), "disagreement": moments(spread)}
