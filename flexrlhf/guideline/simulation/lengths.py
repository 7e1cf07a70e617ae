"""Response lengths of a simulation: those of a file, of an earlier run, or of a named shape; and of each row of a step.

Rows of a step are sampled from these lengths independently of each other, also samples of one prompt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any

from flexrlhf.api import Plan, Spec, UserError, shown
from flexrlhf.guideline.costs.environment_times import EnvironmentTimes
from flexrlhf.guideline.costs.scaled import ScaledCosts
from flexrlhf.guideline.simulation.inputs import (
    USUAL_SHARE,
    CostSource,
    TextLengths,
    lengths_for,
    lengths_in_data,
    truncated,
)
from flexrlhf.guideline.simulation.rounds import RowText, SampledTurn

HEAVY_TAIL = "heavy-tail"
SIGMA = 0.9
"""Standard deviation of the logarithms of ``HEAVY_TAIL``, a log-normal distribution: the longest of two thousand
responses is then 20 times as long as the median (ROLL Flash, arXiv 2510.11345, section 1)."""
REPLY_SIGMA, LEAST_REPLY = 2.9, 1e-6
"""The same of replies to an agent's turns, and the least time of one: of coding agents half of them take 0.3 s, a tenth
more than 13.6 s and a hundredth more than 216 s (TraceLab, University of Washington, 2026)."""
NUM_QUANTILES = 1024
SAMPLES, METRICS = "samples.jsonl", "metrics.jsonl"
"""Files of a run: some responses of each step, each with its length; and the mean length of each step."""
KEYS = ("length", "response_length", "output_lens")
"""Names of lengths in records: of ``SAMPLES``, of ``METRICS``, and of vLLM's benchmarks."""


def read_lengths(text: str | None, plan: Plan, mean_response: float | None = None) -> TextLengths:
    """Return the lengths of ``expected_lengths``; without ``text`` and mean those in the plan's data, or the longest
    where it has none."""
    if text is None and mean_response is None:
        return lengths_in_data(plan)
    return expected_lengths(plan.spec, text, mean_response)


def expected_lengths(spec: Spec, text: str | None, mean_response: float | None = None) -> TextLengths:
    """Return response lengths from ``text``: a number of tokens, ``heavy-tail:MEAN``, a file with lengths, or the
    directory or metrics of a run; without it those of ``lengths_for``.

    Raises UserError for lengths that no responses can have.
    """
    if text is None:
        return lengths_for(spec, mean_response)
    if mean_response is not None:
        raise UserError(f"--mean-response {mean_response:g}: not together with --lengths {text}; give one of them")
    return TextLengths(spec.lengths.prompt, named_lengths(text, spec.lengths.response, spec.name))


def named_lengths(text: str, longest: int, name: str) -> tuple[float, ...]:
    """Return a sample of the response lengths that ``text`` names: a number of tokens, ``heavy-tail:MEAN``, a file with
    lengths, or the directory or metrics of a run.

    longest:  the most tokens of a response of the run ``name``.
    """
    shape, colon, mean = text.partition(":")
    if shape == HEAVY_TAIL:
        if colon and not mean:
            raise UserError(f"--lengths {text}: expected a mean in tokens after the colon; or use {HEAVY_TAIL} alone")
        return heavy_tail(_mean(mean, text) if mean else USUAL_SHARE * longest, longest, name)
    found = tuple(_numbers(text))
    for value in found:
        if not 0 < value <= longest:
            raise UserError(
                f"--lengths {text}: {value:g} is not above 0 and at most data.max_response_tokens of {name}, {longest}"
            )
    return found


def heavy_tail(mean: float, longest: int, name: str) -> tuple[float, ...]:
    """Return quantiles of a log-normal distribution that is cut at ``longest`` and has this mean then."""
    if not 1 <= mean < longest:
        raise UserError(
            f"--lengths {HEAVY_TAIL}:{mean:g}: the mean is not at least 1 and below data.max_response_tokens of "
            f"{name}, {longest}; without a mean it is {USUAL_SHARE * longest:g}"
        )
    return truncated(_log_normal(SIGMA), mean, longest)


def _log_normal(sigma: float) -> list[float]:
    """Return quantiles of a log-normal distribution, ascending."""
    normal = NormalDist(0, sigma)
    return [math.exp(normal.inv_cdf((index + 0.5) / NUM_QUANTILES)) for index in range(NUM_QUANTILES)]


