"""Experts over ranks: results are transformers' own, and the host waits once in a layer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from host_reads import host_reads
from small_models import TINY
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from flexrlhf.config.model_settings import LoraSpec
from flexrlhf.engines.experts import ExpertSplit, add_expert_adapters
from flexrlhf.engines.torch.fsdp import apply_fsdp

LAYERS = 3
SIZES = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": LAYERS}


@pytest.fixture(scope="module")
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def model_of() -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY, "model_type": "qwen3_moe", **SIZES}))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def trained(model: PreTrainedModel) -> list[Tensor]:
    """The output, and gradients of all parameters."""
    tokens = torch.arange(24).view(2, 12) % TINY["vocab_size"]
    logits = model(input_ids=tokens, use_cache=False).logits
    logits.square().sum().backward()
    return [logits.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize("shared", ["ep", "tp", "both", "adapters"])
def test_the_host_waits_once_in_a_layer_and_results_are_the_same(shared: str, alone: dist.ProcessGroup) -> None:
    """Once in its forward pass, and once where it is computed again; not at all if no other rank has experts."""
    model, own = model_of(), model_of()
    if shared == "adapters":
        add_expert_adapters(model, LoraSpec(rank=2), ["gate_up_proj", "down_proj"])
    else:
        groups = (alone if shared in (each, "both") else None for each in ("ep", "tp"))
        ExpertSplit(*groups).apply(model, model.config)
    own.config._experts_implementation = "grouped_mm"
    found: list[Tensor] = []
    reads = host_reads(lambda: found.extend(trained(model)))
    waits = {line: number for line, number in reads.items() if "masking_utils" not in line}
    line = "experts.py: sent, received = torch.stack([counts, arriving]).sum(2).tolist()"
    assert waits == ({} if shared == "adapters" else {line: 2 * LAYERS})
    (logits, *gradients), (own_logits, *own_gradients) = found, trained(own)
    assert torch.equal(logits, own_logits)
    if shared != "adapters":
        for one, other in zip(gradients, own_gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("has_units", [False, True], ids=["with other weights", "units of their own"])
def test_the_next_layer_is_gathered_before_the_host_waits(has_units: bool, alone: dist.ProcessGroup) -> None:
    """By the names of FSDP2's events."""
    model = model_of()
    mesh = DeviceMesh.from_group(alone, "cpu", mesh_dim_names=("dp",))
    ExpertSplit(alone, None).apply(model, model.config)
    apply_fsdp(model, mesh, 3, torch.float32, mesh if has_units else None)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        trained(model)
    names = [event.name for event in sorted(profiled.events(), key=lambda event: event.time_range.start)]
    # one in each layer, next to the read
    waits = [place for place, name in enumerate(names) if name == "aten::searchsorted"]
    assert len(waits) == 2 * LAYERS
    for number, (forward, backward) in enumerate(zip(waits[: LAYERS - 1], waits[-2 : LAYERS - 1 : -1], strict=True)):
        for unit in ("", ".mlp.experts")[: 1 + has_units]:
            assert names.index(f"FSDP::forward_prefetch for model.layers.{number + 1}{unit}") < forward
            assert names.index(f"FSDP::backward_prefetch for model.layers.{number}{unit}") < backward
