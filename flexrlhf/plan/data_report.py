"""Text about a data file of a run: one line and warnings, and the report of ``flexrlhf data`` with some of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from flexrlhf.data.examples import DataCounts
from flexrlhf.data.inspection import Inspection
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


@dataclass(frozen=True)
class DataReport:
    """Text about a data file of a run.

    source:  the file.
    counts:  of its rows.
    """

    source: DataSource
    counts: DataCounts

    def lines(self) -> Iterator[str]:
        """Yield ``line``, and ``unread_line`` if there is one."""
        yield from filter(None, (self.line, self.unread_line))

    @property
    def line(self) -> str:
        """Rows of the file, and how many the limits of the run drop or cut."""
        counts = self.counts
        counted_rows = len(counts.prompts) + len(counts.bad)
        parts = [f"form {counts.form}, {counts.num_rows} rows"]
        if counted_rows < counts.num_rows:
            parts[0] += f" ({counted_rows} of them counted)"
        if counts.bad:
            parts.append(f"{_share(len(counts.bad), counted_rows)} cannot be read")
        parts.append(f"{_share(counts.num_long, len(counts.prompts))} prompts {self._fate}")
        if responses := counts.kept_responses:
            parts.append(f"{_share(counts.num_cut, len(responses))} responses cut")
        for found, use in ((counts.kept_controls, ""), (counts.escaped_controls, " as text")):
            if found:
                parts.append(f"{_share(len(found), len(counts.prompts))} rows with control tokens{use}")
        if counts.unknown:
            parts.append(f"{_share(sum(counts.unknown), counts.num_tokens)} tokens unknown")
        return one_line(f"{self.source.key}: {self.source.path}: {', '.join(parts)}")

    @property
    def unread_line(self) -> str:
        """Sentence on columns and keys that are not read, which scores may read; nothing without any."""
        if not self.counts.unread:
            return ""
        names = sorted(self.counts.unread, key=lambda name: -self.counts.unread[name])
        uses = "are no part of prompts" if self.source.needs == "prompts" else "are not read"
        listed = (f"{name} ({counted(self.counts.unread[name], 'row')})" for name in names)
        return one_line(f"{self.source.key}: these {uses}: {some_of(listed)}")

    def warnings(self) -> Iterator[str]:
        """Yield a sentence for prompts, and one for responses, where more than a few exceed their limit, sentences for
        rows that cannot be read or have control tokens in their text, and one for each remark on rows.
        """
        counts, limits, responses = self.counts, self.counts.limits, self.counts.kept_responses
        if counts.num_long > WARNED_SHARE * len(counts.prompts):
            yield (
                f"{self.source.key}: {_share(counts.num_long, len(counts.prompts))} prompts have more than "
                f"data.max_prompt_tokens {limits.max_prompt} and are {self._fate}; "
                f"{MOST:.0%} have at most {quantile(counts.prompts, MOST)}"
            )
        if counts.bad:
            yield one_line(
                f"{self.source.key}: {_share(len(counts.bad), len(counts.prompts) + len(counts.bad))} rows cannot be "
                f"read and are left out: {'; '.join(self._reasons())}"
            )
        yield from (f"{self.source.key}: {text}" for text in (*self._controls(), *self._remarks()))
        if counts.num_cut > WARNED_SHARE * len(responses):
            yield (
                f"{self.source.key}: {_share(counts.num_cut, len(responses))} responses have more than "
                f"data.max_response_tokens {limits.max_response} and are cut, without an end token; "
                f"{MOST:.0%} have at most {quantile(responses, MOST)}"
            )

    def passes_line(self, plan: Plan) -> str:
        """Return how many passes a run makes over the training rows of the file that its limits leave, of which there
        are some."""
        counts, steps = self.counts, plan.spec.steps
        rows = counts.num_rows - len(counts.bad) - (counts.num_long if counts.limits.drops else 0)
        share = Fraction(self.source.parts, sum(each.parts for each in plan.data.sources if each.is_training))
        prompts = plan.batch.num_new * share
        taken = f"{counted(steps, 'step')} of {float(prompts):.4g} prompts"
        return f"{self.source.key}: {taken} are {float(steps * prompts / rows):.3g} passes over {counted(rows, 'row')}"

    def whole(self, found: Inspection, decode: Callable[..., str]) -> str:
        """Return the whole report.

        found:   inspection of the file, with its counts.
        decode:  tokens to text, special tokens included.
        """
        counts = self.counts
        further = (*self._controls(), *self._remarks(), *self._unknown(), *filter(None, [self.unread_line]))
        lines = [
            self.line,
            *(f"  {line}" for line in (*self._bad_rows(), *_duplicates(found), *further)),
        ]
        lines += ["", *_histogram("prompts", counts.prompts, counts.limits.max_prompt)]
        responses = [length for lengths in counts.responses for length in lengths]
        if responses:
            lines += ["", *_histogram("responses", responses, counts.limits.max_response)]
        for sample in _samples(found, decode):
            lines += ["", *sample]
        if responses and found.samples:
            lines += ["", f"  # {'evaluated' if self.source.key == 'eval' else 'trained on'}, | not"]
        return "\n".join(lines)

    def _controls(self) -> Iterator[str]:
        """Yield a sentence for rows with control tokens that are encoded as such."""
        if found := self.counts.kept_controls:
            yield (
                f"{_share(len(found), len(self.counts.prompts))} rows have a control token of the tokenizer in their "
                f"text, such as {found[0]!r}, which is encoded as that: a text can end its turn; "
                f"data.control_tokens: text encodes it as text, refuse stops there"
            )

    def _unknown(self) -> Iterator[str]:
        """Yield a sentence for unknown tokens."""
        if self.counts.unknown:
            rows = _share(len(self.counts.unknown), len(self.counts.prompts))
            yield (
                f"{_share(sum(self.counts.unknown), self.counts.num_tokens)} tokens, in {rows} rows, are the "
                f"tokenizer's unknown token: all words that it stands for are the same to a model"
            )

    def _reasons(self) -> Iterator[str]:
        """Yield reasons why rows cannot be read, the most frequent first."""
        found = list(self.counts.reasons.items())
        for row, number in found[:MOST_REASONS]:
            rows = f"row {row}" if number == 1 else f"{counted(number, 'row')}, such as row {row}"
            yield f"{rows}: {self.counts.bad[row]}"
        if rest := found[MOST_REASONS:]:
            yield f"{counted(sum(number for _, number in rest), 'row')} for other reasons"

    def _remarks(self) -> Iterator[str]:
        """Yield a sentence for each remark on rows."""
        for remark, number in self.counts.remarks.items():
            yield f"{_share(number, len(self.counts.prompts))} rows {remark}"

    @property
    def _fate(self) -> str:
        """Fate of prompts that are too long."""
        if self.counts.limits.long_prompts == "error":
            return "too long"
        return "left out" if self.counts.limits.drops else "truncated"

    def _bad_rows(self) -> Iterator[str]:
        fate = ", left out" if self.counts.bad and self.counts.limits.bad_rows == "drop" else ""
        yield f"rows that cannot be read: {len(self.counts.bad)}{fate}"
        yield from (f"  {one_line(reason)}" for reason in self._reasons())


def quantile(lengths: Sequence[int], share: float) -> int:
    """Return the smallest of ``lengths`` that at least ``share`` of them do not exceed; 0 without any."""
    ordered = sorted(lengths)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0


def _share(number: int, total: int) -> str:
    return f"{number} of {total} ({number / total:.1%})" if number and total else f"{number} of {total}"


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


def _samples(found: Inspection, decode: Callable[..., str]) -> Iterator[list[str]]:
    """Yield the parts of each row that is shown, each line behind a mark: trained on, or not."""
    for number, row in found.samples:
        names = ("chosen", "rejected") if len(row.responses) == 2 else ("response",)
        title = f"row {number}: {len(row.prompt)} tokens of prompt"
        if not row.responses:
            title += "; the response is sampled"
        lines = _margined("prompt", "|", decode(list(row.prompt)))
        for name, response in zip(names, row.responses, strict=False):
            trained = sum(response.is_trained)
            title += f", {len(response.ids)} of {name}"
            title += f" ({trained} of them #)" if trained < len(response.ids) else ""
            for is_trained, text in response.segments(row.prompt, decode):
                lines += _margined(name, "#" if is_trained else "|", text)
            if not response.is_finished:
                lines.append(f"{name} is cut after {len(response.ids)} of {response.length} tokens: no end token")
        yield [title, *(f"  {line}" for line in lines)]


def _margined(name: str, mark: str, text: str) -> list[str]:
    """Return ``text`` with its line ends visible, each line behind ``name`` and ``mark``."""
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half} more characters) ... {text[-half:]}"
    lines = text.replace("\n", "\\n\n").split("\n")
    visible = ["".join(each if each.isprintable() else repr(each)[1:-1] for each in line) for line in lines]
    return [f"{name:<9}{mark} {line}" for line in visible if line]
