"""Colours of roles, operators and runs, the same in every figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ROLES = {
    "actor": "#3f74b8",
    "critic": "#d98032",
    "ref": "#4f9d8c",
    "reward": "#8a6bb4",
    "cost": "#b4566d",
    "cost_critic": "#b99a2c",
}
OTHERS = ("#6a8f3c", "#a0725a", "#4a9ab5", "#c06ba8", "#7b7fc4", "#8f8f46")
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
SHARES = {
    "generation": "#4a90a4",
    "forward passes": "#8cc0b4",
    "training": "#2f6073",
    "scores and combines": "#b4c4c6",
    "moves and syncs": "#8b9098",
    "evaluation and saving": "#8a9270",
    "waiting": "#d98880",
}
"""What a rank spends its time on."""
PARTS_OF_MEMORY = ("#3f74b8", "#d98032", "#4f9d8c", "#8a6bb4", "#b99a2c", "#b4566d", "#6a8f3c", "#8b9098")
"""Parts of a rank's memory, in their order; the first are the models."""
_SHADES = {"generate": 0.0, "forward": 0.3, "train": -0.28, "combine": 0.62, "score": 0.45, "retokenize": 0.62}
"""Part of white that is mixed into the colour of a role; of black where it is negative."""


def role_colours(roles: Sequence[str]) -> Mapping[str, str]:
    """Return the colour of each role."""
    others = [role for role in roles if role not in ROLES]
    further = {role: OTHERS[index % len(OTHERS)] for index, role in enumerate(others)}
    return {role: ROLES.get(role) or further[role] for role in roles}


def operator_colour(colour: str, kind: str) -> str:
    """Return the shade of a role's ``colour`` for an operator of ``kind``."""
    return mixed(colour, _SHADES.get(kind, 0.45))


def mixed(colour: str, part: float) -> str:
    """Return ``colour`` with a part of white, or of black where ``part`` is negative."""
    goal = 255 if part > 0 else 0
    channels = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(each + abs(part) * (goal - each)):02x}" for each in channels)


def run_colour(number: int) -> str:
    """Return the colour of the run at a place of the command line."""
    return RUNS[number % len(RUNS)]
