"""The operator graph of one algorithm step. Edges follow from the columns that operators read and write."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from flexrlhf.data import Needs

Kind = Literal["generate", "forward", "combine", "train"]


@dataclass(frozen=True)
class Operator:
    """One model call.

    ``function`` names the mathematics of a combine or the loss of a train (operators/functions.py).
    ``barrier``: needs every row of the step at once, so chunks end here (and for all that reads what it writes).
    ``adapters`` False: the base weights alone compute it, without the low-rank adapters that are trained.
    ``every``: it runs at step 0 and each so many steps, and at step ``also``. ``on_trained``: on the copy that is
    trained even where another one is for inference, and before that copy trains.
    """

    name: str
    kind: Kind
    role: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    function: str = ""
    barrier: bool = False
    adapters: bool = True
    every: int = 1
    also: int = 0
    on_trained: bool = False


@dataclass(frozen=True)
class Graph:
    """Operators in the order a person would read them.

    ``roles``: in vector order. ``inputs``: columns that come from the data set. ``evaluation``: operators of one role
    that look at held-out rows. ``can_shadow``: whether inference may run on a copy while the trained weights change.
    """

    operators: tuple[Operator, ...]
    roles: tuple[str, ...]
    data: Needs
    inputs: tuple[str, ...]
    evaluation: tuple[Operator, ...] = ()
    can_shadow: bool = False

    @property
    def trained(self) -> tuple[str, ...]:
        trained = {operator.role for operator in self.operators if operator.kind == "train"}
        return tuple(role for role in self.roles if role in trained)

    @property
    def generated(self) -> str | None:
        """The role that draws what is trained on; None where the data set has it."""
        return next((operator.role for operator in self.operators if operator.kind == "generate"), None)

    @cached_property
    def producers(self) -> dict[str, Operator]:
        return {column: operator for operator in self.operators for column in operator.writes}

    def parents(self, operator: Operator) -> list[Operator]:
        """Operators that write what ``operator`` reads, in graph order."""
        wanted = {self.producers[column].name for column in operator.reads if column in self.producers}
        return [candidate for candidate in self.operators if candidate.name in wanted]

    @cached_property
    def waves(self) -> dict[str, int]:
        """Depth of every operator by name: 0 without parents, else one more than the deepest parent."""
        waves: dict[str, int] = {}
        for operator in self.operators:
            assert all(p.name in waves for p in self.parents(operator)), f"{operator.name} stands before a parent"
            waves[operator.name] = max((waves[parent.name] + 1 for parent in self.parents(operator)), default=0)
        return waves

    @cached_property
    def after_barrier(self) -> frozenset[str]:
        """Operators that need the whole step: barriers and all that depends on one."""
        names: set[str] = set()
        for operator in self.operators:
            if operator.barrier or any(parent.name in names for parent in self.parents(operator)):
                names.add(operator.name)
        return frozenset(names)


def share_weights(graph: Graph, role: str, owner: str) -> Graph:
    """``role`` has no copy of its own: its operators run on ``owner``'s weights without adapters."""

    def shared(operator: Operator) -> Operator:
        return replace(operator, role=owner, adapters=False) if operator.role == role else operator

    return replace(
        graph,
        operators=tuple(shared(operator) for operator in graph.operators),
        roles=tuple(name for name in graph.roles if name != role),
    )
