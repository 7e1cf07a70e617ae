"""Options of one placed model on a mesh: its settings, each with the time of its calls and its bytes.

Bytes are those that ``memory.budget`` counts for a plan, so ``flexrlhf plan`` accepts the result of a search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from math import inf
from operator import attrgetter
from typing import Any, TypeVar

from flexrlhf.config.engines import ALL_KINDS, EngineFacts, facts_of
from flexrlhf.config.model_settings import ModelSpec, ShadowSpec, Shard
from flexrlhf.config.spec import RolloutSpec, ScheduleSpec, Spec
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.sketch import PlacedCall, PlacedCallKind, SearchModel, Sketch
from flexrlhf.guideline.costs.cost_model import Call, CostModel, Links, Mesh
from flexrlhf.guideline.costs.links import MeshSide
from flexrlhf.guideline.search.problem import Option
from flexrlhf.guideline.simulation.calls import CallMaker, row_patterns
from flexrlhf.guideline.simulation.model_free_costs import model_free_cost
from flexrlhf.guideline.simulation.pricing import is_ring, side_of
from flexrlhf.memory.budget import Compute, SequenceLengths, Sizing
from flexrlhf.memory.packed_rows import decodes_in_slots
from flexrlhf.memory.states import State
from flexrlhf.memory.transfer_bytes import UNDER_WAY, saved_model, saving_parts, sync_parts
from flexrlhf.operators.graph import OperatorKind
from flexrlhf.placement.cluster import Cluster, Device, make_cluster
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.place import Degrees, check_degrees, on_devices, sharded_as_set
from flexrlhf.placement.placed import ModelName, PlacedModel, Placement
from flexrlhf.placement.rollout import own_adapters, padded_row, rollout_settings
from flexrlhf.plan.changes import LONG_ROW
from flexrlhf.plan.model_checks import check_placed_model
from flexrlhf.plan.plan import own_texts
from flexrlhf.weights.shapes import DTYPE_BYTES, ModelShape

T = TypeVar("T")

TENSOR_PARALLEL = (1, 2, 4, 8)
WHOLE_NODES = (16, 32, 64)
"""Tensor-parallel ranks on several nodes that are tried for rollout engines, of models with experts or large ones."""
LARGE = 0.25
"""Share of a node's memory that the weights of a model take, from which it is a large one."""
CONTEXT_PARALLEL = (1, 2, 4, 8)
LEAST_EVENER = 0.1
"""Share by which context-parallel ranks have to shorten the work of the fullest replica, of rows that are not long."""
EXPERT_PARALLEL = (1, 2, 4, 8, 16, 32, 64)
STAGES = (1, 2, 4, 8, 16)
"""Pipeline stages that are tried, in engines that have some."""
PASS_TOKENS = (0, 4096, 8192, 32768)
"""Padded tokens of a micro-batch that are tried; at least one text's."""
STEP = 1.25
"""Factor from one number of rows to the next, where sizes between those that are tried are looked at."""
LEAST_FREED = 0.02
"""Share of a device's memory that the inputs of a model's layers take, for one row, where they are tried in host memory
and MLPs in tiles."""
DECODE_SHARES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""All rows decoded together, half of them, a fourth ..."""
_CHOSEN = (
    *("engine", "dtype", "zero", "shard", "tp", "pp", "cp", "ep"),
    *("activation_checkpointing", "offload_activations", "tiled_mlp", "offload_optimizer"),
)
"""Settings that differ between the options of a model, and that others may rule out."""
_chosen = attrgetter(*_CHOSEN)
_SIZES = "micro_batch_tokens", "generate_tokens"
"""Further ones, of passes and decoding."""
CACHE_SHARES = DECODE_SHARES
"""All rows, half of them, ... for which a rollout engine's cache has room; it is allocated all the time."""


@dataclass(frozen=True)
class UniformMesh:
    """``size`` devices of one class, ``per_node`` of them in each node."""

    size: int
    per_node: int
    device: DeviceClass

    @property
    def links(self) -> Links:
        return Links(self.device.link_gb_s, self.device.node_gb_s)

    @property
    def cluster(self) -> Cluster:
        """The devices of the mesh as a cluster of their own."""
        return _cluster(self.size, self.per_node, self.device.name)


@dataclass(frozen=True)
class _ShardedModel:
    """A model on a mesh with a layout and a ZeRO stage, whatever its passes are.

    placed:  the model
    key:     all that its state depends on
    stages:  state of each pipeline stage
    side:    its layout
    """

    placed: PlacedModel
    key: object
    stages: tuple[State, ...]
    side: MeshSide

    @cached_property
    def state(self) -> State:
        """State of the stage that stores most."""
        return max(self.stages, key=lambda state: state.resting)


@dataclass(frozen=True)
class _Figures:
    """A model with some settings, wherever it is between its calls.

    settings: the settings
    seconds:  time of each call
    most:     most bytes that a call needs in addition to the resting ones
    """

    settings: ModelSpec
    seconds: tuple[float, ...]
    most: int


@dataclass(frozen=True, eq=False)
class _CallFigures:
    """Time and bytes of a call by the settings of its passes.

    kind:   kind of work
    price:  computes its time
    size:   computes its bytes in addition to the resting ones
    times:  times computed so far, by the settings that they depend on
    sizes:  bytes computed so far
    """

    kind: PlacedCallKind
    price: Callable[[ModelSpec], float]
    size: Callable[[ModelSpec], int]
    times: dict[object, float] = field(default_factory=dict)
    sizes: dict[object, int] = field(default_factory=dict)

    def seconds(self, settings: ModelSpec) -> float:
        key = _relevant_settings(self.kind, settings)
        found = self.times.get(key)
        if found is None:
            found = self.times[key] = self.price(settings)
        return found

    def most_bytes(self, settings: ModelSpec) -> int:
        key = _relevant_settings(self.kind, settings)
        if self.kind == "generate":
            # slots read prompts in passes
            key = *key, settings.micro_batch_tokens
        found = self.sizes.get(key)
        if found is None:
            found = self.sizes[key] = self.size(settings)
        return found


