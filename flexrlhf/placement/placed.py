"""Placed models: copies of a role's weights on given ranks; together the placement of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, Self, TypeVar

from flexrlhf.config.axes import OF_EXPERTS, OF_PARTS
from flexrlhf.config.engines import EngineFacts, Split
from flexrlhf.config.model_settings import DTYPE_BYTES, Dtype, Head, LoraSpec, ModelSpec, ShadowSpec
from flexrlhf.config.placement_settings import OperatorPlacement
from flexrlhf.config.spec import RolloutSpec
from flexrlhf.errors import Alternative, SettingError, either
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.layout import Layout

Found = TypeVar("Found")
SHADOW = "shadow"
ROLLOUT = "rollout"


class ModelName(str):
    """Name of a placed model: ``role`` for the copy that is trained or frozen, ``role.copy`` for one that follows it.

    A copy is called shadow, rollout, or as the first operator that it computes if operators are placed. It is a string,
    so that it serves as a key of YAML mappings and in messages; this class alone takes it apart.

    role:  ``actor`` of ``actor.shadow``.
    copy:  ``shadow``, ``rollout``, an operator, or nothing.
    """

    role: str
    copy: str

    def __new__(cls, text: str) -> Self:
        name = super().__new__(cls, text)
        name.role, _, name.copy = text.partition(".")
        return name

    @classmethod
    def of(cls, role: str, copy: str = "") -> Self:
        """Return the name of the ``copy`` of ``role``."""
        return cls(f"{role}.{copy}" if copy else role)

    @classmethod
    def shadow_of(cls, role: str) -> Self:
        """Return the name of the shadow of ``role``."""
        return cls.of(role, SHADOW)

    @classmethod
    def rollout_of(cls, role: str) -> Self:
        """Return the name of the rollout engine of ``role``."""
        return cls.of(role, ROLLOUT)

    @property
    def is_shadow(self) -> bool:
        return self.copy == SHADOW

    @property
    def is_rollout(self) -> bool:
        return self.copy == ROLLOUT


class PlacedOperator(Protocol):
    """Operator, as far as its placement depends on it (``Operator`` in operators/graph.py)."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def on_trained(self) -> bool: ...
    @property
    def every(self) -> int: ...
    @property
    def adapters(self) -> bool: ...


