"""Controllers: values that one training step passes to the next.

These are the KL coefficient, the running statistics of scores, the Lagrange multiplier, and how many episodes have
failed in a row. A step uses the values that the step before has left, so chunks and placement change nothing. They
follow from sums over all rows, so all ranks compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flexrlhf.config.algorithms.base import AlgorithmSpec
from flexrlhf.config.algorithms.policy_sections import KlSpec, LagrangeSpec
from flexrlhf.errors import RunStopped
from flexrlhf.metrics import FAILED_IN_A_ROW, METRICS, Triple
from flexrlhf.operators.graph import TAKE_PROMPTS, Operator
from flexrlhf.plan.episodes import EPISODE_STATISTICS
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Run
from flexrlhf.trainer.execution import Execution, Observer, OperatorRun
from flexrlhf.trainer.prompt_attempts import LEFT_OUT, TAKEN, next_taken

ControllerState = dict[str, float]
"""Name → value."""
LEAST_LOGARITHM = -20.0
"""Lower bound of the logarithm of a multiplier, so that one which has decreased for long can increase again."""
GREATEST_LOGARITHM = 20.0
"""Upper bound of the logarithm of a multiplier without a maximum, so that exp() stays finite."""
LARGEST_ERROR = 0.2
"""Bound of the relative error of the measured KL that changes the coefficient (Ziegler et al. 2019, section 2.2)."""


@dataclass(frozen=True)
class _BegunStep:
    """A step of which an operator has not run on all mini-batches.

    state:      values that it computes with.
    left:       mini-batches that have not run.
    statistics: of the others, summed.
    """

    state: ControllerState
    left: set[int]
    statistics: dict[str, Triple] = field(default_factory=dict)


class Controllers(Observer):
    """Controllers of a run: the values that one step passes to the next, such as the KL coefficient."""

    def __init__(self, plan: Plan) -> None:
        """Start with the values before the first step."""
        algorithm, self._shape = plan.spec.algorithm, plan.batch
        self._algorithm = algorithm
        self._max_failed_steps = plan.spec.guards.max_failed_steps
        self.states: dict[str, ControllerState] = {}
        """Values by operator."""
        if algorithm.SAMPLES:
            controlled = [operator for operator in plan.graph.operators if operator.is_controlled]
            counts = {TAKE_PROMPTS.function: TAKEN, EPISODE_STATISTICS.function: FAILED_IN_A_ROW}
            self.states = {
                each.name: {counts[each.function]: 0.0} if each.function in counts else first_state(algorithm)
                for each in controlled
            }
        self._begun: dict[tuple[str, int], _BegunStep] = {}
        self._run_here: set[str] = set()

    def state(self, operator: Operator, step: int | None = None) -> ControllerState:
        """Return the values after the last step; none for an operator without controller. ``step``: if parts of it have
        run, the ones that they had."""
        begun = None if step is None else self._begun.get((operator.name, step))
        return self.states.get(operator.name, {}) if begun is None else begun.state

    @property
    def changed(self) -> dict[str, ControllerState]:
        """Values of the operators that have run on this rank."""
        return {name: self.states[name] for name in sorted(self._run_here)}

    def begun_from(self, next_step: int) -> dict[str, dict[str, Any]]:
        """Return step → operator → its sums so far, for JSON, of steps from ``next_step`` on whose operator has run on
        some mini-batches alone, as a program may call it."""
        found: dict[str, dict[str, Any]] = {}
        for (name, step), begun in self._begun.items():
            if step >= next_step:
                found.setdefault(str(step), {})[name] = {**asdict(begun), "left": sorted(begun.left)}
        return found

    def load(
        self,
        states: Mapping[str, Mapping[str, float]],
        begun: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None,
    ) -> None:
        """Set the values by operator, as ``changed`` of all ranks has them; steps under way begin anew, but for
        ``begun`` ones: step → operator → its sums so far."""
        self.states |= {name: dict(state) for name, state in states.items()}
        self._begun = {
            (name, int(step)): _BegunStep(
                sums["state"], set(sums["left"]), {key: (*triple,) for key, triple in sums["statistics"].items()}
            )
            for step, operators in (begun or {}).items()
            for name, sums in operators.items()
        }

    def computed(self, execution: Execution) -> None:
        """Add the statistics of an operator, summed over all replicas."""
        if execution.inner is None:
            self.add(execution.work, execution.step, execution.statistics)

    def add(self, run: OperatorRun | Run, step: int, statistics: Mapping[str, Triple]) -> None:
        """Add the statistics of ``run`` in ``step``, which ends once all its mini-batches have been added.

        A program may call parts of several steps in turn.

        Raises RunStopped, on all ranks of the operator alike, after too many steps without a score.
        """
        name = run.operator.name
        if name not in self.states:
            return
        self._run_here.add(name)
        if run.operator.takes_prompts:
            left_out = statistics[LEFT_OUT][1] if LEFT_OUT in statistics else None
            self.states[name] = next_taken(self._shape, self.states[name], statistics[TAKEN][1], left_out)
            return
        if FAILED_IN_A_ROW in statistics:
            # every rank has the same number
            ranks, total, _ = statistics[FAILED_IN_A_ROW]
            self.states[name] = {FAILED_IN_A_ROW: total / ranks}
            return
        begun = self._begun.setdefault((name, step), _BegunStep(self.states[name], set(self._shape.mini_batches)))
        METRICS.add(begun.statistics, statistics)
        begun.left.difference_update(run.mini_batches)
        if not begun.left:
            del self._begun[name, step]
            self.states[name] = next_state(self._algorithm, self.states[name], begun.statistics)
            self._check_scores(int(self.states[name]["failed_steps"]))

    def _check_scores(self, failed_steps: int) -> None:
        if self._max_failed_steps is not None and failed_steps >= self._max_failed_steps:
            raise RunStopped(
                f"no response of {failed_steps} steps in a row had a score, so nothing is learned; "
                f"guards.max_failed_steps {self._max_failed_steps} allows fewer, null any number"
            )


def first_state(spec: AlgorithmSpec) -> ControllerState:
    """Return the values before the first step."""
    coefficient = 0.0 if spec.kl is None else spec.kl.coefficient
    multiplier = {} if spec.lagrange_multiplier is None else {"lagrange": spec.lagrange_multiplier.initial}
    return {"kl_coefficient": coefficient, **multiplier, **_score_statistics(0.0, 0.0, 0.0), "failed_steps": 0.0}


def next_state(spec: AlgorithmSpec, state: ControllerState, statistics: Mapping[str, Triple]) -> ControllerState:
    """Return the values after a step. ``statistics``: of its combine, summed over all rows."""
    fresh = dict(state)
    measured = "kl_response_mean" if "kl_response_mean" in statistics else "kl"
    if spec.kl is not None and measured in statistics:
        fresh["kl_coefficient"] = _adapted_coefficient(spec.kl, state["kl_coefficient"], statistics[measured])
    if "shaped_score" in statistics:
        fresh |= _with_scores(state, statistics["shaped_score"])
    if spec.lagrange_multiplier is not None:
        fresh["lagrange"] = _ascended_multiplier(spec.lagrange_multiplier, state["lagrange"], statistics["cost"])
    if _has_rows(statistics):
        fresh["failed_steps"] = 0.0 if _has_scores(statistics) else state["failed_steps"] + 1
    return fresh


def _has_rows(statistics: Mapping[str, Triple]) -> bool:
    """Whether the step has responses; in segments none may have ended."""
    return "score_invalid" not in statistics or statistics["score_invalid"][0] > 0


def _has_scores(statistics: Mapping[str, Triple]) -> bool:
    """Whether at least one response of the step has a score, of every kind that the algorithm reads."""
    return all(statistics[name][0] > 0 for name in ("reward", "cost", "greedy_score") if name in statistics)


def _adapted_coefficient(spec: KlSpec, coefficient: float, measured: Triple) -> float:
    """Adapt the KL coefficient to the measured KL of the responses (Ziegler et al. 2019, section 2.2)."""
    num_responses, total, _ = measured
    if spec.target is None or not num_responses or not math.isfinite(total):
        return coefficient
    error = min(max(total / num_responses / spec.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + error * num_responses / spec.horizon)


def _ascended_multiplier(settings: LagrangeSpec, multiplier: float, costs: Triple) -> float:
    """Make a step of gradient ascent on the logarithm of the multiplier (Dai et al. 2024).

    The logarithm is bounded, so exp() stays finite with any learning rate.
    """
    num_responses, total, _ = costs
    if not num_responses:
        return multiplier
    logarithm = math.log(multiplier) + settings.learning_rate * multiplier * (total / num_responses - settings.limit)
    largest = GREATEST_LOGARITHM if settings.maximum is None else math.log(settings.maximum)
    return math.exp(max(min(logarithm, largest), LEAST_LOGARITHM))


def _with_scores(state: ControllerState, scores: Triple) -> ControllerState:
    """Return the running mean and deviation with a step's scores added (Chan et al. 1979)."""
    count, total, squares = scores
    if not count:
        return {}
    mean, before = total / count, state["score_count"]
    both = before + count
    spread = state["score_spread"] + max(squares - count * mean * mean, 0.0)
    spread += (mean - state["score_mean"]) ** 2 * before * count / both
    return _score_statistics(both, state["score_mean"] + (mean - state["score_mean"]) * count / both, spread)


def _score_statistics(count: float, mean: float, spread: float) -> ControllerState:
    """Return the running statistics. ``spread``: sum of squared deviations.

    The deviation of equal scores, or of a single one, is 1.
    """
    deviation = math.sqrt(spread / (count - 1)) if count > 1 and spread > 0 else 1.0
    return {"score_count": count, "score_mean": mean, "score_spread": spread, "score_deviation": deviation}
