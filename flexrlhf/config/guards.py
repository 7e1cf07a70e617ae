"""Settings of the guards: what ends a run, or is warned of, though every instruction has been executed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flexrlhf.config.strict_model import StrictModel


class GuardsSpec(StrictModel):
    """Numbers that end a run or are warned of. They never change a number of a run without such events,
    but for the rounding of log-probs (``rollout.logprobs``)."""

    non_finite: Literal["stop", "skip"] = Field(
        "stop",
        description="NaN or infinite losses, gradients, log-probs and values: stop: the run ends and names the first "
        "response; skip: the optimizer step of the mini-batch is left out, on all ranks, and counted",
    )
    max_failed_steps: int | None = Field(
        3, ge=1, description="the run ends after so many steps in a row in which no response has a score; null: never"
    )
    sampled_logprobs: Literal["stop", "warn", "off"] = Field(
        "stop",
        description="log-probs of the first step as transformers sampled the tokens differ from those computed of the "
        "whole texts; for torch and vllm see rollout.parity",
    )
    max_logprob_difference: float | None = Field(
        None, gt=0, description="limit of that difference, mean over tokens (nats); null: 1e-3, or 0.05 in 16 bits"
    )
    max_kl: float | None = Field(
        2.0, gt=0, description="warn where kl_token exceeds this in either direction (nats per token); null: never"
    )
    max_update_kl: float | None = Field(
        0.5, gt=0, description="warn where update_kl exceeds this (nats per token); null: never"
    )
    loss_spike: float | None = Field(
        20.0,
        gt=1,
        description="warn where a loss or gradient norm exceeds so many times its median over the steps before; null: "
        "never",
    )
    equal_scores: int | None = Field(
        1, ge=1, description="warn after so many steps in a row whose responses all have the same score; null: never"
    )
    max_truncated: float | None = Field(
        0.5,
        ge=0,
        lt=1,
        description="warn where a larger share of the responses is truncated at data.max_response_tokens; null: never",
    )