@dataclass(frozen=True)
class PlacedModel:
    """One copy of a role's weights on given ranks.

    name:         role and copy.
    layout:       its ranks, and how they form replicas.
    trained:      whether it has an optimizer; other copies of a role follow by Sync.
    settings:     how this copy computes.
    rollout:      settings of a copy that only generates.
    head:         follows from the columns that its operators compute.
    operator:     the first operator that it computes, where operators are placed; else nothing.
    is_hybrid:    whether it is a rollout engine that is filled to generate, and freed afterwards.
    is_kept:      whether it is a shadow, where operators are placed.
    sharded_over: replicas of the weights in a node, over which they are sharded; 0: all replicas.
    keeps_start:  whether it has a frozen copy of the adapters that it goes on training.
    """

    name: ModelName
    layout: Layout
    trained: bool
    settings: ModelSpec = field(default=ModelSpec(), hash=False)
    rollout: RolloutSpec | None = field(default=None, hash=False)
    head: Head = "causal"
    operator: str = ""
    is_hybrid: bool = False
    is_kept: bool = False
    sharded_over: int = 0
    keeps_start: bool = False

    @property
    def role(self) -> str:
        return self.name.role

    @property
    def engine(self) -> str:
        return self.settings.engine

    @cached_property
    def facts(self) -> EngineFacts:
        return self.settings.facts

    @cached_property
    def split(self) -> Split:
        """Split of the weights over replicas between passes."""
        return "whole" if self.layout.of_weights.dp == 1 else self.facts.split(self.settings.zero)

    @property
    def in_lockstep(self) -> bool:
        """Whether its ranks call it equally often: in every pass they gather weights, or send tokens to experts."""
        return self.split != "whole" or self.layout.dims.expert_parts > 1

    @property
    def shares_passes(self) -> bool:
        """Whether ranks compute passes together: in lockstep, or each a part of every pass."""
        return self.in_lockstep or self.layout.width > 1

    @property
    def keeps_slots(self) -> bool:
        """Whether its slots keep the rows of episodes between turns (``TorchEngine.advance``)."""
        return self.facts.plain_modules and not self.shares_passes

    @property
    def num_shards(self) -> int:
        """Replicas of the weights that store different parts of them between passes."""
        return 1 if self.split == "whole" else self.sharded_over or self.layout.of_weights.dp

    def shard_set(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same part of the model as ``rank`` that together store its weights."""
        layout = self.layout.of_weights
        first = layout.replica(rank) // self.num_shards * self.num_shards
        return layout.dp_set(rank)[first : first + self.num_shards]

    def copy_set(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same part of the model as ``rank`` that store the same shard of it."""
        layout = self.layout.of_weights
        return layout.dp_set(rank)[layout.replica(rank) % self.num_shards :: self.num_shards]

    def expert_copy_set(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have the same experts as ``rank``, of those that together store all weights."""
        layout = self.layout.of_weights
        number, parts = self.num_shards if self.split != "whole" else layout.dp, layout.dims.expert_parts
        first = layout.replica(rank) // number * number
        return layout.dp_set(rank)[first : first + number][layout.replica(rank) % parts :: parts]

    @property
    def gather_sets(self) -> tuple[tuple[int, ...], ...]:
        """Smallest sets of ranks that together store all weights."""
        replicas, number = self.layout.of_weights.replica_sets, max(self.num_shards, self.layout.dims.expert_parts)
        if number == len(replicas):
            return (self.ranks,)
        return tuple(sum(replicas[first : first + number], ()) for first in range(0, len(replicas), number))

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.layout.ranks

    @property
    def is_shadow(self) -> bool:
        return self.name.is_shadow or self.is_kept

    def with_passes(self, tokens: int | None) -> PlacedModel:
        """Return the model with so many computed tokens in a pass; None: as it is."""
        if tokens is None:
            return self
        return replace(self, settings=self.settings.model_copy(update={"micro_batch_tokens": tokens}))

    @property
    def follows(self) -> bool:
        """Whether its weights come from another copy by Sync."""
        return bool(self.name.copy)

    @property
    def is_of_operators(self) -> bool:
        """Whether it is a further copy, for operators that are placed otherwise than the training of its role."""
        return self.follows and bool(self.operator)

    @property
    def is_transient(self) -> bool:
        """Whether its weights exist only from a Sync to its last call in a step.

        With adapters they stay, because a Sync brings the adapters alone.
        """
        return self.is_hybrid or (self.is_filled_for_calls and self.rollout is None and self.settings.lora is None)

    @property
    def is_filled_for_calls(self) -> bool:
        """Whether a Sync brings its weights before its first call in a step, else after training."""
        return self.is_hybrid or (self.is_of_operators and not self.is_kept)

    @property
    def has_cache(self) -> bool:
        """Whether keys and values have memory of their own between calls; else a call allocates them."""
        return self.rollout is not None and self.facts.cache_block > 0

    @property
    def zero_text(self) -> str:
        """ZeRO stage, and whether each node stores all shards."""
        return f"{self.settings.zero}" + " in each node" * self.is_sharded_in_nodes

    @property
    def computing_text(self) -> str:
        """Engine, and sharding and dtype if they are not the default."""
        settings = self.settings
        shown = [f"{name} {degree}" for name, degree in self.layout.degrees.items()]
        shown += [f"zero {self.zero_text}"] if settings.zero else []
        shown += [settings.dtype] if settings.dtype != "float32" else []
        shown += ["lora"] if settings.lora is not None else []
        shown += ["child process"] if self.rollout is not None and self.rollout.process == "child" else []
        return " ".join([settings.engine, *shown])

    def key(self, setting: str) -> str:
        """Return the YAML key of ``setting``; settings that a copy's section lacks are its role's."""
        return ".".join(self.place_of(setting))

    def refusal(self, setting: str, reason: str, allowed: tuple[object, ...] = ()) -> SettingError:
        """Return the error of ``setting``. ``allowed``: the values that alone work; empty: unknown."""
        place = self.place_of(setting)
        return SettingError.of(*place, reason, (Alternative(*place, allowed, is_all=True),) if allowed else ())

    def place_of(self, setting: str) -> tuple[str, str]:
        """Return the section of the YAML and the name there of ``setting``."""
        if self.operator and setting in OperatorPlacement.model_fields:
            return f"placement.operators.{self.operator}", setting
        if self.rollout is not None:
            own = {"generate_tokens": "kv_tokens"}.get(setting, setting)
            return ("rollout", own) if own in RolloutSpec.model_fields else (f"models.{self.role}", setting)
        section = f".{SHADOW}" if self.is_shadow and setting in ShadowSpec.model_fields else ""
        return f"models.{self.role}{section}", setting

    @property
    def is_sharded_in_nodes(self) -> bool:
        """Whether parts of a data-parallel group, such as the ranks of a node, each store all of the model's state."""
        return 1 < self.num_shards < self.layout.of_weights.dp

    def sharded_on(self, cluster: Cluster) -> PlacedModel:
        """Return the model with the number of replicas over which its state is sharded by its setting ``shard``.

        Raises UserError unless every node has equally many of its replicas, and several.
        """
        if self.settings.shard == "all" or self.split == "whole":
            return self
        counts = Counter(cluster.node_of(ranks[0]) for ranks in self.layout.of_weights.replica_sets)
        least, most = min(counts.values()), max(counts.values())
        if least < most:
            few, many = (next(node for node, count in counts.items() if count == each) for each in (least, most))
            raise self.refusal(
                "shard",
                f"node needs as many replicas of {self.name} on each of its nodes, found {least} on "
                f"node {few} and {most} on node {many}; use all, or place {max(2, least)} on each",
            )
        if most == 1:
            raise self.refusal(
                "shard",
                f"node needs several replicas of {self.name} on each of its nodes, found 1; use all, or a smaller tp",
            )
        if most % (parts := self.layout.dims.expert_parts):
            raise self.refusal(
                "ep",
                f"{parts} does not divide the {most} replicas of {self.name} on a node, over which shard node shards; "
                f"use shard all, or ep {either(n for n in range(1, most + 1) if most % n == 0)}",
            )
        return replace(self, sharded_over=0 if len(counts) == 1 else most)

    def own_communicators(self, has_experts: bool) -> int:
        """Return the communicators of NCCL that vLLM has of its own on each rank: of ``tp``, of experts among the same
        ranks, and two between stages. Each has as much memory as one of ours: 0.48 GB for ``tp`` 8 (vLLM PR 46234)."""
        tp, pp = self.settings.tp > 1, self.settings.pp > 1
        return tp + (tp and has_experts) + 2 * pp

    @property
    def item_bytes(self) -> int:
        """Bytes of one number of the model's dtype."""
        return self.settings.item_bytes

    def sent_dtype(self, dtype: Dtype | None) -> Dtype:
        """Return the type in which weights are sent: that of this copy, or ``dtype`` (``sync.dtype``) if it is smaller.

        The copy then has the rounded values in its own type, also where a rank copies from itself: results do not
        depend on what crosses.
        """
        own = self.settings.dtype
        return dtype if dtype is not None and DTYPE_BYTES[dtype] < DTYPE_BYTES[own] else own

    def sent_item_bytes(self, dtype: Dtype | None) -> int:
        """Return the bytes of one number of ``sent_dtype``."""
        return DTYPE_BYTES[self.sent_dtype(dtype)]

    def is_filled_in_place(self, source: PlacedModel) -> bool:
        """Whether every rank of this copy has all that it stores from its own trained model ``source``."""
        if not set(self.ranks) <= set(source.ranks):
            return False
        is_alike = (source.engine, source.layout) == (self.engine, self.layout)
        return source.split == "whole" and (not source.layout.dims.several(OF_PARTS + OF_EXPERTS) or is_alike)

    def adapter_gathers(self, source: PlacedModel) -> tuple[tuple[int, ...], ...]:
        """Return the sets of ranks of ``source`` that gather adapters before these are merged: shards of the same part
        of the model, which may have adapters."""
        merges = self.adapters_to_merge(source) is not None
        return tuple(dict.fromkeys(map(source.shard_set, source.ranks))) if merges and source.num_shards > 1 else ()

    def adapters_to_merge(self, source: PlacedModel) -> LoraSpec | None:
        """Return the adapters of ``source`` that this copy, a rollout engine, stores inside the weights that they
        change."""
        return source.settings.lora if self.rollout is not None and self.settings.lora is None else None

    def position(self, rank: int) -> tuple[int, ...]:
        """Return all that the part of the model on a rank depends on: its part along each axis that splits a copy of
        the weights, and the shard or the experts.
        """
        layout = self.layout.of_weights
        return *layout.part(rank), layout.replica(rank) % max(self.num_shards, layout.dims.expert_parts)

    def by_position(self, of: Callable[[int], Found]) -> dict[int, Found]:
        """Return ``of`` each rank; ranks at the same position of its layout share one result."""
        found: dict[tuple[int, ...], Found] = {}
        ranks: dict[int, Found] = {}
        for rank in self.ranks:
            position = self.position(rank)
            if position not in found:
                found[position] = of(rank)
            ranks[rank] = found[position]
        return ranks

    @property
    def stored_dtype(self) -> Dtype:
        """Type of the weights that its passes read: shards of FSDP2 that it trains are float32."""
        return "float32" if self.trained and self.split == "rows" else self.settings.dtype

    @property
    def shared_buffer(self) -> str:
        """Why no tensor of the trained model can be freed by itself; empty if tensors can."""
        if self.settings.zero in self.facts.separate_tensors:
            return ""
        return f"{self.engine} keeps the weights of {self.name} in one buffer"

    def obstacle_to_reuse(self, source: PlacedModel, sync_dtype: Dtype | None) -> str:
        """Return why this copy on ranks of its ``source`` stores all of its weights by itself; empty if it need not."""
        if not self.is_transient:
            return "its weights stay between its calls"
        if not self.facts.plain_modules or self.split != "whole":
            return f"{self.engine} has shards or buffers of its own"
        if source.split == "flat":
            return f"{source.engine} shards {source.name} as flat ranges"
        trained, own = source.stored_dtype, self.settings.dtype
        if trained != own:
            return f"{source.name} is stored in {trained}, and it computes in {own}"
        if (sent := self.sent_dtype(sync_dtype)) != own:
            return f"sync.dtype rounds its weights to {sent}"
        return ""
