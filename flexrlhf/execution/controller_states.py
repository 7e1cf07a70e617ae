"""The controllers of a run on one rank: their numbers, and what the step at work has told so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexrlhf.config.algorithms import AlgorithmSpec, PolicySpec
from flexrlhf.metrics import Triple, add
from flexrlhf.objectives.controllers import State, first_state, next_state
from flexrlhf.operators.graph import Operator
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Run


@dataclass
class Controls:
    """``states``: by operator. ``num_mini_batches``: of a step, after which the numbers change."""

    algorithm: AlgorithmSpec
    num_mini_batches: int
    states: dict[str, State]
    _told: dict[str, dict[str, Triple]] = field(default_factory=dict)

    def state(self, operator: Operator) -> State:
        """As the step before has left it; nothing for an operator that no controller serves."""
        return self.states.get(operator.name, {})

    def add(self, run: Run, statistics: Mapping[str, Triple]) -> None:
        """What ``run`` has found, over all replicas. Its chunks come in order, and the last one ends the step."""
        name = run.operator.name
        if name not in self.states:
            return
        assert isinstance(self.algorithm, PolicySpec), "only these are controlled"
        told = self._told.setdefault(name, {})
        add(told, statistics)
        if run.mini_batches.stop == self.num_mini_batches:
            self.states[name] = next_state(self.algorithm, self.states[name], self._told.pop(name))


def make_controls(plan: Plan) -> Controls:
    """The controllers before the first step."""
    algorithm = plan.spec.algorithm
    states: dict[str, State] = {}
    if isinstance(algorithm, PolicySpec):
        states = {operator.name: first_state(algorithm) for operator in plan.graph.operators if operator.is_controlled}
    return Controls(algorithm, algorithm.num_mini_batches, states)
