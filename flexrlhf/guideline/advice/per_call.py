"""ReaL's space as a search problem: every model call on any mesh, with any dp, tp, pp and micro-batches of its own.

Weights of a role are reallocated between the meshes of its calls (ReaL: Mei et al., MLSys 2025, section 4). It holds
plans that no YAML can say yet (pipeline stages, a third copy of a role); what it finds is what placement can give on
paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.systems.footprint import FLOAT_GRADIENTS, decode_bytes, frozen_bytes, pass_bytes, trained_bytes
from flexrlhf.config.spec import CallKind
from flexrlhf.guideline.costs.cost_model import Call, CostModel, Links, Mesh
from flexrlhf.guideline.costs.exchange import MeshSide, ModelLink, Relation, SyncWeights
from flexrlhf.guideline.costs.transformer import Transformer
from flexrlhf.guideline.search.problem import End, Option, Part, Pool, Problem, Shape, Sync, Task
from flexrlhf.guideline.simulation.pricing import TextLengths
from flexrlhf.placement.devices import DeviceClass

BUCKET_BYTES = 16e6


GENERATED, PASSED = (1, 4, 16), (8, 64, 1 << 20)
"""Into how many groups decoded one after the other, or passes, the rows of a replica are cut, at the most by row."""


@dataclass(frozen=True)
class OneCall:
    """``reads``: calls of the same batch that come before."""

    name: str
    role: str
    kind: CallKind
    reads: tuple[str, ...] = ()


PPO_CALLS = (
    OneCall("actor generate", "actor", "generate"),
    OneCall("reward", "reward", "forward", ("actor generate",)),
    OneCall("ref", "ref", "forward", ("actor generate",)),
    OneCall("critic", "critic", "forward", ("actor generate",)),
    OneCall("actor train", "actor", "train", ("reward", "ref", "critic")),
    OneCall("critic train", "critic", "train", ("reward", "ref", "critic")),
)
"""The six calls of a PPO step."""


@dataclass(frozen=True)
class PerCall:
    """``rows`` of a step over all replicas; ``updates``: optimizer steps; ``trainer``, ``generator``: engines."""

    models: dict[str, Transformer]
    devices: dict[str, DeviceClass]
    pool: Pool
    costs: CostModel
    lengths: TextLengths
    rows: int
    updates: int
    trainer: str = "megatron"
    generator: str = "vllm"

    def problem(self) -> Problem:
        parts = tuple(Part(call.name, partial(self._options, call)) for call in PPO_CALLS)
        return Problem(self.pool, parts, tuple(self._calls()))

    def _calls(self) -> Iterator[Task | Sync]:
        for call in PPO_CALLS:
            yield Task(call.name, call.name, call.reads)
        yield Sync("actor train", "actor generate", partial(self._sync_seconds, "actor"))
        yield Sync("critic train", "critic", partial(self._sync_seconds, "critic"))

    def _options(self, call: OneCall, shape: Shape) -> list[Option]:
        if len(shape.kinds) > 1:
            return []
        device = self.devices[shape.kinds[0]]
        found = (self._option(call, shape, device, tp, pp, rows) for tp, pp, rows in self._splits(call, shape))
        return [option for option in found if option.resting + option.active <= self.pool.memory[shape.kinds[0]]]

    def _splits(self, call: OneCall, shape: Shape) -> Iterator[tuple[int, int, int]]:
        """(tp, pp, rows of a pass or decoded together): powers of two."""
        model = self.models[call.role]
        for tp in (1, 2, 4, 8):
            for pp in (1, 2, 4, 8, 16):
                fits = shape.size % (tp * pp) == 0 and tp <= shape.per_node and pp <= model.layers
                dp = shape.size // (tp * pp)
                if fits and dp <= self.rows and not model.heads % tp:
                    most = -(-self.rows // dp)
                    portions = GENERATED if call.kind == "generate" else PASSED
                    yield from ((tp, pp, rows) for rows in sorted({max(1, most // part) for part in portions}))

    def _option(self, call: OneCall, shape: Shape, device: DeviceClass, tp: int, pp: int, rows: int) -> Option:
        dp = shape.size // (tp * pp)
        zero = 1 if call.kind == "train" else 0
        links = Links(device.link_gb_s, device.node_gb_s)
        mesh = Mesh(device, links, dp, tp, pp, shape.per_node, zero)
        asked = self._question(call, -(-self.rows // dp), rows)
        resting, active = self._bytes(asked, mesh, rows)
        side = MeshSide(shape.size, shape.per_node, dp, tp * pp, shards=tp * pp)
        return Option((self.costs.call(asked, mesh).seconds,), resting, active, side, (dp, tp, pp, rows))

    def _question(self, call: OneCall, rows: int, together: int) -> Call:
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
        besides = decode_bytes if call.kind == "generate" else pass_bytes
        return frozen_bytes(call.model, mesh), besides(call, mesh, rows)

    def _sync_seconds(self, role: str, source: End, to: End, relation: Relation) -> float:
        first, second = source.layout, to.layout
        assert isinstance(first, MeshSide) and isinstance(second, MeshSide), "options of PerCall tell their side"
        if relation == "same" and first == second:
            return 0.0
        whole = 2 * self.models[role].parameters
        part = whole // second.tp
        kinds = [self.devices[kind] for end in (source, to) for kind in end.shape.kinds]
        links = Links(min(kind.link_gb_s for kind in kinds), min(kind.node_gb_s for kind in kinds))
        # layouts differ, so weights move though devices may be the same
        way: Relation = "overlapping" if relation == "same" else relation
        between = ModelLink(first, second, way, links, len(self.pool.nodes) > 1)
        weights = SyncWeights(part, whole, -(-whole // int(BUCKET_BYTES)), 12 * self.models[role].layers)
        return between.sync_cost(self.costs, weights).seconds
