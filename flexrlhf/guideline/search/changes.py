"""Assignments that differ in the mesh and the option of one part: what the others give is computed once for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexrlhf.guideline.search.assignments import AssignmentKey, Spot, columns_seconds
from flexrlhf.guideline.search.part_table import Bools, Floats, Ints
from flexrlhf.guideline.search.tables import Tables


@dataclass(frozen=True, eq=False)
class PartChanges:
    """Assignments that differ from ``spots`` in one part.

    tables:   the problem.
    spots:    spot of each part.
    part:     the part that changes.
    starts:   first device of each of its meshes, (m,).
    shapes:   their shapes, (m,).
    mesh:     index of each assignment's mesh, (n,).
    options:  its option there, (n,).
    """

    tables: Tables
    spots: Sequence[Spot]
    part: int
    starts: Ints
    shapes: Ints
    mesh: Ints
    options: Ints

    def __len__(self) -> int:
        return len(self.options)

    def spot(self, row: int) -> Spot:
        """Return the new spot of the part in an assignment."""
        return int(self.starts[self.mesh[row]]), int(self.options[row])

    def key(self, row: int) -> AssignmentKey:
        """Return the starts and the options of an assignment."""
        spots = [self.spot(row) if part == self.part else spot for part, spot in enumerate(self.spots)]
        return tuple(start for start, _ in spots), tuple(option for _, option in spots)

    def totals(self) -> Floats:
        """Return the time of all calls of each assignment together, (n,)."""
        total = np.zeros(len(self.tables.parts[self.part].options))
        for part, (table, (_, option)) in enumerate(zip(self.tables.parts, self.spots, strict=True)):
            total += table.total if part == self.part else table.total[option]
        return total[self.options]

    def seconds(self, rows: Ints) -> Floats:
        """Return the time of a settled step of each of ``rows``, (len(rows),)."""
        starts: list[Ints | int] = [start for start, _ in self.spots]
        options: list[Ints | int] = [option for _, option in self.spots]
        starts[self.part], options[self.part] = self.starts[self.mesh[rows]], self.options[rows]
        return columns_seconds(self.tables, starts, options, len(rows))

    def over(self) -> Floats:
        """Return the bytes by which the fullest device of each exceeds its memory, (n,); negative: it fits.

        They are added once for all meshes whose devices have the same other parts.
        """
        crowds, number_fixed, covers = self._crowds()
        # none if there is no other part
        alone = max((float(self._over(crowd, is_shared=False)) for crowd in crowds[:number_fixed]), default=-np.inf)
        shared = np.array([self._over(crowd, is_shared=True) for crowd in crowds])
        numbers: dict[bytes, int] = {}
        kind = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in covers], dtype=np.int64)
        distinct = [np.frombuffer(row, dtype=np.bool_) for row in numbers]
        over = np.array([np.maximum(shared[crowd].max(axis=0), alone) for crowd in distinct])
        return np.asarray(over[kind[self.mesh], self.options])

    def _crowds(self) -> tuple[list[int], int, Bools]:
        """Return the codes of devices that differ, the number of those that do so without the part's start, and
        whether each mesh has such devices, (m, codes).

        A code has a bit for each other part on the device, and the run of alike devices. All that are on a device have
        the first device of one of them, or the first of its run.
        """
        sizes = self.tables.sizes
        others = [
            (part, start, start + int(self.tables.parts[part].size[option]))
            for part, (start, option) in enumerate(self.spots)
            if part != self.part
        ]
        runs = [first for first, _ in self.tables.memory_at]
        fixed = np.array(sorted({*(start for _, start, _ in others), *runs[1:]}), dtype=np.int64)
        points = np.concatenate([fixed, self.starts])
        codes = (np.searchsorted(runs, points, side="right") - 1) << len(self.spots)
        for part, start, end in others:
            codes += ((start <= points) & (points < end)).astype(np.int64) << part
        numbers: dict[int, int] = {}
        number = [numbers.setdefault(code, len(numbers)) for code in codes.tolist()]
        number_fixed = len({*number[: len(fixed)]})
        covers = np.zeros((len(self.starts), len(numbers)), dtype=np.bool_)
        covers[np.arange(len(self.starts)), number[len(fixed) :]] = True
        ends = self.starts + sizes[self.shapes]
        for crowd, point in zip(number, fixed.tolist(), strict=False):
            covers[:, crowd] |= (self.starts <= point) & (point < ends)
        return [*numbers], number_fixed, covers

    def _over(self, crowd: int, is_shared: bool) -> Floats | float:
        """Return the bytes that devices with the parts of ``crowd`` lack, with each option of the part that changes if
        it is there, too."""
        used: Floats | float = 0.0
        most: Floats | float = 0.0
        for part, (table, (_, option)) in enumerate(zip(self.tables.parts, self.spots, strict=True)):
            if part == self.part and is_shared:
                used, most = used + table.resting, np.maximum(most, table.active)
            elif part != self.part and crowd >> part & 1:
                used, most = used + table.resting[option], np.maximum(most, table.active[option])
        return used + most - self.tables.memory_at[crowd >> len(self.spots)][1]
