"""Text of responses, as scores, stop strings and people read it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from flexrlhf.config.spec import Spec


@dataclass(frozen=True)
class ResponseText:
    """Decoder of tokens of responses to the text that scores, stop strings and people read.

    tokenizer:  of the run.
    left_out:   special tokens that the text has none of; None: it has no special token at all.
    """

    tokenizer: Any
    left_out: frozenset[int] | None = None

    @classmethod
    def of(cls, spec: Spec, tokenizer: Any, ends: Collection[int]) -> ResponseText:
        """Return the decoder of a run, by ``rollout.special_tokens``.

        ends:  padding, and tokens that end a response.
        """
        if spec.rollout.special_tokens == "skip":
            return cls(tokenizer)
        borders = {token for token in (tokenizer.bos_token_id, *ends) if token is not None}
        # a common token that ends a response is a part of it
        return cls(
            tokenizer, frozenset(each for each in borders if not tokenizer.decode([each], skip_special_tokens=True))
        )

    def __call__(self, tokens: Sequence[int]) -> str:
        if self.left_out is None:
            text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        else:
            text = self.tokenizer.decode([token for token in tokens if token not in self.left_out])
        return text
