"""Summary of a run after its end: metrics before and after, times, and samples of two steps side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from flexrlhf.display.step_text import shares_text, throughput, time_shares
from flexrlhf.metrics import METRICS
from flexrlhf.text import shortened

WIDEST = 120
"""Columns of a summary where the terminal has more."""
MOST_STEPS = 3
"""Steps at either end of a run whose mean is shown."""
MOST_SAMPLES = 3
MOST_LINES = 4
"""Lines of a response that is shown next to another one."""
Sample = Mapping[str, Any]


def format_summary(
    name: str, directory: str, rows: Sequence[Mapping[str, float]], samples: Sequence[Sample], width: int = WIDEST
) -> str:
    """Return steps, times, the main metrics before and after, and samples before and after, in ``width`` columns."""
    width = min(width, WIDEST)
    seconds = sum(row["seconds"] for row in rows)
    head = [f"{name}: {len(rows)} steps, {seconds:.1f} s", _throughput(rows)]
    lines = [", ".join(filter(None, head)), f"  results in {directory}"]
    if shares := time_shares(rows):
        lines += textwrap.wrap(f"  time of all ranks: {shares_text(shares)}", width, subsequent_indent="    ")
    return "\n".join([*lines, *_metrics(rows, width), *_samples(samples, width)])


def _throughput(rows: Sequence[Mapping[str, float]]) -> str:
    """Return samples and tokens in a second over the whole run, without its first step, which warms everything up."""
    return throughput(rows[1:] or rows, len(rows))


def _metrics(rows: Sequence[Mapping[str, float]], width: int) -> Iterator[str]:
    """Yield a line for each main metric: its mean over the first steps, that over the last ones, and what it is."""
    few = max(1, min(MOST_STEPS, len(rows) // 2))
    if len(rows) > 1:
        yield f"  {'':<18}{f'first {few} -> last {few} steps' if few > 1 else 'first -> last step':<26}".rstrip()
    for metric in METRICS:
        values = [row[metric.name] for row in rows if metric.name in row]
        if values and metric.progress:
            few = max(1, min(MOST_STEPS, len(values) // 2))
            first, last = _mean(values[:few]), _mean(values[-few:])
            trend = f"{first:.4g} -> {last:.4g}" if len(values) > 1 else f"{last:.4g}"
            start = f"  {metric.name:<18}{trend:<26}"
            yield (
                start + textwrap.shorten(metric.definition, max(20, width - len(start)), placeholder=" ...")
            ).rstrip()


@dataclass(frozen=True)
class SamplePair:
    """Samples of the first and the last step with some. They are responses to one prompt where ``is_same``."""

    first: Sample
    last: Sample

    @property
    def is_same(self) -> bool:
        return bool(self.first["prompt"] == self.last["prompt"])


def sample_pairs(samples: Sequence[Sample]) -> list[SamplePair]:
    """Return pairs to compare: of evaluations if there are two, else of training; of one prompt where there are such.

    Without two steps there is none.
    """
    found: list[SamplePair] = []
    for rows in ("evaluation", "training"):
        kind = [sample for sample in samples if sample["rows"] == rows]
        steps = [sample["step"] for sample in kind]
        if steps and min(steps) < max(steps):
            first = [sample for sample in kind if sample["step"] == min(steps)]
            last = [sample for sample in kind if sample["step"] == max(steps)]
            by_prompt = {sample["prompt"]: sample for sample in last}
            same = [
                SamplePair(sample, by_prompt[sample["prompt"]]) for sample in first if sample["prompt"] in by_prompt
            ]
            if same:
                return same[:MOST_SAMPLES]
            found = found or [SamplePair(one, other) for one, other in zip(first, last, strict=False)]
    return found[:MOST_SAMPLES]


def _samples(samples: Sequence[Sample], width: int) -> Iterator[str]:
    """Yield samples of the first and the last step next to each other, or those of the only step."""
    pairs = sample_pairs(samples)
    if not pairs:
        yield from (_sample_line(sample, width) for sample in _last_samples(samples))
        return
    column = (width - 7) // 2
    heads = [_titled(pairs[0].first), _titled(pairs[0].last)]
    yield f"  samples{'' if pairs[0].is_same else ', of different prompts'}"
    yield _side_by_side(heads, column)
    for pair in pairs:
        if pair.is_same:
            yield f"  > {shortened(pair.first['prompt'], width - 4)}"
        else:
            yield _side_by_side(
                [f"> {shortened(each['prompt'], column - 2)}" for each in (pair.first, pair.last)], column
            )
        texts = [_wrapped(sample, column) for sample in (pair.first, pair.last)]
        for line in zip_longest(*texts, fillvalue=""):
            yield _side_by_side(line, column)


def _titled(sample: Sample) -> str:
    return f"{sample['rows']}, step {sample['step']}"


def _side_by_side(texts: Sequence[str], column: int) -> str:
    return f"  {texts[0]:<{column}} | {texts[1]}".rstrip()


def _wrapped(sample: Sample, column: int) -> list[str]:
    """Return a response in lines of a column, with its score."""
    text = f"{' '.join(sample['response'].split()) or '(empty)'}{_score(sample)}"
    return textwrap.wrap(shortened(text, MOST_LINES * column * 9 // 10), column)[: MOST_LINES + 1]


def _last_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of the last evaluation, or without any those of the last step of which some are kept."""
    of_evaluations = [sample for sample in samples if sample["rows"] == "evaluation"] or samples
    return [sample for sample in of_evaluations if sample["step"] == of_evaluations[-1]["step"]]


def _sample_line(sample: Sample, width: int) -> str:
    score = _score(sample)
    prompt = shortened(sample["prompt"], width // 3)
    room = max(20, width - len(prompt) - len(score) - 6)
    return f"  {prompt} -> {shortened(sample['response'], room)}{score}"


def _score(sample: Sample) -> str:
    return f"  (score {sample['score']:.4g})" if sample.get("score") is not None else ""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
