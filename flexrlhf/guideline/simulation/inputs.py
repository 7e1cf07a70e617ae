"""Inputs of a simulation in addition to a plan: lengths of prompts and responses, and the cost model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flexrlhf.api import Cluster, EngineFacts, ModelSpec, Plan, Spec, UserError, instead_of, is_present, make_plan
from flexrlhf.guideline import costs
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.costs.cost_model import CostModel
from flexrlhf.guideline.costs.measured import load_costs
from flexrlhf.guideline.costs.profiles import (
    FROM_FIGURES,
    FROM_MEASUREMENTS,
    Accuracy,
    EngineFamily,
    StepPart,
    accuracy_by_figures,
)

USUAL_TOKENS, USUAL_SHARE = 300.0, 0.25
"""Mean response, or share of the limit where that is more: answers of an instruct model have 204 tokens on the average
(Llama 3 8B on ShareGPT, LambdaLabsML/vllm-benchmark), texts that reason grow with the room that they have (a share
that is assumed)."""
_QUANTILES = tuple(-math.log(1 - (index + 0.5) / 64) for index in range(64))
"""Of an exponential distribution with mean 1."""
PROFILE = "profile.json"
"""File in the directory of the runs that ``flexrlhf profile`` writes."""
ORDINARY_CPU = Path(costs.__file__).with_name("ordinary_cpu.json")
"""Such a file of two cores with AVX-512, by the quick start's models."""


@dataclass(frozen=True)
class TextLengths:
    """Tokens of the texts of a step.

    prompt:      longest prompt, to which padded rows are as wide
    responses:   a sample of response lengths
    prompts:     a sample of prompt lengths; empty: all are as long as the longest
    is_assumed:  whether nothing is known of responses but their limit
    turns:       mean turns of an episode; None: all have the most
    replies:     mean tokens of a response that are replies of an environment
    episodes:    a sample of episodes, with the tokens of each turn and of the reply to it; empty: none is known
    """

    prompt: float
    responses: tuple[float, ...]
    prompts: tuple[float, ...] = ()
    is_assumed: bool = False
    turns: float | None = None
    replies: float = 0.0
    episodes: tuple[tuple[tuple[float, float], ...], ...] = ()

    @property
    def mean_response(self) -> float:
        return sum(self.responses) / len(self.responses)

    @property
    def assumption(self) -> str:
        """Hint to print next to the mean of responses of which nothing is known."""
        return " (assumed; --mean-response says it)" if self.is_assumed else ""

    @property
    def mean_prompt(self) -> float:
        return sum(self.all_prompts) / len(self.all_prompts)

    @property
    def all_prompts(self) -> tuple[float, ...]:
        """A sample of prompt lengths, which is never empty."""
        return self.prompts or (self.prompt,)

    @property
    def width(self) -> float:
        """Tokens of a padded row."""
        return self.prompt + max(self.responses)


def longest_lengths(plan: Plan) -> TextLengths:
    """Return the maximum length of every prompt and response of ``plan``."""
    return TextLengths(plan.lengths.prompt, (plan.lengths.response,))


@dataclass(frozen=True)
class CostSource:
    """A cost model, its name in printed text, and how far measured steps are from those that it predicts."""

    costs: CostModel
    name: str
    accuracy: Accuracy

    def accuracy_of(self, plan: Plan, part: StepPart = "step") -> Accuracy:
        """Return how far the measured time of a ``part`` of a step of ``plan`` is from the predicted one: by figures,
        what its engines and adapters let expect."""
        return self.accuracy if self.accuracy != FROM_FIGURES else accuracy_by_figures(engine_family(plan), part)


def engine_family(plan: Plan) -> EngineFamily:
    """Return the family whose published rows the range of ``plan`` is derived from."""
    trained = [model for model in plan.placement.models if model.trained]
    families = {EngineFacts.of(model.facts.priced_as).published for model in trained}
    if any(model.settings.lora is not None for model in trained):
        return "adapters"
    return families.pop() if len(families) == 1 else "figures"


def costs_for(spec: Spec, profile: Path | None) -> CostSource:
    """Return the costs of the given profile; else by figures of the device classes; else of this machine's profile;
    else, of ranks on CPUs, of an ordinary CPU.

    Raises UserError where there is none of them, and for an engine without a price.
    """
    check_prices(spec)
    cluster, default = Cluster.of(spec.cluster), Path(spec.runs) / PROFILE
    if profile is None:
        try:
            check_figures(cluster, spec.cluster.device, default)
        except UserError:
            if default.is_file():
                profile = default
            elif spec.cluster.device == "cpu" or (spec.cluster.is_on_cpu and cluster.classes == (Cluster.ANY_CLASS,)):
                return ordinary_cpu(spec)
            else:
                raise
        else:
            return CostSource(AnalyticCosts(), "figures of the device classes", FROM_FIGURES)
    check_profile(profile)
    return _by_measurements(profile, len(cluster.devices), f"measurements in {profile}")


