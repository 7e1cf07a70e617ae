"""Settings of a model that are tried on a mesh: degrees of parallelism, ZeRO stages, sizes of passes and of caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from pydantic import BaseModel

from flexrlhf.api import (
    AXES,
    Axis,
    BatchShape,
    EngineFacts,
    Layout,
    ModelShape,
    ModelSpec,
    ParallelDims,
    PlacedModel,
    RolloutSpec,
    Spec,
    rollout_settings,
)
from flexrlhf.guideline.advice.sketch import SearchModel
from flexrlhf.guideline.advice.uniform_mesh import UniformMesh
from flexrlhf.guideline.simulation.calls import row_patterns

TENSOR_PARALLEL = (1, 2, 4, 8)
WHOLE_NODES = (16, 32, 64)
"""Tensor-parallel ranks on several nodes that are tried for rollout engines, of models with experts or large ones."""
LARGE = 0.25
"""Share of a node's memory that the weights of a model take, from which it is a large one."""
GATHERED_ONCE = (0.25, 0.75)
"""Shares of a device's memory that the weights of a model take where they are tried as shards that are gathered once in
a call: smaller ones are on each rank anyway, and larger ones leave no room for passes."""
CONTEXT_PARALLEL = (1, 2, 4, 8)
LEAST_EVENER = 0.1
"""Share by which context-parallel ranks have to shorten the work of the fullest replica, of rows that are not long."""
EXPERT_PARALLEL = (1, 2, 4, 8, 16, 32, 64)
STAGES = (1, 2, 4, 8, 16)
"""Pipeline stages that are tried, in engines that have some."""
PASS_TOKENS = (0, 4096, 8192, 32768)
"""Padded tokens of a micro-batch that are tried; at least one text's."""
LEAST_FREED = 0.02
"""Share of a device's memory that the inputs of a model's layers take, for one row, where they are tried in host memory
and MLPs in tiles."""
DECODE_SHARES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""All rows decoded together, half of them, a fourth ..."""
CACHE_SHARES = DECODE_SHARES
"""All rows, half of them, ... for which a rollout engine's cache has room; it is allocated all the time."""


