"""Fastest options on given meshes: branch and bound over parts, on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from flexrlhf.guideline.search.assignments import ROUNDING, clock, pairwise, relations
from flexrlhf.guideline.search.bounds import UNDECIDED
from flexrlhf.guideline.search.cycles import cycle_bound
from flexrlhf.guideline.search.part_table import Bools, Floats, Ints
from flexrlhf.guideline.search.result import SearchState

CHUNK = 4096
"""Rows that are expanded at once."""


class OptionSearch:
    """Branch and bound over the options of all parts on given meshes.

    ``starts``, ``shapes``: first device and mesh shape of each part. ``relation``: relation of the ends of each link.
    ``crowds``: (parts on one device, its memory), of the devices that differ. ``sets``: the options that each part may
    still have, ``leanest``: the least resting and active bytes of these, ``between``: seconds of each link that was
    needed between their ends. Methods take the parts that are ``chosen``, and ``rows`` with an option of each of them,
    (n, parts).
    """

    def __init__(self, state: SearchState, starts: Sequence[int], shapes: Sequence[int]) -> None:
        self.state, self.tables, self.starts = state, state.tables, starts
        first, size = np.array([starts]), self.tables.sizes[np.array([shapes])]
        ends = [(table.link.source, table.link.to) for table in self.tables.links]
        self.relation = [int(relations(first[0, a], size[0, a], first[0, b], size[0, b])) for a, b in ends]
        self.overlaps = pairwise([*first.T], [*size.T], range(len(starts)))
        points = {*starts, *(run for run, _ in self.tables.memory_at)}
        covers = {at: ((first[0] <= at) & (at < first[0] + size[0])).nonzero()[0].tolist() for at in points}
        self.crowds = {(tuple(parts), self.tables.memory_of(at)) for at, parts in covers.items()}
        stated = (part.options_of(shape) for part, shape in zip(self.tables.parts, shapes, strict=True))
        self.sets = [np.arange(each.start, each.stop) for each in stated]
        self.leanest: list[tuple[float, float]] = []
        self.between: dict[int, Floats] = {}

    def run(self, options: Sequence[int]) -> float:
        """Store the best assignments. Returns the least bound of the rest at the limit, else infinite.

        ``options``: option of each part, or ``UNDECIDED``.
        """
        self.state.count(1)
        self.sets = [
            mine if option == UNDECIDED else np.array([option]) for mine, option in zip(self.sets, options, strict=True)
        ]
        if not self._has_fitting():
            self.state.pruned_by_memory += 1
            return np.inf
        blank = np.zeros((1, len(self.sets)), dtype=np.int64)
        start = self._bound([], blank)
        if not len(self.state.below_goal(start)):
            return np.inf
        order = self._order()
        stack: list[tuple[int, Ints, Floats]] = [(0, blank, start)]
        while stack:
            if self.state.is_exhausted:
                return float(min(bounds.min() for _, _, bounds in stack))
            level, rows, bounds = stack.pop()
            rows = rows[self.state.below_goal(bounds)]
            if len(rows) and level == len(order):
                self._time(rows)
            elif len(rows):
                rows, bounds = self._children(order[: level + 1], rows)
                kept = self.state.below_goal(bounds)
                pieces = [kept[at : at + CHUNK] for at in range(0, len(kept), CHUNK)]
                stack += [(level + 1, rows[piece], bounds[piece]) for piece in reversed(pieces)]
        return np.inf

    def _has_fitting(self) -> bool:
        """Leave to each part the options that fit together with the leanest of the others. False: a part has none."""
        changed, blank = True, np.zeros((1, len(self.sets)), dtype=np.int64)
        if any(not len(options) for options in self.sets):
            return False
        self.leanest = [self._leanest(part) for part in range(len(self.sets))]
        while changed:
            changed = False
            for part, options in enumerate(self.sets):
                kept = options[self._fits([part], _expand(blank, part, options))]
                if not len(kept):
                    return False
                if len(kept) < len(options):
                    changed, self.sets[part] = True, kept
                    self.leanest[part] = self._leanest(part)
        return True

    def _leanest(self, part: int) -> tuple[float, float]:
        """Return the least resting and the least active bytes of the options that a part may still have."""
        table, mine = self.tables.parts[part], self.sets[part]
        return float(table.resting[mine].min()), float(table.active[mine].min())

    def _order(self) -> list[int]:
        """Return the order of branching: both ends of a link in sequence, since its seconds follow from both."""
        totals = (part.seconds[mine].sum(axis=1) for part, mine in zip(self.tables.parts, self.sets, strict=True))
        spread = [float(np.ptp(total)) for total in totals]
        links = [(table.link.source, table.link.to) for table in self.tables.links]
        links.sort(key=lambda link: (-spread[link[0]] - spread[link[1]], link))
        rest = sorted(range(len(self.sets)), key=lambda part: (-spread[part], part))
        return list(dict.fromkeys([*(part for link in links for part in link), *rest]))

    def _children(self, chosen: Sequence[int], rows: Ints) -> tuple[Ints, Floats]:
        """Return each row with each option of the last part of ``chosen`` that fits, and their bounds."""
        rows = _expand(rows, chosen[-1], self.sets[chosen[-1]])
        fitting = self._fits(chosen, rows)
        self.state.count(int(fitting.sum()), len(rows))
        self.state.pruned_by_memory += len(rows) - int(fitting.sum())
        rows = rows[fitting]
        return rows, self._bound(chosen, rows)

    def _fits(self, chosen: Sequence[int], rows: Ints) -> Bools:
        """Whether each row fits with the leanest options of parts that are not ``chosen``, (n,)."""
        fitting: Bools = np.ones(len(rows), dtype=np.bool_)
        for parts, memory in self.crowds:
            resting: Floats | float = 0.0
            active: Floats | float = 0.0
            for part in parts:
                if part in chosen:
                    table, mine = self.tables.parts[part], rows[:, part]
                    resting, active = resting + table.resting[mine], np.maximum(active, table.active[mine])
                else:
                    least, other = self.leanest[part]
                    resting, active = resting + least, np.maximum(active, other)
            fitting &= resting + active <= memory * (1 + ROUNDING)
        return fitting

    def _bound(self, chosen: Sequence[int], rows: Ints) -> Floats:
        """Return a lower bound on the time of any completion of each row, (n,)."""
        seconds, delays = self._seconds(chosen, rows)
        return cycle_bound(self.tables.graph, seconds, delays, self.overlaps, len(rows), {})

    def _time(self, rows: Ints) -> None:
        """Time whole assignments and store the best."""
        seconds, delays = self._seconds(range(len(self.sets)), rows)
        values = clock(self.tables.graph, seconds, delays, self.overlaps, len(rows))
        self.state.evaluated += len(rows)
        starts = tuple(self.starts)
        self.state.accept(values, lambda row: (starts, tuple(rows[row].tolist())))

    def _seconds(self, chosen: Sequence[int], rows: Ints) -> tuple[list[Floats | float], list[Floats | float]]:
        """Return the time of each call and the delay of each link, the least where a part is undecided."""
        graph = self.tables.graph
        seconds: list[Floats | float] = [0.0] * graph.num_calls
        for call, (parts, column) in enumerate(zip(graph.parts, graph.column, strict=True)):
            if column >= 0:
                table, part = self.tables.parts[parts[0]], parts[0]
                is_chosen = part in chosen
                seconds[call] = table.seconds[rows[:, part], column] if is_chosen else float(self.least[part][column])
        delays: list[Floats | float] = [0.0] * len(self.relation)
        for index, link in enumerate(self.tables.links):
            between = self._link(index, chosen, rows)
            if link.link.call >= 0:
                seconds[link.link.call] = between
            else:
                delays[index] = between
        return seconds, delays

    def _link(self, index: int, chosen: Sequence[int], rows: Ints) -> Floats:
        """Return the time of a link, the least over the options of an end that is undecided, (n,) or (1,)."""
        table, relation = self.tables.links[index], np.array([[self.relation[index]]])
        a, b = table.link.source, table.link.to
        if index not in self.between:
            (_, sources), (_, targets) = self.ends[a], self.ends[b]
            self.between[index] = table.seconds(sources[:, None], targets[None, :], relation)
        between = self.between[index]
        if a in chosen and b in chosen:
            return between[self.ends[a][0][rows[:, a]], self.ends[b][0][rows[:, b]]]
        if a in chosen:
            return np.asarray(between.min(axis=1)[self.ends[a][0][rows[:, a]]])
        if b in chosen:
            return np.asarray(between.min(axis=0)[self.ends[b][0][rows[:, b]]])
        return np.asarray(between.min(keepdims=True)[0])

    @cached_property
    def least(self) -> list[Floats]:
        """Least time of each task of each part, over the options that it has left."""
        return [part.seconds[mine].min(axis=0) for part, mine in zip(self.tables.parts, self.sets, strict=True)]

    @cached_property
    def ends(self) -> list[tuple[Ints, Ints]]:
        """Number of each option's end of links, and the ends, of the options that each part has left."""
        found = []
        for part, mine in zip(self.tables.parts, self.sets, strict=True):
            ends, numbers = np.unique(part.end[mine], return_inverse=True)
            number = np.zeros(len(part.end), dtype=np.int64)
            number[mine] = numbers
            found.append((number, ends))
        return found


def _expand(rows: Ints, part: int, options: Ints) -> Ints:
    """Return each row with each of ``options`` for ``part``."""
    expanded = np.repeat(rows, len(options), axis=0)
    expanded[:, part] = np.tile(options, len(rows))
    return expanded
