"""Episodes (``environment``): the graph rewritten for turns of the policy and replies of an environment.

``generate`` plays them: it samples a turn of each row, appends the reply to it, and goes on until the episode ends. It
writes whole responses, in which ``response_mask`` has the sampled tokens alone and ``attention_mask`` the replies, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.operators.columns import Column
from flexrlhf.operators.graph import ENVIRONMENT, GENERATE, Graph, Operator

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
        if spec.rollout.order == "free":
            raise UserError(
                "rollout.order: free has rows go on when an environment has replied, and the run has none; remove it"
            )
        return graph
    environment = spec.environment
    _check(graph, spec, environment)
    carried, is_free = (Column.REPLIED,) if spec.num_segments > 1 else (), spec.rollout.order == "free"
    operators = (
        replace(each, writes=(*each.writes, *(f"{name}{each.suffix}" for name in carried)), is_free=is_free)
        if each.has_replies
        else each
        for each in _with_replies(graph.operators)
    )
    return replace(graph, operators=tuple(operators), evaluation=_with_replies(graph.evaluation))


def _with_replies(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    suffixes = [each.suffix for each in operators if each.kind == "generate"]
    return tuple(each for operator in operators for each in _of_episodes(operator, suffixes))


def _of_episodes(operator: Operator, suffixes: Sequence[str]) -> tuple[Operator, ...]:
    """Return an operator that plays episodes, with their statistics, or one that reads what it needs of them.

    suffixes: of the responses to a prompt, a greedy one among them.

    A forward of the policy's log-probs has them of sampled tokens alone, as generation has; rows whose environment
    failed are not counted; functions and models with another tokenizer receive turns.
    """
    if operator.kind == "generate":
        written = (*operator.writes, *(f"{name}{operator.suffix}" for name in STATE))
        played = replace(operator, writes=written, function=ENVIRONMENT)
        return (played,) if operator.is_greedy else (played, replace(EPISODE_STATISTICS, role=operator.role))
    if operator.kind == "forward" and not LOGPROBS.isdisjoint(operator.writes):
        return (replace(operator, reads=(*operator.reads, "response_mask")),)
    if "outcome" in operator.writes:
        return (replace(operator, reads=(*operator.reads, *(f"episode{suffix}" for suffix in suffixes))),)
    if operator.kind in ("score", "retokenize"):
        (suffix,) = (
            each.removeprefix("response_mask") for each in operator.reads if Column.plain(each) == "response_mask"
        )
        return (replace(operator, reads=(*operator.reads, f"{Column.TURN_ENDS}{suffix}")),)
    return (operator,)


def _check(graph: Graph, spec: Spec, environment: EnvironmentSpec) -> None:
    name = spec.algorithm.name
    if spec.debug.late_replies_of is not None and not spec.rollout.carries_late:
        raise UserError(
            f"debug.late_replies_of: {spec.debug.late_replies_of} repeats late replies, which rollout.late_replies: "
            f"await never carries to the next step; remove it, or use carry"
        )
    if not spec.algorithm.SAMPLES or GENERATE.name not in {each.name for each in graph.operators}:
        raise UserError(f"environment: {name} trains on responses of the data set, which have no turns; remove it")
    if environment.api is not None and environment.sequences > 1 and spec.rollout.order == "planned":
        raise UserError(
            f"environment.sequences: {environment.sequences} lets a program begin conversations at any time, and a "
            f"round of rollout.order: planned awaits the replies to all of them; set rollout.order=free"
        )
    if environment.api is not None and environment.sequences > 1 and spec.num_segments > 1:
        raise UserError(
            f"environment.sequences: {environment.sequences}, and rollout.segment_tokens cuts rows: a program may "
            f"await a conversation that is cut, so that no other one of its episode goes on; use 1, or no segments"
        )
    longest = spec.data.max_response_tokens
    if environment.turn_tokens is not None and environment.turn_tokens > longest:
        raise UserError(
            f"environment.turn_tokens: {environment.turn_tokens}, and a response has {longest} tokens at most "
            f"(data.max_response_tokens), replies included; use {longest} or less"
        )
