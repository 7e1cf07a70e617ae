"""Space of placement ratios as a search problem: every placed model of an algorithm on any mesh, with any settings.

The order of the calls is that of the strategies; a plan made from an assignment has the same seconds in the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from flexrlhf.api import (
    BatchShape,
    Layout,
    ModelName,
    ModelSpec,
    ResolvedSpec,
    Spec,
    Strategy,
    UserError,
    model_shapes,
    rollout_settings,
)
from flexrlhf.guideline.advice.limits import SpaceLimits
from flexrlhf.guideline.advice.model_options import OptionEnumerator
from flexrlhf.guideline.advice.searched_step import SearchedStep
from flexrlhf.guideline.advice.sketch import SearchModel
from flexrlhf.guideline.advice.space_checks import check_searched_models, check_searched_settings, with_types_of_stages
from flexrlhf.guideline.advice.uniform_mesh import UniformMesh, layout_of
from flexrlhf.guideline.costs.cost_model import CostModel
from flexrlhf.guideline.costs.links import MeshSide
from flexrlhf.guideline.search.problem import (
    Choice,
    DevicePool,
    Meshes,
    MeshShape,
    Option,
    SearchPart,
    SearchProblem,
    Vectors,
    meshes_of,
)
from flexrlhf.guideline.simulation.calls import CallMaker
from flexrlhf.guideline.simulation.inputs import TextLengths

CHUNKS = (1, 2, 4, 8)
"""Numbers of chunks that are tried."""
USABLE = 0.95
"""Share of a plan's memory that a recommended placement takes at most, unless nothing else fits: up to there larger
micro-batches pay (FlexRLHF, guideline)."""
GAP = 0.01
"""Share of its time by which the result of a search may miss the fastest plan."""


@dataclass(frozen=True)
class Space(SearchedStep):
    """Placements of ``spec`` with or without shadows, for one number of chunks and one lag, as in the spec.

    fixed_schedule:  settings of the schedule that the YAML sets.
    pending:         models that an earlier run of the command will write, by directory.
    offloaded:       models that are in host memory while others compute.
    usable:          share of a device's memory that a plan may take.
    is_lean:         whether MLPs in tiles and activations in host memory are tried.
    limits:          settings and memory that plans have rejected.
    """

    fixed_schedule: frozenset[str] = frozenset()
    pending: Mapping[Path, ModelSpec] = field(default_factory=dict)
    offloaded: frozenset[str] = frozenset()
    usable: float = USABLE
    is_lean: bool = False
    limits: SpaceLimits = field(default_factory=SpaceLimits)

    @property
    def may_have_shadows(self) -> bool:
        """Whether some placement has shadows: a hybrid engine generates on the ranks of the trained copy, and vLLM
        where that copy has to compute log-probs."""
        rollout = self.spec.rollout
        is_apart = not (rollout.is_hybrid or (rollout.has_copy and self.spec.recomputes_next_to_generation))
        return self.graph.can_shadow and self.pool.num_devices > 1 and is_apart

    @property
    def must_have_shadows(self) -> bool:
        """Whether no other placement has a plan: of a lag, rare syncs, or the strategy that the YAML sets."""
        schedule = self.spec.schedule
        return bool(schedule.lag) or self.spec.sync.every > 1 or schedule.strategy == Strategy.DISAGGREGATED

    @cached_property
    def leaner(self) -> Space | None:
        """The same space with MLPs in tiles and activations in host memory, if these free enough for any model."""
        least = min(self.pool.memory.values())
        frees = any(self.enumerator.tried.frees_activations(role, least) for role in self.roles.trained)
        return replace(self, is_lean=True) if frees and not self.is_lean else None

    @property
    def has_less_memory(self) -> bool:
        """Whether a YAML of it has a smaller ``memory_gb``: a plan offloads models where a device is full."""
        return bool(self.offloaded) and self.usable < 1

    @property
    def names(self) -> tuple[ModelName, ...]:
        """Names of the placed models, in vector order."""
        return self.sketch.names

    @cached_property
    def models(self) -> tuple[SearchModel, ...]:
        """Placed models with their calls, in vector order."""
        return tuple(self.sketch.models(self.offloaded, self.is_lean))

    @cached_property
    def problem(self) -> SearchProblem:
        """The space as a search problem."""
        parts = tuple(SearchPart(model.name, partial(self._options, model)) for model in self.models)
        calls, rows = tuple(self._calls()), tuple(self._rows())
        return SearchProblem(self.pool, parts, calls, rows, meshes_of(self.cluster), self._vectors)

    @property
    def _vectors(self) -> Vectors | None:
        """Return how a ratio vector places the models; with some in host memory none is tried."""
        if self.offloaded:
            return None
        if self.has_shadows:
            training = tuple(name for name in self.names if name in self.roles.trained)
            return Vectors((training, tuple(name for name in self.names if name not in training)))
        follows: dict[str, str] = {name: name.role for name in self.names if name.is_rollout}
        return Vectors((tuple(name for name in self.names if name not in follows),), follows)

    @cached_property
    def pool(self) -> DevicePool:
        """Devices in nodes of one size."""
        return DevicePool.of_cluster(self.cluster, self._searched_share, self.communicators)

    @property
    def communicators(self) -> int:
        """Communicators of a rank: of the plans that have been made, or the usual number of its engines."""
        usual = (model.facts.communicators for _, model in self.spec.models if model is not None)
        return self.limits.communicators or max(usual)

    @property
    def _searched_share(self) -> float:
        """Share of a device's memory that a search may fill."""
        return self.usable * self.limits.share

    def memory_of(self, kind: str) -> float:
        """Return the bytes of a device of a class that a plan can fill."""
        return self.pool.memory[kind] / self._searched_share

    def _options(self, model: SearchModel, shape: MeshShape) -> tuple[Option, ...]:
        """Options of a model on a mesh that no plan has refused; none on devices of several classes."""
        if len(shape.kinds) > 1 or self.sketch.refusal:
            return ()
        mesh = self._mesh(shape)
        options = self.allowed(model.name, self.enumerator.options(model, mesh))
        options = tuple(option for option in options if lies_in_nodes(option, model, shape))
        more = self._bytes_of_source(model, mesh)
        return tuple(self._with_further_bytes(model.name, mesh, each, more) for each in options)

    def allowed(self, part: str, options: tuple[Option, ...]) -> tuple[Option, ...]:
        """Return the options of a part that no plan has refused."""
        if not self.limits.refused:
            return options
        return tuple(each for each in options if self.limits.allows(part, each.settings))

    def option(self, model: SearchModel, shape: MeshShape, settings: ModelSpec) -> Option:
        """Option of a model on a mesh of one class. ``settings``: of an option there with other calls."""
        mesh = self._mesh(shape)
        found = self.enumerator.option(model, mesh, settings)
        return self._with_further_bytes(model.name, mesh, found, self._bytes_of_source(model, mesh))

    def faster_options(self, model: SearchModel, choice: Choice) -> list[Option]:
        """Return the options of a model on the mesh of ``choice``, which is of one class, and others between them, that
        take less time by themselves than its own, the fastest first."""
        assert isinstance(choice.option.settings, ModelSpec), "options of a Space have settings"
        shape, most = self.problem.shape_of(choice.start, choice.size), sum(choice.option.seconds)
        between = [*self.enumerator.faster(model, self._mesh(shape), choice.option.settings, most)]
        found = tuple(self.option(model, shape, settings) for settings in between)
        options = self.allowed(model.name, (*self._options(model, shape), *found))
        return sorted((each for each in options if sum(each.seconds) < most), key=lambda each: sum(each.seconds))

    def _with_further_bytes(self, name: ModelName, mesh: UniformMesh, option: Option, of_source: float = 0.0) -> Option:
        """Return ``option`` with the bytes ``of_source`` and of the rows of earlier steps that the model ``name`` of
        the sketch reads and writes."""
        if not (of_source or self._steps_kept):
            return option
        assert isinstance(option.settings, ModelSpec), "options of a Space have settings"
        rows = self._steps_kept * self.enumerator.tried.most_rows(layout_of(mesh, option.settings))
        resting, active = option.resting + rows * self._row_bytes[name], option.active + of_source
        return Option(option.seconds, resting, active, option.layout, option.settings)

    @cached_property
    def _row_bytes(self) -> Mapping[str, int]:
        """Placed model → bytes of a row of the columns that it reads and writes."""
        return {name: sum(map(self._run_lengths.row_bytes, own)) for name, own in self.sketch.columns.items()}

    @cached_property
    def _steps_kept(self) -> int:
        """Steps whose rows a rank keeps next to those of the newest: they are not trained on yet, or carried on."""
        carried = [run.lag + 1 for run in self.sketch.runs if run.operator.carries]
        return max(self.spec.schedule.lag, *carried, 0)

    def _mesh(self, shape: MeshShape) -> UniformMesh:
        (kind,) = shape.kinds
        return UniformMesh(shape.size, shape.per_node, self.devices[kind])

    def _bytes_of_source(self, model: SearchModel, mesh: UniformMesh) -> float:
        """Bytes of the trained copy while it sends its weights to a rollout engine on the same devices, if it is in
        host memory otherwise. The engine's cache is there, too: not at a sync, but while the engine is loaded."""
        if not model.is_rollout or self.has_shadows or model.role not in self.offloaded:
            return 0.0
        source = replace(next(each for each in self.models if each.name == model.role), switches=())
        return min((each.resting for each in self.enumerator.options(source, mesh)), default=0.0)


