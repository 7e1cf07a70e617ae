"""A figure of the page, and what all figures have in common."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class View:
    """A range of the horizontal axis that a button shows.

    name:        on the button
    start, end:  of the range
    """

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Picture:
    """A figure with its title and caption.

    key:      unique in the page
    title:    above it
    caption:  under it: what it shows, and the units
    figure:   for plotly
    height:   in pixels
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
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "xanchor": "left"},
    }


def escaped(text: object) -> str:
    """Return a text as figures show it: plotly reads tags in labels."""
    return html.escape(str(text))
