"""ReaL's space as a search problem: every model call on any mesh, with its own dp, tp, pp and micro-batches.

The weights of a role are reallocated between the meshes of its calls (ReaL: Mei et al., MLSys 2025, section 4). The
space contains plans that no YAML can state (pipeline stages, a third copy of a role): its optimum is the most that
placement can give.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.systems.footprint import FLOAT_GRADIENTS, decode_bytes, frozen_bytes, pass_bytes, trained_bytes
from flexrlhf.config.axes import ParallelDims
from flexrlhf.guideline.costs.cost_model import Call, CostModel, Links, Mesh, Transformer
from flexrlhf.guideline.costs.links import MeshSide, ModelLink, SyncWeights
from flexrlhf.guideline.costs.relations import Relation
from flexrlhf.guideline.search.problem import (
    DevicePool,
    LinkEnd,
    MeshShape,
    Option,
    SearchPart,
    SearchProblem,
    SearchSync,
    SearchTask,
)
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.operators.graph import CallKind
from flexrlhf.placement.devices import DeviceClass

BUCKET_BYTES = 16e6


GENERATED, PASSED = (1, 4, 16), (8, 64, 1 << 20)
"""Counts of groups decoded one after the other, and of passes, into which a replica's rows are split."""


@dataclass(frozen=True)
class PpoCall:
    """A model call of a step. ``reads``: calls of the same batch whose results it reads."""

    name: str
    role: str
    kind: CallKind
    reads: tuple[str, ...] = ()


PPO_CALLS = (
    PpoCall("actor generate", "actor", "generate"),
    PpoCall("reward", "reward", "forward", ("actor generate",)),
    PpoCall("ref", "ref", "forward", ("actor generate",)),
    PpoCall("critic", "critic", "forward", ("actor generate",)),
    PpoCall("actor train", "actor", "train", ("reward", "ref", "critic")),
    PpoCall("critic train", "critic", "train", ("reward", "ref", "critic")),
)
"""The six calls of a PPO step."""


@dataclass(frozen=True)
class PerCallSpace:
    """Space of one placement for each call of PPO.

    models:     role → its transformer.
    devices:    kind → its figures.
    pool:       the devices.
    costs:      cost model of calls and transfers.
    lengths:    tokens of prompts and responses.
    rows:       rows of a step over all replicas.
    updates:    optimizer steps of a step.
    trainer:    engine of inference and training.
    generator:  engine of generation.
    """

    models: dict[str, Transformer]
    devices: dict[str, DeviceClass]
    pool: DevicePool
    costs: CostModel
    lengths: TextLengths
    rows: int
    updates: int
    trainer: str = "megatron"
    generator: str = "vllm"

    def problem(self) -> SearchProblem:
        parts = tuple(SearchPart(call.name, partial(self._options, call)) for call in PPO_CALLS)
        return SearchProblem(self.pool, parts, tuple(self._calls()))

    def _calls(self) -> Iterator[SearchTask | SearchSync]:
        for call in PPO_CALLS:
            yield SearchTask(call.name, call.name, call.reads)
        yield SearchSync("actor train", "actor generate", partial(self._sync_seconds, "actor"))
        yield SearchSync("critic train", "critic", partial(self._sync_seconds, "critic"))

    def _options(self, call: PpoCall, shape: MeshShape) -> list[Option]:
        if len(shape.kinds) > 1:
            return []
        device = self.devices[shape.kinds[0]]
        options = (self._option(call, shape, device, tp, pp, rows) for tp, pp, rows in self._splits(call, shape))
        return [option for option in options if option.resting + option.active <= self.pool.memory[shape.kinds[0]]]

    def _splits(self, call: PpoCall, shape: MeshShape) -> Iterator[tuple[int, int, int]]:
        """(tp, pp, rows of a pass or decoded together), all powers of two."""
        model = self.models[call.role]
        for tp in (1, 2, 4, 8):
            for pp in (1, 2, 4, 8, 16):
                fits = shape.size % (tp * pp) == 0 and tp <= shape.per_node and pp <= model.layers
                dp = shape.size // (tp * pp)
                if fits and dp <= self.rows and not model.heads % tp:
                    most = -(-self.rows // dp)
                    portions = GENERATED if call.kind == "generate" else PASSED
                    yield from ((tp, pp, rows) for rows in sorted({max(1, most // part) for part in portions}))

    def _option(self, call: PpoCall, shape: MeshShape, device: DeviceClass, tp: int, pp: int, rows: int) -> Option:
        dp = shape.size // (tp * pp)
        zero = 1 if call.kind == "train" else 0
        links = Links(device.link_gb_s, device.node_gb_s)
        mesh = Mesh(device, links, dp, ParallelDims(tp, pp), shape.per_node, zero)
        priced = self._call(call, -(-self.rows // dp), rows)
        resting, active = self._bytes(priced, mesh, rows)
        side = MeshSide(shape.size, shape.per_node, dp, ParallelDims(tp * pp), shards=tp * pp)
        return Option((self.costs.call(priced, mesh).seconds,), resting, active, side, (dp, tp, pp, rows))

    def _call(self, call: PpoCall, rows: int, together: int) -> Call:
        return Call(
            kind=call.kind,
            model=self.models[call.role],
            engine=self.generator if call.kind == "generate" else self.trainer,
            rows=rows,
            prompt=self.lengths.prompt,
            responses=self.lengths.responses,
            width=self.lengths.prompt + self.lengths.mean_response,
            updates=self.updates if call.kind == "train" else 1,
            micro_rows=together,
            decode_rows=together,
            recompute="full" if call.kind == "train" else "none",
        )

    def _bytes(self, call: Call, mesh: Mesh, rows: int) -> tuple[float, float]:
        if call.kind == "train":
            return trained_bytes(call.model, mesh, FLOAT_GRADIENTS), pass_bytes(call, mesh, rows)
        active = decode_bytes if call.kind == "generate" else pass_bytes
        return frozen_bytes(call.model, mesh), active(call, mesh, rows)

    def _sync_seconds(self, role: str, source: LinkEnd, to: LinkEnd, relation: Relation) -> float:
        first, second = source.layout, to.layout
        assert isinstance(first, MeshSide) and isinstance(second, MeshSide), "layouts are sides"
        if relation == "same" and first == second:
            return 0.0
        whole = 2 * self.models[role].parameters
        part = whole // second.dims.tp
        kinds = [self.devices[kind] for end in (source, to) for kind in end.shape.kinds]
        links = Links(min(kind.link_gb_s for kind in kinds), min(kind.node_gb_s for kind in kinds))
        # layouts differ, so weights move even if devices are the same
        moved: Relation = "overlapping" if relation == "same" else relation
        # the source's ranks first gather all weights, as ours gather ZeRO's shards of adapters
        between = ModelLink(
            replace(first, dims=first.dims._replace(tp=1)), second, moved, links, len(self.pool.nodes) > 1
        )
        weights = SyncWeights(part, whole, -(-whole // int(BUCKET_BYTES)), 12 * self.models[role].layers)
        return between.sync_cost(self.costs, weights).seconds
