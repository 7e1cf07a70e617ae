"""A grid of line charts as one SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 340, 170
LEFT, RIGHT, TOP, BOTTOM = 30, 12, 28, 32
COLOURS = ("#0b3c5d", "#2a9d8f", "#e9a227", "#d1495b")
MOST_POINTS = 40


@dataclass(frozen=True)
class Curve:
    """A line with its name in the legend."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """One chart. ``span``: ends of its vertical axis."""

    title: str
    unit: str
    curves: Sequence[Curve]
    span: tuple[float, float]

    def svg(self) -> Iterator[str]:
        low, high = self.span
        right = max(curve.xs[-1] for curve in self.curves)
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

        def x(value: float) -> float:
            return LEFT + width * value / right

        def y(value: float) -> float:
            return TOP + height * (1 - (min(max(value, low), high) - low) / (high - low))

        yield f'<text x="{LEFT}" y="{TOP - 10}" font-weight="600">{escape(self.title)}</text>'
        for value in _ticks(low, high):
            yield f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
            yield f'<text x="{LEFT - 4}" y="{y(value) + 3:.1f}" text-anchor="end">{value:g}</text>'
        for value in _ticks(0, right):
            yield f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 13}" text-anchor="middle">{value:,g}</text>'
        yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM + 26}" text-anchor="end">{self.unit}</text>'
        for curve, colour in zip(self.curves, COLOURS, strict=False):
            stride = -(-len(curve.xs) // MOST_POINTS)
            points = list(zip(curve.xs, curve.ys, strict=True))[::-stride][::-1]
            line = " ".join(f"{x(one):.1f},{y(other):.1f}" for one, other in points)
            yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>'


def _ticks(low: float, high: float) -> list[float]:
    """Return about four round numbers from ``low`` to ``high``."""
    rough = (high - low) / 4
    size = 10 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def picture(rows: Sequence[Sequence[Panel]]) -> str:
    """Return an SVG of ``rows`` of panels, with one legend for all."""
    width, height = WIDTH * max(map(len, rows)), HEIGHT * len(rows) + 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="10" fill="#222"><rect width="{width}" height="{height}" fill="#fff"/>'
    ]
    for place, (curve, colour) in enumerate(zip(rows[0][0].curves, COLOURS, strict=False)):
        parts.append(f'<path d="M{LEFT + 70 * place} 9h16" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 20 + 70 * place}" y="12">{escape(curve.name)}</text>')
    for line, row in enumerate(rows):
        for column, panel in enumerate(row):
            inside = "\n".join(panel.svg())
            parts.append(f'<g transform="translate({WIDTH * column} {HEIGHT * line + 18})">\n{inside}\n</g>')
    return "\n".join([*parts, "</svg>\n"])
