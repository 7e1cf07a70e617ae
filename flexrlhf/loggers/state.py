"""State of the loggers of a run in its directory, so that a resumed run goes on in them without repeating a step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from flexrlhf.errors import UserError

FILE = "loggers.json"


@dataclass(frozen=True)
class LoggerState:
    """State of one logger.

    identifier:  of the run in its library; None: it has none
    next_step:   the first step that it has not received
    """

    identifier: str | None
    next_step: int


def read_states(directory: Path) -> dict[str, LoggerState]:
    """Return the states of the loggers of the run in ``directory`` by name; none of a run that begins."""
    path = directory / FILE
    if not path.exists():
        return {}
    try:
        return {name: LoggerState(**state) for name, state in json.loads(path.read_text()).items()}
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"{path}: damaged; remove it, and the loggers begin anew") from None


def write_states(directory: Path, states: Mapping[str, LoggerState]) -> None:
    """Write the states, never in part."""
    fresh = directory / f"{FILE}.writing"
    fresh.write_text(json.dumps({name: asdict(state) for name, state in states.items()}) + "\n")
    fresh.replace(directory / FILE)
