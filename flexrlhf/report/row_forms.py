"""Forms of the rows and values in the files of a run, by which damaged ones are found."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from flexrlhf.api import TrainPart

STRICT = ConfigDict(strict=True)
MOST = 2**53
"""Number up to which a float is exact."""
Number = Annotated[int, Field(ge=-MOST, le=MOST)]
ByteCount = Annotated[int, Field(ge=0, le=MOST)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _StepForm(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    step: Number


class _MetricsForm(_StepForm):
    """A row of metrics: any further key."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]


class _TurnForm(TypedDict, total=False):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    role: str | None
    text: str
    reward: float | None


class _SampleForm(_StepForm):
    """A response. Fields of another version are left out."""

    rows: NotRequired[str]
    row: NotRequired[int]
    prompt: NotRequired[str]
    response: NotRequired[str]
    turns: NotRequired[list[_TurnForm]]
    length: NotRequired[ByteCount | None]
    finished: NotRequired[bool]
    score: NotRequired[float | None]
    cost: NotRequired[float | None]


class _ReplanForm(_StepForm):
    """A decision whether to go on under another placement."""

    switches: bool
    before: str
    after: str
    seconds: Finite
    predicted_after: Finite
    response_length: Finite


class _CallForm(TypedDict):
    """A call of an operator by a program."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    operator: str
    mini_batches: Annotated[list[ByteCount], Field(min_length=2, max_length=2)]
    loss: str
    part: TrainPart | Literal[""]
    parts: list[list[ByteCount]]
    lag: NotRequired[ByteCount]


class _CallsForm(_StepForm):
    calls: list[_CallForm]


class _FactsForm(TypedDict, total=False):
    """Metadata of a timeline, of which pages show these."""

    device: str
    peak_bytes: dict[Number, ByteCount]
    held_bytes: dict[Number, dict[str, dict[str, ByteCount]]]


class _FailureForm(TypedDict):
    """Record of a rank that failed."""

    reason: str
    at: NotRequired[str | None]
    rank: NotRequired[int]


METRIC_ROW: TypeAdapter[Any] = TypeAdapter(_MetricsForm)
SAMPLE_ROW: TypeAdapter[Any] = TypeAdapter(_SampleForm)
REPLAN_ROW: TypeAdapter[Any] = TypeAdapter(_ReplanForm)
CALLS_ROW: TypeAdapter[Any] = TypeAdapter(_CallsForm)
FACTS: TypeAdapter[Any] = TypeAdapter(_FactsForm)
FAILURE_RECORD: TypeAdapter[Any] = TypeAdapter(_FailureForm)
