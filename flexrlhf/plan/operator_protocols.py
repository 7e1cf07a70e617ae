"""Transfer protocols of operators (``algorithm.protocols``): functions of a user's, and HybridFlow's own by name.

Each of HybridFlow's (Sheng et al. 2025, table 3; the last two are of its code, veRL) is a layout, which ``placement``
and ``rollout`` give an operator. Its name here demands that layout.
"""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.config.code_checks import check_function
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError, nearest
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.placement.hosts import Hosts
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.placement import Placement
from flexrlhf.placement.protocols import TransferProtocol
from flexrlhf.text import ranks_text

PROTOCOLS = "algorithm.protocols"
NAMED = (
    *("one_to_all", "3d_proto", "3d_all_micro_dp", "3d_pp_only", "dp_proto", "all_to_all"),
    *("pp_as_dp", "rank_zero"),
)


def with_protocols(placement: Placement, graph: Graph, spec: Spec) -> Placement:
    """Return ``placement`` with the layouts of the operators whose rows a protocol splits.

    Raises UserError for unknown operators and protocols, and for an operator without the layout that its protocol is.
    """
    # moves for what most steps skip would be in every step
    operators = {each.name: each for each in graph.operators if not each.is_rare}
    found: dict[str, TransferProtocol] = {}
    shape = BatchShape.of(spec)
    layouts: dict[str, Layout] = {}
    for name, reference in spec.algorithm.protocols.items():
        key = f"{PROTOCOLS}.{name}"
        if name not in operators:
            raise UserError(f"{key}: no such operator{nearest(name, operators)}; there are {', '.join(operators)}")
        if ":" in reference:
            if reference not in found:
                check_function(reference, key)
                arguments = {
                    (placement.layout_of(operators[other]).replica_sets, shape.numbers(each)): None
                    for other, same in spec.algorithm.protocols.items()
                    if same == reference and other in operators
                    for each in shape.mini_batches
                }
                # ranks compare theirs with each other's
                processes = 1 if Hosts.under_torchrun() else 2
                found[reference] = TransferProtocol.read(reference, tuple(arguments), processes)
            layouts[name] = replace(placement.layout_of(operators[name]), protocol=found[reference])
        elif reference not in NAMED:
            raise UserError(
                f"{key}: no protocol {reference!r}{nearest(reference, NAMED)}; there are {', '.join(NAMED)}, and "
                f"path/to/file.py:name"
            )
    placed = replace(placement, layouts=layouts)
    for name, reference in spec.algorithm.protocols.items():
        if reason := "" if ":" in reference else _misfit(reference, operators[name], placed, graph, spec):
            raise UserError(f"{PROTOCOLS}.{name}: {reference}, but {reason}")
    return placed


def _misfit(protocol: str, operator: Operator, placement: Placement, graph: Graph, spec: Spec) -> str:
    """Return why the layout of ``operator`` is not that of a named protocol; empty if it is."""
    layout, training = placement.layout_of(operator), placement[operator.role].layout
    replica, own, trained = layout.dims.replica, layout.dims, training.dims
    match protocol:
        case "dp_proto" if replica > 1:
            return f"a replica of its model has {replica} ranks, which compute the same rows; use 3d_proto"
        case "one_to_all" | "3d_pp_only" if layout.dp > 1:
            return f"its model has {layout.dp} replicas, which would each compute every row; use tp {len(layout.ranks)}"
        case "rank_zero" if len(layout.ranks) > 1:
            return f"its model is on {ranks_text(layout.ranks)}; place it on one"
        case "3d_all_micro_dp" if own.tp >= trained.tp or not layout.is_inside(training):
            return f"it has tp {own.tp} in replicas that are not parts of those that train with tp {trained.tp}"
        case "pp_as_dp" if own.pp >= trained.pp or not layout.is_inside(training):
            return f"it has pp {own.pp} in replicas that are not parts of those that train with pp {trained.pp}"
        case "all_to_all":
            return _travels(operator, placement, graph, BatchShape.of(spec))
    return ""


def _travels(operator: Operator, placement: Placement, graph: Graph, batch: BatchShape) -> str:
    """Return which rows that ``operator`` reads are written on other ranks; empty if none are."""
    layout = placement.layout_of(operator)
    for parent in graph.parents(operator):
        written = placement.layout_of(parent)
        for rank in layout.ranks:
            had = batch.prompts_on(written, rank, batch.mini_batches) if rank in written.places else ()
            if lacking := set(batch.prompts_on(layout, rank, batch.mini_batches)).difference(had):
                return f"{parent.name} does not write prompt {min(lacking)} on rank {rank}; give both one layout"
    return ""
