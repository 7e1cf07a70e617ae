"""A graph of a user's own: two models score, and the losses of tokens are of this file."""

import torch

from flexrlhf.config.algorithms.policy import policy_graph, reference, sampled_and_scored, train_actor
from flexrlhf.engines.base import Loss, moments
from flexrlhf.objectives.losses import aggregate
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Operator


def make_graph(spec):
    second = Operator("second_scores", "forward", "reward_second", TEXT, ("scores.second",))
    reads = ("scores", "scores.second", "response_mask")
    compared = Operator("advantages", "combine", "actor", reads, ("loss_mask", "advantages"), "compared")
    operators = (*sampled_and_scored(spec), second, compared, train_actor(spec, "plain_loss"))
    return policy_graph(spec, operators, ("actor", *reference(spec), "reward", "reward_second"))


def compared(spec, batch, context):
    both = torch.stack([batch["scores"], batch["scores.second"]])
    groups = both.mean(0).view(-1, batch.samples_per_prompt)
    advantages = (groups - groups.mean(1, keepdim=True)).flatten() * spec.settings["scale"]
    mask = batch["response_mask"]
    columns = {"loss_mask": mask, "advantages": advantages[:, None] * mask}
    return columns, {"reward": moments(both.mean(0)), "disagreement": moments(both.std(0, correction=0))}


def plain_loss(spec):
    def function(outputs, batch, totals):
        ratio = (outputs.quantity - batch["logprobs"]).exp()
        loss = aggregate(-ratio * batch["advantages"], batch.mask, "token-mean", totals)
        return loss, {"policy_ratio": moments(ratio, batch.mask)}

    return Loss("logprobs", function, ("policy_ratio",))


def doubled(trainer):
    """A loop that trains on twice the advantages."""
    for batch in trainer.batches():
        experiences = trainer.generate_experience(batch)
        if "advantages" in experiences:
            experiences["advantages"] = experiences["advantages"] * 2
        trainer.train_rlhf(experiences)


def skipping(trainer):
    """A loop that does not train on its generated batch."""
    for batch in trainer.batches():
        trainer.generate_experience(batch)


def leaving(trainer):
    """A loop that ends after the first batch."""
    for batch in trainer.batches():
        trainer.train_rlhf(trainer.generate_experience(batch))
        break
