"""The page: sections of pictures and tables, one HTML file that loads nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from plotly.offline import get_plotlyjs

from flexrlhf.report.picture import Picture
from flexrlhf.report.samples_table import SampleGroup

GENERATOR = "flexrlhf report"
"""What the page names as its writer, so that a file of somebody else is never replaced."""


@dataclass(frozen=True)
class Table:
    """A table.

    head:   titles of the columns
    rows:   cells as text
    title:  above it
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


@dataclass(frozen=True)
class RunPart:
    """Part of a section, of one run.

    run:       its name
    colour:    its colour
    pictures:  figures
    tables:    tables
    samples:   responses
    text:      in the letters of a terminal
    notes:     sentences on what is missing
    """

    run: str
    colour: str = ""
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    samples: tuple[SampleGroup, ...] = ()
    text: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.pictures or self.tables or self.samples or self.text or self.notes)


@dataclass(frozen=True)
class Section:
    """A section of the page: pictures of all runs together, then a part for each run next to the others.

    key:      anchor
    title:    heading
    caption:  under the heading
    common:   pictures of all runs, as a grid of small ones
    folded:   further ones
    tables:   of all runs
    parts:    by run
    notes:    sentences on what is missing, of all runs
    is_open:  False: folded until it is clicked
    """

    key: str
    title: str
    caption: str = ""
    common: tuple[Picture, ...] = ()
    folded: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    parts: tuple[RunPart, ...] = ()
    notes: tuple[str, ...] = ()
    is_open: bool = True

    @property
    def is_empty(self) -> bool:
        own = (self.common, self.folded, self.tables, self.notes)
        return not any(own) and all(part.is_empty for part in self.parts)


@dataclass(frozen=True)
class Card:
    """Facts of a run at the top of the page.

    run:     its name
    colour:  of its curves
    state:   such as ``finished``
    facts:   pairs of name and value
    alerts:  sentences that come first: why it failed
    notes:   sentences on what is missing
    """

    run: str
    colour: str
    state: str
    facts: tuple[tuple[str, str], ...]
    alerts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """Contents of the page.

    title:     of the page
    cards:     of its runs
    sections:  in order; empty ones are left out
    footer:    a sentence
    """

    title: str
    cards: tuple[Card, ...]
    sections: tuple[Section, ...]
    footer: str = field(default="")


def render(page: Page) -> str:
    """Return the HTML of ``page``. Every text is escaped; figures are JSON in which no tag can begin."""
    folder = files(__package__)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((folder / "page.html").read_text())
    sections = [section for section in page.sections if not section.is_empty]
    members = [f"{json.dumps(picture.key)}:{picture.json}" for section in sections for picture in _pictures(section)]
    return template.render(
        page=page,
        sections=sections,
        generator=GENERATOR,
        style=(folder / "page.css").read_text(),
        script=(folder / "page.js").read_text(),
        plotly=get_plotlyjs() if members else "",
        # "<" occurs in strings alone
        figures="{" + ",".join(members).replace("<", "\\u003c") + "}",
    )


def is_own_page(text: str) -> bool:
    """Whether ``text`` is a page of this package, which may be replaced."""
    return f'<meta name="generator" content="{GENERATOR}">' in text[:2000]


def _pictures(section: Section) -> Iterator[Picture]:
    yield from section.common
    yield from section.folded
    for part in section.parts:
        yield from part.pictures
