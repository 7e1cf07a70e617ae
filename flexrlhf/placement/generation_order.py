"""Ranks of generation in the order in which each keeps what it trains (HybridFlow, Sheng et al. 2024, sec. 5.3)."""

from __future__ import annotations

from fractions import Fraction

from flexrlhf.placement.layout import Layout


def generation_layout(training: Layout, tp: int, pp: int = 1) -> Layout:
    """Return the layout of generation with ``tp`` x ``pp`` ranks a replica on the ranks of ``training``.

    The part of the weights that a rank generates with contains the part that it trains: generation groups take one
    rank of every ``training.tp / tp``. Raises ValueError where no such order exists.
    """
    if training.tp % tp or training.pp % pp:
        raise ValueError(
            f"generation with tp {tp} and pp {pp} keeps no training part whole: they must divide tp {training.tp} and "
            f"pp {training.pp} of training"
        )
    merged_tp, merged_pp = training.tp // tp, training.pp // pp
    replicas = training.dp * merged_tp * merged_pp
    ranks = [-1] * len(training.ranks)
    for rank in training.ranks:
        stage, index = training.stage(rank), training.tp_index(rank)
        replica = (training.replica(rank) * merged_pp + stage % merged_pp) * merged_tp + index % merged_tp
        ranks[(stage // merged_pp * replicas + replica) * tp + index // merged_tp] = rank
    return Layout(tuple(ranks), tp, pp)


def received_share(training: Layout, tp: int, pp: int = 1) -> Fraction:
    """Return the share of all weights that a rank receives for generation in that order: HybridFlow, table 2.

    (t p - t_g p_g) / (t_g p_g t p), with t, p of training and t_g, p_g of generation.
    """
    trained, generating = training.tp * training.pp, tp * pp
    return Fraction(trained - generating, generating * trained)
