"""Header of a run: its title, and where its models are."""

from __future__ import annotations

from flexrlhf.plan.placement_text import computing_text
from flexrlhf.plan.plan import Plan
from flexrlhf.text import counted, ranks_text, span_of


def run_title(plan: Plan, device: str) -> str:
    """Return a line on a run: its algorithm, its strategy and its devices. ``device``: cpu or cuda."""
    spec, where = plan.spec, counted(plan.placement.num_ranks, "CPU rank" if device == "cpu" else "GPU")
    run = f"{spec.name}: {spec.algorithm.name}, {counted(spec.steps, 'step')}, {plan.strategy} on {where}"
    return run + spec.debug.thrown_text


def where_models_are(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Return a row for each placed model: name, ranks, node and device class, engine, and whether it is trained."""
    rows = []
    for model in plan.placement.models:
        devices = [plan.cluster.devices[rank] for rank in model.ranks]
        nodes = tuple(sorted({device.node for device in devices}))
        classes = sorted({device.device_class for device in devices} - {"any"})
        where = " ".join([f"{'node' if len(nodes) == 1 else 'nodes'} {span_of(nodes)}", *classes])
        role = "trained" if model.trained else f"copy of {model.role}" if model.follows else "frozen"
        rows.append((model.name, ranks_text(model.ranks), where, computing_text(model), role))
    return tuple(rows)
