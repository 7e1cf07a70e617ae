"""Settings of how the rows of a data file are read."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from flexrlhf.config.strict_model import Exact, StrictModel
from flexrlhf.config.templates import check_template
from flexrlhf.config.user_paths import UserPath

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
