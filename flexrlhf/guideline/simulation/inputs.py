"""What ``simulate`` is told besides a plan: how long answers are, and where seconds come from."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError, shown
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.costs.cost_model import CostModel
from flexrlhf.guideline.costs.measured import load_costs
from flexrlhf.guideline.simulation.pricing import TextLengths, check_figures
from flexrlhf.placement.cluster import make_cluster
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan

PROFILE = "profile.json"
"""In the directory of the runs: what ``flexrlhf profile`` leaves."""


@dataclass(frozen=True)
class Source:
    """A cost model, and how a person calls it."""

    costs: CostModel
    name: str


def choose_costs(plan: Plan, profile: Path | None) -> Source:
    """For a plan, as ``costs_for``."""
    return costs_for(plan.spec, profile)


def costs_for(spec: Spec, profile: Path | None) -> Source:
    """The profile that is given; else figures of the device classes; else the profile of this machine.

    Raises UserError where there is none of them.
    """
    cluster, default = make_cluster(spec.cluster), Path(spec.runs) / PROFILE
    if profile is None:
        try:
            check_figures(cluster, spec.cluster.device, default)
        except UserError:
            if not default.is_file():
                raise
            profile = default
        else:
            return Source(AnalyticCosts(), "figures of the device classes")
    if not profile.is_file():
        raise UserError(f"--profile {profile}: no such file; `flexrlhf profile` writes one")
    return Source(load_costs(profile, len(cluster.devices)), f"measurements in {profile}")


def texts_for(spec: Spec, mean_response: float | None) -> TextLengths:
    """Prompts as long as they may be, answers of ``mean_response`` tokens: as exponentially distributed lengths of that
    mean are, cut at the longest. Without it as in the data, where they are there already; else the longest.

    Raises UserError for a mean that no answers can have.
    """
    longest = spec.data.max_response_tokens
    if mean_response is None and Path(spec.data.path).is_file():
        return texts_in_data(make_plan(spec.model_copy(update={"placement": None})))
    if mean_response is None or mean_response == longest:
        return TextLengths(spec.data.max_prompt_tokens, (longest,))
    if not mean_response < longest:
        raise UserError(
            f"--mean-response {mean_response:g}: longer than answers may be; data.max_response_tokens of {spec.name} "
            f"is {longest}"
        )
    return TextLengths(spec.data.max_prompt_tokens, cut_exponential(mean_response, longest))


def texts_in_data(plan: Plan) -> TextLengths:
    """Prompts as long as the longest in the data, since passes are padded to it; a sample of its answers."""
    from flexrlhf.plan.data_lengths import prompt_lengths, response_lengths

    return TextLengths(max(prompt_lengths(plan)), response_lengths(plan))


def cut_exponential(mean: float, longest: float, number: int = 64) -> tuple[float, ...]:
    """A sample of lengths with this mean, the longest among them: quantiles of an exponential distribution, cut."""
    quantiles = [-math.log(1 - (index + 0.5) / number) for index in range(number)]
    low, high = 0.0, 100.0 * longest
    for _ in range(60):
        scale = (low + high) / 2
        found = sum(min(longest, max(1.0, scale * q)) for q in quantiles) / number
        low, high = (scale, high) if found < mean else (low, scale)
    return tuple(min(longest, max(1.0, low * q)) for q in quantiles)


def read_lengths(text: str | None, plan: Plan, mean_response: float | None = None) -> TextLengths:
    """Answers of ``text``: a number of tokens, a JSON list of them, or the metrics of a run. With ``mean_response``
    those of ``texts_for``, as ``advise`` takes them.

    Without both as long as those in the data of the plan, where it has some, else all as long as they may be.
    """
    if mean_response is not None:
        if text is not None:
            raise UserError(
                f"--mean-response {mean_response:g}: --response-tokens {text} says it, too; give one of them"
            )
        return texts_for(plan.spec, mean_response)
    if text is None:
        return texts_in_data(plan)
    responses = tuple(_numbers(text))
    most = plan.lengths.response
    for value in responses:
        if not 0 < value <= most:
            raise UserError(
                f"--response-tokens {text}: {value:g} is not above 0 and at most data.max_response_tokens of "
                f"{plan.spec.name}, {most}"
            )
    return TextLengths(plan.lengths.prompt, responses)


def _numbers(text: str) -> Sequence[float]:
    try:
        return [float(text)]
    except ValueError:
        path = Path(text)
    if not path.is_file():
        raise UserError(f"--response-tokens {text}: expected a number or a file, and there is no such file")
    try:
        found = _metrics(path) if path.suffix == ".jsonl" else json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"--response-tokens {text}: not JSON ({error})") from None
    if not isinstance(found, list) or not found or not all(_is_number(value) for value in found):
        raise UserError(f"--response-tokens {text}: expected numbers of tokens in it, found {shown(found)[:40]}")
    return found


def _metrics(path: Path) -> list[Any]:
    """The mean over the steps of a run: rows' own lengths are not recorded. Where there are some, what is no number."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    means = [row["response_length"] for row in rows if isinstance(row, dict) and "response_length" in row]
    wrong = [mean for mean in means if not _is_number(mean)]
    return wrong or ([sum(means) / len(means)] if means else [])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
