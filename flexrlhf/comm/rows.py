"""The rows of one step that one rank holds: by column, in the order in which they came."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flexrlhf.operators.columns import COLUMNS, Lengths

DTYPES = {"int32": torch.int32, "uint8": torch.uint8, "float32": torch.float32}
Arrival = Callable[[], None]


class RowStore:
    """Columns with rows by global row number. Rows that still travel are awaited when they are first read."""

    def __init__(self, lengths: Lengths, device: torch.device) -> None:
        self._lengths = lengths
        self._device = device
        self._blocks: dict[str, list[Tensor]] = {}
        self._index: dict[str, dict[int, tuple[int, int]]] = {}
        self._arrivals: list[tuple[frozenset[str], Arrival]] = []

    def put(self, column: str, rows: Sequence[int], values: Tensor) -> None:
        """``values`` (len(rows), ...). A row that is put again is replaced."""
        assert len(rows) == len(values), f"{column}: {len(rows)} rows, {len(values)} values"
        blocks = self._blocks.setdefault(column, [])
        index = self._index.setdefault(column, {})
        index.update({row: (len(blocks), i) for i, row in enumerate(rows)})
        blocks.append(values)

    def expect(self, columns: Sequence[str], arrival: Arrival) -> None:
        """``arrival`` puts rows of ``columns`` when called; it is called once, before any of them is read."""
        self._arrivals.append((frozenset(columns), arrival))

    def get(self, column: str, rows: Sequence[int]) -> Tensor:
        """The values of ``rows`` (len(rows), ...), in this order."""
        self._await(column)
        if not rows:
            return self._blank(column)
        blocks, index = self._blocks[column], self._index[column]
        places = [index[row] for row in rows]
        if len(blocks) == 1 and [place for _, place in places] == list(range(len(blocks[0]))):
            return blocks[0]
        return torch.stack([blocks[block][place] for block, place in places])

    def _blank(self, column: str) -> Tensor:
        """No rows: of a replica without rows no move brings the column."""
        kind = COLUMNS[column]
        width = self._lengths.width(kind)
        return torch.empty((0,) if width is None else (0, width), dtype=DTYPES[kind.dtype], device=self._device)

    def _await(self, column: str) -> None:
        due = [item for item in self._arrivals if column in item[0]]
        self._arrivals = [item for item in self._arrivals if column not in item[0]]
        for _, arrival in due:
            arrival()

    def finish(self) -> None:
        """Await whatever is still under way."""
        for _, arrival in self._arrivals:
            arrival()
        self._arrivals = []
