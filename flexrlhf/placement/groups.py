"""Process groups by purpose. The plan lists them, comm/ creates them."""

from __future__ import annotations

from dataclasses import dataclass

from flexrlhf.placement.placed import PlacedModel


@dataclass(frozen=True)
class Group:
    """Ranks that communicate for one purpose: compute or tp (of a placed model), move, sync or gather.

    Purposes never share a group. A single rank needs none, unless a library requires one (``alone``).
    """

    purpose: str
    ranks: tuple[int, ...]
    alone: bool = False


def compute_groups(model: PlacedModel) -> list[Group]:
    """Return the groups of an engine: data-parallel, tensor-parallel and, for DeepSpeed, of single ranks."""
    layout = model.layout
    groups = [Group(f"compute {model.name}", layout.dp_set(rank)) for rank in model.ranks[: layout.tp]]
    if layout.tp > 1:
        groups += [Group(f"tp {model.name}", ranks) for ranks in layout.tp_sets]
    if model.engine == "deepspeed":
        groups += [Group("alone", (rank,), alone=True) for rank in model.ranks]
    return groups
