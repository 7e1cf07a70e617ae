"""Names and colours of instructions in figures, from the labels that timelines record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flexrlhf.plan.plan import Plan
from flexrlhf.report.colours import INSTRUCTIONS, operator_colour, role_colours
from flexrlhf.timeline import Span

NAMES = {
    "move": "moves of rows",
    "sync": "weight syncs",
    "offload": "offload, reload, release",
    "reload": "offload, reload, release",
    "release": "offload, reload, release",
    "save": "saving, checkpoints",
    "checkpoint": "saving, checkpoints",
    "eval": "evaluation",
}
"""Name in legends of each kind of instruction but Run, which has the name of its operator."""
OPERATOR_KINDS = {"generate": "generation", "forward": "forward passes", "train": "training"}
EXCHANGE, RARE, OTHER = "moves and syncs", "evaluation and saving", "scores and combines"
PARTS = (*OPERATOR_KINDS.values(), OTHER, EXCHANGE, RARE)
"""What a rank spends its time on, in the order of figures."""


@dataclass(frozen=True)
class Style:
    """Look of an instruction.

    name:    in legends
    colour:  of its bars
    part:    one of PARTS
    """

    name: str
    colour: str
    part: str


class InstructionStyles:
    """Styles of the instructions of one run."""

    def __init__(self, plan: Plan | None, spans: Iterable[Span] = ()) -> None:
        """Take the kinds of operators from ``plan``; without one, from the labels of ``spans``."""
        operators = () if plan is None else (*plan.graph.operators, *plan.graph.evaluation)
        self._kinds = {operator.name: operator.kind for operator in operators}
        self._order = [*(operator.name for operator in operators), *NAMES.values()]
        models = [str(model.name) for model in plan.placement.models] if plan is not None else []
        models += [_operator_and_model(span.label)[1] for span in spans if span.kind == "run"]
        roles = [] if plan is None else list(plan.graph.roles)
        self.colours: Mapping[str, str] = role_colours([*dict.fromkeys([*roles, *map(_role, models)])])

    def place(self, name: str) -> int:
        """Return the place of a name in legends: operators in the order of the graph, then other instructions."""
        return self._order.index(name) if name in self._order else len(self._order)

    def of(self, kind: str, label: str) -> Style:
        """Return the style of an instruction of ``kind`` with ``label``."""
        if kind != "run":
            colour = INSTRUCTIONS.get(kind, INSTRUCTIONS["move"])
            part = EXCHANGE if kind in ("move", "sync", "offload", "reload", "release") else RARE
            return Style(NAMES.get(kind, kind), colour, part)
        name, model = _operator_and_model(label)
        operator = self._kinds.get(name) or _guessed_kind(name)
        colour = operator_colour(self.colours.get(_role(model), INSTRUCTIONS["move"]), operator)
        return Style(name, colour, OPERATOR_KINDS.get(operator, OTHER))


def _operator_and_model(label: str) -> tuple[str, str]:
    name, _, model = label.partition(" on ")
    return name, model


def _role(model: str) -> str:
    return model.partition(".")[0]


def _guessed_kind(name: str) -> str:
    """Return the kind of an operator of an unknown graph, by its name."""
    if name.startswith("train_"):
        return "train"
    return "generate" if name == "generate" else "forward"
