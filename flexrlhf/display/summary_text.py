"""Summary of a run after its end: metrics before and after, times, and samples of two steps side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from flexrlhf.display.plain_lines import restarts_text, shares_by_kind, shares_text, throughput
from flexrlhf.metrics import METRICS, Ends
from flexrlhf.operators.outcomes import RowAccount
from flexrlhf.text import counted, shortened

WIDEST = 120
"""Columns of a summary if the terminal has more."""
MOST_SAMPLES = 3
MOST_LINES = 4
"""Lines of a prompt, and of a response that is shown next to another one."""
LEAST_ROOM = 30
"""Columns that the definition of a metric needs next to its values."""
NO_BREAK = "\N{NO-BREAK SPACE}"
SampleRow = Mapping[str, Any]


def format_summary(
    name: str, directory: str, rows: Sequence[Mapping[str, float]], samples: Sequence[SampleRow], width: int = WIDEST
) -> str:
    """Return steps, times, outcomes of rows, the main metrics and samples before and after, in ``width`` columns."""
    width = min(width, WIDEST)
    seconds = sum(row["seconds"] for row in rows)
    # the first step of a run warms everything up
    head = [f"{name}: {len(rows)} steps, {seconds:.1f} s", throughput(rows[1:] or rows, len(rows))]
    lines = [", ".join(filter(None, head)), f"  results in {directory}"]
    if shares := shares_by_kind(rows):
        lines += _wrapped_shares(shares, width)
    if (account := RowAccount.of(rows)).counts:
        text = f"rows: {account}"
        lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
    if restarts := restarts_text(rows):
        lines.append(f"  {restarts}")
    return "\n".join([*lines, *_metrics(rows, width), *_samples(samples, width)])


def _wrapped_shares(shares: Mapping[str, float], width: int) -> list[str]:
    """Return the shares of time in lines that end after one of them."""
    text = f"  time of all ranks: {shares_text(shares).replace(' ', NO_BREAK).replace(f',{NO_BREAK}', ', ')}"
    return [line.replace(NO_BREAK, " ") for line in textwrap.wrap(text, width, subsequent_indent="    ")]


def _metrics(rows: Sequence[Mapping[str, float]], width: int) -> Iterator[str]:
    """Yield lines for each main metric: its means over the first and the last steps, and its definition."""
    if len(rows) > 1:
        yield f"  {'':<18}{Ends.of([0.0] * len(rows)).title}"
    for metric in METRICS:
        values = [row[metric.name] for row in rows if metric.name in row]
        if values and metric.progress:
            ends = Ends.of(values)
            trend = f"{ends.first:.4g} -> {ends.last:.4g}" if len(values) > 1 else f"{ends.last:.4g}"
            yield from _defined(f"  {metric.name:<18}{trend:<26}", metric.definition, width)


def _defined(start: str, definition: str, width: int) -> list[str]:
    """Return the line that begins with ``start``, and the definition next to it; below it in a narrow terminal."""
    room = width - len(start)
    if room < LEAST_ROOM:
        return [start.rstrip(), *textwrap.wrap(definition, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    first, *others = textwrap.wrap(definition, room)
    return [start + first, *(" " * len(start) + line for line in others)]


def sample_pairs(samples: Sequence[SampleRow]) -> tuple[list[tuple[SampleRow, SampleRow]], bool]:
    """Return pairs of samples of the first and the last step, and whether each is of one prompt.

    Of evaluations if there are two, else of training; of one prompt if there are such. Without two steps there is none.
    """
    found: list[tuple[SampleRow, SampleRow]] = []
    for rows in ("evaluation", "training"):
        kind = [sample for sample in samples if sample["rows"] == rows]
        steps = [sample["step"] for sample in kind]
        if steps and min(steps) < max(steps):
            first = [sample for sample in kind if sample["step"] == min(steps)]
            last = [sample for sample in kind if sample["step"] == max(steps)]
            by_prompt = {sample["prompt"]: sample for sample in last}
            same = [(sample, by_prompt[sample["prompt"]]) for sample in first if sample["prompt"] in by_prompt]
            if same:
                return same[:MOST_SAMPLES], True
            found = found or list(zip(first, last, strict=False))
    return found[:MOST_SAMPLES], False


def _samples(samples: Sequence[SampleRow], width: int) -> Iterator[str]:
    """Yield samples of the first and the last step next to each other, or of the only step."""
    pairs, are_same = sample_pairs(samples)
    if not pairs:
        shown = [sample for sample in samples if sample["rows"] == "evaluation"] or samples
        yield from (_sample_line(sample, width) for sample in shown if sample["step"] == shown[-1]["step"])
        return
    column = (width - 7) // 2
    yield f"  samples{'' if are_same else ', of different prompts'}"
    yield _side_by_side([_title(sample) for sample in pairs[0]], column)
    for pair in pairs:
        if are_same:
            yield from (f"  {line}" for line in _wrapped_prompt(pair[0], width - 2))
        else:
            yield from _columns([_wrapped_prompt(sample, column) for sample in pair], column)
        yield from _columns([_wrapped_response(sample, column) for sample in pair], column)


def _title(sample: SampleRow) -> str:
    """Return the rows of a sample, and when it was sampled."""
    if sample["rows"] != "evaluation":
        return f"{sample['rows']}, step {sample['step']}"
    is_first = sample.get("weights_version") == 0
    return f"evaluation, {'before training' if is_first else 'after ' + counted(sample['step'] + 1, 'step')}"


def _columns(texts: Sequence[Sequence[str]], column: int) -> Iterator[str]:
    """Yield the lines of two texts next to each other."""
    yield from (_side_by_side(line, column) for line in zip_longest(*texts, fillvalue=""))


def _side_by_side(texts: Sequence[str], column: int) -> str:
    return f"  {texts[0]:<{column}} | {texts[1]}".rstrip()


def _wrapped_prompt(sample: SampleRow, column: int) -> list[str]:
    """Return a prompt in lines of a column, behind a mark."""
    return [f"{'  ' if index else '> '}{line}" for index, line in enumerate(_wrapped(sample["prompt"], column - 2))]


def _wrapped_response(sample: SampleRow, column: int) -> list[str]:
    """Return a response in lines of a column, with its score."""
    return _wrapped(f"{response_text(sample) or '(empty)'}{_score(sample)}", column)


def response_text(sample: SampleRow) -> str:
    """Return a response on one line, the replies of an environment in brackets."""
    turns = sample.get("turns") or [{"role": "policy", "text": sample["response"]}]
    texts = [(turn["role"], " ".join(turn["text"].split())) for turn in turns]
    return " ".join(text if role == "policy" else f"[{text}]" for role, text in texts)


def _wrapped(text: str, column: int) -> list[str]:
    """Return a text in lines of a column, without its middle where these are too many."""
    return textwrap.wrap(shortened(text, MOST_LINES * column * 9 // 10), column)[: MOST_LINES + 1] or [""]


def _sample_line(sample: SampleRow, width: int) -> str:
    score = _score(sample)
    prompt = shortened(sample["prompt"], width // 3)
    room = max(20, width - len(prompt) - len(score) - 6)
    return f"  {prompt} -> {shortened(response_text(sample), room)}{score}"


def _score(sample: SampleRow) -> str:
    return f"  (score {sample['score']:.4g})" if sample.get("score") is not None else ""
