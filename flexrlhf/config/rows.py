"""Settings of how the rows of a data file are read."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from flexrlhf.config.ratio_vector import Exact
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.config.user_paths import UserPath


def check_template(template: str) -> str:
    """Return ``template``. Raises ValueError where it has another field than a plain ``{column}``, or none."""
    if not template_fields(template):
        raise ValueError(f"no field such as {{question}} in {template!r}")
    return template


def template_fields(template: str) -> tuple[str, ...]:
    """Return the columns that a template names, in order. Raises ValueError."""
    return tuple(field for _, field in _parts(template) if field is not None)


def render(template: str, values: Mapping[str, str]) -> str:
    """Return the template with each field replaced by its value."""
    return "".join(text + ("" if field is None else values[field]) for text, field in _parts(template))


def _parts(template: str) -> list[tuple[str, str | None]]:
    """Return texts, each with the column that follows it. Raises ValueError for anything but plain columns."""
    try:
        parts: list[tuple[str, str | None, Any, Any]] = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error} in {template!r}; write {{{{ and }}}} for braces") from None
    for _, field, form, conversion in parts:
        if field is not None and (form or conversion or not field.replace("-", "_").isidentifier()):
            found = field + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise ValueError(
                f"the field {{{found}}} is no plain column such as {{question}}; write {{{{ and }}}} for braces, and "
                f"name what is inside a column with columns"
            )
    return [(text, field) for text, field, _, _ in parts]


Form = Literal["prompt", "messages", "conversations", "pairs", "instruction", "question", "input", "text"]
FormSetting = Literal["auto", Form]
TextForm = Literal["auto", "prompt", "messages", "conversations", "instruction", "question", "input", "text"]
"""Forms of rows with one response."""
LongPrompts = Literal["error", "drop", "truncate-left", "truncate-right"]
Template = Annotated[str, AfterValidator(check_template)]
FILES = (
    "a .jsonl, .jsonl.gz, .json, .csv or .parquet file, a directory of datasets, a name on the Hub, or "
    "reasoning-gym:TASK"
)


def _positive(weight: Fraction) -> Fraction:
    if weight <= 0:
        raise ValueError(f"expected a number above 0, found {float(weight):g}")
    return weight


class RowsSpec(StrictModel):
    """Rows that may be of another form than those of ``data``. null: the setting of ``data``."""

    path: UserPath = Field(description=FILES)
    form: FormSetting | None = Field(None, description="columns of a row")
    columns: dict[str, str] | None = Field(None, description="name that is used here: column of the rows")
    template: Template | None = Field(None, description="text of the prompt, with {column} fields")
    system: str | None = Field(None, description="system prompt of rows without one")


class SourceSpec(RowsSpec):
    """One of several sources of training rows."""

    weight: Annotated[Exact, AfterValidator(_positive)] = Field(
        Fraction(1), description="share of the prompts, relative to the other sources"
    )
