"""Text about a data file of a run: one line and warnings, and the report of ``flexrlhf data`` with some of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from flexrlhf.data.encoding import EncodedResponse, EncodedRow
from flexrlhf.data.examples import DataCounts
from flexrlhf.data.files import ENDINGS
from flexrlhf.data.hub import HubName
from flexrlhf.data.inspection import Inspection
from flexrlhf.data.reasoning_tasks import is_task
from flexrlhf.errors import one_line, some_of
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.run_data import DataSource
from flexrlhf.text import counted, table

WARNED_SHARE = 0.05
"""Share of prompts or responses that the limits drop or cut, above which a line warns of it."""
MOST = 0.95
"""Share of them that a suggested limit keeps."""
BAR = 40
"""Characters of the longest bar."""
MOST_REASONS = 5
"""Reasons why rows cannot be read that are shown."""
LONGEST = 1200
"""Characters of a part of a row that are shown."""
Decode = Callable[..., str]


def data_line(source: DataSource, counts: DataCounts) -> str:
    """Return the rows of a file, and how many the limits of the run drop or cut."""
    counted_rows = len(counts.prompts) + len(counts.bad)
    parts = [f"form {counts.form}, {counts.num_rows} rows"]
    if counted_rows < counts.num_rows:
        parts[0] += f" ({counted_rows} of them counted)"
    if counts.bad:
        parts.append(f"{_share(len(counts.bad), counted_rows)} cannot be read")
    parts.append(f"{_share(counts.num_long, len(counts.prompts))} prompts {_fate(counts)}")
    if responses := counts.kept_responses:
        parts.append(f"{_share(counts.num_cut, len(responses))} responses cut")
    for found, use in ((counts.kept_controls, ""), (counts.escaped_controls, " as text")):
        if found:
            parts.append(f"{_share(len(found), len(counts.prompts))} rows with control tokens{use}")
    if counts.unknown:
        parts.append(f"{_share(sum(counts.unknown), counts.num_tokens)} tokens unknown")
    return one_line(f"{source.key}: {source.path}: {', '.join(parts)}")


def absent_line(source: DataSource) -> str:
    """Return why the rows of a file that planning does not find are not checked."""
    if is_task(source.path):
        return one_line(f"{source.key}: {source.path} needs reasoning-gym (flexrlhf[reasoning]): no rows are checked")
    if not source.path.endswith(ENDINGS) and HubName.parse(source.path) is not None:
        return one_line(f"{source.key}: {source.path} is not in the cache of the Hub yet, so its rows are not checked")
    return one_line(f"{source.key}: {source.path} does not exist yet, so its rows are not checked")


def data_warnings(source: DataSource, counts: DataCounts) -> Iterator[str]:
    """Yield a sentence for prompts, and one for responses, where more than a few exceed their limit, sentences for rows
    that cannot be read or have control tokens in their text, and one for each remark on rows.
    """
    limits, responses = counts.limits, counts.kept_responses
    if counts.num_long > WARNED_SHARE * len(counts.prompts):
        yield (
            f"{source.key}: {_share(counts.num_long, len(counts.prompts))} prompts have more than "
            f"data.max_prompt_tokens {limits.max_prompt} and are {_fate(counts)}; "
            f"{MOST:.0%} have at most {quantile(counts.prompts, MOST)}"
        )
    if counts.bad:
        yield one_line(
            f"{source.key}: {_share(len(counts.bad), len(counts.prompts) + len(counts.bad))} rows cannot be "
            f"read and are left out: {'; '.join(_reasons(counts))}"
        )
    yield from (f"{source.key}: {text}" for text in (*_controls(counts), *_remarks(counts)))
    if counts.num_cut > WARNED_SHARE * len(responses):
        yield (
            f"{source.key}: {_share(counts.num_cut, len(responses))} responses have more than data.max_response_tokens "
            f"{limits.max_response} and are cut, without an end token; "
            f"{MOST:.0%} have at most {quantile(responses, MOST)}"
        )


def _controls(counts: DataCounts) -> Iterator[str]:
    """Yield a sentence for rows with control tokens that are encoded as such."""
    if found := counts.kept_controls:
        yield (
            f"{_share(len(found), len(counts.prompts))} rows have a control token of the tokenizer in their text, such "
            f"as {found[0]!r}, which is encoded as that: a text can end its turn; "
            f"data.control_tokens: text encodes it as text, refuse stops there"
        )


def _unknown(counts: DataCounts) -> Iterator[str]:
    """Yield a sentence for unknown tokens."""
    if counts.unknown:
        rows = _share(len(counts.unknown), len(counts.prompts))
        yield (
            f"{_share(sum(counts.unknown), counts.num_tokens)} tokens, in {rows} rows, are the tokenizer's unknown "
            f"token: all words that it stands for are the same to a model"
        )


def unread_line(source: DataSource, counts: DataCounts) -> str:
    """Return a sentence on columns and keys that are not read, which scores may read; nothing without any."""
    if not counts.unread:
        return ""
    names = sorted(counts.unread, key=lambda name: -counts.unread[name])
    uses = "are no part of prompts" if source.needs == "prompts" else "are not read"
    listed = (f"{name} ({counted(counts.unread[name], 'row')})" for name in names)
    return one_line(f"{source.key}: these {uses}: {some_of(listed)}")


def quantile(lengths: Sequence[int], share: float) -> int:
    """Return the smallest of ``lengths`` that at least ``share`` of them do not exceed; 0 without any."""
    ordered = sorted(lengths)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0


def _reasons(counts: DataCounts) -> Iterator[str]:
    """Yield reasons why rows cannot be read, the most frequent first."""
    found = list(counts.reasons.items())
    for row, number in found[:MOST_REASONS]:
        rows = f"row {row}" if number == 1 else f"{counted(number, 'row')}, such as row {row}"
        yield f"{rows}: {counts.bad[row]}"
    if rest := found[MOST_REASONS:]:
        yield f"{counted(sum(number for _, number in rest), 'row')} for other reasons"


def _remarks(counts: DataCounts) -> Iterator[str]:
    """Yield a sentence for each remark on rows."""
    for remark, number in counts.remarks.items():
        yield f"{_share(number, len(counts.prompts))} rows {remark}"


def _fate(counts: DataCounts) -> str:
    """Return the fate of prompts that are too long."""
    if counts.limits.long_prompts == "error":
        return "too long"
    return "left out" if counts.limits.drops else "truncated"


def _share(number: int, total: int) -> str:
    return f"{number} of {total} ({number / total:.1%})" if number and total else f"{number} of {total}"


def passes_line(plan: Plan, source: DataSource, counts: DataCounts) -> str:
    """Return how many passes a run makes over the training rows of a file that its limits leave, of which there are
    some."""
    steps, rows = plan.spec.steps, counts.num_rows - len(counts.bad) - (counts.num_long if counts.limits.drops else 0)
    share = Fraction(source.parts, sum(each.parts for each in plan.data.sources if each.is_training))
    prompts = plan.batch.num_new * share
    taken = f"{counted(steps, 'step')} of {float(prompts):.4g} prompts"
    return f"{source.key}: {taken} are {float(steps * prompts / rows):.3g} passes over {counted(rows, 'row')}"


def format_inspection(source: DataSource, found: Inspection, decode: Decode) -> str:
    """Return the whole report about the file of ``source``. ``decode``: tokens to text, special tokens included."""
    counts = found.counts
    further = (*_controls(counts), *_remarks(counts), *_unknown(counts), *filter(None, [unread_line(source, counts)]))
    lines = [
        data_line(source, counts),
        *(f"  {line}" for line in (*_bad_rows(counts), *_duplicates(found), *further)),
    ]
    lines += ["", *_histogram("prompts", counts.prompts, counts.limits.max_prompt)]
    responses = [length for lengths in counts.responses for length in lengths]
    if responses:
        lines += ["", *_histogram("responses", responses, counts.limits.max_response)]
    for number, row in found.samples:
        lines += ["", *_sample(number, row, decode)]
    if responses and found.samples:
        lines += ["", f"  # {'evaluated' if source.key == 'eval' else 'trained on'}, | not"]
    return "\n".join(lines)


def _bad_rows(counts: DataCounts) -> Iterator[str]:
    fate = ", left out" if counts.bad and counts.limits.bad_rows == "drop" else ""
    yield f"rows that cannot be read: {len(counts.bad)}{fate}"
    yield from (f"  {one_line(reason)}" for reason in _reasons(counts))


def _duplicates(found: Inspection) -> Iterator[str]:
    also = f", its responses, too: {found.repeated_rows}" if any(found.counts.responses) else ""
    yield f"rows with the prompt of an earlier one: {found.repeated_prompts}{also}"
    if found.equal_pairs:
        yield f"pairs of the same response twice: {found.equal_pairs}"


def _histogram(name: str, lengths: Sequence[int], limit: int) -> list[str]:
    """Return lengths in bins that double, with a border at ``limit``."""
    middle, most, longest = quantile(lengths, 0.5), quantile(lengths, 0.95), max(lengths, default=0)
    title = f"tokens of {name}: median {middle}, 95% at most {most}, longest {longest}, limit {limit}"
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
    """Return the parts of a row, each line behind a mark: trained on, or not."""
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

    Each is decoded after all before it: alone, some tokenizers drop a leading space.
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
    visible = ["".join(each if each.isprintable() else repr(each)[1:-1] for each in line) for line in lines]
    return [f"{name:<9}{mark} {line}" for line in visible if line]
