"""Orders of a command to its ranks: which runs to execute, and what each goes on from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import dump_spec, parse_spec
from flexrlhf.config.yaml_io import read_yaml

SHARED, OWN = "shared", "own"
"""Words for the directories of the runs on a machine: those of rank 0's, or others of its own."""


@dataclass(frozen=True)
class RunOrder:
    """A run that a worker executes.

    spec:        its settings.
    candidates:  checkpoints that it may go on from, the newest first.
    continues:   whether it goes on in its directory.
    """

    spec: Spec
    candidates: tuple[Path, ...] = ()
    continues: bool = False


def dump_orders(orders: Sequence[RunOrder]) -> str:
    """Return orders as text, which ``load_orders`` reads."""
    raw = [
        {"spec": dump_spec(each.spec), "candidates": list(map(str, each.candidates)), "continues": each.continues}
        for each in orders
    ]
    return json.dumps(raw)


def load_orders(text: str) -> list[RunOrder]:
    """Return the orders of ``dump_orders``."""
    raw = json.loads(text)
    return [
        RunOrder(parse_spec(read_yaml(each["spec"])), tuple(map(Path, each["candidates"])), each["continues"])
        for each in raw
    ]
