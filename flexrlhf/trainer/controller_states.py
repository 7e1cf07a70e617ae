"""States of the controllers of a run on one rank, and the statistics of the step that will change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexrlhf.config.algorithms.base import AlgorithmSpec
from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.errors import RunStopped
from flexrlhf.metrics import Triple, add
from flexrlhf.objectives.controllers import State, first_state, next_state
from flexrlhf.operators.graph import Operator
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Run


@dataclass
class ControllerStates:
    """Numbers that one step passes on to the next, such as the KL coefficient.

    algorithm:         settings of the controllers.
    num_mini_batches:  of a step, after which the states change.
    states:            by operator.
    max_failed_steps:  steps in a row without a score that end the run; None: no number of them does.
    """

    algorithm: AlgorithmSpec
    num_mini_batches: int
    states: dict[str, State]
    max_failed_steps: int | None = None
    _statistics: dict[str, dict[str, Triple]] = field(default_factory=dict)
    _run_here: set[str] = field(default_factory=set)

    def state(self, operator: Operator) -> State:
        """Return the state after the last step; empty for an operator without controller."""
        return self.states.get(operator.name, {})

    @property
    def changed(self) -> dict[str, State]:
        """States of the operators that run on this rank, once they have run."""
        return {name: self.states[name] for name in sorted(self._run_here)}

    def load(self, states: Mapping[str, Mapping[str, float]]) -> None:
        """Set the states by operator, as ``changed`` of all ranks has them."""
        self.states |= {name: dict(state) for name, state in states.items()}

    def add(self, run: Run, statistics: Mapping[str, Triple]) -> None:
        """Add the statistics of ``run``, summed over all replicas. Its chunks come in order; the last ends the step.

        Raises RunStopped, on all ranks of the operator alike, after too many steps without a score.
        """
        name = run.operator.name
        if name not in self.states:
            return
        assert isinstance(self.algorithm, PolicySpec), "only these have controllers"
        self._run_here.add(name)
        add(self._statistics.setdefault(name, {}), statistics)
        if run.mini_batches.stop == self.num_mini_batches:
            self.states[name] = next_state(self.algorithm, self.states[name], self._statistics.pop(name))
            self._check_scores(int(self.states[name]["failed_steps"]))

    def _check_scores(self, failed_steps: int) -> None:
        if self.max_failed_steps is not None and failed_steps >= self.max_failed_steps:
            raise RunStopped(
                f"no response of {failed_steps} steps in a row had a score, so nothing is learned; "
                f"guards.max_failed_steps {self.max_failed_steps} allows fewer, null any number"
            )


def make_controller_states(plan: Plan) -> ControllerStates:
    """Return the states before the first step."""
    algorithm = plan.spec.algorithm
    states: dict[str, State] = {}
    if isinstance(algorithm, PolicySpec):
        states = {operator.name: first_state(algorithm) for operator in plan.graph.operators if operator.is_controlled}
    return ControllerStates(algorithm, algorithm.num_mini_batches, states, plan.spec.guards.max_failed_steps)
