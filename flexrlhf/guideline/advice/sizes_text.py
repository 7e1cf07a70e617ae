"""Tables of the fewest devices on which models train: one line a plan for a terminal, one a row of cells for a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from flexrlhf.api import Plan, bytes_text, rate, table
from flexrlhf.guideline.advice.request import AdviceOptions
from flexrlhf.guideline.advice.sizes import MOST_DEVICES, TIMES, Size, SizedPlan, SizeTable
from flexrlhf.guideline.costs.profiles import accuracy_by_figures
from flexrlhf.guideline.simulation.inputs import engine_family
from flexrlhf.guideline.simulation.simulation_text import seconds_text
from flexrlhf.guideline.simulation.usage import THOUSAND, Prices, RunUsage, usage_of
from flexrlhf.guideline.simulation.usage_text import amount_text, duration_text, share_text

GENERATOR = "<!-- flexrlhf size "
"""Start of the first line of a Markdown page, which has the command that writes it."""
NONE = f"over {MOST_DEVICES}"
ON_HOST = "host"
TableCells = tuple[str, ...]


@dataclass(frozen=True)
class SizesText:
    """Text of a table and its cells.

    table:    the requests
    sizes:    a result for each of its cells
    command:  the command line
    prices:   of devices; None: no money is printed
    """

    table: SizeTable
    sizes: Sequence[Size]
    command: str
    prices: Prices | None = None

    def terminal(self) -> str:
        """Return a line for each cell, with the plan on the fewest devices, then one on its speed and cost."""
        names = len(self._names()) + 1
        plans, costs = [*self.lines()], [*self.costs()]
        lines = table(plans, "<" * names + "><<" + ">" * (len(plans[0]) - names - 3))
        lines += ["", *table(costs, "<" * names + ">" * (len(costs[0]) - names))]
        notes = [self.cost_note, *self.notes()]
        return "\n".join([self.title, *(f"  {line}".rstrip() for line in [*lines, "", *notes])])

    def markdown(self) -> str:
        """Return a page with a row for each model, length and kind of training, and a column for each class."""
        head, *rows = self.grid()
        lines = [head, ("---",) * len(head), *rows]
        cells = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        notes = "\n".join(f"- {note}" for note in self.notes())
        start = f"{GENERATOR}writes this page -->\n# Devices that a model needs"
        return f"{start}\n\n{self.title}.\n\n{cells}\n\n{notes}\n\n```bash\n{self.command}\n```\n"

    @property
    def title(self) -> str:
        """Description of the runs in a sentence."""
        plans = [plan.chosen.plan for size in self.sizes for plan in size.plans]
        runs = dict.fromkeys(map(_run_text, plans))
        mean = "as long as they may be" if self.table.mean is None else f"of {self.table.mean:g} tokens on average"
        return f"{'; '.join(runs) or 'no plan fits'}; responses are {mean}"

    def lines(self) -> Iterator[TableCells]:
        """Yield the head and a row for each cell."""
        speeds = ("samples/s", *(f"{times} x" for times in TIMES[1:]))
        plan = ("engine", "in host memory", "memory", "s/step")
        yield (*self._names(), "class", "devices", *plan, *speeds)
        for size in self.sizes:
            yield (*self._names(size.options), size.options.gpu_type or "", *_cells(size))

    def costs(self) -> Iterator[TableCells]:
        """Yield the head and a row for each cell with a plan, on the speed and cost of a run on the fewest devices."""
        money = () if self.prices is None else ("price", f"of {THOUSAND:,} steps")
        usage = ("devices", "tokens/s", "per GPU", "MFU", "all steps", "GPU-hours", *money)
        yield (*self._names(), "class", *usage)
        for size in self.sizes:
            if size.plans:
                usage = _usage_cells(usage_of(size.plans[0].chosen.simulation, self.prices))
                yield (*self._names(size.options), size.options.gpu_type or "", *usage)

    @property
    def cost_note(self) -> str:
        """Sentence on the columns of ``costs``; all runs have as many steps."""
        steps = next((plan.chosen.plan.spec.steps for size in self.sizes for plan in size.plans), 0)
        return f"tokens/s: of prompts and responses, on the fewest devices; all steps: their time, of {steps:,} steps"

    def grid(self) -> Iterator[TableCells]:
        """Yield the head and a row for all classes."""
        yield (*self._names(), *dict.fromkeys(size.options.gpu_type or "" for size in self.sizes))
        for names, sizes in groupby(self.sizes, lambda size: self._names(size.options)):
            yield (*names, *map(_short, sizes))

    def _names(self, options: AdviceOptions | None = None) -> TableCells:
        """Return the cells that name a row but for the class; without ``options`` their titles. A table of one
        algorithm names it above."""
        if options is None:
            names = ["model", "algorithm", "response", "training"]
        else:
            training = "full" if options.lora is None else f"LoRA {options.lora}"
            names = [options.model or "", options.algorithm or "", str(options.response_tokens), training]
        return tuple(names if len(self.table.algorithms) > 1 else [names[0], *names[2:]])

    def notes(self) -> Iterator[str]:
        """Yield sentences on the columns."""
        yield (
            f"devices: the fewest of 1, 2, 4, 8 or whole nodes of 8 on which a plan fits, up to {MOST_DEVICES}; "
            f"samples/s: predicted on these, and on {' and '.join(map(str, TIMES[1:]))} times as many"
        )
        families = dict.fromkeys(engine_family(plan.chosen.plan) for size in self.sizes for plan in size.plans)
        for each in map(accuracy_by_figures, families):
            which = f" ({each.name})" if len(families) > 1 else ""
            times = f"{each.low:.3g} to {each.high:.3g} times the predicted seconds"
            yield f"measured steps take {times}, in {each.share:.0%} of cases{which}"
        for rollout in dict.fromkeys(size.other_rollout for size in self.sizes if size.other_rollout):
            yield f"{rollout}: generates, since the usual engine, with weights of its own, needs more devices"
        yield f"({ON_HOST}): optimizer states (deepspeed), or models while others compute, are in host memory"
        plan = next((plan for size in self.sizes for plan in size.plans), None)
        if plan is not None:
            command = plan.command(self.table.overrides, self.table.mean)
            yield f"each is a plan of `advise`, the first of `{command}`; `-o DIRECTORY` writes the YAMLs of all"


def _usage_cells(usage: RunUsage) -> TableCells:
    money = (usage.money(usage.steps), usage.money(THOUSAND))
    return (
        str(usage.num_devices),
        *(rate(speed) for speed in (usage.tokens_per_second, usage.tokens_per_device)),
        "-" if usage.mfu is None else share_text(usage.mfu),
        duration_text(usage.duration),
        amount_text(usage.device_hours),
        *(amount_text(each) for each in money if each is not None),
    )


def is_sizes(text: str) -> bool:
    """Whether a text is a page of ``SizesText.markdown``."""
    return text.startswith(GENERATOR)


def _run_text(plan: Plan) -> str:
    rows, roles = plan.batch, plan.graph.roles
    return (
        f"{plan.spec.algorithm.name} with {', '.join(roles)}: {rows.num_new} prompts x {rows.samples_per_prompt} a "
        f"step, prompts of {plan.lengths.prompt} tokens"
    )


def _cells(size: Size) -> TableCells:
    """Return devices, engine, host memory, memory, time and speeds of a cell."""
    first = next(iter(size.plans), None)
    if first is None:
        return (NONE, *[""] * (4 + len(TIMES)))
    chosen, speeds = first.chosen, _speeds(size)
    memory = f"{bytes_text(int(chosen.peak))} {chosen.share:.0%}"
    return (
        str(first.devices),
        ", ".join(filter(None, (first.options.engine, size.other_rollout))),
        ", ".join(_on_host(first)),
        memory,
        seconds_text(chosen.seconds).removesuffix(" s"),
        *speeds,
    )


def _on_host(plan: SizedPlan) -> Iterator[str]:
    """Yield the tensors that a plan has in host memory, the last with the bytes that a node needs."""
    planned = plan.chosen.plan
    settings = [model.settings for model in planned.placement.models]
    names = ["optimizers"] if any(each.offload_optimizer for each in settings) else []
    names += ["activations"] if any(each.offload_activations for each in settings) else []
    names += ["idle models"] if plan.chosen.candidate.space.offloaded else []
    if names:
        size = planned.cluster.most_on_node * max(memory.loaded_host_bytes for memory in planned.memories)
        yield from (*names[:-1], f"{names[-1]} {bytes_text(size)}")


def _short(size: Size) -> str:
    """Return devices and speeds of a cell."""
    first = next(iter(size.plans), None)
    if first is None:
        return NONE
    marks = ", ".join(filter(None, (ON_HOST if any(_on_host(first)) else "", size.other_rollout)))
    mark = f" ({marks})" if marks else ""
    return f"{first.devices}{mark}: {' / '.join(_speeds(size))}"


def _speeds(size: Size) -> list[str]:
    """Return the samples per second on each multiple of the devices, ``-`` where none fits."""
    found = {plan.devices: plan.samples_per_second for plan in size.plans}
    return [f"{found[count]:.3g}" if (count := times * size.least) in found else "-" for times in TIMES]
