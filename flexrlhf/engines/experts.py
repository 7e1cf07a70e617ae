"""Experts of which each rank has a part: tokens travel to the ranks of their experts, and outputs back.

Tensor-parallel ranks have the same tokens: each computes the ones of its own experts, and outputs are summed over them.
So they have whole experts, too, whose products are larger than those of slices of all, and send a part of the tokens.

It is a function registered with transformers: a model's own router and block call it, whatever the family. Ranks of
a group have different tokens, so all of them call the model equally often (``lockstep`` in ``passes.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import grouped_mm, pad
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from flexrlhf.comm.reduce import Summed
from flexrlhf.config.model_settings import LoraSpec
from flexrlhf.engines.tensor_parallel import SumOfGradients
from flexrlhf.weights.parameters import ParameterName

OVER_RANKS = "over_ranks"
"""Name of the function in transformers."""
GROUPED_BYTES = 16
"""Bytes of which rows of matrices in grouped products are a multiple."""


def has_experts(module: nn.Module | None) -> bool:
    """Whether ``module`` has the experts of a layer, in one tensor for each matrix."""
    return hasattr(module, "gate_up_proj") and isinstance(getattr(module, "num_experts", None), int)


@dataclass(frozen=True)
class ExpertSplit:
    """Ranks that each have a block of the experts of a layer, in the order of (ep, tp).

    ep:  ranks with other tokens; None: this one alone.
    tp:  ranks with the same tokens; None: this one alone.
    """

    ep: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None

    @property
    def num_ep(self) -> int:
        return 1 if self.ep is None else self.ep.size()

    @property
    def num_tp(self) -> int:
        return 1 if self.tp is None else self.tp.size()

    @property
    def tp_index(self) -> int:
        return 0 if self.tp is None else self.tp.rank()

    @property
    def block(self) -> int:
        """Number of this rank's block."""
        return (0 if self.ep is None else self.ep.rank()) * self.num_tp + self.tp_index

    def apply(self, model: nn.Module, config: PreTrainedConfig) -> frozenset[str]:
        """Leave each rank its block of the experts of every layer of ``model``, as many as any other; return
        the names of their parameters.

        ``config``: of the layers. Parameters may be on the meta device.
        """
        names, number = set[str](), self.num_ep * self.num_tp
        for path, module in model.named_modules():
            if has_experts(module):
                module.expert_split = self
                module.num_experts //= number
                for name, parameter in list(module.named_parameters()):
                    part = parameter.detach().chunk(number, 0)[self.block].clone()
                    owner, _, own = name.rpartition(".")
                    setattr(module.get_submodule(owner), own, nn.Parameter(part, requires_grad=parameter.requires_grad))
                    names.add(f"{path}.{name}")
        if names:
            config._experts_implementation = OVER_RANKS
        return frozenset(names)


@torch.no_grad()
def add_expert_adapters(model: PreTrainedModel, lora: LoraSpec, targets: Sequence[str]) -> None:
    """Add to the weights ``targets`` of all experts an A (experts, rank, inputs) and a B (experts, outputs, rank).

    peft has a matrix A and a matrix B for all experts, and adds their products to the weights in every pass, with
    gradients as large as these. Here tokens are multiplied by the matrices of their experts.
    """
    for module in model.modules():
        if has_experts(module):
            adapter = ParameterName.ADAPTER
            module.scaling, module._active_adapter = {adapter: lora.scale}, [adapter]
            matrices = nn.Module(), nn.Module()
            for name in (name for name, _ in list(module.named_parameters()) if name in targets):
                experts, outputs, inputs = getattr(module, name).shape
                rows = experts * lora.rank
                # random numbers are peft's, which makes two linear layers and then initialises the first one again
                first, _ = nn.Linear(inputs, rows, bias=False), nn.Linear(rows, outputs, bias=False)
                nn.init.kaiming_uniform_(first.weight, a=5**0.5)
                matrices[0].register_parameter(name, nn.Parameter(first.weight.view(experts, lora.rank, inputs)))
                matrices[1].register_parameter(name, nn.Parameter(torch.zeros(experts, outputs, lora.rank)))
            module.lora_A, module.lora_B = (nn.ModuleDict({adapter: matrix}) for matrix in matrices)
            module.expert_split = ExpertSplit(None, None)
    model.config._experts_implementation = OVER_RANKS