def with_schedule(space: Space, num_chunks: int, lag: int) -> Space:
    """Return the same space with another schedule; itself, with all that it has computed, if that is its own."""
    schedule = space.spec.schedule
    if (schedule.num_chunks, schedule.lag) == (num_chunks, lag):
        return space
    schedule = schedule.model_copy(update={"num_chunks": num_chunks, "lag": lag})
    return replace(space, spec=space.spec.model_copy(update={"schedule": schedule}))


def with_syncs_in_turn(space: Space) -> Space:
    """The same space with syncs that overlap nothing."""
    spec = space.spec.model_copy(update={"sync": space.spec.sync.model_copy(update={"overlap": False})})
    return replace(space, spec=spec, enumerator=replace(space.enumerator, spec=spec))


def on_all_devices(space: Space) -> SearchProblem:
    """The problem of ``space`` with every model on all devices."""
    return replace(space.problem, meshes=Meshes((), ((0, space.pool.num_devices),), "all devices"), vectors=None)


def chunk_counts(space: Space) -> tuple[int, ...]:
    """Numbers of chunks that a search tries: several pay where inference and training are on different devices."""
    return allowed_chunks(space) if space.has_shadows else allowed_chunks(space)[:1]


def allowed_chunks(space: Space) -> tuple[int, ...]:
    """Numbers of chunks that ``space`` allows, ascending."""
    if "num_chunks" in space.fixed_schedule:
        return (space.spec.schedule.num_chunks,)
    mini_batches, most = space.spec.algorithm.num_mini_batches, Spec.MAX_PLANNED // space.pool.num_devices
    return tuple(number for number in CHUNKS if mini_batches % number == 0 and number <= max(1, most))


