"""Inspection of a data file: every row is tried, so that all bad ones are counted and not the first one alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flexrlhf.data.chat import ChatFormat
from flexrlhf.data.encoding import EncodedRow, RowEncoder, Tokenizer, bos_in_front
from flexrlhf.data.examples import DataCounts, TokenLimits, encode_rows, truncated
from flexrlhf.data.row_layout import RowLayout
from flexrlhf.data.text_rows import TextRows, spaced
from flexrlhf.operators.graph import Needs

NUM_SAMPLES = 3


@dataclass(frozen=True)
class Inspection:
    """Contents of a data file.

    counts:            lengths of the rows that can be used, and why others cannot
    samples:           some rows as a run has them, truncated, by their numbers from 1
    repeated_prompts:  number of usable rows with the prompt of an earlier row
    repeated_rows:     number of usable rows with the prompt and the responses of an earlier row
    equal_pairs:       number of usable rows whose chosen and rejected response are the same
    """

    counts: DataCounts
    samples: tuple[tuple[int, EncodedRow], ...]
    repeated_prompts: int
    repeated_rows: int
    equal_pairs: int

    @classmethod
    def of(
        cls,
        path: str,
        *,
        form: str,
        needs: Needs,
        layout: RowLayout,
        tokenizer: Tokenizer,
        chat: ChatFormat,
        limits: TokenLimits,
        max_rows: int | None = None,
    ) -> Inspection:
        """Read and tokenise every row of a file, or ``max_rows`` evenly spaced ones.

        Raises UserError for a file that cannot be read, and for one whose form is not known.
        """
        rows = TextRows.read(path, form, needs, layout, drops=limits.bad_rows == "drop", most=max_rows)
        encoded = encode_rows(rows, RowEncoder(tokenizer, chat, sys.maxsize))
        counts = DataCounts.of(rows, encoded, limits)
        samples = _samples(encoded, limits, next(iter(bos_in_front(tokenizer)), None))
        return cls(counts, samples, *_count_repeated(list(encoded.values()), rows.form != "text"))


def _count_repeated(rows: Sequence[EncodedRow], has_prompts: bool) -> tuple[int, int, int]:
    """Return the numbers of repeated prompts, repeated rows and equal pairs.

    has_prompts:  whether the rows have prompts, which texts of pretraining do not
    """
    responses = [tuple(response.ids for response in row.responses) for row in rows]
    prompts = [row.prompt for row in rows] if has_prompts else []
    whole = {(row.prompt, ids) for row, ids in zip(rows, responses, strict=True)}
    equal = sum(len(ids) == 2 and ids[0] == ids[1] for ids in responses)
    return len(prompts) - len(set(prompts)), len(rows) - len(whole), equal


def _samples(
    encoded: dict[int, EncodedRow], limits: TokenLimits, bos: int | None
) -> tuple[tuple[int, EncodedRow], ...]:
    """Return some rows that are not left out, as a run truncates them."""
    kept = [number for number, row in encoded.items() if len(row.prompt) <= limits.max_prompt or not limits.drops]
    numbers = [kept[index] for index in spaced(len(kept), NUM_SAMPLES)]
    return tuple((number, _limited(encoded[number], limits, bos)) for number in numbers)


def _limited(row: EncodedRow, limits: TokenLimits, bos: int | None) -> EncodedRow:
    prompt = truncated(row.prompt, limits.max_prompt, limits.long_prompts == "truncate-left", bos)
    size = limits.max_response
    responses = tuple(
        replace(each, ids=each.ids[:size], is_trained=each.is_trained[:size], is_finished=each.length <= size)
        for each in row.responses
    )
    return replace(row, prompt=prompt, responses=responses)
