"""Names and colours of instructions in figures, from the labels that timelines record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flexrlhf.operators.graph import OperatorKind
from flexrlhf.plan.plan import Plan
from flexrlhf.report.colours import INSTRUCTIONS, operator_colour, role_colours
from flexrlhf.strategies.instructions import TITLES, Work, work_of
from flexrlhf.timeline import Span

PART_OF: Mapping[Work, str] = {
    **{"generate": TITLES["generate"], "forward": TITLES["forward"], "train": TITLES["train"]},
    **dict.fromkeys(("score", "combine"), "scores and combines"),
    **dict.fromkeys(("move", "sync", "offload"), "moves and syncs"),
    **dict.fromkeys(("evaluate", "save"), "evaluation and saving"),
}
"""Part of a figure that each kind of work is in."""
PARTS = tuple(dict.fromkeys(PART_OF.values()))
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
        self._order = [*(operator.name for operator in operators), *TITLES.values()]
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
            work = work_of(kind, None)
            return Style(TITLES[work], colour, PART_OF[work])
        name, model = _operator_and_model(label)
        operator = self._kinds.get(name) or _guessed_kind(name)
        colour = operator_colour(self.colours.get(_role(model), INSTRUCTIONS["move"]), operator)
        return Style(name, colour, PART_OF[work_of(kind, operator)])


def _operator_and_model(label: str) -> tuple[str, str]:
    name, _, model = label.partition(" on ")
    return name, model


def _role(model: str) -> str:
    return model.partition(".")[0]


def _guessed_kind(name: str) -> OperatorKind:
    """Return the kind of an operator of an unknown graph, by its name."""
    if name.startswith("train_"):
        return "train"
    return "generate" if name == "generate" else "forward"