@dataclass(frozen=True)
class _TransferBytes:
    """Bytes of a model's syncs and saves.

    under_way:  of buffers for weights that travel while ranks compute, which stay
    most:       that one of them needs in addition to the resting ones
    """

    under_way: int
    most: int


@dataclass(frozen=True)
class OptionEnumerator:
    """Enumerates the options of the models of a spec.

    spec:    the spec, its models resolved.
    shapes:  role → sizes of its model.
    batch:   rows of a step.
    costs:   cost model of calls and transfers.
    maker:   makes the calls that ``costs`` prices.
    refusals: name of a model → why a plan refuses the last of its settings that are tried and not allowed.
    """

    spec: Spec
    shapes: Mapping[str, ModelShape]
    batch: BatchShape
    costs: CostModel
    maker: CallMaker
    refusals: dict[str, str] = field(default_factory=dict, compare=False)
    _options: dict[object, tuple[Option, ...]] = field(default_factory=dict)
    _all_figures: dict[object, tuple[tuple[_ShardedModel, tuple[_Figures, ...]], ...]] = field(default_factory=dict)
    _cache: dict[object, Any] = field(default_factory=dict)
    _sketches: list[Sketch] = field(default_factory=list)

    def of(self, spec: Spec) -> OptionEnumerator:
        """Return an enumerator of the models of ``spec``, which has the shapes and rows of this one's."""
        return OptionEnumerator(spec, self.shapes, self.batch, self.costs, self.maker)

    def is_like(self, other: OptionEnumerator) -> bool:
        """Whether the options are those of ``other``, on any mesh: its spec may differ in the nodes of the cluster, and
        in the schedule, of which calls depend by the rows alone."""
        whole, others = (
            each.spec.model_copy(
                update={"cluster": each.spec.cluster.model_copy(update={"nodes": ()}), "schedule": ScheduleSpec()}
            )
            for each in (self, other)
        )
        own, theirs = ((each.shapes, each.batch, each.costs, each.maker, each._most_memory) for each in (self, other))
        return own == theirs and whole == others

    def sketch(self, sketch: Sketch) -> Sketch:
        """Return the first sketch that equals the given one, so that spaces share its instructions."""
        found = next((each for each in self._sketches if each == sketch), None)
        if found is None:
            self._sketches.append(found := sketch)
        return found

    def options(self, model: SearchModel, mesh: UniformMesh) -> tuple[Option, ...]:
        """Options of a model on a mesh; none if the engine lacks a kind of call, or the devices all that is tried."""
        base = self.spec.models.of(model.role)
        if base is not None and not ALL_KINDS & set(model.kinds) <= self._facts(model, base).kinds:
            return ()
        if (model, mesh) not in self._options:
            # where a model is between its calls changes no time of these
            figures = self._figures(replace(model, switches=(), is_apart=False), mesh)
            self._options[model, mesh] = tuple(
                option for sharded, each in figures for option in self._options_of(model, mesh, sharded, each)
            )
        return self._options[model, mesh]

    def option(self, model: SearchModel, mesh: UniformMesh, settings: ModelSpec) -> Option:
        """Option of a model with ``settings``, taken from an option with other calls."""
        chosen = (getattr(settings, name) for name in (*_CHOSEN, *_SIZES))
        return self.cached(("option", model, mesh, *chosen), partial(self._option_with, model, mesh, settings))

    def _option_with(self, model: SearchModel, mesh: UniformMesh, settings: ModelSpec) -> Option:
        sharded, figures = self._figures_of(model, mesh, self._placed_with(model, mesh, settings), [settings])
        (option,) = self._options_of(model, mesh, sharded, figures)
        return option

    def _placed_with(self, model: SearchModel, mesh: UniformMesh, settings: ModelSpec) -> PlacedModel:
        """Place the model with ``settings``."""
        degrees = {"tp": settings.tp, "pp": settings.pp}
        rollout = self.spec.rollout.model_copy(update=degrees) if model.is_rollout else None
        return _on(model, mesh, _layout_of(mesh, settings), settings, rollout)

    def faster(self, model: SearchModel, mesh: UniformMesh, chosen: ModelSpec, most: float) -> Iterator[ModelSpec]:
        """Yield the settings of ``between`` whose calls take less than ``most`` seconds."""
        calls: list[_CallFigures] = []
        for settings in self.between(model, mesh, chosen):
            if model.is_rollout or not calls:
                calls = [*self._calls(model, mesh, self._sharded(self._placed_with(model, mesh, settings), mesh))]
            if sum(call.seconds(settings) for call in calls) < most:
                yield settings

    def between(self, model: SearchModel, mesh: UniformMesh, chosen: ModelSpec) -> Iterator[ModelSpec]:
        """Yield settings of a model between those of its options: with any number of rows in a pass or in a cache.

        ``chosen``: of an option, or as returned here.
        """
        if model.is_rollout:
            if self.spec.rollout.kv_tokens is None:
                yield from self._caches(model, mesh)
            return
        layout, fixed, texts = _layout_of(mesh, chosen), self._fixed(model), self.spec.data
        row = texts.max_prompt_tokens + texts.max_response_tokens
        rows = _spread(max(1, self._most_rows(layout)))
        passes = [row * number for number in rows] if "micro_batch_tokens" not in fixed else [chosen.micro_batch_tokens]
        recomputes = {chosen.activation_checkpointing}
        if model.trained and "activation_checkpointing" not in fixed and not chosen.offload_activations:
            recomputes = {False, True}
        for tokens, recompute in product(passes, sorted(recomputes)):
            yield chosen.model_copy(update={"micro_batch_tokens": tokens, "activation_checkpointing": recompute})
        if self._decodes(model, _on(model, mesh, layout, chosen)) != [{}]:
            yield from (chosen.model_copy(update={"generate_tokens": row * number}) for number in rows)

    def _caches(self, model: SearchModel, mesh: UniformMesh) -> Iterator[ModelSpec]:
        """Yield the settings of a rollout engine with room for any number of rows, in each of its splits."""
        figures = self._figures(replace(model, switches=(), is_apart=False), mesh)
        found = (sharded.placed.settings for sharded, _ in figures)
        splits = {(settings.tp, settings.pp): settings for settings in found}
        for settings in splits.values():
            row, most = padded_row(self.spec), max(1, self._most_rows(_layout_of(mesh, settings)))
            yield from (settings.model_copy(update={"generate_tokens": row * number}) for number in _spread(most))

    def _figures(self, model: SearchModel, mesh: UniformMesh) -> tuple[tuple[_ShardedModel, tuple[_Figures, ...]], ...]:
        """Return the figures of the model with each of its settings, by layout and ZeRO stage."""
        if (model, mesh) not in self._all_figures:
            self._all_figures[model, mesh] = tuple(
                self._figures_of(model, mesh, placed, settings) for placed, settings in self._placed(model, mesh)
            )
        return self._all_figures[model, mesh]

    def _figures_of(
        self, model: SearchModel, mesh: UniformMesh, placed: PlacedModel, settings: Sequence[ModelSpec]
    ) -> tuple[_ShardedModel, tuple[_Figures, ...]]:
        sharded = self._sharded(placed, mesh)
        calls = list(self._calls(model, mesh, sharded))
        return sharded, tuple(
            _Figures(each, tuple(call.seconds(each) for call in calls), max(call.most_bytes(each) for call in calls))
            for each in settings
        )

    def _sharded(self, placed: PlacedModel, mesh: UniformMesh) -> _ShardedModel:
        key = self._state_key(placed, mesh)
        stages = self.cached(("stages", key), lambda: tuple(self._states(placed)))
        side = self.cached(("side", key), lambda: side_of(placed, mesh.per_node))
        return _ShardedModel(placed, key, stages, side)

    def _states(self, placed: PlacedModel) -> Iterator[State]:
        """Yield the state of each pipeline stage."""
        for rank in placed.layout.pp_set(0):
            state = self._sizing.own_state(placed, rank)
            assert state is not None, "shapes are known"
            yield state

    def _placed(self, model: SearchModel, mesh: UniformMesh) -> Iterator[tuple[PlacedModel, Sequence[ModelSpec]]]:
        """Place the model on the first devices, once with each layout and ZeRO stage; with the settings of its
        passes."""
        placed = list(self._laid_out(model, mesh))
        # replicas without a row only where there is no other way
        most = max(self.batch.num_prompts, min((each.layout.dp for each in placed), default=0))
        for each in placed:
            if each.layout.dp > most:
                continue
            if each.rollout is not None:
                rollouts = self._rollouts(self._base(model, mesh), each.layout, each.rollout)
                caches = [replace(each, settings=settings) for settings in rollouts]
                yield from (
                    (cache, [cache.settings]) for cache in caches if cache is caches[0] or self._may_fit(cache, mesh)
                )
                continue
            for change in self._offloads(model):
                changed = _with(each, change)
                if self._is_allowed(model, mesh, changed):
                    sized = self._with_batch_sizes if self._may_fit(changed, mesh) else self._leanest
                    yield changed, [*sized(model, mesh, changed)]

    def _may_fit(self, placed: PlacedModel, mesh: UniformMesh) -> bool:
        """Whether the state of a model fits the largest device."""
        return self._sharded(placed, mesh).state.resting <= self._most_memory

    def _leanest(self, model: SearchModel, mesh: UniformMesh, plain: PlacedModel) -> Iterator[ModelSpec]:
        """Settings of ``plain``, which fits no device, with the passes and the decoding that need least memory."""
        tried = self._allowed_passes(model, mesh, plain)
        least = min(each.micro_batch_tokens for each in tried)
        # those with which passes need less come later
        leanest = [each for each in tried if each.micro_batch_tokens == least][-1]
        yield _changed(leanest, self._decodes(model, plain)[0])

    def _allowed_passes(self, model: SearchModel, mesh: UniformMesh, plain: PlacedModel) -> tuple[ModelSpec, ...]:
        """Return the settings of ``plain`` with each of ``_passes`` that a plan allows: equal ones on most meshes."""
        rows = self._pass_rows(plain.layout)
        key = "passes", model.is_lean, rows, self._allowed_key(model, mesh, plain)

        def made() -> tuple[ModelSpec, ...]:
            tried = (_with(plain, change) for change in self._passes(model, rows))
            return tuple(each.settings for each in tried if self._is_allowed(model, mesh, each))

        return self.cached(key, made)

    def _base(self, model: SearchModel, mesh: UniformMesh) -> ModelSpec:
        """Return the settings of the model's role on the devices of ``mesh``."""
        base = self.spec.models.of(model.role)
        assert base is not None, f"{model.role} is resolved"
        return on_devices(base, base.fallback_dtype, (0,), mesh.cluster)

    def _laid_out(self, model: SearchModel, mesh: UniformMesh) -> Iterator[PlacedModel]:
        """Place the model on the first devices, once with each layout and ZeRO stage that plans allow."""
        base = self._base(model, mesh)
        own = base.of_shadow if model.is_shadow else base
        for tp, pp, cp, ep in self._degrees(model, mesh, base):
            layout = self._allowed_layout(mesh, tp, pp, cp, ep, model.is_rollout, own.context_parallel == "ring")
            if layout is None:
                continue
            if model.is_rollout:
                rollout = self.spec.rollout.model_copy(update={"tp": tp, "pp": pp})
                settings = rollout_settings(base, layout, self.spec.model_copy(update={"rollout": rollout}))
                placed = PlacedModel(model.name, layout, False, settings, rollout)
                if self._is_allowed(model, mesh, placed):
                    yield placed
                continue
            stages: dict[int, list[PlacedModel]] = {}
            for zero, shard in product(self._stages(model, base), self._shards(model, mesh, own)):
                change = {"zero": zero, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "shard": shard}
                sharded = self._as_set(model, mesh, layout, own.model_copy(update=change))
                if sharded is not None and self._is_allowed(model, mesh, sharded):
                    stages.setdefault(zero, []).append(sharded)
            # of a single replica no stage shards anything
            for zero in stages if tp * pp < mesh.size else [*stages][:1]:
                yield from stages[zero]

    def _degrees(self, model: SearchModel, mesh: UniformMesh, base: ModelSpec) -> Iterator[tuple[int, int, int, int]]:
        """(tp, pp, cp, ep) that are tried, of those that divide the devices of the mesh: ``_is_allowed`` refuses what
        does not go with the model."""
        for tp in self._tensor_parallel(model, mesh, base):
            for pp in self._pipelines(model, mesh, base):
                for cp in self._parts_of_rows(model, base, tp, mesh.size // (tp * pp)):
                    for ep in self._parts_of_experts(model, mesh, base, tp):
                        if mesh.size % (tp * pp * cp) == 0 and mesh.size // (tp * pp) % ep == 0:
                            yield tp, pp, cp, ep

    def _allowed_layout(
        self, mesh: UniformMesh, tp: int, pp: int, cp: int, ep: int, is_rollout: bool, crosses: bool
    ) -> Layout | None:
        """Return the layout of a model on all devices of the mesh; None if a plan refuses it.

        ``crosses``: whether context-parallel ranks may be on several nodes.
        """
        degrees = Degrees(tp, pp, cp, crosses, ep, whole_nodes=is_rollout)

        def made() -> tuple[Layout | None]:
            layout = _layout(mesh.size, tp, pp, cp, ep)
            try:
                check_degrees("", "", layout.ranks, degrees, mesh.cluster)
            except UserError:
                return (None,)
            return (layout,)

        return self.cached(("layout", mesh.size, mesh.per_node, degrees), made)[0]

    def _as_set(self, model: SearchModel, mesh: UniformMesh, layout: Layout, settings: ModelSpec) -> PlacedModel | None:
        """Return the model with its state sharded as set; None if a plan refuses that."""
        try:
            return _on(model, mesh, layout, settings)
        except UserError:
            return None

    def _is_allowed(self, model: SearchModel, mesh: UniformMesh, placed: PlacedModel) -> bool:
        """Whether a plan allows the settings of a placed model."""
        key = self._allowed_key(model, mesh, placed)
        return self.cached(("allowed", key), lambda: (self._is_checked(model, mesh, placed),))[0]

    def _allowed_key(self, model: SearchModel, mesh: UniformMesh, placed: PlacedModel) -> object:
        """Return all that ``_is_allowed`` depends on."""
        chosen = _chosen(placed.settings)
        of_model = model.name, model.trained, model.operator, "generate" in model.kinds
        return of_model, mesh.device.name, placed.split, chosen

    def _is_checked(self, model: SearchModel, mesh: UniformMesh, placed: PlacedModel) -> bool:
        if model.operator:
            name, settings = ModelName.of(model.role, model.operator), placed.settings.of_copy({})
            placed = replace(placed, name=name, operator=model.operator, settings=settings)
        shape, longest = self.shapes[model.role], self.spec.lengths.of_role(model.role).total
        generates, on_gpus = "generate" in model.kinds, self.spec.cluster.device != "cpu"
        try:
            check_placed_model(placed, shape, mesh.cluster, longest, generates, on_gpus)
        except UserError as error:
            self.refusals[model.name] = str(error)
            return False
        return True

    def _parts_of_experts(self, model: SearchModel, mesh: UniformMesh, base: ModelSpec, tp: int) -> tuple[int, ...]:
        """Numbers of expert-parallel ranks that are tried; the one in the YAML alone, if there is one. Tensor-parallel
        ranks share experts, too: next to several, those alone are tried that fill a node, of a large model."""
        sizes, in_yaml = self.shapes[model.role].sizes, self._in_yaml(model, base, "ep")
        if in_yaml is not None:
            return (in_yaml,)
        has_experts = sizes is not None and sizes.experts is not None
        if not has_experts or model.is_rollout or not self._facts(model, base).ep:
            return (1,)
        if tp == 1:
            return EXPERT_PARALLEL
        return tuple(sorted({1, mesh.per_node // tp})) if self._fills_node(model, mesh, base) else (1,)

    def _parts_of_rows(self, model: SearchModel, base: ModelSpec, tp: int, replicas: int) -> tuple[int, ...]:
        """Numbers of context-parallel ranks that are tried; the one in the YAML alone, if there is one, and several
        only for long rows, and for fewer replicas where some would wait: they exchange states in every layer, and
        replicas do not. Ranks that cannot have equally many heads each exchange more, and are not tried."""
        in_yaml, data, sizes = self._in_yaml(model, base, "cp"), self.spec.data, self.shapes[model.role].sizes
        if in_yaml is not None:
            return (in_yaml,)
        if model.is_rollout or not self._facts(model, base).cp or sizes is None:
            return (1,)
        tried = tuple(cp for cp in CONTEXT_PARALLEL if sizes.heads % (cp * tp) == 0)
        is_long = data.max_prompt_tokens + data.max_response_tokens >= LONG_ROW
        return tried if is_long else self._evener(model, tried, replicas)

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

    def _shards(self, model: SearchModel, mesh: UniformMesh, own: ModelSpec) -> tuple[Shard, ...]:
        """Ranks over which ZeRO shards that are tried: of all nodes, and of each where there are several."""
        if "shard" in self._fixed(model):
            return (own.shard,)
        return ("all", "node") if facts_of(own.engine).node and mesh.size > mesh.per_node else ("all",)

    def _offloads(self, model: SearchModel) -> Iterator[dict[str, object]]:
        """Settings of where the optimizer's state is: as in the YAML, and in host memory."""
        yield {}
        if model.trained and "offload_optimizer" not in self._fixed(model):
            yield {"offload_optimizer": True}

    def _facts(self, model: SearchModel, base: ModelSpec) -> EngineFacts:
        engine = self.spec.rollout.engine if model.is_rollout else (base.of_shadow if model.is_shadow else base).engine
        return facts_of(engine)

    def _pipelines(self, model: SearchModel, mesh: UniformMesh, base: ModelSpec) -> tuple[int, ...]:
        """Numbers of pipeline stages that are tried; the one in the YAML alone, if there is one. Stages of a rollout
        engine decode in turn, so it has several only where its weights take much of a node's memory."""
        in_yaml = self._in_yaml(model, base, "pp")
        if in_yaml is not None or not self._facts(model, base).pp:
            return (in_yaml or 1,)
        return STAGES if not model.is_rollout or self._fills_node(model, mesh, base) else (1,)

    def _tensor_parallel(self, model: SearchModel, mesh: UniformMesh, base: ModelSpec) -> tuple[int, ...]:
        """Sizes of tensor-parallel groups that are tried, in a node or on whole ones; the one in the YAML alone, if
        there is one.

        Training with adapters is tried with 1: published steps with adapters, which costs are fitted to, have no other.
        """
        sizes, in_yaml = self.shapes[model.role].sizes, self._in_yaml(model, base, "tp")
        if in_yaml is not None:
            return (in_yaml,)
        is_adapted = base.lora is not None and not model.is_rollout
        is_open = self._facts(model, base).searches_tp and not is_adapted
        tried = tuple(tp for tp in TENSOR_PARALLEL if tp <= mesh.per_node) if is_open else (1,)
        has_experts = sizes is not None and sizes.experts is not None
        crosses = model.is_rollout and (has_experts or self._fills_node(model, mesh, base))
        return tried + WHOLE_NODES if crosses else tried

    def _fills_node(self, model: SearchModel, mesh: UniformMesh, base: ModelSpec) -> bool:
        """Whether the weights of a model take ``LARGE`` of the memory of a node's devices."""
        item = DTYPE_BYTES[(self.spec.rollout.dtype if model.is_rollout else None) or base.dtype]
        room = mesh.per_node * mesh.device.usable_bytes
        return self.shapes[model.role].num_parameters * item >= LARGE * room

    def _stages(self, model: SearchModel, base: ModelSpec) -> tuple[int, ...]:
        """ZeRO stages that are tried; of a copy that is not trained those alone that differ for it."""
        in_yaml, stages = self._in_yaml(model, base, "zero"), self._facts(model, base).zero
        if in_yaml is not None:
            return (in_yaml,)
        return stages if model.trained else tuple(stage for stage in stages if stage in (0, 3))

    def _in_yaml(self, model: SearchModel, base: ModelSpec, setting: str) -> int | None:
        """Value of a setting of this copy in the YAML; None: it is open."""
        section: StrictModel | None = base
        if model.is_shadow:
            section = self.spec.rollout if model.is_rollout else base.shadow
        if section is None or setting not in section.model_fields_set:
            return None
        value: int | None = getattr(section, setting)
        return value

    def _rollouts(self, base: ModelSpec, layout: Layout, rollout: RolloutSpec) -> Iterator[ModelSpec]:
        """Settings of a rollout engine, with room for the keys and values of more or fewer rows."""
        room = [padded_row(self.spec) * rows for rows in self._row_counts(layout, CACHE_SHARES)]
        for tokens in room if rollout.kv_tokens is None else [rollout.kv_tokens]:
            sized = rollout.model_copy(update={"kv_tokens": tokens})
            yield rollout_settings(base, layout, self.spec.model_copy(update={"rollout": sized}))

    def _row_counts(self, layout: Layout, shares: Sequence[int]) -> list[int]:
        """Rows of the fullest replica over each of ``shares``, ascending."""
        return sorted({max(1, self._most_rows(layout) // share) for share in shares})

    def _most_rows(self, layout: Layout) -> int:
        """Rows of the fullest replica in a step."""
        return max(map(sum, row_patterns(self.batch, layout, self.batch.mini_batches)))

    def _with_batch_sizes(self, model: SearchModel, mesh: UniformMesh, plain: PlacedModel) -> Iterator[ModelSpec]:
        """Settings of ``plain`` with pairs of batch sizes for passes and for decoding: the fastest that fit into the
        same bytes.

        Each call has all memory in addition to the states, so a smaller size than fits is slower for nothing.
        """
        passes, changes = self._allowed_passes(model, mesh, plain), self._decodes(model, plain)
        if len(changes) < 2:
            yield from (_changed(settings, change) for settings in passes for change in changes)
            return
        shape, data = self.shapes[model.role], self.spec.data
        in_slots = decodes_in_slots(plain.settings, shape, data.max_prompt_tokens + data.max_response_tokens)
        calls = [*self._calls(model, mesh, self._sharded(plain, mesh))]
        decoding, others = (
            [call for call in calls if call.kind in kinds] for kinds in (("generate",), ("forward", "train"))
        )
        of_decodes: dict[int, list[tuple[float, int]]] = {}
        figures: dict[tuple[int, int], tuple[float, int]] = {}
        for index, settings in enumerate(passes):
            # slots read prompts in passes of the same tokens
            read = settings.micro_batch_tokens if in_slots else 0
            if read not in of_decodes:
                of_decodes[read] = [_total(decoding, _changed(settings, change)) for change in changes]
            seconds, size = _total(others, settings)
            for number, (taken, needed) in enumerate(of_decodes[read]):
                figures[index, number] = seconds + taken, max(size, needed)
        rooms = sorted({size for _, size in figures.values()})
        for index, number in dict.fromkeys(_fastest_within(figures, room) for room in rooms):
            yield _changed(passes[index], changes[number])

    def _pass_rows(self, layout: Layout) -> tuple[int, ...]:
        """Numbers of rows of a micro-batch that are tried, at most those of the fullest replica."""
        row, most = self.spec.data.max_prompt_tokens + self.spec.data.max_response_tokens, self._most_rows(layout)
        return tuple(sorted({min(max(1, tokens // row), most) for tokens in PASS_TOKENS}))

    def _passes(self, model: SearchModel, rows: Sequence[int]) -> Iterator[dict[str, object]]:
        """Settings of passes: tokens of a micro-batch with each number of ``rows``, and activation checkpointing."""
        texts, fixed = self.spec.data, self._fixed(model)
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
        fixed = self._fixed(model)
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
        if model is None or sizes is None or not facts_of(model.engine).transformers_modules:
            return False
        row = self.spec.data.max_prompt_tokens + self.spec.data.max_response_tokens
        return row * sizes.layers * sizes.hidden * DTYPE_BYTES[model.dtype] >= LEAST_FREED * memory

    def _decodes(self, model: SearchModel, placed: PlacedModel) -> list[dict[str, object]]:
        """Settings of decoding: tokens of the rows decoded together."""
        if "generate" not in model.kinds or "generate_tokens" in self._fixed(model):
            return [{}]
        width = self.spec.data.max_prompt_tokens + self.spec.data.max_response_tokens
        return [{"generate_tokens": width * rows} for rows in self._row_counts(placed.layout, DECODE_SHARES)]

    def _fixed(self, model: SearchModel) -> set[str]:
        """Settings of this copy that the YAML sets."""
        base = self.spec.models.of(model.role)
        assert base is not None, f"{model.role} is resolved"
        section = (base.shadow or ShadowSpec()) if model.is_shadow else base
        return {name for name in section.model_fields_set if getattr(section, name) is not None}

    def _options_of(
        self, model: SearchModel, mesh: UniformMesh, sharded: _ShardedModel, figures: Sequence[_Figures]
    ) -> Iterator[Option]:
        """Yield the options of a model with each of the settings of its passes."""
        state, side = sharded.state, sharded.side
        key = "transfers", self._transfer_key(sharded, mesh), model.partner, model.is_apart
        transfers = self.cached(key, partial(self._transfers, model, sharded.placed))
        resting = state.resting + transfers.under_way
        if model.is_offloaded:
            # it has no cache while weights arrive
            for each in figures:
                most = max(each.most, transfers.most - state.cache)
                yield Option(each.seconds, state.resting - state.freed, state.freed + most, side, each.settings)
            return
        if not model.switches:
            for each in figures:
                yield Option(each.seconds, resting, max(each.most, transfers.most), side, each.settings)
            return
        moved = self.costs.switch(state.offloaded, mesh.device).seconds
        added = [number * moved for number in model.switches]
        for each in figures:
            seconds = tuple(taken + more for taken, more in zip(each.seconds, added, strict=True))
            most = max(each.most, transfers.most)
            yield Option(seconds, resting - state.freed, state.freed + most, side, each.settings)

    def _transfers(self, model: SearchModel, placed: PlacedModel) -> _TransferBytes:
        """Return the bytes of a model's syncs and saves, of the stage that needs most."""
        ranks = placed.layout.pp_set(0)
        most, under_way = [0], [0]
        if placed.trained:
            buckets, files = self.spec.sync.bucket_bytes, self.spec.save.shard_bytes
            saved = saved_model(placed, self.shapes[placed.role], buckets, files)
            most += [size or 0 for size in saving_parts(saved, len(placed.gather_sets[0])).values()]
        if model.partner is not None:
            ends = (placed, self._partner(model, placed))
            source, copy = ends if placed.trained else reversed(ends)
            for rank in ranks:
                settings, shape = self.spec.sync, self.shapes[placed.role]
                parts = dict(sync_parts(source, copy, shape, settings, rank, model.is_apart))
                under_way.append(parts.pop(UNDER_WAY, 0) or 0)
                most.append(sum(size or 0 for size in parts.values()))
        return _TransferBytes(max(under_way), max(most))

    def _partner(self, model: SearchModel, placed: PlacedModel) -> PlacedModel:
        """Return the other end of a model's syncs, as if it was whole on another device."""
        base, rollout, name = self.spec.models.of(model.role), self.spec.rollout, model.partner
        assert base is not None and name is not None, f"{model.role} is resolved"
        settings = base.of_shadow if name.copy else base
        if name.is_rollout:
            adapters = own_adapters(base, rollout)
            settings = ModelSpec(engine=rollout.engine, dtype=rollout.dtype or base.dtype, lora=adapters)
        elsewhere = Layout((len(placed.ranks),))
        return PlacedModel(name, elsewhere, not name.copy, settings, rollout if name.is_rollout else None, placed.head)

    @staticmethod
    def _key(placed: PlacedModel, mesh: UniformMesh, *settings: object) -> object:
        """Key of a model on ranks, with those of its ``settings`` that are not the same wherever these are."""
        where, layout = (mesh.size, mesh.per_node, mesh.device.name), placed.layout
        # a rollout engine's cache is allocated all the time
        cache = None if placed.rollout is None else placed.settings.generate_tokens
        return placed.role, placed.trained, where, layout.tp, layout.pp, layout.cp, layout.ep, cache, settings

    def _priced_mesh(self, placed: PlacedModel, mesh: UniformMesh) -> Mesh:
        """Return the mesh of a model as costs depend on it."""
        layout, zero, shape = placed.layout, placed.settings.zero, self.shapes[placed.role]
        # the stages of a rollout engine work in turn
        split = layout.dp, layout.tp, 1 if placed.rollout is not None else layout.pp
        over, parts = placed.sharded_over, (layout.cp, is_ring(placed, shape))
        return Mesh(mesh.device, mesh.links, *split, mesh.per_node, zero, True, over, *parts, layout.ep)

    def _state_key(self, placed: PlacedModel, mesh: UniformMesh) -> object:
        """Key of all that the bytes of the model's state depend on."""
        return self._key(placed, mesh, placed.settings.zero, placed.sharded_over, placed.settings.offload_optimizer)

    @staticmethod
    def _transfer_key(sharded: _ShardedModel, mesh: UniformMesh) -> object:
        """Key of all that the bytes of the model's syncs and saves depend on: the parts of it that ranks store."""
        placed, layout = sharded.placed, sharded.placed.layout
        stored = placed.split, placed.num_shards, layout.tp, layout.pp, layout.ep
        kind = placed.role, placed.trained, placed.rollout is None
        return kind, mesh.device.name, stored, sharded.side.shards

    def _calls(self, model: SearchModel, mesh: UniformMesh, sharded: _ShardedModel) -> Iterator[_CallFigures]:
        """Yield time and bytes of each call."""
        placed, state_key = sharded.placed, sharded.key
        zero, over, priced_mesh = placed.settings.zero, placed.sharded_over, self._priced_mesh(placed, mesh)
        for call in model.calls:
            time_key = size_key = state_key
            if call.kind == "switch":
                yield _CallFigures(call.kind, partial(self._switch_seconds, sharded, mesh), lambda _: 0)
                continue
            if call.kind != "train":
                # without gradients ZeRO matters where it shards the weights alone
                time_key = self._key(placed, mesh, *((zero, over) if zero >= 2 else ()))
                if placed.layout.pp == 1:
                    size_key = self._key(placed, mesh, *((zero, over) if placed.split != "whole" else ()))
            patterns = row_patterns(call.shape(self.batch), placed.layout, call.mini_batches)
            most = max(map(max if call.kind == "train" else sum, patterns))
            price = partial(self._seconds, placed, mesh, priced_mesh, call.kind, call)
            size = partial(self._bytes, sharded, call, most)
            times = self.cached(("seconds", time_key, call), lambda: dict[object, float]())
            sizes = self.cached(
                ("bytes", size_key, call.kind, most, call.texts, call.compares), lambda: dict[object, int]()
            )
            yield _CallFigures(call.kind, price, size, times, sizes)

    def _switch_seconds(self, sharded: _ShardedModel, mesh: UniformMesh, _: ModelSpec) -> float:
        """Time of a transfer to or from host memory."""
        trained = self.spec.models.of(sharded.placed.role)
        # a Sync brings all weights, unless it brings adapters
        has_copy = trained is not None and trained.lora is not None
        return self.costs.switch(sharded.state.offloaded if has_copy else 0, mesh.device).seconds

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """Return the first result of ``make`` for ``key``: settings share most of their costs."""
        value: T | None = self._cache.get(key)
        if value is None:
            value = self._cache[key] = make()
        return value

    def _seconds(
        self,
        placed: PlacedModel,
        mesh: UniformMesh,
        priced_mesh: Mesh,
        kind: OperatorKind,
        call: PlacedCall,
        settings: ModelSpec,
    ) -> float:
        rows = row_patterns(call.shape(self.maker.batch), placed.layout, call.mini_batches)
        if kind == "combine" or kind == "interact" or kind == "score" or kind == "retokenize":
            most, width = max(map(sum, rows)), self.maker.lengths.width
            return model_free_cost(self.costs, self.spec, call.score_source, most, width).seconds
        assert kind != "loss" and kind != "backward" and kind != "step", "programs alone call them"
        used = [each for each in rows if any(each)]
        layout, shape = placed.layout, self.shapes[placed.role]
        own = settings.offload_optimizer, placed.rollout is None, placed.trained, mesh.device.name
        key = "call", placed.role, own, _relevant_settings(kind, settings), call, tuple(used), layout.cp

        def made() -> Call:
            return self.maker.call(kind, replace(placed, settings=settings), shape, used, call.texts, call.compares)

        # whatever the ZeRO stage, tensor-parallel and pipeline ranks are
        priced = self.cached(key, made)
        # each turn of an episode has a part of a response
        return self.costs.call(priced, priced_mesh).seconds / call.turns

    def _bytes(self, sharded: _ShardedModel, call: PlacedCall, most_rows: int, settings: ModelSpec) -> int:
        """Most bytes that a call needs on a rank in addition to the resting ones of the stage that stores most.

        ``most_rows``: of the fullest replica; settings may allow fewer that are decoded together.
        """
        kind, rows = call.kind, most_rows
        if kind not in ("generate", "forward", "train"):
            return 0
        placed = replace(sharded.placed, settings=settings)
        if kind == "generate":
            # context-parallel ranks share the rows
            parts = placed.layout.cp
            rows = parts * self._lengths.rows_decoded(placed, -(-rows // parts))
        block = self.batch.block_rows
        work = Compute(kind, placed.name, rows, texts=call.texts, compares=call.compares, block=block)
        most, sizes = sharded.state.resting, []
        for rank, state in zip(placed.layout.pp_set(0), sharded.stages, strict=True):
            for phase in self._sizing.call_phases(work, placed, rank):
                sizes.append(phase.part_bytes + (state.training if phase.trains else state.resting) - most)
        return max(sizes)

    @cached_property
    def _sizing(self) -> Sizing:
        """Bytes of any model of the spec, wherever it is."""
        lengths, own, nothing = self._lengths, self._own_lengths, Placement((), 0)
        on_gpus = self._cluster.has_known_classes
        return Sizing(nothing, self.shapes, lengths, self.spec.sync, own, on_gpus=on_gpus)

    @cached_property
    def _cluster(self) -> Cluster:
        return make_cluster(self.spec.cluster)

    @cached_property
    def _most_memory(self) -> float:
        """Bytes of the largest device; without limit if one has no known size."""
        sizes = [self._cluster.memory_bytes(self._cluster.ranks_on(name)[0]) for name in self._cluster.classes]
        return inf if None in sizes else float(max(size or 0 for size in sizes))

    @cached_property
    def _lengths(self) -> SequenceLengths:
        data = self.spec.data
        return SequenceLengths(data.max_prompt_tokens, data.max_response_tokens, self.batch.samples_per_prompt)

    @cached_property
    def _own_lengths(self) -> dict[str, SequenceLengths]:
        """Lengths by role, for models with a tokenizer of their own."""
        return own_texts(self.spec.lengths, self._lengths)


def _on(
    model: SearchModel, mesh: UniformMesh, layout: Layout, settings: ModelSpec, rollout: RolloutSpec | None = None
) -> PlacedModel:
    """Place ``model`` on ``mesh``. Raises UserError if its state cannot be sharded as set."""
    placed = PlacedModel(model.name, layout, model.trained, settings, rollout, model.head)
    return placed if rollout is not None else sharded_as_set(placed, mesh.cluster)


def _with(placed: PlacedModel, change: Mapping[str, object]) -> PlacedModel:
    """The model with other settings."""
    return replace(placed, settings=_changed(placed.settings, change)) if change else placed


def _changed(settings: ModelSpec, change: Mapping[str, object]) -> ModelSpec:
    return settings.model_copy(update=dict(change)) if change else settings


def _total(calls: Sequence[_CallFigures], settings: ModelSpec) -> tuple[float, int]:
    """Return the time of ``calls`` together, and the most bytes that one needs in addition to the resting ones."""
    return sum(call.seconds(settings) for call in calls), max((call.most_bytes(settings) for call in calls), default=0)


def _fastest_within(figures: Mapping[tuple[int, int], tuple[float, int]], room: int) -> tuple[int, int]:
    """Return the fastest pair whose bytes fit into ``room``. ``figures``: pair → (seconds, bytes)."""
    return min((pair for pair, (_, size) in figures.items() if size <= room), key=lambda pair: figures[pair][0])


@lru_cache(maxsize=1024)
def _layout(size: int, tp: int, pp: int, cp: int, ep: int) -> Layout:
    """Layout on the first ``size`` devices."""
    return Layout(tuple(range(size)), tp, pp, cp=cp, ep=ep)


@lru_cache(maxsize=1024)
def _cluster(size: int, per_node: int, device_class: str) -> Cluster:
    """Cluster of ``size`` devices of one class."""
    return Cluster(tuple(Device(rank, rank // per_node, device_class) for rank in range(size)))


def _layout_of(mesh: UniformMesh, settings: ModelSpec) -> Layout:
    return _layout(mesh.size, settings.tp, settings.pp, settings.cp, settings.ep)


def _spread(most: int) -> list[int]:
    """Return numbers up to ``most``, each at most ``STEP`` times the one before."""
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, int(STEP * found[-1]))))
    return found


def _relevant_settings(kind: PlacedCallKind, settings: ModelSpec) -> tuple[object, ...]:
    """Settings that a call of ``kind`` depends on, of those that differ between options of one mesh."""
    if kind == "generate":
        return (settings.generate_tokens,)
    if kind == "train":
        of_layers = settings.activation_checkpointing, settings.offload_activations
        return settings.micro_batch_tokens, settings.tiled_mlp, of_layers
    return settings.micro_batch_tokens, settings.tiled_mlp
