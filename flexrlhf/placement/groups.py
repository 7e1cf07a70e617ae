"""Which ranks communicate for what. The plan lists the groups, comm/ creates them."""

from __future__ import annotations

from dataclasses import dataclass

from flexrlhf.placement.placed import PlacedModel


@dataclass(frozen=True)
class Group:
    """Ranks that communicate for one purpose: compute or tp (a placed model), move, sync or gather.

    Purposes never share a group. A single rank needs none, unless a library asks for one (``alone``).
    """

    purpose: str
    ranks: tuple[int, ...]
    alone: bool = False


def compute_groups(model: PlacedModel) -> list[Group]:
    """The groups that an engine is handed: of replicas, of tensor-parallel ranks; DeepSpeed also wants single ranks."""
    layout = model.layout
    groups = [Group(f"compute {model.name}", layout.dp_set(rank)) for rank in model.ranks[: layout.tp]]
    if layout.tp > 1:
        groups += [Group(f"tp {model.name}", ranks) for ranks in layout.tp_sets]
    if model.engine == "deepspeed":
        groups += [Group("alone", (rank,), alone=True) for rank in model.ranks]
    return groups
