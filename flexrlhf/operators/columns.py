"""Columns: named tensors with one row per sample. Shapes and types are fixed before a run, and so are the bytes moved.

P = data.max_prompt_tokens, R = data.max_response_tokens. Prompts are left-padded, responses right-padded; padding is
known from the masks alone, never from the token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self

from flexrlhf.config.spec import Spec

Width = Literal["row", "prompt", "response", "response+1", "sequence"]
DType = Literal["int32", "uint8", "float32"]
Quantity = Literal["logprobs", "values", "scores", "token_scores"]

_ITEM_BYTES: dict[DType, int] = {"int32": 4, "uint8": 1, "float32": 4}


@dataclass(frozen=True)
class Column:
    """A named tensor with one row per sample.

    width:     numbers per row; "row" is one number.
    quantity:  what a model computes when a forward writes the column.
    """

    name: str
    width: Width
    dtype: DType
    quantity: Quantity | None = None


COLUMNS = {
    column.name: column
    for column in (
        Column("prompts", "prompt", "int32"),
        Column("prompt_mask", "prompt", "uint8"),
        Column("tokens", "sequence", "int32"),
        Column("attention_mask", "sequence", "uint8"),
        Column("response_mask", "response", "uint8"),
        Column("loss_mask", "response", "uint8"),
        Column("finished", "row", "uint8"),
        Column("policy_version", "row", "int32"),
        Column("rollout_logprobs", "response", "float32"),
        Column("logprobs", "response", "float32", "logprobs"),
        Column("trainer_logprobs", "response", "float32", "logprobs"),
        Column("computed_logprobs", "response", "float32", "logprobs"),
        Column("ref_logprobs", "response", "float32", "logprobs"),
        Column("values", "response+1", "float32", "values"),
        Column("scores", "row", "float32", "scores"),
        Column("token_scores", "response", "float32", "token_scores"),
        Column("step_ends", "response", "uint8"),
        Column("advantages", "response", "float32"),
        Column("returns", "response", "float32"),
        Column("kept_mask", "response", "uint8"),
        Column("selected_tokens", "response", "uint8"),
        Column("reference_point", "row", "float32"),
    )
}


LONGER = 2
"""How much longer than a row of the policy's tokens a text may be in those of another tokenizer, by default."""
TEXT = ("tokens", "attention_mask")
"""Columns that a model reads of a sample: prompt and response."""


def column_of(name: str) -> Column:
    """Return the column ``name``, which may have a qualifier behind a dot: ``tokens.greedy``, ``scores.cost``."""
    return replace(COLUMNS[plain(name)], name=name)


def plain(name: str) -> str:
    """Return ``name`` without its qualifier: ``tokens`` of ``tokens.greedy``."""
    return name.partition(".")[0]


def qualified(names: Iterable[str], qualifier: str) -> tuple[str, ...]:
    """Return ``names`` with ``qualifier`` behind a dot."""
    return tuple(f"{name}.{qualifier}" for name in names)


@dataclass(frozen=True)
class Lengths:
    """Padded lengths in tokens.

    prompt:    P, of prompts.
    response:  R, of responses.
    texts:     (role, length) of whole texts, for models with a tokenizer of their own.
    """

    prompt: int
    response: int
    texts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, spec: Spec) -> Self:
        """Return the lengths of ``spec``."""
        prompt, response = spec.data.max_prompt_tokens, spec.data.max_response_tokens
        own = ((role, model) for role, model in spec.models if model is not None and model.retokenize)
        texts = tuple((role, model.max_text_tokens or LONGER * (prompt + response)) for role, model in own)
        return cls(prompt, response, texts)

    @property
    def total(self) -> int:
        """Tokens of a prompt and a response."""
        return self.prompt + self.response

    def of_role(self, role: str) -> Lengths:
        """Return the lengths of what ``role`` reads; whole texts are left-padded and end at the last place."""
        length = dict(self.texts).get(role)
        return self if length is None else Lengths(length - 1, 1)

    def width(self, column: Column) -> int | None:
        """Return the numbers per row; None for a column without a second dim."""
        if column.width == "sequence":
            return self._sequence(column.name)
        widths = {"prompt": self.prompt, "response": self.response, "response+1": self.response + 1}
        return widths.get(column.width)

    def _sequence(self, name: str) -> int:
        """Return the width of whole texts; the first qualifier of ``name`` may be a role with texts of its own."""
        _, _, qualifiers = name.partition(".")
        return dict(self.texts).get(qualifiers.partition(".")[0], self.prompt + self.response)

    def row_bytes(self, name: str) -> int:
        """Return the bytes of one row of the column ``name``."""
        column = column_of(name)
        return (self.width(column) or 1) * _ITEM_BYTES[column.dtype]
