"""The fewest devices on which a model trains, by algorithm, device class, response length, and with or without
adapters."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from flexrlhf.api import TORCH, Cluster, DeviceClass, EngineFacts, FoundModel, Spec, UserError
from flexrlhf.guideline.advice.advise import advise
from flexrlhf.guideline.advice.candidates import FeasibleCandidate
from flexrlhf.guideline.advice.model_options import OptionEnumerator
from flexrlhf.guideline.advice.refusal import last_resort
from flexrlhf.guideline.advice.request import AdviceOptions
from flexrlhf.guideline.advice.space import Space, make_space
from flexrlhf.guideline.simulation.inputs import costs_for, lengths_for

CLASSES = ("RTX4090-24G", "L40S-48G", "A100-80G", "H100-80G")
"""Device classes of a table, where none is named."""
RESPONSES = (1024, 8192)
"""Response lengths of a table, where none is named."""
ROLLOUTS = (None, "transformers")
"""Rollouts that are tried, where none is named: the usual one of ``advise``, then one without weights of its own."""
FASTER = 1.1
"""Speed at which a training engine is preferred to one that is tried before it."""
TIMES = (1, 2, 4)
"""Multiples of the fewest devices for which speed is predicted."""
MOST_DEVICES = 512
"""Most devices that are tried."""


@dataclass(frozen=True)
class SizedPlan:
    """The placement that ``advise`` recommends on some devices.

    options:  options of ``advise``
    chosen:   the placement
    """

    options: AdviceOptions
    chosen: FeasibleCandidate

    @property
    def devices(self) -> int:
        assert self.options.gpus is not None, "a plan is of some devices"
        return self.options.gpus

    @property
    def samples_per_second(self) -> float:
        return self.chosen.samples_per_second

    def command(self, overrides: Sequence[str], mean_response: float | None) -> str:
        """Return the command that recommends this placement."""
        given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in self.options.given.items()]
        given += [("--set", each) for each in overrides]
        given += [] if mean_response is None else [("--mean-response", f"{mean_response:g}")]
        return shlex.join(["flexrlhf", "advise", *(word for pair in given for word in pair)])

    @property
    def file_name(self) -> str:
        """Name of its YAML."""
        options, path = self.options, Path(self.options.model or "")
        model = path.parent.name if path.name == "config.json" else path.name
        training = "full" if options.lora is None else f"lora{options.lora}"
        parts = (model, options.algorithm, options.response_tokens, training, options.gpu_type, f"x{self.devices}")
        return "-".join(map(str, parts)) + ".yaml"


@dataclass(frozen=True)
class Size:
    """Devices for one way to train a model.

    options:  options of ``advise`` but for the number of devices
    least:    fewest devices; 0: no plan fits ``MOST_DEVICES``
    plans:    on ``TIMES`` as many, where one fits
    """

    options: AdviceOptions
    least: int
    plans: tuple[SizedPlan, ...]

    @property
    def other_rollout(self) -> str:
        """Rollout on the fewest devices, if it is neither the usual nor the given one."""
        chosen = self.plans[0].options.rollout if self.plans else None
        return "" if chosen is None or chosen == self.options.rollout else chosen


@dataclass(frozen=True)
class SizeTable:
    """Cells of a table.

    models:      names, directories or config files
    rank:        of adapters
    algorithms:  names
    classes:     names of device classes
    responses:   maximum response lengths
    others:      further options of ``advise``
    overrides:   of ``--set``
    mean:        mean response length; None: the maximum
    known:       options of the models of the cell in work, which all numbers of devices share
    """

    models: Sequence[str]
    rank: int
    algorithms: Sequence[str] = ("ppo",)
    classes: Sequence[str] = CLASSES
    responses: Sequence[int] = RESPONSES
    others: AdviceOptions = AdviceOptions()
    overrides: tuple[str, ...] = ()
    mean: float | None = None
    known: list[OptionEnumerator] = field(default_factory=list, compare=False, repr=False)

    @property
    def cells(self) -> list[AdviceOptions]:
        """Options of each cell, by row. Raises UserError for unknown models, device classes and settings."""
        for model in self.models:
            FoundModel.find(model, "MODEL")
        classes = list(dict.fromkeys(DeviceClass.find(name, "--gpu-type") for name in self.classes))
        rows = product(self.models, self.algorithms, self.responses, (None, self.rank))
        cells = [
            replace(self.others, model=m, algorithm=a, response_tokens=r, lora=lora, gpu_type=name)
            for m, a, r, lora in rows
            for name in classes
        ]
        for each in cells:
            # before minutes are spent on others
            self._spec(each)
        return cells

    @property
    def device_classes(self) -> list[str]:
        """Classes of the devices of all cells."""
        clusters = (Cluster.of(self._spec(each).cluster) for each in self.cells)
        return [*dict.fromkeys(name for cluster in clusters for name in cluster.classes)]

    def size(self, options: AdviceOptions) -> Size:
        """Return the devices for one cell. Raises UserError for settings that its first engines have not."""
        self.known.clear()
        ways = self.ways(options)
        least = least_count(lambda count: any(self.fits(way, count) for way in ways))
        if least is None:
            return Size(options, 0, ())
        first = self.plan_on(ways, least)
        # short of memory there, the first engine may fit more devices and be the slower one still
        tries_all = first is not None and first.options.engine != ways[0].engine
        more = (self.plan_on(ways, times * least, tries_all) for times in TIMES[1:])
        return Size(options, least, tuple(plan for plan in (first, *more) if plan is not None))

    def ways(self, options: AdviceOptions) -> list[AdviceOptions]:
        """Return ``options`` with each rollout and training engine that has the settings of the cell, in the order of
        preference. Raises UserError if the first has not."""
        # the optimizer of the second may be in host memory
        tried = dict.fromkeys(each for each in (TORCH.name, EngineFacts.offloading_engine()) if each)
        engines = tuple(tried) if options.engine is None else (options.engine,)
        rollouts = ROLLOUTS if options.rollout is None else (options.rollout,)
        found: list[AdviceOptions] = []
        specs: list[Spec] = []
        for rollout, engine in product(rollouts, engines):
            way = replace(options, engine=engine, rollout=rollout)
            try:
                spec = self._spec(way)
                self._space(spec)
            except UserError:
                if not found:
                    raise
                continue
            # an algorithm that generates nothing is the same with each rollout
            if spec not in specs:
                found.append(way)
                specs.append(spec)
        return found

    def fits(self, options: AdviceOptions, devices: int) -> bool:
        """Whether any plan fits ``devices``."""
        spec = self._spec(replace(options, gpus=devices))
        return last_resort(self._space(spec)) is not None

    def plan_on(self, ways: Iterable[AdviceOptions], devices: int, tries_all: bool = False) -> SizedPlan | None:
        """Return the recommended placement on ``devices``; None if none fits.

        An engine is taken if it is faster than the ones before it by ``FASTER``. It is tried if they have no placement
        without idle models in host memory, or ``tries_all``; a rollout is tried if none fits with those before it.
        """
        best = None
        for way in ways:
            if best is not None and (
                way.rollout != best.options.rollout or not (tries_all or best.chosen.candidate.space.offloaded)
            ):
                break
            on_devices = replace(way, gpus=devices)
            spec = self._spec(on_devices)
            source, lengths = costs_for(spec, None), lengths_for(spec, self.mean)
            # one with a lag would not be chosen
            advice = advise(
                spec, source.costs, lengths, margin=source.accuracy.tie, explains=False, max_lag=0, known=self.known
            )
            if advice.comparable:
                found = SizedPlan(on_devices, advice.best)
                if best is None or found.samples_per_second > FASTER * best.samples_per_second:
                    best = found
        return best

    def _space(self, spec: Spec) -> Space:
        return make_space(spec, costs_for(spec, None).costs, lengths_for(spec, self.mean), known=self.known)

    def _spec(self, options: AdviceOptions) -> Spec:
        return options.request().spec(self.overrides, "size")


def least_count(fits: Callable[[int], bool]) -> int | None:
    """Return the fewest devices that fit: 1, 2, 4 or whole nodes; None if ``MOST_DEVICES`` do not. More devices than
    some that fit count as fitting, too."""
    enough = next(filter(fits, _doubled()), None)
    if enough is None or enough <= 2 * DeviceClass.PER_NODE:
        return enough
    low, high = enough // 2 // DeviceClass.PER_NODE, enough // DeviceClass.PER_NODE
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * DeviceClass.PER_NODE) else (middle, high)
    return high * DeviceClass.PER_NODE


def _doubled() -> Iterator[int]:
    count = 1
    while count <= MOST_DEVICES:
        yield count
        count *= 2
