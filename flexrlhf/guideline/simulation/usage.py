"""Speed and cost of a run in a user's units: tokens, model FLOPs, device hours and money, from a simulated step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flexrlhf.api import CallKind, Plan, Run, UserError, nearest
from flexrlhf.guideline.costs.cost_model import Transformer, transformer_of
from flexrlhf.guideline.costs.profiles import StepPart
from flexrlhf.guideline.simulation.calls import attempt_shape, texts_per_row
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.simulate import PARTS, Simulation

Prices = Mapping[str, float]
"""Price of an hour of a device, by its class."""
MOST_PRICE = 1_000_000
THOUSAND = 1000
"""Steps for which money is printed in addition to all steps of a run."""


@dataclass(frozen=True)
class PartWork:
    """Model FLOPs of a part of a step.

    flops:  of the step
    most:   FLOPs at the peak of the devices that compute them, in their time; None: their peak is unknown
    """

    flops: float = 0.0
    most: float | None = 0.0

    @property
    def utilisation(self) -> float | None:
        return self.flops / self.most if self.most else None


@dataclass(frozen=True)
class RunUsage:
    """Speed and cost of a run.

    seconds:  time of a step
    steps:    steps of the run
    tokens:   tokens of prompts and responses that a step trains on, a prompt once for each of its responses
    responses: of these the tokens of responses, as a run's metric ``tokens_per_second`` counts them
    flops:    model FLOPs of a step
    devices:  devices by class
    unit:     word for one of them
    peak:     dense 16-bit peak of all devices together, FLOP/s; None: unknown
    parts:    work of the parts of a step
    prices:   of an hour of a device; None: not given
    """

    seconds: float
    steps: int
    tokens: float
    responses: float
    flops: float
    devices: Mapping[str, int]
    unit: str
    peak: float | None
    parts: Mapping[StepPart, PartWork]
    prices: Prices | None = None

    @property
    def num_devices(self) -> int:
        return sum(self.devices.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def response_tokens_per_second(self) -> float:
        return self.responses / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_device(self) -> float:
        """Tokens per second and device: the ``perf/throughput`` of verl."""
        return self.tokens_per_second / self.num_devices

    @property
    def flops_per_device(self) -> float:
        """Model FLOPs per second and device."""
        return self.flops / self.seconds / self.num_devices if self.seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: model FLOPs over those at the peak of all devices, also of idle ones."""
        return self.flops / (self.seconds * self.peak) if self.peak and self.seconds else None

    @property
    def duration(self) -> float:
        """Time of all steps."""
        return self.steps * self.seconds

    @property
    def device_hours(self) -> float:
        """Hours of all devices in all steps."""
        return self.duration / 3600 * self.num_devices

    def money(self, steps: int) -> float | None:
        """Return the price of so many steps; None without prices."""
        if self.prices is None:
            return None
        return steps * self.seconds / 3600 * sum(number * self.prices[name] for name, number in self.devices.items())


def usage_of(simulation: Simulation, prices: Prices | None = None) -> RunUsage:
    """Return the speed and cost of the simulated run."""
    plan, lengths = simulation.plan, simulation.lengths
    parts, has_gpus = _work(simulation), plan.cluster.has_known_gpus(plan.spec.cluster)
    return RunUsage(
        seconds=simulation.seconds,
        steps=plan.spec.steps,
        tokens=plan.batch.num_taken * (lengths.mean_prompt + lengths.mean_response),
        responses=plan.batch.num_taken * lengths.mean_response,
        flops=sum(each.flops for each in parts.values()),
        devices={name: len(plan.cluster.ranks_on(name)) for name in plan.cluster.classes},
        unit="GPU" if has_gpus else "device",
        peak=_peak(plan, plan.cluster.ranks),
        parts=parts,
        prices=prices,
    )


def _peak(plan: Plan, ranks: Sequence[int]) -> float | None:
    """Return the dense 16-bit peak of ``ranks`` together, in FLOP/s; None if that of any is unknown."""
    figures = [plan.cluster.figures(rank) for rank in ranks if plan.cluster.has_known_gpus(plan.spec.cluster)]
    return 1e12 * sum(each.tflops for each in figures if each is not None) or None


