"""Rows of a data file by their lengths in tokens, and what the limits of a run do to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexrlhf.config.rows import LongPrompts


@dataclass(frozen=True)
class TokenLimits:
    """TokenLimits of a run in tokens.

    max_prompt:    tokens of the longest prompt
    max_response:  tokens at which responses are truncated
    long_prompts:  what happens to longer prompts
    """

    max_prompt: int
    max_response: int
    long_prompts: LongPrompts = "error"

    @property
    def drops(self) -> bool:
        """Whether rows with longer prompts are left out."""
        return not self.long_prompts.startswith("truncate")


@dataclass(frozen=True)
class DataCounts:
    """Rows of a file, before any is left out or truncated.

    form:       of the rows
    num_rows:   of the file; where it is large, only some of them are counted
    prompts:    tokens of the prompt of each counted row
    responses:  tokens of the responses of each counted row, end tokens included
    limits:     of the run
    """

    form: str
    num_rows: int
    prompts: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    limits: TokenLimits

    @property
    def num_long(self) -> int:
        """Number of prompts over the limit."""
        return sum(length > self.limits.max_prompt for length in self.prompts)

    @property
    def kept_responses(self) -> tuple[int, ...]:
        """Tokens of the responses of the rows that are not left out."""
        limit = self.limits.max_prompt
        return tuple(
            length
            for prompt, responses in zip(self.prompts, self.responses, strict=True)
            if prompt <= limit or not self.limits.drops
            for length in responses
        )

    @property
    def num_cut(self) -> int:
        """Number of responses that are truncated, and so have no end token."""
        return sum(length > self.limits.max_response for length in self.kept_responses)


def quantile(lengths: Sequence[int], share: float) -> int:
    """Return the smallest of ``lengths`` that at least ``share`` of them do not exceed; 0 without any."""
    ordered = sorted(lengths)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0
