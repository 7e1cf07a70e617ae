"""Sources of scores as a user writes them: one class for each kind of source."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from flexrlhf.config.plugins import named_reference
from flexrlhf.config.secrets import check_header, check_url, without_secrets
from flexrlhf.config.strict_model import LEAST_SECONDS, StrictModel
from flexrlhf.config.user_paths import UserPath
from flexrlhf.errors import shown

Level = Annotated[
    Literal["answer", "token", "step"], Field(description="one score a response, one a response token, or one a step")
]


class _WeightedSource(StrictModel):
    """Settings of every source. The score of a response is the weighted sum over the sources."""

    weight: float = Field(1.0, description="factor of this source's scores in the sum")

    def predicted_seconds(self, rows: int) -> float:
        """Time of the calls for ``rows`` responses; a model is no call."""
        return 0.0

    level: Level = "answer"


class _LevelledSource(_WeightedSource):
    """Settings of sources that score responses, their tokens, or their steps."""

    separator: str | None = Field(
        None, min_length=1, description="text that ends a step; null: a function or service returns where steps end"
    )

    @model_validator(mode="after")
    def _separator_of_steps(self) -> Self:
        if self.separator is not None and self.level != "step":
            raise ValueError(f"separator {shown(self.separator)} goes with level: step; use that, or remove separator")
        return self


class ModelSource(_LevelledSource):
    """Scalar head of a placed model, at the last token of the response, after every token, or at the ends of steps."""

    model: str = Field(description="a role of models: reward, or one named reward_...")

    @model_validator(mode="after")
    def _steps_have_ends(self) -> Self:
        if self.level == "step" and self.separator is None:
            raise ValueError("level: step of a model needs separator, the text that ends a step; use '\\n\\n'")
        return self


class _CalledSource(_WeightedSource):
    """Settings of sources that are no models. They are called with batches of responses."""

    batch_size: int = Field(16, ge=1, description="responses of one call")
    seconds: float = Field(0.0, ge=0, description="time of one call that simulate and advise assume")

    @property
    def num_together(self) -> int:
        """Calls that are made at a time."""
        return 1

    def predicted_seconds(self, rows: int) -> float:
        """Time of the calls for ``rows`` responses, in rounds of as many calls as are made at a time."""
        calls = -(-rows // self.batch_size)
        return -(-calls // self.num_together) * self.seconds


class FunctionSource(_LevelledSource, _CalledSource):
    """Python function of the user, called in worker processes: a call that hangs or crashes costs its scores only.

    ``function(prompts, responses, **columns) -> list of numbers``: texts, and each column of the data's rows as a list;
    ``num_tokens`` of the responses too, and with a separator their ``steps``, a list of texts each. It receives the
    columns that it has a parameter for, or all where it takes ``**columns``. With level: step it returns for each
    response one number a step, or without a separator pairs (end of the step in characters, score). A function with a
    parameter ``completions``, as TRL has them, is called by names alone, and ones of verl and OpenRLHF as there:
    docs/rewards.md.
    """

    function: Annotated[UserPath, AfterValidator(partial(named_reference, "rewards"))] = Field(
        description="path/to/file.py:name, module:name, or a plug-in's name"
    )
    timeout_seconds: float = Field(10.0, ge=LEAST_SECONDS, description="limit of one call; its worker is then ended")
    workers: int = Field(1, ge=1, le=1024, description="worker processes of one rank")

    @property
    def num_together(self) -> int:
        return self.workers


class ServiceSource(_LevelledSource, _CalledSource):
    """HTTP service: POST of JSON {query, prompts, labels} as OpenRLHF sends it; the reply is {rewards: [...]}.

    With a separator it also receives {steps: [[...], ...]}.
    """

    url: Annotated[
        tuple[str, ...],
        BeforeValidator(
            lambda value: (value,) if isinstance(value, str) else value, json_schema_input_type=str | tuple[str, ...]
        ),
        Field(description="address, or several that take turns"),
    ]
    timeout_seconds: float = Field(30.0, ge=LEAST_SECONDS, description="limit of one request")
    deadline_seconds: float = Field(120.0, ge=LEAST_SECONDS, description="limit of one batch with all its retries")
    retries: int = Field(3, ge=0, description="further requests after a failed one, with growing pauses between")
    concurrency: int = Field(4, ge=1, description="requests of one rank at a time")
    label: str = Field("label", description="column of the data's rows that is sent as labels; absent: null")
    headers: dict[str, str] = Field(
        default_factory=dict,
        description="further headers of each request; ${NAME} is an environment variable's value, here and in url",
    )

    @property
    def num_together(self) -> int:
        return self.concurrency

    @model_validator(mode="after")
    def _urls_are_http(self) -> Self:
        for url in self.url:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"url must start with http:// or https://, found {shown(without_secrets(url))}")
            check_url(url)
        if not self.url:
            raise ValueError("url must name at least one service")
        return self

    @model_validator(mode="after")
    def _secrets_are_variables(self) -> Self:
        for name, value in self.headers.items():
            check_header(name, value)
        return self


class RuleSource(_CalledSource):
    """Rule that ships with flexrlhf, of whole responses: right is 1, wrong 0."""

    level: Literal["answer"] = "answer"
    rule: Literal["exact_answer", "gsm8k", "math", "reasoning-gym", "format", "length"] = Field(
        description="exact_answer: the response is the solution; gsm8k: the number behind #### is that of the "
        "solution; math: its answer, in LaTeX or plain, has the value of the solution (math-verify); "
        "reasoning-gym: the task's own score of the text between <answer> and </answer>; "
        "format: the response matches pattern; length: by its number of tokens"
    )
    answer: str = Field("answer", description="exact_answer, gsm8k, math: column with the solution")
    pattern: str | None = Field(None, description="format: regular expression that the whole response must match")
    target_tokens: int | None = Field(None, ge=1, description="length: 1 at so many, falling to 0 at twice as many")

    @model_validator(mode="after")
    def _settings_of_the_rule(self) -> Self:
        for rule, name in (("format", "pattern"), ("length", "target_tokens")):
            if (self.rule == rule) != (getattr(self, name) is not None):
                verb = "needs" if self.rule == rule else "has no"
                raise ValueError(f"rule {self.rule} {verb} {name}")
        return self


KINDS = ("model", "function", "url", "rule")
"""Key that each kind of source has, and no other kind."""


def _kind(value: Any) -> str | None:
    if isinstance(value, dict):
        kinds = [kind for kind in KINDS if kind in value]
        return kinds[0] if len(kinds) == 1 else None
    return next((kind for kind in KINDS if hasattr(value, kind)), None)


RewardSource = Annotated[
    Annotated[ModelSource, Tag("model")]
    | Annotated[FunctionSource, Tag("function")]
    | Annotated[ServiceSource, Tag("url")]
    | Annotated[RuleSource, Tag("rule")],
    # spec_file has the message
    Discriminator(_kind, custom_error_type="source_kind", custom_error_message="no kind of source"),
]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list | tuple) or value is None else (value,)


Sources = Annotated[
    tuple[RewardSource, ...],
    BeforeValidator(_as_list, json_schema_input_type=RewardSource | tuple[RewardSource, ...]),
    Field(min_length=1),
]