def _work(simulation: Simulation) -> dict[StepPart, PartWork]:
    """Return the model FLOPs of each part of a step."""
    plan, flops, most = simulation.plan, defaultdict[StepPart, float](float), defaultdict[StepPart, float](float)
    peaks = {model.name: _peak(plan, model.ranks) for model in plan.placement.models}
    for item in simulation.regular:
        run = item.instruction
        if isinstance(run, Run) and run.operator.call is not None:
            part, peak = PARTS[run.operator.call], peaks[run.model]
            flops[part] += _run_flops(plan, run, simulation.lengths) / item.every
            most[part] += math.nan if peak is None else peak * item.computing / item.every
    return {part: PartWork(flops[part], None if math.isnan(most[part]) else most[part]) for part in flops}


def _run_flops(plan: Plan, run: Run, lengths: TextLengths) -> float:
    """Return the model FLOPs of one execution of ``run``."""
    model, kind = plan.placement[run.model], run.operator.call
    shape = plan.shapes[model.role]
    assert kind is not None, f"{run.operator.name} is no model call"
    batch = attempt_shape(plan.batch, run)
    places = sum(len(batch.prompts(mini_batch)) for mini_batch in run.mini_batches)
    # of places for rows in segments as many have one as a round takes, on the average
    prompts = places * batch.num_taken / batch.num_rows
    transformer = transformer_of(shape, model.head, is_adapted=model.settings.lora is not None)
    times = texts_per_row(run.operator) * (plan.spec.algorithm.epochs if kind == "train" else 1)
    prompts *= batch.samples_per_prompt / batch.alike_rows
    return times * prompts * prompt_flops(kind, transformer, lengths, batch.alike_rows)


def prompt_flops(kind: CallKind, model: Transformer, lengths: TextLengths, samples: int) -> float:
    """Return the model FLOPs of a call on one prompt with its ``samples`` responses, in the mean over ``lengths``.

    PaLM, appendix B, as Megatron-LM counts it: 2 FLOPs a token for each parameter of a matrix, of experts those that
    compute the token, and 4 for each feature of attention and pair of tokens, of which the causal mask leaves half of
    the square. Twice that backwards, but of frozen matrices (under adapters) their input's gradients alone. Needed work
    counts, whatever an engine computes: no padding, no recomputation, a prompt once for all its responses, the head for
    tokens of responses.
    """
    prompts, responses = lengths.all_prompts, lengths.responses
    prompt, response = lengths.mean_prompt, lengths.mean_response
    squares = sum(each**2 for each in responses) / len(responses)
    pairs = sum(each**2 for each in prompts) / len(prompts) / 2 + samples * (response * prompt + squares / 2)
    tokens, answered = prompt + samples * response, samples * response
    matrices = 2 * (tokens * model.layers * model.active_parameters + answered * model.head_parameters)
    adapters = 2 * tokens * model.adapters
    attention = 4 * model.layers * model.attention_features * pairs
    if kind != "train":
        return matrices + adapters + attention
    return (2 if model.adapters else 3) * matrices + 3 * (adapters + attention)


def read_prices(text: str | None, classes: Iterable[str]) -> Prices | None:
    """Return the prices of ``--price``, a number for all ``classes`` or ``CLASS=NUMBER,CLASS=NUMBER``; None without it.

    Raises UserError for other texts, classes that no device has, and classes without a price.
    """
    if text is None:
        return None
    names = list(dict.fromkeys(classes))
    if "=" not in text:
        return dict.fromkeys(names, _price(text, text))
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in names:
            raise UserError(
                f"--price {text}: no device is of class {name}{nearest(name, names)}; there is {', '.join(names)}"
            )
        if name in found:
            raise UserError(f"--price {text}: {name} is there twice; give it once")
        found[name] = _price(value, text)
    lacking = next((name for name in names if name not in found), None)
    if lacking is not None:
        raise UserError(f"--price {text}: no price of {lacking}; add {lacking}=NUMBER")
    return found


def _price(value: str, text: str) -> float:
    try:
        price = float(value)
    except ValueError:
        price = math.nan
    if not 0 <= price < MOST_PRICE:
        raise UserError(
            f"--price {text}: expected a number from 0 to {MOST_PRICE}, the price of an hour of a GPU, or one for each "
            f"class such as A100-80G=1.2,H100-80G=2.5"
        )
    return price
