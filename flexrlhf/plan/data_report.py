"""Report of ``flexrlhf data`` about one file: counts, histograms of lengths, and some rows as a run has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from flexrlhf.data.data_counts import quantile
from flexrlhf.data.encoding import EncodedResponse, EncodedRow
from flexrlhf.data.inspection import Inspection
from flexrlhf.errors import one_line
from flexrlhf.plan.data_lines import data_line
from flexrlhf.plan.data_sources import DataSource
from flexrlhf.text import table

BAR = 40
"""Characters of the longest bar."""
LONGEST = 1200
"""Characters of a part of a row that are shown."""
Decode = Callable[..., str]


def format_inspection(source: DataSource, found: Inspection, decode: Decode) -> str:
    """Return the whole report about the file of ``source``. ``decode``: tokens to text, special tokens included."""
    counts = found.counts
    lines = [data_line(source, counts), *(f"  {line}" for line in (*_bad_rows(found), *_duplicates(found)))]
    lines += ["", *_histogram("prompts", counts.prompts, counts.limits.max_prompt)]
    responses = [length for lengths in counts.responses for length in lengths]
    if responses:
        lines += ["", *_histogram("responses", responses, counts.limits.max_response)]
    for number, row in found.samples:
        lines += ["", *_sample(number, row, decode)]
    if responses and found.samples:
        lines += ["", f"  # {'evaluated' if source.key == 'eval' else 'trained on'}, | not"]
    return "\n".join(lines)


def _bad_rows(found: Inspection) -> Iterator[str]:
    if not found.bad:
        yield "rows that cannot be read: 0"
        return
    first = found.bad[0]
    yield one_line(f"rows that cannot be read: {len(found.bad)}; the first is row {first.number}: {first.sentence}")


def _duplicates(found: Inspection) -> Iterator[str]:
    same, has_responses = found.duplicates, any(found.counts.responses)
    also = f", its responses, too: {same.rows}" if has_responses else ""
    yield f"rows with the prompt of an earlier one: {same.prompts}{also}"
    if same.pairs:
        yield f"pairs of the same response twice: {same.pairs}"


def _histogram(what: str, lengths: Sequence[int], limit: int) -> list[str]:
    """Return lengths in bins that double, with a border at ``limit``."""
    middle, most, longest = quantile(lengths, 0.5), quantile(lengths, 0.95), max(lengths, default=0)
    title = f"tokens of {what}: median {middle}, 95% at most {most}, longest {longest}, limit {limit}"
    bins = [(low, high, sum(low <= each <= high for each in lengths)) for low, high in _bins(lengths, limit)]
    widest = max((number for _, _, number in bins), default=1)
    rows = [
        [f"{low}-{high}", "#" * -(-BAR * number // widest), str(number), "over the limit" if low > limit else ""]
        for low, high, number in bins
    ]
    return [title, *(f"  {line}" for line in (table(rows, "><><") if rows else []))]


def _bins(lengths: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Return ranges from the shortest to the longest length: up to each power of two from 16, and up to ``limit``."""
    if not lengths:
        return []
    longest = max(lengths)
    borders = {limit, *(2**power for power in range(4, longest.bit_length() + 1))}
    ends = sorted(border for border in borders if border < longest)
    bins = list(zip([0, *(end + 1 for end in ends)], [*ends, longest], strict=True))
    first = next(index for index, (_, high) in enumerate(bins) if high >= min(lengths))
    return bins[first:]


def _sample(number: int, row: EncodedRow, decode: Decode) -> list[str]:
    """Return the parts of a row, each line behind what happens to it."""
    names = ("chosen", "rejected") if len(row.responses) == 2 else ("response",)
    title = f"row {number}: {len(row.prompt)} tokens of prompt"
    if not row.responses:
        title += "; the response is sampled"
    lines = _margined("prompt", "|", decode(list(row.prompt)))
    for name, response in zip(names, row.responses, strict=False):
        trained = sum(response.is_trained)
        title += f", {len(response.ids)} of {name}"
        title += f" ({trained} of them #)" if trained < len(response.ids) else ""
        for is_trained, text in _segments(row.prompt, response, decode):
            lines += _margined(name, "#" if is_trained else "|", text)
        if not response.is_finished:
            lines.append(f"{name} is cut after {len(response.ids)} of {response.length} tokens: no end token")
    return [title, *(f"  {line}" for line in lines)]


def _segments(prompt: Sequence[int], response: EncodedResponse, decode: Decode) -> Iterator[tuple[bool, str]]:
    """Yield the parts of a response that are trained on, or not, as text.

    A text is what its tokens add to all before them: alone, some tokenizers drop a leading space.
    """
    mask, start, before = response.is_trained, 0, decode(list(prompt))
    for end in range(1, len(mask) + 1):
        if end == len(mask) or mask[end] != mask[start]:
            whole = decode([*prompt, *response.ids[:end]])
            follows = whole.startswith(before)
            yield mask[start], whole[len(before) :] if follows else decode(list(response.ids[start:end]))
            start, before = end, whole


def _margined(name: str, mark: str, text: str) -> list[str]:
    """Return ``text`` with its line ends visible, each line behind ``name`` and ``mark``."""
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half} more characters) ... {text[-half:]}"
    lines = text.replace("\n", "\\n\n").split("\n")
    return [f"{name:<9}{mark} {''.join(map(_visible, line))}" for line in lines if line]


def _visible(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]
