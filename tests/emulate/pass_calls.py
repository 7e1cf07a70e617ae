"""Calls of a rank inside the passes of a placed model, in the order in which engines make them.

Two layers have every order that more would have: inside a layer, and from one to the next. Replicas that are not in
lockstep have different numbers of micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nccl_rules import Await, Call, Post

from flexrlhf.placement.groups import (
    Group,
    GroupPurpose,
)
from flexrlhf.placement.placed import PlacedModel

LAYERS = range(2)
FROM_BEFORE, TO_AFTER, FROM_AFTER, TO_BEFORE = (-1, 0), (0, 1), (1, 0), (0, -1)
"""Messages between stages."""
ROOT = "root"
"""Unit of FSDP2 with the parameters outside of layers."""
Ranks = tuple[int, ...]
GroupOf = Callable[[str, Ranks], Group]


@dataclass
class PassCalls:
    """Calls of one Run of ``model``, or of one optimizer step, on ``rank``.

    key:      of the Run, the same on all ranks.
    is_ring:  whether keys and values travel around the context-parallel ranks, else heads are exchanged.
    group:    of a purpose without the model's name, and ranks.
    """

    model: PlacedModel
    rank: int
    key: tuple[object, ...]
    is_ring: bool
    group: GroupOf
    calls: list[Call] = field(default_factory=list)
    _posted: Counter[tuple[Group, bool]] = field(default_factory=Counter)
    _gathers: dict[object, object] = field(default_factory=dict)
    _reductions: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout, model = self.model.layout, self.model
        weights = GroupPurpose.WEIGHTS if layout.dims.cp > 1 else "compute"
        self._same_part = self.group(weights, layout.of_weights.dp_set(self.rank))
        self._dp = self.group("compute", layout.dp_set(self.rank))
        self._cp = self.group("cp", layout.along("cp", self.rank))
        self._stages = self.group("pp", layout.along("pp", self.rank))
        self._ends = self.group(*GroupPurpose.of_ends(layout.along("pp", self.rank)))
        self._tp = self.group("tp", next(ranks for ranks in layout.sets("tp") if self.rank in ranks))
        self._ep = self._same_experts = Group(GroupPurpose.EXPERTS, (self.rank,))
        if layout.dims.ep > 1:
            self._ep = self.group(GroupPurpose.EXPERTS, layout.along("ep", self.rank))
            self._same_experts = self.group(GroupPurpose.SAME_EXPERTS, model.expert_copy_set(self.rank))
        in_node = model.is_sharded_in_nodes
        self._shards = self.group(GroupPurpose.SHARD, model.shard_set(self.rank)) if in_node else self._same_part
        whole = self._same_part if model.split == "whole" else None
        self._copies = self.group(GroupPurpose.COPIES, model.copy_set(self.rank)) if in_node else whole
        of_library = model.engine == "deepspeed" and model.trained
        self._in_lockstep = model.split != "whole" or layout.dims.ep > 1 or of_library
        # micro-batches, and tokens that are generated
        self._count = 1 if self._in_lockstep else 1 + layout.replica(self.rank) % 2

    def forward(self) -> list[Call]:
        """Columns of rows."""
        self._lockstep()
        for _ in range(self._count):
            self._between_stages(FROM_BEFORE)
            self._forward()
            self._between_stages(TO_AFTER)
        self._collective("results of all stages", self._stages)
        return self._free()

    def generate(self) -> list[Call]:
        """Responses; context-parallel ranks generate to a part of the prompts each."""
        for _ in range(self._count):
            self._lockstep()
            self._forward(attends_alone=True)
        # a rank without rows left
        self._lockstep()
        self._collective("columns", self._cp, host=True)
        self._collective("hidden states of all stages", self._stages)
        return self._free()

    def train(self) -> list[Call]:
        """Passes of the micro-batches of one mini-batch, and the optimizer step."""
        self.backward()
        return self.step()

    def backward(self) -> list[Call]:
        """Gradients of one mini-batch."""
        self._lockstep()
        self._collective("totals", self._dp, host=True)
        if len(self._stages.ranks) > 1:
            self._in_turn()
        else:
            for _ in range(self._count):
                self._forward()
                self._backward()
        self._collective("statistics of all stages", self._stages)
        return self._free()

    def step(self) -> list[Call]:
        """The sums of gradients over ranks, and their norm."""
        if self._copies is not None:
            self._collective("gradients", self._copies, host=True)
        if self.model.layout.dims.ep > 1 and self.model.split == "whole":
            self._collective("gradients", self._same_experts, host=True)
        self._collective("partial gradients", self._tp, host=True)
        if self.rank in self._ends.ranks:
            self._collective("tied embedding", self._ends)
        if self.model.layout.dims.ep > 1:
            self._collective("norm of experts", self._ep, host=True)
        self._collective("norm", self._tp, host=True)
        self._collective("norm", self._same_part, host=True)
        return self.calls

    def _lockstep(self) -> None:
        if self._in_lockstep:
            self._collective("passes", self._same_part, host=True)

    def _forward(self, attends_alone: bool = False) -> None:
        self._gathered(ROOT, self._shards)
        for layer in LAYERS:
            self._gathered(layer, self._shards)
            if layer + 1 in LAYERS:
                # while this layer computes
                self._gather(layer + 1, self._shards)
            self._layer(layer, attends_alone)
            self._reshard(layer)
        # of logits, which are split, and of the results of all tokens
        self._collective("head", self._tp)
        if not attends_alone:
            self._collective("results", self._cp)

    def _layer(self, layer: int, attends_alone: bool = False) -> None:
        if self.model.layout.dims.cp > 1 and not attends_alone:
            self._attend()
        self._collective("attention", self._tp)
        if self.model.layout.dims.ep > 1:
            self._experts_forward(layer)
        self._collective("mlp", self._tp)

    def _attend(self) -> None:
        if self.is_ring:
            for _ in self._cp.ranks[1:]:
                self._wait(self._send_around("keys and values"))
        else:
            self._collective("heads", self._cp)
            self._collective("heads back", self._cp)

    def _experts_forward(self, layer: int) -> None:
        self._gathered(("experts", layer), self._same_experts)
        # the host reads how many tokens arrive
        self._collective("counts", self._ep, host=True)
        self._collective("tokens", self._ep)
        self._collective("outputs", self._ep)
        self._reshard(("experts", layer))

    def _backward(self) -> None:
        for layer in reversed(LAYERS):
            self._gathered(layer, self._shards)
            if layer - 1 in LAYERS:
                self._gather(layer - 1, self._shards)
            if self.model.settings.activation_checkpointing:
                self._layer(layer)
            if self.model.layout.dims.ep > 1:
                self._experts_backward(layer)
            for name in ("mlp", "weights of experts"):
                self._collective(f"gradients, {name}", self._tp)
            if self.model.layout.dims.cp > 1:
                self._attend_backward()
            for name in ("queries", "keys", "values"):
                self._collective(f"gradients, {name}", self._tp)
            self._reduce(layer, self._shards)
            self._reshard(layer)
        self._reduce(ROOT, self._shards)
        for key in self._reductions:
            self._wait(key)
        self._reductions.clear()

    def _attend_backward(self) -> None:
        if not self.is_ring:
            self._collective("gradients, heads", self._cp)
            self._collective("gradients, heads back", self._cp)
            return
        returning: object = None
        for step in range(len(self._cp.ranks)):
            is_last = step == len(self._cp.ranks) - 1
            arriving = None if is_last else self._send_around("keys and values")
            self._wait(returning)
            returning = self._send_around("gradients of keys and values")
            self._wait(arriving)
        self._wait(returning)

    def _experts_backward(self, layer: int) -> None:
        self._collective("gradients, outputs", self._ep)
        self._gathered(("experts", layer), self._same_experts)
        self._reduce(("experts", layer), self._same_experts)
        self._reshard(("experts", layer))
        self._collective("gradients, tokens", self._ep)

    def _in_turn(self) -> None:
        """One forward pass and one backward pass in turn, behind as many forward passes as there are later stages."""
        ahead = min(len(self._stages.ranks) - 1 - self._stages.ranks.index(self.rank), self._count)
        for _ in range(ahead):
            self._between_stages(FROM_BEFORE)
            self._forward()
            self._between_stages(TO_AFTER)
        if ahead < self._count:
            self._between_stages(FROM_BEFORE)
        for number in range(ahead, self._count):
            self._forward()
            self._between_stages(TO_AFTER, FROM_AFTER)
            self._backward()
            self._between_stages(TO_BEFORE, *[FROM_BEFORE] * (number < self._count - 1))
        for _ in range(ahead):
            self._between_stages(FROM_AFTER)
            self._backward()
            self._between_stages(TO_BEFORE)

    def _between_stages(self, *steps: tuple[int, int]) -> None:
        """Exchange hidden states and their gradients with neighbours of this stage, in one batch.

        steps:  from which stage to which, counted from this one.
        """
        ranks, stage = self._stages.ranks, self._stages.ranks.index(self.rank)
        places = [(stage + source, stage + destination) for source, destination in steps]
        messages = [(ranks[a], ranks[b]) for a, b in places if min(a, b) >= 0 and max(a, b) < len(ranks)]
        if messages:
            self._wait(self._post("hidden states", self._stages, messages))

    def _send_around(self, name: str) -> object:
        """Begin to send to the next context-parallel rank, and to receive from the one before."""
        ranks, index = self._cp.ranks, self._cp.ranks.index(self.rank)
        after, before = ranks[(index + 1) % len(ranks)], ranks[index - 1]
        return self._post(name, self._cp, ((self.rank, after), (before, self.rank)))

    def _gathered(self, unit: object, ranks: Group) -> None:
        """Begin to gather the weights of a unit, unless that has begun, and have the main stream wait for them."""
        self._gather(unit, ranks)
        self._wait(self._gathers.get(unit))

    def _gather(self, unit: object, ranks: Group) -> None:
        if self._gathers_in_passes and unit not in self._gathers:
            self._gathers[unit] = self._post(f"gather {unit}", ranks)

    @property
    def _gathers_in_passes(self) -> bool:
        return self.model.split != "whole"

    def _reshard(self, unit: object) -> None:
        if self.model.settings.zero == 3:
            self._gathers.pop(unit, None)

    def _reduce(self, unit: object, ranks: Group) -> None:
        if self._gathers_in_passes:
            self._reductions.append(self._post(f"reduce {unit}", ranks))

    def _free(self) -> list[Call]:
        self._gathers.clear()
        return self.calls

    def _collective(self, name: str, ranks: Group, host: bool = False) -> None:
        """Wait for a collective. ``host``: it is read, or awaited with a deadline."""
        self._wait(self._post(name, ranks))
        if host and len(ranks.ranks) > 1:
            self.calls.append(Await())

    def _post(self, name: str, ranks: Group, messages: Sequence[tuple[int, int]] = ()) -> object:
        """Begin communication and return its key; None for one rank."""
        if len(ranks.ranks) == 1:
            return None
        # a stage in the middle has more messages than the first, and as many collectives
        kind = ranks, bool(messages)
        self._posted[kind] += 1
        key = (*self.key, ranks, self._posted[kind], name)
        self.calls.append(Post(key, ranks, tuple(messages)))
        return key

    def _wait(self, key: object) -> None:
        if key is not None:
            self.calls.append(Await(key, on_device=True))
