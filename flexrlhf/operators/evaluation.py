"""Operators that evaluations of several algorithms have in common."""

from __future__ import annotations

from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Operator

GENERATE = Operator(
    "generate",
    "generate",
    "actor",
    ("prompts", "prompt_mask"),
    (*TEXT, "response_mask", "finished", "policy_version"),
)
DIVERSITY = Operator("diversity", "combine", "actor", ("tokens", "response_mask"), function="diversity")