def experts_over_ranks(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum (T, H) of the outputs of the experts of each token.

    hidden:   (T, H) tokens of this rank.
    chosen:   (T, k) experts of each token, numbered over all ranks.
    weights:  (T, k) of their outputs.
    """
    split: ExpertSplit = module.expert_split
    (tokens, top), here, flat = chosen.shape, module.num_experts, chosen.reshape(-1)
    if split.tp is not None:
        hidden, weights = (SumOfGradients.apply(each, split.tp) for each in (hidden, weights))
    order, counts = _by_expert(flat, here, split)
    arriving = counts
    if split.ep is not None:
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=split.ep)
    if split.ep is None and split.tp is None:
        sent = received = [len(flat)]
    else:
        # the only read of a layer: a host that waits for a GPU launches nothing meanwhile
        sent, received = torch.stack([counts, arriving]).sum(2).tolist()
    places = order[: sum(sent)]
    rows = _TokenExchange.apply(hidden[places // top], sent, received, split.ep)
    numbers = torch.arange(here, device=flat.device).repeat(split.num_ep)
    experts = numbers.repeat_interleave(arriving.reshape(-1), output_size=sum(received))
    returned = _TokenExchange.apply(_own_experts(module, rows, experts), received, sent, split.ep)
    # as transformers': each output is rounded after its weight, and the sum has the type of the weighted outputs
    weighted = returned * weights.reshape(-1)[places].unsqueeze(-1)
    outputs = weighted.new_zeros(tokens * top, weighted.shape[1]).index_copy_(0, places, weighted)
    total = outputs.view(tokens, top, -1).sum(1).to(hidden.dtype)
    return total if split.tp is None else Summed.apply(total, split.tp)


def _by_expert(chosen: Tensor, here: int, split: ExpertSplit) -> tuple[Tensor, Tensor]:
    """Return the places (n,) in ``chosen`` (n,) by the expert, first the ones that this rank sends, and the number
    (ep, here) of these for each expert of its ``ep`` ranks, of which each has ``here`` experts."""
    number = here * split.num_ep
    if split.tp is not None:
        # of the choices of these tokens the other ranks with the same tokens compute theirs
        block = chosen // here
        there = block // split.num_tp * here + chosen % here
        chosen = there.masked_fill_(block % split.num_tp != split.tp_index, number)
    ordered, order = torch.sort(chosen, stable=True)
    return order, _ends(ordered, number).diff(prepend=order.new_zeros(1)).view(split.num_ep, here)


def _ends(ordered: Tensor, number: int) -> Tensor:
    """Return for each of ``number`` experts the places up to its last one in ``ordered`` (n,), int64."""
    # bincount would read its largest value on the host
    return torch.searchsorted(ordered, torch.arange(number, device=ordered.device), right=True)


def _own_experts(module: Any, rows: Tensor, experts: Tensor) -> Tensor:
    """Return the outputs (S, H) of this rank's ``experts`` (S,), one for each of ``rows`` (S, H)."""
    if len(rows):
        return _outputs(module, rows, experts)
    # weights that nobody asked for have gradients, too: of zero, since FSDP2 sums them on all ranks or on none
    return _outputs(module, rows.new_zeros(1, rows.shape[1]), experts.new_zeros(1))[:0] + rows


def _outputs(module: Any, rows: Tensor, experts: Tensor) -> Tensor:
    if not hasattr(module, "lora_A"):
        return grouped_mm_experts_forward(module, rows, experts.unsqueeze(1), rows.new_ones(len(rows), 1))
    ordered, order = torch.sort(experts, stable=True)
    ends = _ends(ordered, module.num_experts).int()
    inside = module._apply_gate(_adapted(module, "gate_up_proj", rows[order], ends))
    outputs = _adapted(module, "down_proj", inside, ends)
    return torch.empty_like(outputs).index_copy(0, order, outputs)


def _adapted(module: Any, name: str, rows: Tensor, ends: Tensor) -> Tensor:
    """Return the products of ``rows``, by expert, with a weight of their experts and its adapters.

    ends:  for each expert the number of the rows up to its last one.
    """

    def times(rows: Tensor, weight: Tensor) -> Tensor:
        return grouped_mm(rows.to(weight.dtype), weight.transpose(1, 2), offs=ends)

    outputs, (adapter,) = times(rows, getattr(module, name)), module._active_adapter
    if adapter not in module.lora_A or not hasattr(module.lora_A[adapter], name):
        return outputs
    a, b = (getattr(matrices[adapter], name) for matrices in (module.lora_A, module.lora_B))
    if surplus := -a.shape[1] % (GROUPED_BYTES // a.element_size()):
        a, b = pad(a, (0, 0, 0, surplus)), pad(b, (0, surplus))
    return outputs.add_(times(times(rows, a), b), alpha=module.scaling[adapter])


class _TokenExchange(Function):
    """Rows (n, H) by the rank that they go to, exchanged for those that come from each rank."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return rows.view_as(rows)
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


ALL_EXPERTS_FUNCTIONS.register(OVER_RANKS, experts_over_ranks)
