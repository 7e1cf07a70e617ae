"""Bytes, ranks and tables as text for a person."""

from __future__ import annotations

from collections.abc import Sequence


def bytes_text(size: int | None) -> str:
    """Return a size in bytes with three digits and a decimal unit, as links and device memory are sold."""
    if size is None:
        return "? B"
    if size >= 999.5e12:
        return f"{size / 1e12:.0f} TB"
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # three digits of what is just below a unit are one of that unit
        if size >= 0.9995 * factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


def counted(number: int, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks`` ``2 mini-batches`` or ``2 processes``."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith(('ch', 'ss')) else 's'}"


def table(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return one line for each row, with columns aligned. ``sides``: ``<`` or ``>`` for each column."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Return ``rank 2`` or ``ranks 0-3,6``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {span_of(ranks)}"


def mini_batches_text(numbers: range) -> str:
    """Return ``mini-batch 2`` or ``mini-batches 2 to 3`` for these numbers."""
    return f"mini-batch {numbers[0]}" if len(numbers) == 1 else f"mini-batches {numbers[0]} to {numbers[-1]}"


def span_of(ranks: tuple[int, ...]) -> str:
    """Return ``0-3,6`` for (0, 1, 2, 3, 6)."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def rank_marks(ranks: tuple[int, ...], num_ranks: int) -> str:
    """Return ``##..`` for ranks (0, 1) of up to 32, and ``0-1`` of more."""
    if num_ranks > 32:
        return f"{span_of(ranks):<12}"
    return "".join("#" if rank in ranks else "." for rank in range(num_ranks))


def shortened(text: str, width: int) -> str:
    """Return ``text`` in one line of at most ``width`` characters, without its middle where it is longer."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    half = (width - 5) // 2
    return f"{line[: width - 5 - half].rstrip()} ... {line[-half:].lstrip()}"
