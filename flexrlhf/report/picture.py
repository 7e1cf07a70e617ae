"""Figures of the page: their layout, titles and views."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

LANE, BOTTOM = 30, 30
"""Pixels of a lane, and under all lanes."""

AUTOMARGIN = "left"
"""Margin of a figure that grows with the labels of its vertical axes.

The top one must not: plotly chooses the labels by the height, and redraws without end where the upper one needs a
margin that leaves no room for it.
"""


@dataclass(frozen=True)
class View:
    """A range of the horizontal axis that a button shows.

    name:        on the button
    steps:       that it shows
    start, end:  of the range
    """

    name: str
    steps: int
    start: float
    end: float


@dataclass(frozen=True)
class Picture:
    """A figure with its title and caption.

    key:      unique in the page
    title:    above it
    caption:  under it: what it shows, and the units
    figure:   for plotly
    height:   in pixels, without the legend, which the page writes below it
    views:    ranges that buttons show; without any there are no buttons
    """

    key: str
    title: str
    caption: str
    figure: go.Figure
    height: int
    views: tuple[View, ...] = ()

    @property
    def json(self) -> str:
        """Data and layout, as plotly.js takes them."""
        return str(self.figure.to_json())


def make_figure(traces: Sequence[Any], height: int, **layout: Any) -> go.Figure:
    """Return a figure with the look of all figures; the page gives it the colours of its theme."""
    figure = go.Figure(traces)
    figure.update_layout(**{**base_layout(height), **layout})
    figure.update_xaxes(tickangle=0)
    return figure


def base_layout(height: int) -> Mapping[str, Any]:
    """Return the layout that all figures share."""
    return {
        "template": go.layout.Template(),
        "height": height,
        "autosize": True,
        "margin": {"l": 52, "r": 12, "t": 12, "b": 40},
        "font": {"family": FONT, "size": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "uniformtext": {"minsize": 9, "mode": "hide"},
    }


def lane_layout(num_parts: int, num_lanes: int, between: int, top: int) -> tuple[int, float]:
    """Return height and spacing of figures with one part above the other, each of so many lanes.

    between, top:  pixels above a further part, and above the first one
    """
    plotted = num_parts * LANE * num_lanes + (num_parts - 1) * between
    # one part has nothing above it, and one lane is less than that
    return plotted + top + BOTTOM, between / plotted if num_parts > 1 else 0.0


def add_part_title(figure: go.Figure, title: str, number: int, above: int) -> None:
    """Write a title so many pixels above the part with this number, from 1."""
    suffix = "" if number == 1 else str(number)
    figure.add_annotation(
        x=0,
        y=1,
        yshift=above,
        xref=f"x{suffix} domain",
        yref=f"y{suffix} domain",
        xanchor="left",
        yanchor="bottom",
        text=title,
        showarrow=False,
    )


def escaped(text: object) -> str:
    """Return a text as figures show it: plotly reads tags in labels."""
    return html.escape(str(text))
