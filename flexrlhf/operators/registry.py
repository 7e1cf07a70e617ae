"""Algorithm name → graph. A new algorithm adds one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexrlhf.config.spec import Spec
from flexrlhf.config.user_code.checks import check_function
from flexrlhf.operators.ac_share import ac_share
from flexrlhf.operators.dpo import dpo
from flexrlhf.operators.graph import Graph, share_weights
from flexrlhf.operators.group import group
from flexrlhf.operators.kto import kto
from flexrlhf.operators.own_graph import check_operators_have_roles, own_graph
from flexrlhf.operators.ppo import ppo
from flexrlhf.operators.raft import raft
from flexrlhf.operators.reference_free import reference_free
from flexrlhf.operators.reinforce import reinforce
from flexrlhf.operators.remax import remax
from flexrlhf.operators.retokenize import with_retokenized
from flexrlhf.operators.reward import reward
from flexrlhf.operators.safe_rlhf import safe_rlhf
from flexrlhf.operators.sft import sft
from flexrlhf.operators.sources import with_sources

GRAPHS: dict[str, Callable[[Any], Graph]] = {
    "ppo": ppo,
    "ac-share": ac_share,
    "grpo": group,
    "rloo": group,
    "gspo": group,
    "raft": raft,
    "reinforce++": reinforce,
    "remax": remax,
    "safe-rlhf": safe_rlhf,
    "dpo": dpo,
    "simpo": reference_free,
    "orpo": reference_free,
    "kto": kto,
    "sft": sft,
    "reward": reward,
}


def make_graph(spec: Spec) -> Graph:
    """Return the graph of the algorithm before its models are placed, with the sources of scores; roles that share
    another's weights are part of that role. Raises UserError for sources that the algorithm does not use, for models
    that cannot retokenize, and for a graph or loop of a user's own that cannot run.
    """
    algorithm = spec.algorithm
    if algorithm.loop is not None:
        check_function(algorithm.loop, "algorithm.loop")
    made = GRAPHS[algorithm.name](algorithm) if algorithm.graph is None else own_graph(algorithm)
    graph = with_retokenized(with_sources(made, spec), spec)
    if algorithm.graph is not None:
        check_operators_have_roles(graph)
    for role in graph.roles:
        model = spec.models.of(role)
        if model is not None and model.share is not None:
            graph = share_weights(graph, role, model.share)
    return graph
