"""Look of roles, instructions and runs, the same in every figure, by the labels that timelines record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flexrlhf.api import OperatorKind, Plan, Span, WorkKind

ROLES = {
    "actor": "#3f74b8",
    "critic": "#d98032",
    "ref": "#4f9d8c",
    "reward": "#8a6bb4",
    "cost": "#b4566d",
    "cost_critic": "#b99a2c",
}
OTHERS = ("#6a8f3c", "#a0725a", "#4a9ab5", "#c06ba8", "#7b7fc4", "#8f8f46", "#5f8a8b")
"""Colours of further roles, in their order."""
RUNS = ("#3f74b8", "#d98032", "#4f9d8c", "#8a6bb4", "#b4566d", "#b99a2c")
INSTRUCTIONS = {
    "move": "#8b9098",
    "sync": "#5c6470",
    "offload": "#b79f86",
    "reload": "#b79f86",
    "release": "#b79f86",
    "save": "#707a52",
    "checkpoint": "#707a52",
    "eval": "#a3a44e",
}
SHARE_COLOURS = {
    "generation": "#4a90a4",
    "forward passes": "#8cc0b4",
    "training": "#2f6073",
    "scores and combines": "#b4c4c6",
    "moves and syncs": "#8b9098",
    "evaluation and saving": "#8a9270",
    "waiting": "#d98880",
}
"""Activities of a rank, as shares of its time."""
PARTS_OF_MEMORY = ("#3f74b8", "#d98032", "#4f9d8c", "#8a6bb4", "#b99a2c", "#b4566d", "#6a8f3c", "#8b9098")
"""Parts of a rank's memory, in their order; the first are the models."""
_SHADES = {"generate": 0.0, "forward": 0.3, "train": -0.28, "combine": 0.62, "score": 0.45, "retokenize": 0.62}
"""Part of white that is mixed into the colour of a role; of black if it is negative."""
PART_OF: Mapping[WorkKind, str] = {
    **{kind: kind.text for kind in (WorkKind.GENERATE, WorkKind.FORWARD, WorkKind.TRAIN)},
    **dict.fromkeys((WorkKind.SCORE, WorkKind.COMBINE), "scores and combines"),
    **dict.fromkeys((WorkKind.MOVE, WorkKind.SYNC, WorkKind.OFFLOAD), "moves and syncs"),
    **dict.fromkeys((WorkKind.EVALUATE, WorkKind.SAVE), "evaluation and saving"),
}
"""Part of a figure that each kind of work is in."""
PARTS = tuple(dict.fromkeys(PART_OF.values()))
"""Activities of a rank, in the order of figures."""


def role_colours(roles: Sequence[str]) -> Mapping[str, str]:
    """Return the colour of each role."""
    others = [role for role in roles if role not in ROLES]
    further = {role: OTHERS[index % len(OTHERS)] for index, role in enumerate(others)}
    return {role: ROLES.get(role) or further[role] for role in roles}


def _mixed(colour: str, part: float) -> str:
    """Return ``colour`` with a part of white, or of black if ``part`` is negative."""
    goal = 255 if part > 0 else 0
    channels = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(each + abs(part) * (goal - each)):02x}" for each in channels)


def run_colour(number: int) -> str:
    """Return the colour of the run at a place of the command line."""
    return RUNS[number % len(RUNS)]


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
        self._order = [*(operator.name for operator in operators), *(kind.text for kind in WorkKind)]
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
            work = WorkKind.of(kind, None)
            return Style(work.text, colour, PART_OF[work])
        name, model = _operator_and_model(label)
        operator = self._kinds.get(name) or _guessed_kind(name)
        colour = _mixed(self.colours.get(_role(model), INSTRUCTIONS["move"]), _SHADES.get(operator, 0.45))
        return Style(name, colour, PART_OF[WorkKind.of(kind, operator)])


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
