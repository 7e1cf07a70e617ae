"""Rows of one step on one rank, by column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexrlhf.operators.columns import Column, Lengths

DTYPES = {"int32": torch.int32, "uint8": torch.uint8, "float32": torch.float32}


@dataclass(frozen=True, eq=False)
class PendingRows:
    """Rows that are under way.

    cells:   row numbers by column.
    arrive:  awaits them and puts them into the store.
    """

    cells: Mapping[str, frozenset[int]]
    arrive: Callable[[], None]

    def overlaps(self, columns: Iterable[str], rows: Sequence[int]) -> bool:
        """Whether any of ``rows`` of ``columns`` is among them."""
        return any(not self.cells[column].isdisjoint(rows) for column in columns if column in self.cells)


class RowStore:
    """Columns with rows by global row number. Rows that are under way are awaited when they are first read."""

    def __init__(self, lengths: Lengths, device: torch.device) -> None:
        self.lengths = lengths
        self.device = device
        self._blocks: dict[str, list[Tensor]] = {}
        self._index: dict[str, dict[int, tuple[int, int]]] = {}
        self._arrivals: list[PendingRows] = []

    def put(self, column: str, rows: Sequence[int], values: Tensor) -> None:
        """Store ``values`` (len(rows), ...). A row that is put again is replaced."""
        assert len(rows) == len(values), f"{column}: {len(rows)} rows, {len(values)} values"
        blocks = self._blocks.setdefault(column, [])
        index = self._index.setdefault(column, {})
        index.update({row: (len(blocks), i) for i, row in enumerate(rows)})
        blocks.append(values)
        if len(blocks) > 1:
            used = {block for block, _ in index.values()}
            for number in range(len(blocks)):
                if number not in used:
                    # turns of an episode replace its rows
                    blocks[number] = values.new_empty(0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(block.nbytes for blocks in self._blocks.values() for block in blocks)

    def expect(self, cells: Mapping[str, Iterable[int]], arrive: Callable[[], None]) -> None:
        """Call ``arrive``, which puts the rows of ``cells`` (by column), once, before any of them is read."""
        self._arrivals.append(PendingRows({column: frozenset(rows) for column, rows in cells.items()}, arrive))

    def get(self, column: str, rows: Sequence[int]) -> Tensor:
        """Return the values of ``rows`` (len(rows), ...), in this order."""
        self.arrive([column], rows)
        if not rows:
            # no move sends a column to a replica without rows
            return self.absent(column, 0)
        blocks, index = self._blocks[column], self._index[column]
        places = [index[row] for row in rows]
        if len(blocks) == 1 and [place for _, place in places] == list(range(len(blocks[0]))):
            return blocks[0]
        return torch.stack([blocks[block][place] for block, place in places])

    def absent(self, column: str, count: int) -> Tensor:
        """Return the values (count, ...) of rows that nothing has written."""
        kind = Column.of(column)
        width = self.lengths.width(kind)
        shape = (count,) if width is None else (count, width)
        return torch.full(shape, kind.absent, dtype=DTYPES[kind.dtype], device=self.device)

    def arrive(self, columns: Iterable[str], rows: Sequence[int]) -> None:
        """Await the ``rows`` of ``columns`` that are under way, and no others: a later chunk may be far behind."""
        due = [item for item in self._arrivals if item.overlaps(columns, rows)]
        self._arrivals = [item for item in self._arrivals if item not in due]
        for item in due:
            item.arrive()

    def finish(self) -> None:
        """Await whatever is still under way."""
        for item in self._arrivals:
            item.arrive()
        self._arrivals = []
