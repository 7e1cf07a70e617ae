"""Kinds of work that ranks spend their time on: of metrics, figures and tables alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from flexrlhf.operators.graph import OperatorKind

Work = Literal["generate", "forward", "score", "train", "combine", "move", "sync", "offload", "evaluate", "save"]
TITLES: Mapping[Work, str] = {
    "generate": "generation",
    "forward": "forward passes",
    "score": "functions, services and rules",
    "train": "training",
    "combine": "advantages and other sums",
    "move": "moves of rows",
    "sync": "weight syncs",
    "offload": "host offload",
    "evaluate": "evaluations",
    "save": "saving, checkpoints",
}
"""What a person reads, in the order of tables."""
_OPERATORS: Mapping[OperatorKind, Work] = {
    "generate": "generate",
    "forward": "forward",
    "train": "train",
    "score": "score",
    "retokenize": "score",
    "combine": "combine",
}
_INSTRUCTIONS: Mapping[str, Work] = {
    **{"move": "move", "sync": "sync", "eval": "evaluate", "save": "save", "checkpoint": "save"},
    **dict.fromkeys(("offload", "reload", "release"), "offload"),
}


def work_of(instruction: str, operator: OperatorKind | None) -> Work:
    """Return the work of a kind of instruction, of a Run that of its kind of operator; unknown ones compute sums."""
    if instruction == "run":
        return "combine" if operator is None else _OPERATORS[operator]
    return _INSTRUCTIONS.get(instruction, "combine")