@dataclass(frozen=True)
class TriedSettings:
    """Settings that are tried for the models of a spec.

    spec:    the spec, its models resolved.
    shapes:  role → sizes of its model.
    batch:   rows of a step.
    """

    spec: Spec
    shapes: Mapping[str, ModelShape]
    batch: BatchShape

    def base(self, model: SearchModel, mesh: UniformMesh) -> ModelSpec:
        """Return the settings of the model's role on the devices of ``mesh``."""
        base = self.spec.models.of(model.role)
        assert base is not None, f"{model.role} is resolved"
        return mesh.cluster.settings_on(base, base.fallback_dtype, (0,))

    def dims(self, model: SearchModel, mesh: UniformMesh, base: ModelSpec) -> Iterator[ParallelDims]:
        """Degrees that are tried, of those that divide the devices of the mesh; of an axis that the YAML has a degree
        of that one alone. ``_is_allowed`` refuses what does not go with the model."""
        found = [ParallelDims()]
        for axis in AXES:
            tried = [(each, self._degrees(axis, model, mesh, base, each)) for each in found]
            found = [each._replace(**{axis.name: degree}) for each, degrees in tried for degree in degrees]
        for each in found:
            if mesh.size % each.replica == 0 and mesh.size // each.parts % each.expert_parts == 0:
                yield each

    def _degrees(
        self, axis: Axis, model: SearchModel, mesh: UniformMesh, base: ModelSpec, others: ParallelDims
    ) -> tuple[int, ...]:
        """Degrees of one axis that are tried with the degrees of ``others`` before it."""
        in_yaml = self._in_yaml(model, base, axis.name)
        if in_yaml is not None:
            return (in_yaml,)
        if axis.name not in self.facts(model, base).axes or (model.is_rollout and axis.name not in RolloutSpec.AXES):
            return (1,)
        return _TRIED[axis.name](self, model, mesh, base, others)

    def _parts_of_experts(
        self, model: SearchModel, mesh: UniformMesh, base: ModelSpec, others: ParallelDims
    ) -> tuple[int, ...]:
        """Numbers of expert-parallel ranks that are tried. Tensor-parallel ranks share experts, too: next to several,
        those alone are tried that fill a node, of a large model."""
        sizes = self.shapes[model.role].sizes
        if sizes is None or sizes.experts is None:
            return (1,)
        if others.tp == 1:
            return EXPERT_PARALLEL
        return tuple(sorted({1, mesh.per_node // others.tp})) if self._fills_node(model, mesh, base) else (1,)

    def _parts_of_rows(
        self, model: SearchModel, mesh: UniformMesh, base: ModelSpec, others: ParallelDims
    ) -> tuple[int, ...]:
        """Numbers of context-parallel ranks that are tried, several only for long rows, and for fewer replicas where
        some would wait: they exchange states in every layer, and replicas do not. Ranks that cannot have equally many
        heads each exchange more, and are not tried."""
        sizes = self.shapes[model.role].sizes
        if sizes is None:
            return (1,)
        tried = tuple(cp for cp in CONTEXT_PARALLEL if sizes.heads % (cp * others.tp) == 0)
        return tried if self.spec.lengths.are_long else self._evener(model, tried, mesh.size // others.replica)

    def _evener(self, model: SearchModel, tried: Sequence[int], replicas: int) -> tuple[int, ...]:
        """Return the numbers, of those ``tried``, with which ``replicas`` wait less for the fullest one than with
        smaller ones: all rows of a prompt are on one replica."""
        prompts = self.batch.num_prompts // (self.batch.num_mini_batches if model.trained else 1)
        found, least = [], inf
        for cp in tried:
            fewer = replicas // cp
            waiting = -(-prompts // fewer) * fewer / prompts if fewer and replicas % cp == 0 else inf
            if cp == 1 or waiting <= (1 - LEAST_EVENER) * least:
                found.append(cp)
                least = waiting
        return tuple(found)

    def shards(self, model: SearchModel, mesh: UniformMesh, own: ModelSpec) -> tuple[str, ...]:
        """Ranks over which ZeRO shards that are tried: of all nodes, and of each where there are several."""
        if "shard" in self.fixed(model):
            return (own.shard,)
        return ("all", "node") if own.facts.node and mesh.size > mesh.per_node else ("all",)

    def offloads(self, model: SearchModel) -> Iterator[dict[str, object]]:
        """Settings of where the optimizer's state is: as in the YAML, and in host memory."""
        yield {}
        if model.trained and "offload_optimizer" not in self.fixed(model):
            yield {"offload_optimizer": True}

    def facts(self, model: SearchModel, base: ModelSpec) -> EngineFacts:
        engine = self.spec.rollout.engine if model.is_rollout else (base.of_shadow if model.is_shadow else base).engine
        return EngineFacts.of(engine)

    def _pipelines(
        self, model: SearchModel, mesh: UniformMesh, base: ModelSpec, others: ParallelDims
    ) -> tuple[int, ...]:
        """Numbers of pipeline stages that are tried. Stages of a rollout engine decode in turn, so it has several only
        where its weights take much of a node's memory."""
        return STAGES if not model.is_rollout or self._fills_node(model, mesh, base) else (1,)

    def _tensor_parallel(
        self, model: SearchModel, mesh: UniformMesh, base: ModelSpec, others: ParallelDims
    ) -> tuple[int, ...]:
        """Sizes of tensor-parallel groups that are tried, in a node or on whole ones.

        Training with adapters is tried with 1: published steps with adapters, which costs are fitted to, have no other.
        """
        sizes = self.shapes[model.role].sizes
        is_adapted = base.lora is not None and not model.is_rollout
        is_open = self.facts(model, base).searches_tp and not is_adapted
        tried = tuple(tp for tp in TENSOR_PARALLEL if tp <= mesh.per_node) if is_open else (1,)
        has_experts = sizes is not None and sizes.experts is not None
        crosses = model.is_rollout and (has_experts or self._fills_node(model, mesh, base))
        return tried + WHOLE_NODES if crosses else tried

    def _fills_node(self, model: SearchModel, mesh: UniformMesh, base: ModelSpec) -> bool:
        """Whether the weights of a model take ``LARGE`` of the memory of a node's devices."""
        return self._weights_share(model, mesh, base) >= LARGE * mesh.per_node

    def _weights_share(self, model: SearchModel, mesh: UniformMesh, base: ModelSpec) -> float:
        """Return the weights of a model in memories of a device."""
        own = self.spec.rollout.dtype if model.is_rollout else None
        settings = base if own is None else base.model_copy(update={"dtype": own})
        return self.shapes[model.role].num_parameters * settings.item_bytes / mesh.device.usable_bytes

    def stages(self, model: SearchModel, mesh: UniformMesh, base: ModelSpec, parts: int) -> tuple[int, ...]:
        """ZeRO stages that are tried for a model whose replicas are ``parts`` ranks: if it is not trained weights on
        each rank, shards that are gathered for each pass and, in replicas of one rank, shards that are gathered once in
        a call."""
        in_yaml, facts = self._in_yaml(model, base, "zero"), self.facts(model, base)
        if in_yaml is not None:
            return (in_yaml,)
        least, most = GATHERED_ONCE
        stays_gathered = facts.split(2) != "whole" and least <= self._weights_share(model, mesh, base) <= most
        tried = (0, 2, 3) if stays_gathered and parts == 1 else (0, 3)
        return tuple(stage for stage in facts.zero if model.trained or stage in tried)

    def _in_yaml(self, model: SearchModel, base: ModelSpec, setting: str) -> int | None:
        """Value of a setting of this copy in the YAML; None: it is open."""
        section: BaseModel | None = base
        if model.is_shadow:
            section = self.spec.rollout if model.is_rollout else base.shadow
        if section is None or setting not in section.model_fields_set:
            return None
        value: int | None = getattr(section, setting)
        return value

    def rollouts(self, base: ModelSpec, layout: Layout, rollout: RolloutSpec) -> Iterator[ModelSpec]:
        """Settings of a rollout engine, with room for the keys and values of more or fewer rows."""
        room = [self.spec.padded_row * rows for rows in self._row_counts(layout, CACHE_SHARES)]
        room = room if rollout.kv_tokens is None else [rollout.kv_tokens]
        sized = rollout.model_copy(update={"kv_tokens": room[-1]})
        largest = rollout_settings(base, layout, self.spec.model_copy(update={"rollout": sized}))
        for tokens in room:
            yield largest.model_copy(update={"generate_tokens": min(tokens, largest.generate_tokens)})

    def _row_counts(self, layout: Layout, shares: Sequence[int]) -> list[int]:
        """Rows of the fullest replica over each of ``shares``, ascending; where they keep their caches, a slot for each
        row of each generate."""
        if self.spec.rollout.caches == "kept":
            generates = sum(each.kind == "generate" for each in self.spec.algorithm.step_graph().operators)
            return [generates * self.most_rows(layout)]
        return sorted({max(1, self.most_rows(layout) // share) for share in shares})

    def most_rows(self, layout: Layout) -> int:
        """Rows of the fullest replica in a step."""
        return max(map(sum, row_patterns(self.batch, layout, self.batch.mini_batches)))

    def pass_rows(self, layout: Layout) -> tuple[int, ...]:
        """Numbers of rows of a micro-batch that are tried, at most those of the fullest replica."""
        row, most = self.spec.data.max_prompt_tokens + self.spec.data.max_response_tokens, self.most_rows(layout)
        return tuple(sorted({min(max(1, tokens // row), most) for tokens in PASS_TOKENS}))

    def passes(self, model: SearchModel, rows: Sequence[int]) -> Iterator[dict[str, object]]:
        """Settings of passes: tokens of a micro-batch with each number of ``rows``, and activation checkpointing."""
        texts, fixed = self.spec.data, self.fixed(model)
        row = texts.max_prompt_tokens + texts.max_response_tokens
        tried = [row * number for number in rows] if "micro_batch_tokens" not in fixed else [0]
        for tokens in tried:
            change: dict[str, object] = {"micro_batch_tokens": tokens} if tokens else {}
            yield change
            if model.trained and "activation_checkpointing" not in fixed:
                yield {**change, "activation_checkpointing": True}
        if model.is_lean and not model.is_shadow:
            yield from self._lean_passes(model, {"micro_batch_tokens": tried[0]} if tried[0] else {})

    def _lean_passes(self, model: SearchModel, smallest: Mapping[str, object]) -> Iterator[dict[str, object]]:
        """Settings with which the smallest passes take least memory: MLPs in tiles, activations in host memory."""
        fixed = self.fixed(model)
        recomputes = model.trained and "activation_checkpointing" not in fixed
        change = {**smallest, **({"activation_checkpointing": True} if recomputes else {})}
        tried = {"tiled_mlp": True, "offload_activations": model.trained}
        open_ones = [name for name, can in tried.items() if can and name not in fixed]
        for values in product((False, True), repeat=len(open_ones)):
            if any(values):
                yield {**change, **dict(zip(open_ones, values, strict=True))}

    def frees_activations(self, role: str, memory: float) -> bool:
        """Whether the inputs of a model's layers, for one row, take a share of ``memory`` worth freeing."""
        model, sizes = self.spec.models.of(role), self.shapes[role].sizes
        if model is None or sizes is None or not model.facts.transformers_modules:
            return False
        row = self.spec.data.max_prompt_tokens + self.spec.data.max_response_tokens
        return row * sizes.layers * sizes.hidden * model.item_bytes >= LEAST_FREED * memory

    def decodes(self, model: SearchModel, placed: PlacedModel) -> list[dict[str, object]]:
        """Settings of decoding: tokens of the rows decoded together."""
        if "generate" not in model.kinds or "generate_tokens" in self.fixed(model):
            return [{}]
        width = self.spec.data.max_prompt_tokens + self.spec.data.max_response_tokens
        return [{"generate_tokens": width * rows} for rows in self._row_counts(placed.layout, DECODE_SHARES)]

    def fixed(self, model: SearchModel) -> set[str]:
        """Settings of this copy that the YAML sets."""
        base = self.spec.models.of(model.role)
        assert base is not None, f"{model.role} is resolved"
        section = base.shadow if model.is_shadow else base
        if section is None:
            return set()
        return {name for name in section.model_fields_set if getattr(section, name) is not None}


_TRIED: Mapping[str, Callable[[TriedSettings, SearchModel, UniformMesh, ModelSpec, ParallelDims], tuple[int, ...]]] = {
    "tp": TriedSettings._tensor_parallel,
    "pp": TriedSettings._pipelines,
    "cp": TriedSettings._parts_of_rows,
    "ep": TriedSettings._parts_of_experts,
}
"""Axis → function that returns the degrees that are tried."""
