"""Columns: named tensors with one row per sample. Shapes and types are fixed before a run, and so are the bytes moved.

P = data.max_prompt_tokens, R = data.max_response_tokens. Prompts are left-padded, responses right-padded; padding is
known from the masks alone, never from the token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import ClassVar, Literal

Width = Literal["row", "prompt", "response", "response+1", "sequence", "experts"]
DType = Literal["int32", "uint8", "float32"]
Quantity = Literal["logprobs", "values", "scores", "token_scores"]

_ITEM_BYTES: dict[DType, int] = {"int32": 4, "uint8": 1, "float32": 4}


@dataclass(frozen=True)
class Column:
    """A named tensor with one row per sample.

    width:     numbers per row; "row" is one number, "experts" the bytes of the experts of all tokens.
    quantity:  output of the model in a forward that writes the column.
    absent:    its numbers in a row that nothing has written.
    """

    PRESENT: ClassVar[str] = "present"
    """Column of the rows that a step trains on, where responses are generated in segments or prompts are taken by
    attempts."""
    POSITION: ClassVar[str] = "data_position"
    """Column of the places of prompts in the order of the data, where a step takes as many as it needs."""
    GROUP_SCORES: ClassVar[str] = "group_scores"
    """Column of scores that advantages are relative to, of the responses to a prompt that have ended by
    now; NaN of others."""
    GROUP_STEPS: ClassVar[str] = "group_steps"
    """Column of the rewards of these responses' steps, each on its last token; NaN elsewhere."""
    STEP_ENDS: ClassVar[str] = "step_ends"
    """Column of the tokens that end a step."""
    REWARDS: ClassVar[str] = "token_scores.environment"
    """Column of the environment's rewards, each on the last token of its turn; NaN in an episode that failed."""
    TURN_ENDS: ClassVar[str] = "turn_ends"
    """Column of the last tokens of the policy's turns: two turns follow one another where a reply has no tokens."""
    REPLIED: ClassVar[str] = "replied"
    """Column of the digests of an environment's replies, by which an episode that is carried on is replayed: of its
    reset, and one place behind the last token of each turn."""
    FINAL_OUTCOME: ClassVar[str] = "outcome.final"
    """Outcome of a row after its training, in the store of the rank that trains it."""
    EXPERTS: ClassVar[str] = "experts"
    """Column of the experts that generation chose for the tokens of prompt and response, in every layer with some."""

    name: str
    width: Width
    dtype: DType
    quantity: Quantity | None = None
    absent: float = 0

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, name: str) -> Column:
        """Return the column ``name``, which may have a qualifier behind a dot: ``tokens.greedy``, ``scores.cost``."""
        return replace(COLUMNS[Column.plain(name)], name=name)

    @staticmethod
    def plain(name: str) -> str:
        """Return ``name`` without its qualifier: ``tokens`` of ``tokens.greedy``."""
        return name.partition(".")[0]

    @staticmethod
    def qualified(names: Iterable[str], qualifier: str) -> tuple[str, ...]:
        """Return ``names`` with ``qualifier`` behind a dot."""
        return tuple(f"{name}.{qualifier}" for name in names)

    @staticmethod
    def expert_bytes(number: int) -> int:
        """Return the bytes in which one of ``number`` experts is recorded."""
        return 1 if number <= 256 else 2


class Qualifier(StrEnum):
    """Word behind a dot in the names of columns.

    CALLED:       of columns that functions, services and rules write
    GENERATED:    that are generated where the data set has responses, too
    MISMATCHED:   of responses to other prompts than their own
    PTX:          of pretraining texts
    ENVIRONMENT:  that environments write
    """

    CALLED = "called"
    GENERATED = "drawn"
    MISMATCHED = "mismatched"
    PTX = "ptx"
    ENVIRONMENT = "environment"


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
        Column("present", "row", "uint8"),
        Column("policy_version", "response", "int32"),
        Column("rollout_logprobs", "response", "float32"),
        Column("logprobs", "response", "float32", "logprobs"),
        Column("trainer_logprobs", "response", "float32", "logprobs"),
        Column("computed_logprobs", "response", "float32", "logprobs"),
        Column("ref_logprobs", "response", "float32", "logprobs"),
        Column("values", "response+1", "float32", "values"),
        Column("scores", "row", "float32", "scores"),
        Column("group_scores", "row", "float32", absent=math.nan),
        Column("group_steps", "response", "float32", absent=math.nan),
        Column("token_scores", "response", "float32", "token_scores"),
        Column("step_ends", "response", "uint8"),
        Column("advantages", "response", "float32"),
        Column("returns", "response", "float32"),
        Column("kept_mask", "response", "uint8"),
        Column("selected_tokens", "response", "uint8"),
        Column("reference_point", "row", "float32"),
        Column("outcome", "row", "uint8"),
        Column("episode", "row", "uint8"),
        Column("turns", "row", "int32"),
        Column("turn_ends", "response", "uint8"),
        Column("replied", "response+1", "int32"),
        Column("tool_calls", "row", "int32"),
        Column("failed_tool_calls", "row", "int32"),
        Column("data_position", "row", "int32", absent=-1),
        Column("experts", "experts", "uint8"),
    )
}


TEXT = ("tokens", "attention_mask")
"""Columns that a model reads of a sample: prompt and response."""
LONGER = 2
"""How many times longer than a row of the policy's tokens a text may be in another tokenizer's, by default."""


@dataclass(frozen=True)
class Lengths:
    """Padded lengths in tokens.

    prompt:    P, of prompts.
    response:  R, of responses.
    texts:     (role, length) of whole texts, for models with a tokenizer of their own.
    experts:   bytes of the recorded experts of a token; 0: none are recorded.
    """

    LONG: ClassVar[int] = 8192
    """Tokens of a prompt and its response from which several context-parallel ranks are tried."""

    prompt: int
    response: int
    texts: tuple[tuple[str, int], ...] = ()
    experts: int = 0

    @property
    def total(self) -> int:
        """Tokens of a prompt and a response."""
        return self.prompt + self.response

    @property
    def are_long(self) -> bool:
        return self.total >= self.LONG

    def of_role(self, role: str) -> Lengths:
        """Return the lengths of columns that ``role`` reads; whole texts are left-padded and end at the last place."""
        length = dict(self.texts).get(role)
        return self if length is None else Lengths(length - 1, 1)

    def width(self, column: Column) -> int | None:
        """Return the numbers per row; None for a column without a second dim.

        The first qualifier of a whole text's column may be a role with texts of its own.
        """
        if column.width == "sequence":
            _, _, qualifiers = column.name.partition(".")
            return dict(self.texts).get(qualifiers.partition(".")[0], self.total)
        widths = {"prompt": self.prompt, "response": self.response, "response+1": self.response + 1}
        widths["experts"] = self.total * self.experts
        return widths.get(column.width)

    def row_bytes(self, name: str) -> int:
        """Return the bytes of one row of the column ``name``."""
        column = Column.of(name)
        return (self.width(column) or 1) * _ITEM_BYTES[column.dtype]
