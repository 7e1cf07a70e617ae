"""Settings that all algorithms have."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from flexrlhf.config.presets.filling import PEERS, Like, filled_algorithm
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.config.user_paths import UserPath


class AlgorithmSpec(StrictModel):
    """Settings of every algorithm: the size of a step and of its mini-batches."""

    like: Like | None = Field(
        None, description="engine or paper whose trainer's defaults stand where nothing is written"
    )
    graph: UserPath | None = Field(
        None,
        description="path/to/file.py:function, module:function or an entry point of flexrlhf.graphs: takes these "
        "settings, returns the graph of operators that replaces the algorithm's",
    )
    loop: UserPath | None = Field(
        None,
        description="path/to/file.py:function or module:function: takes the trainer of a rank, calls its "
        "generate_experience and train_rlhf for each of its batches; null: that and nothing else",
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="of a graph or loop of one's own, for its functions to read"
    )
    prompts_per_step: int = Field(32, ge=1, description="prompts of one training step, over all replicas")
    num_mini_batches: int = Field(1, ge=1, description="optimizer steps per epoch of one step")
    epochs: int = Field(1, ge=1, description="passes over the rows of one step")

    @property
    def num_prompts(self) -> int:
        """Number of prompts whose rows one step trains on."""
        return self.prompts_per_step

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        return cls.with_preset(value) if isinstance(value, dict) else value

    @classmethod
    def with_preset(cls, written: dict[str, Any]) -> dict[str, Any]:
        """Return what is ``written`` with the preset ``like`` where nothing is, as yet unvalidated."""
        like = written.get("like")
        if not isinstance(like, str) or like not in PEERS:
            return written
        return filled_algorithm(written, {name: field.default for name, field in cls.model_fields.items()})

    @model_validator(mode="after")
    def _settings_of_a_graph(self) -> Self:
        if self.settings and self.graph is None and self.loop is None:
            raise ValueError(f"settings {', '.join(self.settings)} go with a graph or loop of one's own: give graph")
        return self

    @model_validator(mode="after")
    def _mini_batches_have_rows(self) -> Self:
        if self.num_mini_batches > self.prompts_per_step:
            raise ValueError(
                f"num_mini_batches {self.num_mini_batches} exceeds prompts_per_step {self.prompts_per_step}: "
                f"use at most {self.prompts_per_step}"
            )
        return self


LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