def lies_in_nodes(option: Option, model: SearchModel, shape: MeshShape) -> bool:
    """Whether groups that exchange activations are on one node each, or have all devices of theirs where they may, and
    ZeRO shards over equally many replicas of each node where it shards in nodes."""
    if not shape.spans_nodes:
        return True
    side, settings = option.layout, option.settings
    assert isinstance(side, MeshSide) and isinstance(settings, ModelSpec), "options of a Space have both"
    near = side.dims.width
    if shape.unit % near:
        near = side.dims.neighbours(settings.crossing_axes)
    is_near = shape.unit % near == 0 or (model.is_rollout and shape.is_whole and near % shape.per_node == 0)
    return is_near and (settings.shard != "node" or shape.is_even)


def make_space(
    spec: Spec,
    costs: CostModel,
    lengths: TextLengths | None,
    pending: Mapping[Path, ModelSpec] | None = None,
    obstacle: str = "",
    of_operators: bool = False,
    known: list[OptionEnumerator] | None = None,
) -> Space:
    """Return the space of ``spec`` without shadows. Raises UserError for models or devices that no plan could have.

    lengths:       tokens of prompts and responses; None: the longest.
    pending:       directory → model, for models that an earlier run of the command will write there.
    obstacle:      why vLLM cannot generate, if that follows from an earlier run.
    of_operators:  whether operators will be placed, so that a role may generate with another engine than its own.
    known:         enumerators of earlier spaces: one with the same options is used, else this space's is added.
    """
    resolved = ResolvedSpec.of(spec, pending, obstacle)
    graph, longest = resolved.graph, spec.lengths
    resolved = replace(resolved, spec=with_types_of_stages(spec, resolved.spec, resolved.cluster))
    spec = resolved.spec
    texts = lengths or TextLengths(longest.prompt, (longest.response,))
    batch = replace(BatchShape.of(spec), num_chunks=1)
    shapes = model_shapes(spec, graph, pending or {})
    check_searched_models(spec, shapes, graph.roles, None if of_operators else graph.generated)
    for role in resolved.roles.all:
        check_searched_settings(resolved, role)
    # calls are priced as if responses were whole; memory is for the places of a step in segments
    maker = CallMaker(batch.of_one_round, longest, texts, spec.algorithm.epochs)
    enumerator = OptionEnumerator(spec, shapes, batch, costs, maker)
    if known is not None:
        enumerator = next((each for each in known if each.is_like(enumerator)), enumerator)
        known += [] if any(each is enumerator for each in known) else [enumerator]
    fixed = frozenset(spec.schedule.model_fields_set)
    space = Space(
        spec,
        graph,
        resolved.cluster,
        shapes=shapes,
        costs=costs,
        lengths=texts,
        enumerator=enumerator,
        fixed_schedule=fixed,
        pending=pending or {},
    )
    if not of_operators:
        _check_kinds(space)
    return space


def _check_kinds(space: Space) -> None:
    """Raise UserError if no plan is possible without shadows nor with them, or if the cache of a rollout engine has no
    room for a row."""
    role = space.roles.rollout
    if role is not None:
        rollout_settings(space.spec.models.of(role) or ModelSpec(), Layout((0,)), space.spec)
    kinds = [] if space.must_have_shadows else [space]
    kinds += [replace(space, has_shadows=True)] if space.may_have_shadows else []
    refusals = [each.sketch.refusal for each in kinds]
    if refusals and all(refusals):
        raise UserError(refusals[0])
