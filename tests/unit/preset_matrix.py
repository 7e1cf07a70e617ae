"""Defaults of other engines' trainers, read from their sources a second time: ``preset_values/``.

A row is a setting, a column an algorithm, a value as in the YAML; ``-``: the preset does not set it. ``*``: of all
trained models. Of 100 steps; in OpenRLHF's 1024 responses are 8 mini-batches of 128, with groups of 8 eight times as
many and with groups of 4 four times, and the warm-up is 3 % of all updates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexrlhf.config.yaml_io import read_yaml

FILES = {path.stem: path for path in sorted(Path(__file__).with_name("preset_values").glob("*.txt"))}
TRAINED = {
    "ppo": ("actor", "critic"),
    "safe-rlhf": ("actor", "critic", "cost_critic"),
    "reward": ("reward",),
}
"""Roles that ``*`` stands for, where it is not the actor alone."""
ROLES = ("*", "actor", "critic", "cost_critic", "reward")


def expected(like: str) -> dict[tuple[str, str], Any]:
    """(algorithm, dotted key) → value in the file of ``like``."""
    head, *rows = (line.split("|") for line in FILES[like].read_text().splitlines())
    algorithms = [name.strip() for name in head[1:]]
    found: dict[tuple[str, str], Any] = {}
    for name, *values in rows:
        assert len(values) == len(algorithms), name
        for algorithm, value in zip(algorithms, values, strict=True):
            if value.strip() != "-":
                found |= {(algorithm, key): read_yaml(value) for key in _keys(name.strip(), algorithm)}
    return found


def _keys(name: str, algorithm: str) -> list[str]:
    role, _, setting = name.partition(".")
    if role not in ROLES:
        return [f"algorithm.{name}"]
    roles = TRAINED.get(algorithm, ("actor",)) if role == "*" else (role,)
    return [f"models.{each}.optimizer.{setting}" for each in roles]
