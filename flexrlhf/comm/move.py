"""Execution of a Move: pack the planned rows into bytes, send them by the planned primitive, unpack them on arrival.

Receives are posted when the Move is reached and awaited when a column is first read. A send is awaited before the
second next one of the same edge, which bounds the memory in flight to two buffers per edge.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.point_to_point import exchange
from flexrlhf.comm.rows import DTYPES, RowStore
from flexrlhf.comm.world import Wait, Waitable
from flexrlhf.operators.columns import Column, Lengths
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.transfer import Transfer
from flexrlhf.strategies.instructions import Move


@dataclass(frozen=True)
class RowPacking:
    """Rows of columns as bytes: shapes and types follow from the plan, so nothing but values is sent.

    batch:    rows of each prompt.
    lengths:  widths of the columns.
    device:   of the buffers.
    """

    batch: BatchShape
    lengths: Lengths
    device: torch.device

    def num_bytes(self, transfers: list[Transfer]) -> int:
        """Bytes of all rows of ``transfers``."""
        samples = self.batch.samples_per_prompt
        return sum(len(t.prompts) * samples * self.lengths.row_bytes(t.column) for t in transfers)

    def pack(self, transfers: list[Transfer], rows: RowStore) -> Tensor:
        """Return all rows of ``transfers``, one after another, as bytes."""
        parts = [
            rows.get(t.column, self.batch.rows(t.prompts)).contiguous().view(-1).view(torch.uint8) for t in transfers
        ]
        return torch.cat(parts) if parts else self.empty(0)

    def unpack(self, buffer: Tensor, transfers: list[Transfer], rows: RowStore) -> None:
        """Put the rows in ``buffer``, packed from the same ``transfers``, into ``rows``."""
        start = 0
        for transfer in transfers:
            end = start + self.num_bytes([transfer])
            column = Column.of(transfer.column)
            width = self.lengths.width(column)
            numbers = self.batch.rows(transfer.prompts)
            # a clone, since a view of bytes at an odd offset cannot be read as int32
            values = buffer[start:end].clone().view(DTYPES[column.dtype])
            rows.put(transfer.column, numbers, values if width is None else values.view(len(numbers), width))
            start = end

    def empty(self, size: int) -> Tensor:
        """Return a buffer of ``size`` bytes."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)


@dataclass
class MoveInFlight:
    """Buffers and handles of one Move on this rank.

    ranks:       that take part in it.
    works:       handles that are still to be awaited.
    buffers:     memory that must live until then.
    bytes_sent:  handed to torch for other ranks.
    """

    ranks: tuple[int, ...]
    works: list[Waitable]
    buffers: list[Tensor]
    bytes_sent: int


Started = tuple[MoveInFlight, Callable[[], None]]
"""A Move that is posted, and a function that unpacks the rows that have arrived."""


class ColumnMover:
    """Moves of one rank, with at most two in flight per edge."""

    def __init__(self, rank: int, packing: RowPacking, wait: Wait) -> None:
        self._rank = rank
        self._packing = packing
        self._wait = wait
        self._edges: dict[str, deque[MoveInFlight]] = {}

    def start(self, move: Move, rows: RowStore, group: dist.ProcessGroup) -> int:
        """Post ``move`` on this rank and return the bytes sent; ``rows`` gets its columns when they are first read."""
        edge = self._edges.setdefault(move.label, deque())
        if len(edge) == 2:
            self._finish(edge.popleft())
        launch = {
            "all_gather": self._all_gather,
            "point_to_point": self._point_to_point,
            "all_to_all": self._all_to_all,
        }
        flight, arrive = launch[move.primitive](move, rows, group)
        edge.append(flight)

        def arrival() -> None:
            self._finish(flight)
            arrive()

        incoming: dict[str, set[int]] = defaultdict(set)
        for transfer in move.transfers:
            if transfer.destination == self._rank:
                incoming[transfer.column].update(self._packing.batch.rows(transfer.prompts))
        rows.expect(incoming, arrival)
        return flight.bytes_sent

    def close(self) -> None:
        """Await all moves that are under way."""
        for edge in self._edges.values():
            for flight in edge:
                self._finish(flight)

    def _finish(self, flight: MoveInFlight) -> None:
        while flight.works:
            self._wait(flight.works.pop(), flight.ranks)

    def _sent(self, move: Move, destination: int) -> list[Transfer]:
        return [t for t in move.transfers if t.source == self._rank and t.destination == destination]

    def _received(self, move: Move, source: int) -> list[Transfer]:
        return [t for t in move.transfers if t.destination == self._rank and t.source == source]

    def _all_gather(self, move: Move, rows: RowStore, group: dist.ProcessGroup) -> Started:
        other = next(rank for rank in move.ranks if rank != self._rank)
        mine = self._packing.pack(self._sent(move, other), rows)
        out = self._packing.empty(len(mine) * len(move.ranks))
        work = dist.all_gather(list(out.split(len(mine))), mine, group=group, async_op=True)
        flight = MoveInFlight(move.ranks, [work], [mine, out], len(mine) * (len(move.ranks) - 1))

        def arrive() -> None:
            for buffer, rank in zip(out.split(len(mine)), move.ranks, strict=True):
                self._packing.unpack(buffer, self._received(move, rank), rows)

        return flight, arrive

    def _all_to_all(self, move: Move, rows: RowStore, group: dist.ProcessGroup) -> Started:
        sent = [self._packing.pack(self._sent(move, rank), rows) for rank in move.ranks]
        sizes = [self._packing.num_bytes(self._received(move, rank)) for rank in move.ranks]
        packed, out = torch.cat(sent), self._packing.empty(sum(sizes))
        work = dist.all_to_all_single(out, packed, sizes, [len(part) for part in sent], group=group, async_op=True)
        flight = MoveInFlight(move.ranks, [work], [packed, out], len(packed))

        def arrive() -> None:
            for buffer, rank in zip(out.split(sizes), move.ranks, strict=True):
                self._packing.unpack(buffer, self._received(move, rank), rows)

        return flight, arrive

    def _point_to_point(self, move: Move, rows: RowStore, group: dist.ProcessGroup) -> Started:
        outgoing = {rank: transfers for rank in move.ranks if (transfers := self._sent(move, rank))}
        incoming = {rank: transfers for rank in move.ranks if (transfers := self._received(move, rank))}
        sent = [(self._packing.pack(transfers, rows), rank) for rank, transfers in outgoing.items()]
        received = [
            (self._packing.empty(self._packing.num_bytes(transfers)), rank) for rank, transfers in incoming.items()
        ]
        works = [work for each in exchange(sent, received, group) for work, _ in each]
        buffers = [buffer for buffer, _ in sent]
        flight = MoveInFlight(move.ranks, works, buffers, sum(map(len, buffers)))

        def arrive() -> None:
            for buffer, rank in received:
                self._packing.unpack(buffer, incoming[rank], rows)

        return flight, arrive
