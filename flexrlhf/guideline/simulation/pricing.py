"""Seconds of a plan's instructions, from a cost model.

A Run has one cost, that of its slowest replicas: those with most rows; on a cluster of several device classes the
slowest of the classes, each with its own rows. Replicas of equal share differ by a prompt at most.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from flexrlhf.api import (
    BatchShape,
    DeviceClass,
    Eval,
    Instruction,
    Lengths,
    ModelShape,
    Move,
    PlacedModel,
    Plan,
    Run,
    Spec,
    Sync,
    TextPacking,
    UserError,
)
from flexrlhf.guideline.costs.cost_model import Call, Cost, CostModel, Links, Mesh, priced_dims
from flexrlhf.guideline.costs.links import MeshSide, ModelLink, SyncWeights
from flexrlhf.guideline.costs.relations import relation_of
from flexrlhf.guideline.simulation.calls import (
    CallMaker,
    attempt_shape,
    reads_prompts_once,
    replica_rows,
    texts_per_row,
)
from flexrlhf.guideline.simulation.episode_prices import REPLIES, EpisodePrices, crowding
from flexrlhf.guideline.simulation.free_prices import FIRST_TOKEN, free_generation
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.model_free_costs import model_free_cost, source_section

UNKNOWN = DeviceClass("any", tflops=0.1, memory_gb=16, memory_gb_s=20, link_gb_s=1, host_gb_s=10, node_gb_s=1)
"""About a CPU: stands for a class without figures, where the cost model was measured on the device itself."""


@dataclass(frozen=True)
class Pricer:
    """Prices of the instructions of ``plan`` by ``costs``, for texts of ``lengths``."""

    plan: Plan
    costs: CostModel
    lengths: TextLengths
    _figures: dict[int, DeviceClass] = field(default_factory=dict)
    _model_links: dict[tuple[str, str], ModelLink] = field(default_factory=dict)

    def price(self, instruction: Instruction) -> Cost:
        """Return the time of one execution of ``instruction``."""
        match instruction:
            case Run():
                return self._operator(instruction)
            case Move():
                return self._move(instruction)
            case Sync():
                return self._sync(instruction)
            case Eval():
                return self._eval(instruction)
        match instruction.kind:
            case "offload" | "reload":
                return self._switch(instruction)
            case "checkpoint":
                return self._copy(instruction)
            case "save":
                (name,) = instruction.uses
                return self.costs.save(self.plan.sizing.saved_bytes(self.plan.placement[name]))
        assert instruction.kind == "release", f"{instruction} has no price"
        return Cost()

    def shape(self, model: PlacedModel) -> ModelShape:
        """Return the shape of ``model``. Raises UserError where its sizes are unknown."""
        shape = self.plan.shapes.get(model.role)
        if shape is None or shape.sizes is None:
            raise UserError(
                f"models.{model.role}: the sizes of this family of models do not follow from its config, and seconds "
                f"need them; simulate with a model of another family"
            )
        return shape

    def links(self, ranks: Iterable[int]) -> Links:
        """Return the links of the slowest class among ``ranks``."""
        of_node = {self.plan.cluster.node_of(rank): rank for rank in ranks}
        classes = {self.device(rank) for rank in of_node.values()}
        return Links(min(each.link_gb_s for each in classes), min(each.node_gb_s for each in classes))

    def device(self, rank: int) -> DeviceClass:
        """Return the figures of the device of ``rank``."""
        node = self.plan.cluster.node_of(rank)
        if node not in self._figures:
            self._figures[node] = self.plan.cluster.figures_or(rank, UNKNOWN)
        return self._figures[node]

    @cached_property
    def has_copy_streams(self) -> bool:
        """Whether devices copy to host memory and back while they compute; a CPU makes copies itself."""
        settings, ranks = self.plan.spec.cluster, range(self.plan.placement.num_ranks)
        return settings.device == "cuda" or all(
            self.plan.cluster.figures_or(rank, UNKNOWN) != UNKNOWN for rank in ranks
        )

    @cached_property
    def maker(self) -> CallMaker:
        """Maker of the plan's model calls."""
        plan = self.plan
        return CallMaker(plan.batch, plan.lengths, self.lengths, plan.spec.algorithm.epochs)

    def _operator(self, run: Run) -> Cost:
        operator = run.operator
        if operator.call is None:
            batch = self.plan.batch
            rows_of = replica_rows(attempt_shape(batch, run), run.layout, run.mini_batches)
            most = max(map(sum, rows_of.values()))
            # of places for rows in segments as many have one as a round takes, on the average
            most = -(-most * batch.num_taken // batch.num_rows)
            return model_free_cost(self.costs, self.plan.spec, source_section(operator), most, self.lengths.width)
        if self.episodes is None or not operator.has_replies:
            return self._slowest(run)
        if operator.is_free:
            return self._free(self.episodes, run)
        parts: defaultdict[str, float] = defaultdict(float)
        for turn in range(self.episodes.settings.max_turns):
            for name, seconds in self._slowest(run, turn).parts.items():
                parts[name] += seconds
        return Cost({**parts, REPLIES: self.episodes.waiting_seconds(run)})

    def _free(self, episodes: EpisodePrices, run: Run) -> Cost:
        """Return the cost of episodes whose rows go on by themselves, on the device class that takes longest."""
        costs = [
            free_generation(
                self.costs,
                call,
                mesh,
                episodes.followed(call.rows, call.prompt_samples),
                episodes.lanes(run.layout),
                self.keeps_turns(self.plan.placement[run.model], call),
            )[0]
            for call, mesh in self.calls(run, None)
        ]
        return max(costs, key=lambda cost: cost.seconds, default=Cost())

    def _slowest(self, run: Run, turn: int = 0) -> Cost:
        """Return the cost of the calls of ``run``, or of a ``turn``, on the device class that takes longest."""
        costs = [self._call_cost(run, turn, call, mesh) for call, mesh in self.calls(run, turn)]
        return max(costs, key=lambda cost: cost.seconds, default=Cost())

    def _call_cost(self, run: Run, turn: int, call: Call, mesh: Mesh) -> Cost:
        found, model = self.costs.call(call, mesh), self.plan.placement[run.model]
        if not turn or self.episodes is None or not self.keeps_turns(model, call):
            return found
        reply = replace(call, prompt=self.episodes.reply_tokens, responses=FIRST_TOKEN)
        return Cost({**found.parts, "prefill": self.costs.call(reply, mesh).parts.get("prefill", 0.0)})

    def keeps_turns(self, model: PlacedModel, call: Call) -> bool:
        """Whether generation keeps the keys and values of an episode from turn to turn, so that it reads the reply
        alone. ``call``: of whole responses."""
        if model.has_cache:
            return reads_prompts_once(model)
        packing = TextPacking.of(model, self.shape(model), self.plan.lengths.total)
        in_slots = packing.in_slots and self.plan.spec.debug.slots
        return in_slots and model.keeps_slots and call.decode_rows >= call.rows

    @cached_property
    def episodes(self) -> EpisodePrices | None:
        """Prices of episodes; None if the plan has no environment."""
        environment = self.plan.spec.environment
        if environment is None:
            return None
        times = self.costs.environment(environment.name)
        crowded = 1.0 if times is None else crowding(self.plan, times.computing)
        return EpisodePrices(environment, times, self.plan.batch, self.lengths, crowded)

    def calls(self, run: Run, turn: int | None = 0) -> Iterator[tuple[Call, Mesh]]:
        """Yield the call and mesh of a Run for each device class among the replicas that have rows; of one that plays
        episodes, of a ``turn``, or of whole responses if that is None."""
        episodes = self.episodes if run.operator.has_replies else None
        maker = self.maker
        if episodes is not None and turn is not None:
            maker = replace(maker, lengths=episodes.lengths_of(turn))
        model = self.plan.placement[run.model].with_passes(run.tokens)
        rows = replica_rows(attempt_shape(self.plan.batch, run), run.layout, run.mini_batches)
        for device, replicas in self.replicas_by_class(model).items():
            class_rows = [rows[replica] for replica in replicas if any(rows[replica])]
            if episodes is not None and turn is not None:
                class_rows = [(episodes.rows(sum(each), turn),) for each in class_rows]
            if not class_rows:
                continue
            kind, texts, compares = run.operator.call, texts_per_row(run.operator), run.operator.compares_responses
            assert kind is not None, f"{run.operator.name} is no model call"
            call = maker.call(kind, model, self.shape(model), class_rows, texts, compares)
            # contexts of later turns differ between the samples of a prompt
            yield replace(call, prompt_samples=1) if turn else call, self.mesh(model, device)

    def replicas_by_class(self, model: PlacedModel) -> dict[DeviceClass, list[int]]:
        """Return the replicas of ``model`` by the class of their slowest device."""
        by_class: dict[DeviceClass, list[int]] = {}
        for replica, ranks in enumerate(model.layout.replica_sets):
            slowest = min((self.device(rank) for rank in ranks), key=lambda device: device.tflops)
            by_class.setdefault(slowest, []).append(replica)
        return by_class

    def mesh(self, model: PlacedModel, device: DeviceClass) -> Mesh:
        """Return the mesh of ``model``, with all replicas on devices of one class."""
        return Mesh(
            device=device,
            links=self.links(model.ranks),
            dp=model.layout.dp,
            dims=priced_dims(model),
            per_node=self._per_node(model),
            zero=model.settings.zero,
            stages_spread=True,
            sharded_over=model.sharded_over,
            is_ring=is_ring(model, self.shape(model)),
        )

    def _move(self, move: Move) -> Cost:
        """Return the time of the source and destination that take longest."""
        batch, lengths = self.plan.batch, self.plan.lengths
        # attempts of dynamic sampling are not chunked; with segments a step has but one
        parts = batch.attempts if batch.attempts > 1 and batch.segments == 1 else batch.num_chunks
        chunks = 1 if move.chunk is None else parts
        size = batch.num_rows // chunks * sum(map(lengths.row_bytes, move.columns))
        pairs = (self.model_link(source, to) for source in move.sources for to in move.destinations)
        return max((pair.rows_cost(self.costs, size) for pair in pairs), key=lambda cost: cost.seconds)

    def rows_cost(self, writer: Run, reader: Run) -> Cost:
        """Return the time in which the columns of ``writer`` that ``reader`` reads move to its ranks."""
        size = rows_bytes(self.plan.batch, self.plan.lengths, writer, reader)
        return self.model_link(writer.model, reader.model).rows_cost(self.costs, size)

    def model_link(self, source: str, destination: str) -> ModelLink:
        """Return the link between two placed models."""
        if (source, destination) not in self._model_links:
            self._model_links[source, destination] = self._make_link(source, destination)
        return self._model_links[source, destination]

    def _make_link(self, source: str, destination: str) -> ModelLink:
        first, second = self.plan.placement[source], self.plan.placement[destination]
        relation = relation_of(first.ranks, second.ranks)
        links = self.links((*first.ranks, *second.ranks))
        side, other = (side_of(model, self._per_node(model)) for model in (first, second))
        return ModelLink(side, other, relation, links, self.plan.cluster.num_nodes > 1)

    def _per_node(self, model: PlacedModel) -> int:
        """Return the most devices that ``model`` has in one node."""
        return max(Counter(self.plan.cluster.devices[rank].node for rank in model.ranks).values())

    def _sync(self, sync: Sync) -> Cost:
        destination = self.plan.placement[sync.destination]
        weights = synced_weights(destination, self.shape(destination), self.plan.spec, sync.overlaps)
        return self.model_link(sync.source, sync.destination).sync_cost(self.costs, weights)

    def _switch(self, instruction: Instruction) -> Cost:
        """Return the time of the first rank of a stage, which has most where shards are uneven."""
        if not instruction.copies:
            return self.costs.switch(0, self.device(instruction.ranks[0]))
        (name,) = instruction.uses
        model = self.plan.placement[name]
        states = [self.plan.state(model, rank) for rank in model.layout.along("pp", instruction.ranks[0])]
        slowest = min((self.device(rank) for rank in instruction.ranks), key=lambda device: device.host_gb_s)
        return self.costs.switch(max(0 if state is None else state.offloaded for state in states), slowest)

    def _copy(self, instruction: Instruction) -> Cost:
        """Return the time of the first rank of a model's stage that copies most to host memory; files are written
        meanwhile."""
        models = [self.plan.placement[name] for name in instruction.uses]
        sizes: dict[int, int] = defaultdict(int)
        firsts = {rank for each in models for rank in each.layout.along("pp", each.ranks[0])}
        for model in models:
            for rank in firsts & set(model.ranks):
                sizes[rank] += self.plan.sizing.copied_bytes(model, rank)
        slowest = min((self.device(rank) for rank in instruction.ranks), key=lambda device: device.host_gb_s)
        return self.costs.switch(max(sizes.values()), slowest)

    def _eval(self, instruction: Eval) -> Cost:
        """Return the time of one batch, one operator after the other; the number of evaluation prompts is not known
        without the data."""
        inner = replace(self, plan=replace(self.plan, batch=instruction.batch))
        parts: dict[str, float] = {}
        for each in instruction.instructions:
            name = each.operator.name if isinstance(each, Run) else "moves"
            parts[name] = parts.get(name, 0.0) + inner.price(each).seconds
        return Cost(parts)


def side_of(model: PlacedModel, per_node: int) -> MeshSide:
    """Return the layout of ``model`` as one end of an exchange."""
    shards = max(map(len, model.gather_sets))
    return MeshSide(len(model.ranks), per_node, model.layout.dp, model.layout.dims, model.settings.zero, shards)


def is_ring(model: PlacedModel, shape: ModelShape) -> bool:
    """Whether keys and values travel around the context-parallel ranks of ``model``."""
    return shape.sizes is not None and model.settings.is_ring(shape.sizes.heads)


def rows_bytes(batch: BatchShape, lengths: Lengths, writer: Run, reader: Run) -> int:
    """Return the padded bytes of all rows of the columns that ``writer`` writes and ``reader`` reads."""
    common = writer.common_mini_batches(reader)
    shape = attempt_shape(batch, writer)
    num_rows = shape.samples_per_prompt * sum(len(shape.prompts(m)) for m in common)
    reads = reader.operator.columns_read(reader.attempt, writer.attempt)
    columns = (column for column in writer.operator.writes if column in reads)
    return num_rows * sum(map(lengths.row_bytes, columns))


def synced_weights(destination: PlacedModel, shape: ModelShape, spec: Spec, overlaps: bool = False) -> SyncWeights:
    """Return the weights that a Sync sends to ``destination``; adapters that are merged there are gathered in
    float32."""
    sent = shape.of_copy(destination).trained
    # where shards are uneven the first rank of a stage has most
    firsts = destination.layout.along("pp", destination.ranks[0])
    item = destination.sent_item_bytes(spec.sync.dtype)
    part = item * max(shape.trained_elements_on(destination, rank) for rank in firsts)
    adapters = 4 * shape.num_trained if shape.is_merged_in(destination) else 0
    return SyncWeights(part, adapters, -(-spec.sync.NUM_BUCKETS * part // spec.sync.bucket_bytes), len(sent), overlaps)
