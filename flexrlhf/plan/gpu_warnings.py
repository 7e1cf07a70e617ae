"""Warnings about settings that are slow on GPUs alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.plan import Plan
from flexrlhf.text import counted
from flexrlhf.weights.decoder_sizes import Sizes


def gpu_warnings(plan: Plan) -> Iterator[str]:
    """Yield a line for each setting of ``plan`` that is slow on its GPUs; none for CPU ranks."""
    if plan.spec.cluster.device != "cpu":
        yield from _decoding_in_lockstep(plan)
        yield from _experts_one_by_one(plan)


def _decoding_in_lockstep(plan: Plan) -> Iterator[str]:
    """Yield a line for each copy that decodes with weights or experts of other ranks."""
    copies = {plan.placement.copy_for(each) for each in plan.graph.operators if each.samples_responses}
    for copy in sorted(copies, key=lambda copy: copy.name):
        if copy.in_lockstep and (plan.spec.cluster.device == "cuda" or _classes(plan, copy)):
            shape = plan.shapes.get(copy.role)
            number = counted(_collectives(copy, None if shape is None else shape.sizes), "collective")
            yield (
                f"{copy.name} generates with {_shared(copy)}: each of up to {plan.lengths.response} tokens takes "
                f"{number} of its ranks, and the host waits for the GPU; use rollout: {{engine: vllm}}, or "
                f"{{engine: torch}} for a copy with whole weights"
            )


def _shared(copy: PlacedModel) -> str:
    parts = [f"weights sharded by zero: {copy.settings.zero}"] if copy.split != "whole" else []
    sharers = copy.layout.dims.expert_parts
    return " and ".join(parts + [f"experts on {sharers} ranks"] * (sharers > 1))


def _collectives(copy: PlacedModel, sizes: Sizes | None) -> int:
    """Return the collectives of one token: whether any rank has rows left; of each layer its weights, and three
    exchanges of its experts: counts, tokens and outputs."""
    layers = 1 if sizes is None else sizes.layers
    gathered = 1 + layers if copy.settings.zero == 3 and copy.split != "whole" else 0
    exchanged = 3 * (layers if sizes is None else sizes.sparse_layers) if copy.layout.dims.expert_parts > 1 else 0
    return 1 + gathered + exchanged


def _experts_one_by_one(plan: Plan) -> Iterator[str]:
    """Yield a line for each device class and type for whose experts torch has no kernel."""
    found = defaultdict[tuple[str, str], list[str]](list)
    for model in plan.placement.models:
        shape = plan.shapes.get(model.role)
        has_experts = shape is not None and shape.sizes is not None and shape.sizes.experts is not None
        for name in _classes(plan, model) if has_experts and model.facts.trains else ():
            dtype = model.settings.dtype
            if dtype != "bfloat16" or not DeviceClass.KNOWN[name].has_grouped_mm(2):
                found[name, dtype].append(str(model.name))
    majors = " and ".join(map(str, DeviceClass.GROUPED_CAPABILITIES))
    for (name, kind), models in found.items():
        yield (
            f"{name} computes the products of experts of {', '.join(models)} one after the other, in {kind}: torch "
            f"has a kernel for all of them in bfloat16 on GPUs of compute capability {majors}"
        )


def _classes(plan: Plan, model: PlacedModel) -> list[str]:
    """Return the classes of GPUs, of which figures are known, that ``model`` is on."""
    names = {plan.cluster.devices[rank].device_class for rank in model.ranks}
    return sorted(names & DeviceClass.KNOWN.keys())
