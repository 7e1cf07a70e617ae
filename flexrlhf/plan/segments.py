"""Responses that are generated in segments (``rollout.segment_tokens``): the graph rewritten for them.

A round generates at most so many tokens of a response. Rows that have not ended are carried to the next round, in which
they go on with the weights of that round; a prompt's responses are trained on in the round in which the last of them
ends. So a step's batch has a place for each prompt that may be under way (``BatchShape.segments``), and the column
``present`` says which of them the step trains on; every other operator computes for these alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.operators.columns import Column
from flexrlhf.operators.graph import GENERATE, WHOLE_RESPONSES, Graph, Operator, is_own
from flexrlhf.operators.named_functions import COMBINES

_RECOMPUTED = ("attention_mask",)
"""Columns of a generate without replies that follow from the carried ones."""


def with_segments(graph: Graph, spec: Spec) -> Graph:
    """Return ``graph`` with responses in segments, if ``spec`` has them.

    Raises UserError for algorithms whose responses cannot be generated in segments.
    """
    _check(graph, spec)
    if spec.num_segments == 1:
        return graph
    several = [_carrying(operator) for operator in graph.operators if operator.kind == "generate"]
    if len(several) > 1:
        others = (_reading(each, spec) for each in graph.operators if each.kind != "generate")
        return replace(graph, operators=(*several, _joining(several), *others))
    return replace(graph, operators=tuple(_segmented(operator, spec) for operator in graph.operators))


def _segmented(operator: Operator, spec: Spec) -> Operator:
    if operator.kind == "generate":
        return _carrying(replace(operator, writes=(*operator.writes, Column.PRESENT)))
    return _reading(operator, spec)


def _carrying(operator: Operator) -> Operator:
    """Return a generate that goes on with the responses that the step before has not trained on."""
    written = (name for name in operator.writes if operator.has_replies or Column.plain(name) not in _RECOMPUTED)
    return replace(operator, carries=tuple(dict.fromkeys((*written, Column.PRESENT))))


def _joining(generates: Sequence[Operator]) -> Operator:
    """Return the combine that joins the responses of several ``generates``; it also reads the sampled texts, with the
    turns of their episodes."""
    written = [name for each in generates for name in each.writes]
    texts, ends = (*GENERATE.writes, Column.TURN_ENDS, Column.REWARDS), ("response_mask", "finished", "episode")
    read = (name for name in written if name in texts or Column.plain(name) in ends)
    role = generates[0].role
    return Operator("whole", "combine", role, tuple(read), (Column.PRESENT,), function=WHOLE_RESPONSES)


def _reading(operator: Operator, spec: Spec) -> Operator:
    """Return an operator that computes for the rows that the step trains on."""
    operator, carried = replace(operator, reads=(*operator.reads, Column.PRESENT)), spec.algorithm.group_columns
    function = COMBINES.get(operator.function)
    if spec.rollout.groups == "as-ended" and function is not None and function.compares_ended:
        return replace(operator, writes=(*operator.writes, *carried), carries=carried)
    return operator


def _check(graph: Graph, spec: Spec) -> None:
    algorithm, tokens = spec.algorithm, spec.rollout.segment_tokens
    if tokens is None:
        return
    key = f"rollout.segment_tokens: {tokens}"
    if graph.generated is None:
        raise UserError(
            f"{key} has nothing to cut, since {algorithm.name} trains on responses of the data set; use null"
        )
    if spec.rollout.groups == "as-ended" and (reason := _needs_whole_groups(graph, spec)):
        raise UserError(f"rollout.groups: as-ended trains on each response when it ends, and {reason}; use wait")
    if spec.rollout.max_segments == 1:
        raise UserError(
            f"rollout.max_segments: 1 would end each response after {tokens} tokens; use 2 or more, or "
            f"data.max_response_tokens: {tokens} without segments"
        )
    if spec.num_segments == 1:
        longest = spec.data.max_response_tokens
        use = "use less, or null" if longest > 1 else "use null"
        raise UserError(f"{key} cuts nothing, since data.max_response_tokens is {longest}; {use}")


def _needs_whole_groups(graph: Graph, spec: Spec) -> str:
    """Return why all responses to a prompt must be trained on together, in words; empty if they need not."""
    if spec.algorithm.samples_per_prompt == 1:
        return ""
    compared = (each for each in graph.operators if each.compares_responses or each.kind != "train")
    own = next((each.function for each in compared if is_own(each.function)), None)
    if own is not None:
        return f"{own} may compare the responses to a prompt"
    return spec.algorithm.why_whole_groups
