"""Header of a run: its title, and a table of the placed models."""

from __future__ import annotations

from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import computing_text
from flexrlhf.text import counted, ranks_text, span_of


def title_of(plan: Plan, device: str) -> str:
    """Return the run, its algorithm, its strategy and its devices. ``device``: cpu or cuda."""
    spec, name = plan.spec, "CPU rank" if device == "cpu" else "GPU"
    where = counted(plan.placement.num_ranks, name)
    return f"{spec.name}: {spec.algorithm.name}, {counted(spec.steps, 'step')}, {plan.strategy} on {where}"


def places_of(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Return a row for each placed model: name, ranks, node and device class, engine, and whether it is trained."""
    return tuple(_row(plan, model) for model in plan.placement.models)


def _row(plan: Plan, model: PlacedModel) -> tuple[str, ...]:
    devices = [plan.cluster.devices[rank] for rank in model.ranks]
    nodes = tuple(sorted({device.node for device in devices}))
    classes = sorted({device.device_class for device in devices} - {"any"})
    where = " ".join([f"{'node' if len(nodes) == 1 else 'nodes'} {span_of(nodes)}", *classes])
    role = "trained" if model.trained else f"copy of {model.role}" if model.follows else "frozen"
    return (model.name, ranks_text(model.ranks), where, computing_text(model), role)
