"""Settings of the data and of evaluations: how the rows of a file are read, and the lengths that they are padded to."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from string import Formatter
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from flexrlhf.config.ratio_vector import Exact
from flexrlhf.config.strict_model import StrictModel, optional_fields
from flexrlhf.config.user_paths import UserPath


def check_template(template: str) -> str:
    """Return ``template``. Raises ValueError if it has another field than a plain ``{column}``, or none."""
    if not template_fields(template):
        raise ValueError(f"no field such as {{question}} in {template!r}")
    return template


def template_fields(template: str) -> tuple[str, ...]:
    """Return the columns that a template names, in order. Raises ValueError."""
    return tuple(field for _, field in _parts(template) if field is not None)


def filled_template(template: str, values: Mapping[str, str]) -> str:
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
ControlUse = Literal["auto", "text", "keep", "refuse"]
LongPrompts = Literal["error", "drop", "truncate-left", "truncate-right"]
BadRows = Literal["error", "drop"]
Template = Annotated[str, AfterValidator(check_template)]
FILES = (
    "a .jsonl, .jsonl.gz, .json, .csv or .parquet file, a directory of datasets, a name on the Hub, or "
    "reasoning-gym:TASK"
)


MOST_TOKENS = 20_000_000
"""Longest text: more than any model has positions for."""


def check_positive(value: Fraction) -> Fraction:
    """Return ``value``. Raises ValueError if it is not above 0."""
    if value <= 0:
        raise ValueError(f"expected a number above 0, found {float(value):g}")
    return value


class DataSpec(StrictModel):
    """Prompts, demonstrations or preference pairs, and the lengths that they are padded to."""

    path: UserPath | None = Field(None, description=FILES)
    sources: tuple[SourceSpec, ...] = Field((), description="several of these instead, mixed by their weights")
    form: FormSetting = Field("auto", description="columns of a row; auto: follows from the first row")
    columns: dict[str, str] = Field(
        default_factory=dict, description="name that a form or a score uses: column of the rows, such as outer.inner"
    )
    template: Template | None = Field(
        None, description="text of the prompt, with {column} fields; without one that of the form"
    )
    system: str | None = Field(None, description="system prompt of rows without one, which makes chats of texts")
    tokenizer: UserPath | None = Field(
        None, description="Hugging Face directory, or a name on the Hub; null: that of the first model with a path"
    )
    max_prompt_tokens: int = Field(128, ge=1, le=MOST_TOKENS, description="longest prompt, bos included")
    max_response_tokens: int = Field(
        128, ge=1, le=MOST_TOKENS, description="responses are truncated to this length, eos included"
    )
    chat: Literal["auto", "always", "never"] = Field(
        "auto", description="rows that the chat template renders: those that are chats, also text prompts, or none"
    )
    chat_template: UserPath | None = Field(
        None, description="a file with a Jinja chat template; null: the tokenizer's own"
    )
    end_token: str | None = Field(
        None,
        min_length=1,
        description="token that the chat template is to write behind each turn of the assistant, trained on and ending "
        "sampled responses: eos, the tokenizer's own, or another special token of it; null: as the template is",
    )
    control_tokens: ControlUse = Field(
        "auto",
        description="control tokens of the tokenizer, such as its end token, in a row's own text: auto: they are text "
        "in the turns of a chat that are not the assistant's, and else those tokens, as a prompt may be a rendered "
        "chat; text: text, but for bos in front of a prompt and a token behind a response; keep: tokens; refuse: stop",
    )
    long_prompts: LongPrompts = Field(
        "error",
        description="prompts over max_prompt_tokens: error: stop; drop: leave them out; truncate-left, truncate-right: "
        "leave out their first or last tokens, but not bos",
    )
    bad_rows: BadRows = Field(
        "error",
        description="rows that cannot be read, or that no chat template renders: error: stop; drop: leave them out, "
        "counted by reason",
    )

    @model_validator(mode="after")
    def _path_or_sources(self) -> Self:
        if self.path is None and not self.sources:
            raise ValueError("path: missing; give a file, or several in sources")
        if self.path is not None and self.sources:
            raise ValueError("path and sources exclude each other: remove one")
        return self

    def for_rows(self, rows: RowsSpec) -> DataSpec:
        """Return the settings by which ``rows`` are read: their own, else these."""
        own = {name: getattr(rows, name) for name in ("form", "columns", "template", "system")}
        return self.model_copy(update={name: value for name, value in own.items() if value is not None})


_OfData: Any = optional_fields(DataSpec, "path", "form", "columns", "template", "system")


class RowsSpec(_OfData, StrictModel):  # type: ignore[misc]
    """Rows that may be of another form than those of ``data``. null: the setting of ``data``."""

    path: UserPath = Field(description=FILES)


class SourceSpec(RowsSpec):
    """One of several sources of training rows."""

    weight: Annotated[Exact, AfterValidator(check_positive)] = Field(
        Fraction(1), description="share of the prompts, relative to the other sources"
    )


DataSpec.model_rebuild()  # its sources are of this class


class EvalSpec(RowsSpec):
    """Evaluation of the trained model on a data file of its own.

    pass@k: the share of prompts of which at least one of k responses is right (Chen et al. 2021).
    """

    every: int | None = Field(None, ge=1, description="steps between two evaluations; null: one, after the last step")
    before: bool = Field(
        False, description="also before the first step, with metrics in its row; not if that step ends with one"
    )
    temperature: float | None = Field(
        None, ge=0, description="sampling temperature of the responses; null: the algorithm's; 0: greedy"
    )
    samples_per_prompt: int | None = Field(
        None, ge=1, description="responses to each prompt; null: the algorithm's, or 1 with temperature 0"
    )
    pass_score: float = Field(1.0, description="a response with at least this score is right")
    pass_at: int | None = Field(None, ge=1, description="k of pass@k; null: the responses to each prompt")

    def num_samples(self, of_training: int) -> int:
        """Return the number of responses to a prompt of the evaluation set; greedy ones are all the same."""
        return self.samples_per_prompt or (1 if self.temperature == 0 else of_training)
