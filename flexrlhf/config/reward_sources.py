"""What a user may write of rewards: where the scores of answers come from, one class for each kind of source."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from flexrlhf.config.strict_model import StrictModel
from flexrlhf.errors import shown


class _Source(StrictModel):
    """What all sources have. The score of an answer is the weighted sum over the sources."""

    weight: float = 1.0


class ModelSource(_Source):
    """The scalar head of a placed model, at the last token of the text, or after every token of the answer."""

    model: str = Field(description="a role of models: reward, or one named reward_...")
    level: Literal["answer", "token"] = "answer"


class _Called(_Source):
    """What is asked from outside the models, in batches."""

    level: Literal["answer", "token"] = Field("answer", description="token: a list of numbers, one a response token")
    batch_size: int = Field(16, ge=1, description="answers of one call")
    seconds: float = Field(0.0, ge=0, description="of one call, as simulate and advise are to reckon it")


class FunctionSource(_Called):
    """A Python function of the user, called in worker processes: a call that hangs or crashes costs its rewards only.

    ``function(prompts, responses, **columns) -> list of numbers``: texts, and each column of the data's rows as a list;
    ``num_tokens`` of the responses too. It is given the columns that it names, or all where it takes ``**columns``.
    """

    function: str = Field(description="path/to/file.py:name, or module:name")
    timeout_seconds: float = Field(10.0, gt=0, description="of one call; its worker is then ended")
    workers: int = Field(1, ge=1, description="worker processes of one rank")


class ServiceSource(_Called):
    """An HTTP service: POST of JSON {query, prompts, labels} as OpenRLHF sends it, answered by {rewards: [...]}."""

    url: Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
    timeout_seconds: float = Field(30.0, gt=0, description="of one request")
    deadline_seconds: float = Field(120.0, gt=0, description="of one batch with all its retries")
    retries: int = Field(3, ge=0, description="further requests after a failed one, with growing pauses between")
    concurrency: int = Field(4, ge=1, description="requests of one rank at a time")
    label: str = Field("label", description="column of the data's rows that is sent as labels; absent: null")
    headers: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _urls_are_http(self) -> Self:
        for url in self.url:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"url must start with http:// or https://, found {shown(url)}")
        if not self.url:
            raise ValueError("url must name at least one service")
        return self


class RuleSource(_Called):
    """A rule that ships with flexrlhf, of whole answers. Right is 1, wrong 0."""

    level: Literal["answer"] = "answer"
    rule: Literal["exact_answer", "gsm8k", "format", "length"]
    answer: str = Field("answer", description="column with the right answer, of exact_answer and gsm8k")
    pattern: str | None = Field(None, description="regular expression that the whole answer must match, of format")
    target_tokens: int | None = Field(None, ge=1, description="of length: 1 at so many, falling to 0 at twice as many")

    @model_validator(mode="after")
    def _settings_of_the_rule(self) -> Self:
        for rule, name in (("format", "pattern"), ("length", "target_tokens")):
            if (self.rule == rule) != (getattr(self, name) is not None):
                which = "needs" if self.rule == rule else "has no"
                raise ValueError(f"rule {self.rule} {which} {name}")
        return self


KINDS = ("model", "function", "url", "rule")


def _kind(value: Any) -> str | None:
    if isinstance(value, dict):
        kinds = [kind for kind in KINDS if kind in value]
        return kinds[0] if len(kinds) == 1 else None
    return next((kind for kind in KINDS if hasattr(value, kind)), None)


Source = Annotated[
    Annotated[ModelSource, Tag("model")]
    | Annotated[FunctionSource, Tag("function")]
    | Annotated[ServiceSource, Tag("url")]
    | Annotated[RuleSource, Tag("rule")],
    # spec_file words it
    Discriminator(_kind, custom_error_type="source_kind", custom_error_message="no kind of source"),
]


def _listed(value: Any) -> Any:
    """One source is a list of one."""
    return value if isinstance(value, list | tuple) or value is None else (value,)


Sources = Annotated[tuple[Source, ...], BeforeValidator(_listed), Field(min_length=1)]
