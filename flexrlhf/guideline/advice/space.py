"""The space of placement ratios as a search problem: every placed model of an algorithm on any mesh, in any setting.

The order of the calls is that of the strategies; a plan made from an assignment has the same seconds in the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import gcd

from flexrlhf.config.spec import Head, ModelSpec, Spec
from flexrlhf.engines.capabilities import ALL_KINDS, SERVES, check_engine
from flexrlhf.errors import UserError, either
from flexrlhf.guideline.advice.choices import Chooser, Member, Place, Work
from flexrlhf.guideline.costs.cost_model import CostModel, Links
from flexrlhf.guideline.costs.exchange import Between, Relation, Side, Weights
from flexrlhf.guideline.search.problem import End, Meshes, Option, Part, Pool, Problem, Rows, Shape, Sync, Task
from flexrlhf.guideline.simulation.pricing import (
    UNKNOWN,
    CallMaker,
    TextLengths,
    asked_by,
    rows_bytes,
    synced_weights,
    texts_of,
)
from flexrlhf.guideline.simulation.simulate import is_rare_operator
from flexrlhf.operators.columns import Lengths
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.names import ROLLOUT, ModelName
from flexrlhf.placement.placed import PlacedModel, Placement
from flexrlhf.placement.ratios import Roles
from flexrlhf.plan.models import model_shapes
from flexrlhf.plan.pipeline import resolve
from flexrlhf.plan.run_graph import run_graph
from flexrlhf.strategies import schedule
from flexrlhf.strategies.schedule import make_tasks
from flexrlhf.weights.shapes import LLAMA_LIKE, ModelShape

FORBIDDEN = 1e9
"""Seconds of what a placement must not do; with a lag they may be spread over some steps."""
CHUNKS = (1, 2, 4, 8)
UNLIMITED = 1e15
"""Bytes of a device that nobody says the size of."""
USABLE = 0.95
"""Share of a device's memory that a plan may take: FlexRLHF's guideline; the rest is for fragments and the driver."""


def is_allowed(seconds: float) -> bool:
    """Whether a plan of so many seconds a step does nothing that is forbidden."""
    return seconds < FORBIDDEN / 10


@dataclass(frozen=True)
class Space:
    """Placements of ``spec`` with or without shadows, for one number of chunks and one lag (those of the spec).

    ``said``: settings of the schedule that the YAML says.
    """

    spec: Spec
    graph: Graph
    roles: Roles
    shapes: Mapping[str, ModelShape]
    cluster: Cluster
    costs: CostModel
    lengths: TextLengths
    chooser: Chooser
    has_shadows: bool = False
    said: frozenset[str] = frozenset()

    @cached_property
    def batch(self) -> BatchShape:
        return BatchShape.of(self.spec)

    @cached_property
    def names(self) -> tuple[ModelName, ...]:
        """The placed models, in vector order."""
        if self.has_shadows:
            return self.roles.with_shadows
        engine = () if self.roles.rollout is None else (ModelName.of(self.roles.rollout, ROLLOUT),)
        return self.roles.without_shadows + engine

    @cached_property
    def sketch(self) -> Placement:
        """Each placed model on a rank of its own (a rollout engine beside the trained copy on that one's): what the
        order of a schedule follows from."""
        home = {name: number for number, name in enumerate(self.names)}
        if not self.has_shadows and self.roles.rollout is not None:
            home[ModelName.of(self.roles.rollout, ROLLOUT)] = home[ModelName(self.roles.rollout)]
        return Placement(tuple(self._sketched(name, home[name]) for name in self.names), len(self.names))

    def _sketched(self, name: ModelName, rank: int) -> PlacedModel:
        settings = self.spec.models.of(name.role)
        assert settings is not None, f"{name.role} is resolved"
        rollout = self.spec.rollout if name.is_rollout else None
        own = settings.of_shadow if name.is_shadow else settings
        if rollout is not None:
            own = ModelSpec(engine="vllm", dtype=rollout.dtype or settings.dtype)
        return PlacedModel(name, Layout((rank,)), name in self.roles.trained, own, rollout, self._head(name))

    def _head(self, name: ModelName) -> Head:
        """A rollout engine generates alone."""
        return "causal" if name.is_rollout else self.roles.heads[name.role]

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        graph = self.whole_graph
        return tuple(operator for operator in graph.operators if not is_rare_operator(operator))

    @cached_property
    def whole_graph(self) -> Graph:
        return run_graph(self.spec, self.sketch)

    @cached_property
    def steps(self) -> tuple[tuple[schedule.OperatorTask, int], ...]:
        """The operators in the order of the strategy, each with its lag."""
        tasks = partial(make_tasks, self.whole_graph, self.sketch, self.batch)
        if not self.spec.schedule.lag or not self.has_shadows:
            return tuple((task, 0) for task in tasks(self.operators))
        trained = [o for o in self.operators if not self.model_of(o).follows and o.role in self.roles.trained]
        newest = tasks([o for o in self.operators if o not in trained])
        return (*((task, 0) for task in newest), *((task, 1) for task in tasks(trained)))

    def model_of(self, operator: Operator) -> PlacedModel:
        if operator.name not in self._models:
            self._models[operator.name] = self.sketch.copy_for(operator.role, operator.kind, operator.on_trained)
        return self._models[operator.name]

    @cached_property
    def _models(self) -> dict[str, PlacedModel]:
        """By operator: those that have been asked for."""
        return {}

    def mini_batches(self, task: schedule.OperatorTask) -> range:
        return self.batch.mini_batches if task.chunk is None else self.batch.chunk(task.chunk)

    @property
    def sleeper(self) -> str | None:
        """The rollout engine beside the trained copy, which goes to host memory behind its call and comes back for the
        weights."""
        beside = [name for name in self.names if name.is_rollout] if not self.has_shadows else []
        return beside[0] if beside and self.spec.rollout.sleep else None

    @cached_property
    def members(self) -> tuple[Member, ...]:
        calls: dict[str, list[Work]] = {name: [] for name in self.names}
        for task, _ in self.steps:
            operator = task.operator
            work = Work(operator.kind, self.mini_batches(task), asked_by(operator), texts_of(operator))
            calls[self.model_of(operator).name].append(work)
        if self.sleeper is not None:
            calls[self.sleeper] += [Work("switch", self.batch.mini_batches)] * 2
        return tuple(
            Member(
                name,
                name in self.roles.trained,
                tuple(calls[name]),
                self._head(name),
            )
            for name in self.names
        )

    @cached_property
    def devices(self) -> dict[str, DeviceClass]:
        """The classes of the cluster, by name."""
        found = {}
        for name in self.cluster.classes:
            # of a class without figures all is measured
            found[name] = self.cluster.figures(self.cluster.ranks_on(name)[0]) or UNKNOWN
        return found

    def problem(self) -> Problem:
        parts = tuple(Part(member.name, partial(self._options, member)) for member in self.members)
        return Problem(self.pool, parts, tuple(self._calls()), tuple(self._rows()), self.meshes)

    @cached_property
    def node_sizes(self) -> dict[str, int]:
        """Class → devices of its largest node."""
        sizes: dict[str, int] = {}
        for node in range(self.cluster.num_nodes):
            ranks = self.cluster.ranks_on_node(node)
            name = self.cluster.devices[ranks[0]].device_class
            sizes[name] = max(sizes.get(name, 0), len(ranks))
        return sizes

    @cached_property
    def pool(self) -> Pool:
        """Nodes as the search counts them: all of one size, so larger ones as several."""
        memory: dict[str, float] = {}
        for device in self.cluster.devices:
            size = self.cluster.memory_bytes(device.rank)
            memory[device.device_class] = USABLE * (UNLIMITED if size is None else size)
        ranks = [self.cluster.ranks_on_node(node) for node in range(self.cluster.num_nodes)]
        unit = gcd(*map(len, ranks))
        kinds = [self.cluster.devices[mine[at]].device_class for mine in ranks for at in range(0, len(mine), unit)]
        return Pool(tuple(kinds), unit, memory)

    @cached_property
    def meshes(self) -> Meshes:
        """The usual ones; where nodes differ in size, powers of two inside a node and runs of whole nodes."""
        nodes = [self.cluster.ranks_on_node(node) for node in range(self.cluster.num_nodes)]
        if len(set(map(len, nodes))) == 1:
            return Meshes((), ())
        inside = [
            (ranks[0] + at, size)
            for ranks in nodes
            for size in (1 << bit for bit in range((len(ranks) - 1).bit_length()))
            for at in range(0, len(ranks) - size + 1, size)
        ]
        starts = [ranks[0] for ranks in nodes] + [len(self.cluster.devices)]
        runs = [(first, last - first) for i, first in enumerate(starts) for last in starts[i + 1 :]]
        return Meshes((), (*inside, *runs), "powers of two inside a node, runs of whole nodes")

    def _options(self, member: Member, shape: Shape) -> tuple[Option, ...]:
        """A model stays on devices of one class."""
        if len(shape.kinds) > 1:
            return ()
        kind = shape.kinds[0]
        return self.chooser.options(
            member, Place(shape.size, min(shape.size, self.node_sizes[kind]), self.devices[kind])
        )

    def _calls(self) -> Iterator[Task | Sync]:
        steps = self.steps
        last = {self.model_of(task.operator).name: task for task, _ in steps if task.operator.kind == "train"}
        # behind the last of its calls: two may stand beside each other
        falls_asleep = next(
            (task for task, _ in reversed(steps) if self.model_of(task.operator).name == self.sleeper), None
        )
        lagging, end = bool(self.spec.schedule.lag) and self.has_shadows, list[Sync]()
        for task, lag in steps:
            model = self.model_of(task.operator).name
            reads = tuple(name_of(writer) for writer in (*self._writers(task), *self._apart(task)))
            yield Task(name_of(task), model, reads, lag)
            if task is falls_asleep:
                yield Task("offload", model)
            if last.get(model) is task:
                syncs = [self._sync(task, follower) for follower in self.sketch.followers if follower.role == model]
                if lagging or not self.has_shadows:
                    end += syncs
                else:
                    yield from syncs
        if self.sleeper is not None:
            yield Task("reload", self.sleeper)
        order = [follower.name for follower in self.sketch.followers]
        yield from sorted(end, key=lambda sync: order.index(ModelName(sync.to)))

    def _writers(self, reader: schedule.OperatorTask) -> Iterator[schedule.OperatorTask]:
        for task, _ in self.steps:
            is_read = not set(task.operator.writes).isdisjoint(reader.operator.reads)
            if is_read and not set(self.mini_batches(task)).isdisjoint(self.mini_batches(reader)):
                yield task

    def _sync(self, task: schedule.OperatorTask, follower: PlacedModel) -> Sync:
        return Sync(name_of(task), follower.name, partial(self._sync_seconds, follower), self.spec.sync.every)

    def _rows(self) -> Iterator[Rows]:
        for reader, _ in self.steps:
            for writer in self._writers(reader):
                sides = self.model_of(writer.operator), self.model_of(reader.operator)
                size = self._rows_bytes(writer, reader)
                seconds = partial(self._rows_seconds, size, self._must_part(*sides))
                yield Rows(name_of(writer), name_of(reader), seconds)
            for writer in self._apart(reader):
                yield Rows(name_of(writer), name_of(reader), self._border_seconds)

    def _apart(self, reader: schedule.OperatorTask) -> Iterator[schedule.OperatorTask]:
        """Of each other model that must not share a device with that of ``reader``, though nothing travels between, a
        task that it waits for anyhow. With shadows all inference is waited for: advantages follow from it."""
        if not self.has_shadows or reader.operator.kind != "train":
            return
        own, written = self.model_of(reader.operator), list(self._writers(reader))
        known = {self.model_of(task.operator).name for task in written}
        others = {self.model_of(task.operator).name: task for task in self._ancestors[name_of(reader)].values()}
        for name, task in others.items():
            if name not in known and self._must_part(self.model_of(task.operator), own):
                yield task

    @cached_property
    def _ancestors(self) -> dict[str, dict[str, schedule.OperatorTask]]:
        """Task → all that it waits for, by name."""
        found: dict[str, dict[str, schedule.OperatorTask]] = {}
        for task, _ in self.steps:
            mine = found[name_of(task)] = {}
            for writer in self._writers(task):
                mine |= found[name_of(writer)] | {name_of(writer): writer}
        return found

    @staticmethod
    def _border_seconds(source: End, to: End, relation: Relation) -> float:
        return 0.0 if relation == "disjoint" else FORBIDDEN

    def _rows_bytes(self, writer: schedule.OperatorTask, reader: schedule.OperatorTask) -> int:
        """Of what ``reader`` reads of ``writer``."""
        common = range(
            max(self.mini_batches(writer).start, self.mini_batches(reader).start),
            min(self.mini_batches(writer).stop, self.mini_batches(reader).stop),
        )
        return rows_bytes(self.batch, Lengths.of(self.spec), writer.operator, reader.operator, common)

    def _rows_seconds(self, size: int, must_part: bool, source: End, to: End, relation: Relation) -> float:
        if must_part and relation != "disjoint":
            return FORBIDDEN
        # many readers read as much of writers that lie alike
        key = size, source.layout, to.layout, source.shape.kinds, to.shape.kinds, relation
        return self.chooser.once(key, lambda: self._between(source, to, relation).rows_cost(self.costs, size).seconds)

    def _must_part(self, first: PlacedModel, second: PlacedModel) -> bool:
        """With shadows no device serves both training and inference."""
        trains = [model.name in self.roles.trained for model in (first, second)]
        return self.has_shadows and trains[0] != trains[1]

    def _sync_seconds(self, follower: PlacedModel, source: End, to: End, relation: Relation) -> float:
        if relation != ("disjoint" if self.has_shadows else "same"):
            return FORBIDDEN
        weights = self._weights(follower, to)
        return self._between(source, to, relation).sync_cost(self.costs, weights).seconds

    def _weights(self, follower: PlacedModel, to: End) -> Weights:
        side = side_of(to)
        if (follower.name, side) not in self._sent:
            layout = Layout(tuple(range(side.size)), side.tp)
            settings = follower.settings.model_copy(update={"zero": side.zero, "tp": side.tp})
            model = PlacedModel(follower.name, layout, False, settings, follower.rollout, follower.head)
            self._sent[follower.name, side] = synced_weights(model, self.shapes[follower.role], self.spec)
        return self._sent[follower.name, side]

    @cached_property
    def _sent(self) -> dict[tuple[str, Side], Weights]:
        """What syncs send: what has been asked for."""
        return {}

    def _between(self, source: End, to: End, relation: Relation) -> Between:
        kinds = [self.devices[kind] for end in (source, to) for kind in end.shape.kinds]
        links = Links(min(kind.link_gb_s for kind in kinds), min(kind.node_gb_s for kind in kinds))
        return Between(side_of(source), side_of(to), relation, links, self.cluster.num_nodes > 1)


def with_schedule(space: Space, num_chunks: int, lag: int) -> Space:
    schedule = space.spec.schedule.model_copy(update={"num_chunks": num_chunks, "lag": lag})
    return replace(space, spec=space.spec.model_copy(update={"schedule": schedule}))


def chunk_counts(space: Space) -> tuple[int, ...]:
    """Those that are tried: they pay only where inference and training are apart."""
    if "num_chunks" in space.said:
        return (space.spec.schedule.num_chunks,)
    mini_batches = space.spec.algorithm.num_mini_batches
    return tuple(number for number in CHUNKS if mini_batches % number == 0) if space.has_shadows else (1,)


def name_of(task: schedule.OperatorTask) -> str:
    return task.operator.name if task.chunk is None else f"{task.operator.name}.{task.chunk}"


def side_of(end: End) -> Side:
    assert isinstance(end.layout, Side), "options of a Space tell their side"
    return end.layout


def make_space(spec: Spec, costs: CostModel, lengths: TextLengths | None) -> Space:
    """Without shadows. Raises UserError where the spec has models or devices that no plan could have."""
    resolved = resolve(spec)
    spec, graph, longest = resolved.spec, resolved.graph, Lengths.of(spec)
    texts = lengths or TextLengths(longest.prompt, (longest.response,))
    batch = replace(BatchShape.of(spec), num_chunks=1)
    shapes = model_shapes(spec, graph, {})
    _check_models(spec, shapes, graph.roles)
    chooser = Chooser(spec, shapes, batch, costs, CallMaker(batch, longest, texts, spec.algorithm.epochs))
    said = frozenset(spec.schedule.model_fields_set)
    return Space(spec, graph, resolved.roles, shapes, resolved.cluster, costs, texts, chooser, said=said)


def _check_models(spec: Spec, shapes: Mapping[str, ModelShape], roles: Sequence[str]) -> None:
    for role in roles:
        settings = spec.models.of(role)
        assert settings is not None, f"{role} is resolved"
        check_engine(f"models.{role}.engine", settings.engine)
        if SERVES[settings.engine].kinds != ALL_KINDS:
            whole = [name for name, serves in SERVES.items() if serves.kinds == ALL_KINDS]
            raise UserError(
                f"models.{role}.engine: {settings.engine} only generates; use {either(whole)} here, and "
                f"rollout.engine: {settings.engine} to generate with it"
            )
        if role not in shapes or shapes[role].sizes is None:
            raise UserError(
                f"models.{role}: seconds follow from the sizes of a model, and this family's config does not tell "
                f"them; known families: {', '.join(LLAMA_LIKE)}"
            )
