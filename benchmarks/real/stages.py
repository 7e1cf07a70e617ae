"""The runs of ``make real``: config, second placement, and metrics in the table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A config, trained under its own placement and under another one.

    name:     of the file in configs/real, and of the run
    against:  the other placement, as ``--set placement=...`` takes it
    shown:    metrics of the table, with their words there
    changes:  settings that both runs change in the config
    """

    name: str
    against: str
    shown: tuple[tuple[str, str], ...]
    changes: tuple[str, ...] = ()


SFT = (("NLL", "nll"), ("evaluation", "eval_nll"))
PAIRS = (("loss", "pair_loss"), ("accuracy", "pair_accuracy"), ("evaluation", "eval_accuracy"))
PREFERENCES = (("loss", "preference_loss"), ("accuracy", "pair_accuracy"), ("evaluation", "eval_accuracy"))
POLICY = (("reward", "reward_mean"), ("KL", "kl"), ("tokens", "response_length"))
EPISODES = (("reward", "reward_mean"), ("turns", "turns_mean"), ("calls", "tool_calls"))

STAGES = (
    Stage("sft", "{actor: {ratio: 1, row_shares: [2, 1]}}", SFT),
    Stage("dpo", "[1, 0.5]", PREFERENCES),
    Stage("reward", "{reward: {ratio: 1, row_shares: [1, 2]}}", PAIRS),
    Stage("ppo", "[0.5, 0.5, 0.5, 0.5, 0.5, 0.5]", POLICY),
    Stage("grpo", "[1, 0.5]", POLICY),
    Stage("tools", "{actor: {ratio: 1, row_shares: [2, 1]}}", EPISODES),
)
"""In an order in which each finds the models that it starts from."""