def check_profile(profile: Path) -> None:
    """Raise UserError for a file of ``flexrlhf profile`` that is not there."""
    if not profile.is_file():
        raise UserError(
            f"--profile {profile}: no such file{instead_of(profile, '.json')}; `flexrlhf profile` writes one"
        )


def check_prices(spec: Spec) -> None:
    """Raise UserError for an engine whose times are not known."""
    written = {f"models.{role}.engine": model.engine for role, model in spec.models if model is not None}
    for key, name in {**written, "rollout.engine": spec.rollout.engine}.items():
        if EngineFacts.is_engine(name) and not EngineFacts.of(name).priced_as:
            raise UserError(f"{key}: {name} has no price (priced_as of its facts), so that nothing is predicted")


def _by_measurements(profile: Path, ranks: int, name: str) -> CostSource:
    costs = load_costs(profile, ranks)
    return CostSource(costs, name, FROM_MEASUREMENTS.scattered(costs.measured.spread))


def check_figures(cluster: Cluster, device: str, profile: object) -> None:
    """Raise UserError where the speed of the devices is unknown. ``profile``: file expected to have measurements."""
    if device == "cpu":
        raise UserError(_without_figures("cluster.device: cpu", profile))
    for device_class in cluster.classes:
        if cluster.figures(cluster.ranks_on(device_class)[0]) is None:
            raise UserError(_without_figures(f"cluster: device class {device_class}", profile))


def _without_figures(what: str, profile: object) -> str:
    return (
        f"{what} has no figures to compute seconds from: give cluster.nodes with a class such as A100-80G, or "
        f"measure with `flexrlhf profile` first (no {profile})"
    )


def ordinary_cpu(spec: Spec) -> CostSource:
    """Return the costs of CPU ranks by measurements of another machine: which of two placements is the faster."""
    ranks, name = len(Cluster.of(spec.cluster).devices), "measurements of an ordinary CPU"
    found = _by_measurements(ORDINARY_CPU, ranks, name)
    return replace(found, accuracy=found.accuracy.elsewhere)


def lengths_for(
    spec: Spec, mean_response: float | None, pending: Mapping[Path, ModelSpec] | None = None
) -> TextLengths:
    """Return prompts of the maximum length and responses of ``mean_response`` tokens: exponentially distributed with
    that mean, truncated at the longest. Without it the lengths in the data, if that exists already; else the longest.

    ``pending``: models that an earlier run of the command will write, by directory. Raises UserError for a mean that no
    responses can have.
    """
    longest = spec.data.max_response_tokens
    paths = [spec.data.path] if spec.data.path is not None else [source.path for source in spec.data.sources]
    if mean_response is None and is_present(paths[0]):
        return lengths_in_data(make_plan(spec.model_copy(update={"placement": None}), pending))
    if mean_response is None or mean_response == longest:
        return TextLengths(spec.data.max_prompt_tokens, (longest,))
    if not mean_response < longest:
        raise UserError(
            f"--mean-response {mean_response:g}: longer than responses may be; data.max_response_tokens of {spec.name} "
            f"is {longest}"
        )
    return TextLengths(spec.data.max_prompt_tokens, truncated_exponential(mean_response, longest))


def lengths_in_data(plan: Plan) -> TextLengths:
    """Return a sample of the lengths in the data, with the longest prompt: of responses that it lacks usual ones, and
    without data the longest."""

    prompts, responses = plan.data.prompt_lengths(), plan.data.response_lengths()
    if not prompts:
        return TextLengths(plan.lengths.prompt, responses or (plan.lengths.response,))
    # of responses nothing is known but their limit: exponentially distributed, those above the limit cut there
    longest = plan.lengths.response
    scale = max(USUAL_TOKENS, USUAL_SHARE * longest)
    usual = tuple(min(longest, max(1.0, scale * quantile)) for quantile in _QUANTILES)
    return TextLengths(max(prompts), responses or usual, prompts, is_assumed=not responses)


def truncated_exponential(mean: float, longest: float) -> tuple[float, ...]:
    """Return a sample of lengths with this mean, including the longest: quantiles of a truncated exponential
    distribution."""
    return truncated(_QUANTILES, mean, longest)


def truncated(quantiles: Sequence[float], mean: float, longest: float) -> tuple[float, ...]:
    """Return ``quantiles`` of a distribution, scaled so that their mean is ``mean`` with those above ``longest`` cut
    there."""

    def scaled(scale: float) -> tuple[float, ...]:
        return tuple(min(longest, max(1.0, scale * quantile)) for quantile in quantiles)

    low, high = 0.0, 100.0 * longest
    for _ in range(60):
        scale = (low + high) / 2
        low, high = (scale, high) if sum(scaled(scale)) < mean * len(quantiles) else (low, scale)
    return scaled(low)
