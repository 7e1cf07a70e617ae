"""Settings of the samples that a run keeps for people to read."""

from __future__ import annotations

from pydantic import Field

from flexrlhf.config.strict_model import StrictModel


class SamplesSpec(StrictModel):
    """Responses that ``runs/<name>/samples.jsonl`` keeps as text, with their scores. They change no number."""

    every: int = Field(
        10, ge=1, description="steps between two whose training responses are kept; those of the last step always are"
    )
    count: int = Field(4, ge=0, description="responses kept of such a step, and of each evaluation; 0: none")
