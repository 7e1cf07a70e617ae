"""Losses that compare the texts of a prompt: these are in one pass, while texts of other prompts may be divided."""

from __future__ import annotations

from flexrlhf.operators.graph import Operator
from flexrlhf.operators.own_graph import is_own

PAIR_LOSSES = frozenset(("kto_loss", "orpo_loss", "pair_loss", "preference_loss", "simpo_loss"))
"""Losses in ``objectives/functions.py`` that compare the chosen and the rejected response to a prompt."""


def compares_texts(operator: Operator) -> bool:
    """Whether all texts of a prompt are in one pass of ``operator``, because its loss may compare them.

    A loss of a user's own may, unless its operator says otherwise.
    """
    if operator.kind != "train":
        return False
    if operator.compares is not None:
        return operator.compares
    return is_own(operator.function) or operator.function in PAIR_LOSSES
