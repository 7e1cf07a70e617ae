"""Dynamic sampling (``algorithm.dynamic_sampling``): the graph rewritten for attempts that follow one another.

A step first samples as many prompts as it trains on. Once these are scored, mini-batches that lack groups sample their
share again, and so on, up to a largest number of attempts, all of which are in the list of instructions. The column
``present`` says which rows an attempt has; operators compute for these alone.

Responses in segments are scored steps later, so a step has no further attempts. In place of each group that ended in
the step before and was left out it takes one prompt more, so that as many groups stay under way.
"""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.operators.columns import Column
from flexrlhf.operators.graph import TAKE_PROMPTS, Graph, Operator


def with_attempts(graph: Graph, spec: Spec) -> Graph:
    """Return ``graph`` with its attempts, if ``spec`` has several. Raises UserError if it compares no groups."""
    if spec.algorithm.attempts == 1:
        return graph
    if not any(operator.function == "group_advantages" for operator in graph.operators):
        raise UserError(
            "algorithm.dynamic_sampling chooses among the groups of the combine group_advantages, which the graph "
            "lacks; use null, or that combine"
        )
    # which responses count decides, too
    take = replace(TAKE_PROMPTS, earlier=tuple(name for name in TAKE_PROMPTS.earlier if name in graph.producers))
    if spec.num_segments > 1:
        return _with_replacement(graph, take)
    taken = _before(graph, graph.producers["scores"])
    operators = (_with_presence(each, each.name in taken) for each in graph.operators)
    return replace(graph, operators=(take, *operators))


def _before(graph: Graph, operator: Operator) -> frozenset[str]:
    """Return the names of ``operator`` and of all whose columns it depends on."""
    return frozenset((operator.name,)).union(*(_before(graph, parent) for parent in graph.parents(operator)))


def _with_replacement(graph: Graph, take: Operator) -> Graph:
    """Return ``graph``, of responses in segments, with the prompts that a step takes in place of groups left out."""
    carries = Column.POSITION, Column.PRESENT, *take.earlier
    take = replace(take, writes=(Column.POSITION,), is_repeated=False, earlier=(), carries=carries)
    # the ranks that account for rows do so for the ones that were taken
    readers = [each for each in graph.operators if each.reads_data or each == graph.accounting]
    operators = (replace(o, reads=(*o.reads, Column.POSITION)) if o in readers else o for o in graph.operators)
    return replace(graph, operators=(take, *operators))


def _with_presence(operator: Operator, is_repeated: bool) -> Operator:
    further = (Column.PRESENT, Column.POSITION) if operator.reads_data else (Column.PRESENT,)
    return replace(operator, reads=(*operator.reads, *further), is_repeated=is_repeated)
