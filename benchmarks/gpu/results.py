"""Results of the stages: rows of one table, which are also written as JSON, and skipped measurements with the
reason."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Found = tuple[str, str, dict[str, float]]
"""Name of a measurement, the result in words, and its figures."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    stage:        stage of the command
    measurement:  name of the measurement
    found:        result in words
    figures:      figures by name
    """

    stage: str
    measurement: str
    found: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LeftOut:
    """Something that did not run, and why."""

    stage: str
    measurement: str
    reason: str


def printed_rows(stage: str, printed: str) -> Iterator[Row]:
    """Yield the results that a process has printed, each as a line of JSON, among other lines."""
    for line in printed.splitlines():
        if line.startswith('["'):
            measurement, found, figures = json.loads(line)
            yield Row(stage, measurement, found, figures)


@dataclass
class Results:
    """All that one command found.

    machine:   facts of the machine and its libraries
    rows:      rows of the table
    left_out:  skipped measurements
    """

    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    @classmethod
    def of(cls, machine: dict[str, str], directory: Path, again: Collection[str]) -> Results:
        """Return the results of earlier commands in ``directory``, without the stages that run ``again``."""
        file = directory / "gpu.json"
        written = json.loads(file.read_text()) if file.exists() else {"rows": [], "left_out": []}
        kept = {kind: [each for each in written[kind] if each["stage"] not in again] for kind in ("rows", "left_out")}
        return cls(machine, [Row(**each) for each in kept["rows"]], [LeftOut(**each) for each in kept["left_out"]])

    def add(self, *found: Row | LeftOut) -> None:
        """Append results in the order in which they were found."""
        for each in found:
            (self.rows if isinstance(each, Row) else self.left_out).append(each)  # type: ignore[arg-type]

    def table(self) -> str:
        """Return everything as Markdown."""
        lines = [f"{', '.join(f'{name} {value}' for name, value in self.machine.items())}", ""]
        lines += ["| stage | measurement | result |", "|---|---|---|"]
        lines += [f"| {row.stage} | {row.measurement} | {row.found} |" for row in self.rows]
        lines += [f"| {each.stage} | {each.measurement} | skipped: {each.reason} |" for each in self.left_out]
        return "\n".join(lines) + "\n"

    def write(self, directory: Path) -> None:
        """Write ``gpu.json`` and ``gpu.md`` into ``directory``."""
        content: dict[str, Any] = {
            "machine": self.machine,
            "rows": [asdict(row) for row in self.rows],
            "left_out": [asdict(each) for each in self.left_out],
        }
        (directory / "gpu.json").write_text(json.dumps(content, indent=2) + "\n")
        (directory / "gpu.md").write_text(self.table())