def with_replies(source: CostSource, spec: Spec, text: str | None) -> CostSource:
    """Return costs with the times of an environment's replies that ``text`` names, if there is one: a mean in seconds,
    or ``heavy-tail:SECONDS``.

    Raises UserError for a run without an environment, and for times that no reply can have.
    """
    if text is None:
        return source
    environment = spec.environment
    if environment is None:
        raise UserError(f"--replies {text}: {spec.name} has no environment that replies; leave it out")
    shape, colon, mean = text.rpartition(":")
    if shape not in ("", HEAVY_TAIL) or (colon and not shape):
        raise UserError(f"--replies {text}: expected seconds, or {HEAVY_TAIL}:SECONDS")
    try:
        seconds, most = float(mean), environment.timeout_seconds
    except ValueError:
        raise UserError(f"--replies {text}: expected seconds, or {HEAVY_TAIL}:SECONDS") from None
    if not 0 <= seconds <= most or (shape and not LEAST_REPLY < seconds < most):
        raise UserError(f"--replies {text}: expected at most environment.timeout_seconds of {spec.name}, {most:g}")
    times: tuple[float, ...] = (seconds,)
    if shape:
        parts = truncated(_log_normal(REPLY_SIGMA), seconds / LEAST_REPLY, most / LEAST_REPLY)
        times = tuple(LEAST_REPLY * part for part in parts)
    known = source.costs.environment(environment.name) or EnvironmentTimes(name=environment.name, resets=(), replies=())
    replies = known.model_copy(update={"replies": times})
    return replace(source, costs=ScaledCosts(source.costs, {}, 1.0, replies))


def mean_of_steps(directory: Path, steps: range) -> float | None:
    """Return the mean response length of ``steps`` in the metrics of a run; None if it has none of them."""
    try:
        content = _content((directory / METRICS).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    rows = content if isinstance(content, list) else [content]
    found = [row[KEYS[1]] for row in rows if isinstance(row, dict) and row.get("step") in steps and KEYS[1] in row]
    lengths = [float(length) for length in found if _is_number(length) and math.isfinite(length)]
    return sum(lengths) / len(lengths) if lengths else None


def batch_lengths(plan: Plan, lengths: TextLengths, number: int) -> list[list[int]]:
    """Return the response length of each row of the first ``number`` batches of ``plan``: a function of (seed, step,
    row), whatever the number of rows."""
    chosen = (
        Random(f"{plan.spec.seed} {step}").choices(lengths.responses, k=plan.batch.num_taken) for step in range(number)
    )
    return [[max(1, round(length)) for length in rows] for rows in chosen]


def batch_texts(plan: Plan, lengths: TextLengths, number: int) -> Sequence[Sequence[RowText]]:
    """Return the text of each row of the first ``number`` batches of ``plan``, as ``batch_lengths``: its length, or of
    an episode its turns, and which share of the replies is faster, a function of (seed, step, row, turn)."""
    environment, seed = plan.spec.environment, plan.spec.seed
    if environment is None or not lengths.episodes:
        return batch_lengths(plan, lengths, number)
    most, cap = environment.max_turns, environment.turn_tokens or math.inf
    batches = []
    for step in range(number):
        chosen = Random(f"{seed} {step}").choices(lengths.episodes, k=plan.batch.num_taken)
        rows = []
        for row, turns in enumerate(chosen):
            random = Random(f"{seed} {step} {row}")
            rows.append(
                tuple(SampledTurn(min(cap, sampled), reply, random.random()) for sampled, reply in turns[:most])
            )
        batches.append(rows)
    return batches


def _mean(mean: str, text: str) -> float:
    try:
        return float(mean)
    except ValueError:
        raise UserError(f"--lengths {text}: expected a mean in tokens after the colon, found {mean!r}") from None


def _numbers(text: str) -> Sequence[float]:
    try:
        return [float(text)]
    except ValueError:
        path = Path(text)
    if text.startswith("[") and not path.exists():
        return _listed(text, text)
    if path.is_dir():
        path = next((path / name for name in (SAMPLES, METRICS) if (path / name).is_file()), path / METRICS)
    if not path.is_file():
        raise UserError(
            f"--lengths {text}: expected a number, {HEAVY_TAIL}, a file or a run's directory, and there is no such file"
        )
    try:
        content = path.read_text()
    except ValueError as error:
        raise UserError(f"--lengths {text}: neither JSON nor numbers ({error})") from None
    lengths = _listed(content, text)
    # means over steps say nothing of the spread of single responses
    return [sum(lengths) / len(lengths)] if path.name == METRICS else lengths


def _listed(content: str, text: str) -> list[float]:
    """Return the lengths in the text of a file, or of ``--lengths`` itself. Raises UserError."""
    try:
        lengths = list(_found(_content(content)))
    except (ValueError, RecursionError) as error:
        raise UserError(f"--lengths {text}: neither JSON nor numbers ({error})") from None
    if not lengths or not all(map(_is_number, lengths)):
        raise UserError(f"--lengths {text}: expected numbers of tokens in it, found {shown(lengths)[:40]}")
    # others do not count the end token, which is then the only one
    return [length or 1.0 for length in lengths]


def _content(text: str) -> Any:
    """Return the content of a JSON file, or the values of a file that has one in each line."""
    try:
        return json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _found(content: Any) -> Iterator[Any]:
    """Yield the lengths in numbers, records and lists of them; of records that name the rows, those of training."""
    if isinstance(content, list):
        for item in content:
            yield from _found(item)
    elif not isinstance(content, dict):
        yield content
    elif content.get("rows", "training") == "training":
        for key in KEYS:
            yield from _found(content.get(key, []))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53
