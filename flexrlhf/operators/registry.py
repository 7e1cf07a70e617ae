"""Algorithm name → graph. A new algorithm adds one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexrlhf.operators.graph import Graph
from flexrlhf.operators.ppo import ppo
from flexrlhf.operators.reward import reward
from flexrlhf.operators.sft import sft
from flexrlhf.spec import Spec

GRAPHS: dict[str, Callable[[Any], Graph]] = {"ppo": ppo, "sft": sft, "reward": reward}


def make_graph(spec: Spec) -> Graph:
    return GRAPHS[spec.algorithm.name](spec.algorithm)
