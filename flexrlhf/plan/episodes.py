"""Episodes (``environment``): the graph rewritten for turns of the policy and replies of an environment.

    reset -> generate -> interact -> generate -> ... -> interact -> log-probs, scores, training as before

``reset`` writes the prompts as the episodes begin. ``generate`` continues each response by a turn, ``interact`` by the
reply to it, both for the rows whose episode goes on; both write whole responses, in which ``response_mask`` has the
sampled tokens alone and ``attention_mask`` the replies, too. The last ``interact`` writes what all others read.
"""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.operators.columns import Column, Qualifier, qualified
from flexrlhf.operators.graph import GENERATE, Graph, Operator

LOGPROBS = frozenset(("logprobs", "computed_logprobs", "trainer_logprobs"))
"""Columns of the policy's log-probs that a forward may write."""
COUNTS = ("episode", "turns", "tool_calls", "failed_tool_calls")
STATE = (*COUNTS, Column.TURN_ENDS, Column.REWARDS)
"""Columns of an episode in addition to those of a response."""
EPISODE_STATISTICS = Operator(
    "episodes",
    "combine",
    "actor",
    ("attention_mask", "response_mask", *COUNTS),
    function="episodes",
    barrier=True,
    is_controlled=True,
)


def with_episodes(graph: Graph, spec: Spec) -> Graph:
    """Return ``graph`` with the turns of ``spec.environment``, if it has one.

    Raises UserError for algorithms and settings that have no episodes.
    """
    if spec.environment is None:
        return graph
    environment = spec.environment
    _check(graph, spec, environment)
    return replace(
        graph,
        operators=_with_turns(graph.operators, environment),
        evaluation=_with_turns(graph.evaluation, environment),
    )


def _with_turns(operators: tuple[Operator, ...], environment: EnvironmentSpec) -> tuple[Operator, ...]:
    return tuple(
        each
        for operator in operators
        for each in (_turns(operator, environment) if operator.samples_responses else (_of_episodes(operator),))
    )


def _of_episodes(operator: Operator) -> Operator:
    """Return an operator that reads what it needs of episodes.

    A forward of the policy's log-probs has them of sampled tokens alone, as generation has; rows whose environment
    failed are not counted; functions receive turns.
    """
    if operator.kind == "forward" and not LOGPROBS.isdisjoint(operator.writes):
        return replace(operator, reads=(*operator.reads, "response_mask"))
    if "outcome" in operator.writes:
        return replace(operator, reads=(*operator.reads, "episode"))
    if operator.kind == "score":
        return replace(operator, reads=(*operator.reads, Column.TURN_ENDS))
    return operator


def _turns(generate: Operator, environment: EnvironmentSpec) -> tuple[Operator, ...]:
    """Return the operators that take the place of ``generate``."""
    opened = qualified(generate.reads, Qualifier.OPENED)
    reset = replace(generate, name="reset", kind="interact", writes=(*opened, f"episode.{Qualifier.OPENED}"))
    written = (*generate.writes, *STATE)
    return (
        reset,
        replace(
            generate,
            reads=reset.writes,
            writes=qualified(generate.writes, Qualifier.TURN),
            suffix=f".{Qualifier.TURN}",
            turns=environment.max_turns,
            continues=written,
        ),
        replace(
            generate,
            name="interact",
            kind="interact",
            reads=(*reset.writes, *qualified(generate.writes, Qualifier.TURN)),
            writes=written,
            turns=environment.max_turns,
            continues=written,
        ),
        replace(EPISODE_STATISTICS, role=generate.role),
    )


def _check(graph: Graph, spec: Spec, environment: EnvironmentSpec) -> None:
    name = spec.algorithm.name
    if not isinstance(spec.algorithm, PolicySpec) or GENERATE.name not in {each.name for each in graph.operators}:
        raise UserError(f"environment: {name} trains on responses of the data set, which have no turns; remove it")
    if any(operator.is_greedy for operator in graph.operators):
        raise UserError(f"environment: {name} compares with a second response, which has no episode; use reinforce++")
    longest = spec.data.max_response_tokens
    if environment.turn_tokens is not None and environment.turn_tokens > longest:
        raise UserError(
            f"environment.turn_tokens: {environment.turn_tokens}, and a response has {longest} tokens at most "
            f"(data.max_response_tokens), replies included; use {longest} or less"
        )
    if spec.rollout.segment_tokens is not None:
        raise UserError(
            f"rollout.segment_tokens: {spec.rollout.segment_tokens} carries responses to the next step, and the "
            f"environment's episodes end in theirs; use null"
        )
    if spec.algorithm.attempts > 1:
        raise UserError(
            "algorithm.dynamic_sampling samples prompts again in the step, and the environment's episodes run "
            "once; use null"
        )
    if any(operator.kind == "retokenize" for operator in graph.operators):
        raise UserError("environment: a model with retokenize reads responses without replies; use its own tokenizer")
