"""Seconds of a plan's instructions, from a cost model.

A Run has one cost, that of its slowest replicas: those with most rows; on a cluster of several device classes the
slowest of the classes, each with its own rows. Replicas of equal share differ by a prompt at most.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.guideline.costs.cost_model import Call, Cost, CostModel, Links, MeanPass, Mesh, transformer_of
from flexrlhf.guideline.costs.links import MeshSide, ModelLink, SyncWeights
from flexrlhf.guideline.simulation.pass_counts import TextLayout, all_passes, mean_pass
from flexrlhf.guideline.simulation.scoring_time import RETOKENIZED, model_free_cost
from flexrlhf.memory.budget import SequenceLengths
from flexrlhf.memory.packed_rows import packs_texts, shares_prompts
from flexrlhf.memory.states import elements_on_rank, item_bytes
from flexrlhf.memory.transfer_bytes import copied_bytes, saved_bytes
from flexrlhf.operators.columns import Lengths
from flexrlhf.operators.graph import CallKind, Operator
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.layout import BatchShape, Layout, common_range
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.routes import relation_of
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import (
    Checkpoint,
    Eval,
    Instruction,
    Move,
    Offload,
    Release,
    Reload,
    Run,
    Save,
    Sync,
)
from flexrlhf.weights.lora import is_merged, num_adapters_in_vllm, shape_of
from flexrlhf.weights.shapes import DTYPE_BYTES, ModelShape, count_elements
from flexrlhf.weights.shards import shape_on
from flexrlhf.weights.sync_plan import sent_dtype
from flexrlhf.weights.transfer_plan import NUM_BUCKETS

UNKNOWN = DeviceClass("any", tflops=0.1, memory_gb=16, memory_gb_s=20, link_gb_s=1, host_gb_s=10, node_gb_s=1)
"""About a CPU: stands for a class without figures, where the cost model was measured on the device itself."""


@dataclass(frozen=True)
class TextLengths:
    """Tokens of the texts of a step.

    prompt:      longest prompt, to which padded rows are as wide
    responses:   a sample of response lengths
    prompts:     a sample of prompt lengths; empty: all are as long as the longest
    is_assumed:  whether nothing is known of responses but their limit
    """

    prompt: float
    responses: tuple[float, ...]
    prompts: tuple[float, ...] = ()
    is_assumed: bool = False

    @property
    def mean_response(self) -> float:
        return sum(self.responses) / len(self.responses)

    @property
    def assumption(self) -> str:
        """Hint to print next to the mean of responses of which nothing is known."""
        return " (assumed; --mean-response says it)" if self.is_assumed else ""

    @property
    def mean_prompt(self) -> float:
        return sum(self.all_prompts) / len(self.all_prompts)

    @property
    def all_prompts(self) -> tuple[float, ...]:
        """A sample of prompt lengths, which is never empty."""
        return self.prompts or (self.prompt,)

    @property
    def width(self) -> float:
        """Tokens of a padded row."""
        return self.prompt + max(self.responses)


def longest_lengths(plan: Plan) -> TextLengths:
    """Return the maximum length of every prompt and response of ``plan``."""
    return TextLengths(plan.lengths.prompt, (plan.lengths.response,))


def check_figures(cluster: Cluster, device: str, profile: object) -> None:
    """Raise UserError where the speed of the devices is unknown. ``profile``: file expected to have measurements."""
    if device == "cpu":
        raise UserError(_without_figures("cluster.device: cpu", profile))
    for device_class in cluster.classes:
        if cluster.figures(cluster.ranks_on(device_class)[0]) is None:
            raise UserError(_without_figures(f"cluster: device class {device_class}", profile))


def _without_figures(what: str, profile: object) -> str:
    return (
        f"{what} has no figures to compute seconds from: give cluster.nodes with a class such as A100-80G, or "
        f"measure with `flexrlhf profile` first (no {profile})"
    )


@dataclass(frozen=True)
class CallMaker:
    """Maker of the model calls of a plan.

    batch:    rows of a step
    longest:  maximum lengths, for which memory is reserved
    lengths:  expected lengths
    epochs:   passes of training over the rows
    """

    batch: BatchShape
    longest: Lengths
    lengths: TextLengths
    epochs: int

    def call(
        self,
        kind: CallKind,
        model: PlacedModel,
        shape: ModelShape,
        rows: Sequence[Sequence[int]],
        texts: int = 1,
        compares: bool = False,
    ) -> Call:
        """Return the call of the fullest of some replicas.

        rows:      rows of each replica, by mini-batch.
        texts:     texts of a row, each in passes of its own.
        compares:  whether all texts of a prompt are in one pass.
        """
        settings, trains = model.settings, kind == "train"
        epochs = self.epochs if trains else 1
        # replicas wait for each other at every update, else at the end
        most = sum(map(max, zip(*rows, strict=True))) if trains else max(map(sum, rows))
        at_once = max(map(max, rows)) if trains else most
        return Call(
            kind=kind,
            model=transformer_of(shape, model.head, is_adapted=settings.lora is not None),
            engine=engine_of(model),
            rows=epochs * most * texts,
            prompt=self.lengths.prompt,
            responses=self.lengths.responses,
            width=self.lengths.width,
            updates=epochs * len(rows[0]),
            decode_rows=max(1, self._reserved.rows_decoded(model, at_once)),
            item=item_bytes(model),
            cache_item=item_bytes(model),
            recompute="full" if trains and settings.activation_checkpointing else "none",
            offload_optimizer=settings.offload_optimizer,
            passes=None if kind == "generate" else self._passes(model, shape, rows, trains, epochs * texts, compares),
            adapters_apart=num_adapters_in_vllm(model.role, shape, settings.lora) if model.rollout else 0,
            prompt_samples=self.batch.samples_per_prompt if kind == "generate" and reads_prompts_once(model) else 1,
        )

    def _passes(
        self,
        model: PlacedModel,
        shape: ModelShape,
        rows: Sequence[Sequence[int]],
        trains: bool,
        times: int,
        compares: bool,
    ) -> MeanPass:
        """Return the passes of the fullest replica, ``times`` over. Every mini-batch is trained on by itself."""
        settings, samples = model.settings, self.batch.samples_per_prompt
        packs = packs_texts(settings, shape, self.longest.of_role(model.role).total)
        layout = TextLayout(settings.micro_batch_tokens, packs, shares_prompts(settings), compares)
        most = map(max, zip(*rows, strict=True)) if trains else [max(map(sum, rows))]
        prompts, responses = self.lengths.all_prompts, self.lengths.responses
        return all_passes(
            (times * number, mean_pass(prompts, responses, each // samples, samples, layout))
            for each, number in Counter(most).items()
            if each
        )

    @property
    def _reserved(self) -> SequenceLengths:
        """Lengths of a row in decoding, which reserves memory for responses of full length."""
        return SequenceLengths(self.longest.prompt, self.longest.response)


@dataclass(frozen=True)
class Pricer:
    """Prices of the instructions of ``plan`` by ``costs``, for texts of ``lengths``."""

    plan: Plan
    costs: CostModel
    lengths: TextLengths
    _figures: dict[object, DeviceClass] = field(default_factory=dict)
    _model_links: dict[tuple[str, str], ModelLink] = field(default_factory=dict)

    def price(self, instruction: Instruction) -> Cost:
        """Return the seconds of one execution of ``instruction``."""
        match instruction:
            case Run():
                return self._operator(instruction.operator, self.plan.placement[instruction.model], instruction)
            case Move():
                return self._move(instruction)
            case Sync():
                return self._sync(instruction)
            case Offload() | Reload():
                return self._switch(instruction)
            case Release():
                return Cost()
            case Save():
                model = self.plan.placement[instruction.model]
                return self.costs.save(saved_bytes(model, self.shape(model)))
            case Checkpoint():
                return self._copy(instruction)
            case Eval():
                return self._eval(instruction)
        raise AssertionError(f"{instruction} has no price")

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
        classes = {self.device(rank) for rank in ranks}
        return Links(min(each.link_gb_s for each in classes), min(each.node_gb_s for each in classes))

    def device(self, rank: int) -> DeviceClass:
        """Return the figures of the device of ``rank``."""
        device = replace(self.plan.cluster.devices[rank], rank=0, node=0)
        if device not in self._figures:
            self._figures[device] = self.plan.cluster.figures_or(rank, UNKNOWN)
        return self._figures[device]

    @cached_property
    def _maker(self) -> CallMaker:
        plan = self.plan
        return CallMaker(plan.batch, plan.lengths, self.lengths, plan.spec.algorithm.epochs)

    def _operator(self, operator: Operator, model: PlacedModel, run: Run) -> Cost:
        if operator.call is None:
            most = max(sum(rows) for rows in replica_rows(self.plan.batch, model.layout, run.mini_batches).values())
            return model_free_cost(self.costs, self.plan.spec, source_section(operator), most, self.lengths.width)
        costs = [self.costs.call(call, mesh) for call, mesh in self.calls(run)]
        return max(costs, key=lambda cost: cost.seconds, default=Cost())

    def calls(self, run: Run) -> Iterator[tuple[Call, Mesh]]:
        """Yield the call and mesh of a Run for each device class among the replicas that have rows."""
        model = self.plan.placement[run.model]
        rows = replica_rows(self.plan.batch, model.layout, run.mini_batches)
        by_class: dict[DeviceClass, list[int]] = {}
        for replica, ranks in enumerate(replica_ranks(model.layout)):
            if any(rows[replica]):
                by_class.setdefault(min((self.device(rank) for rank in ranks), key=_speed), []).append(replica)
        for device, replicas in by_class.items():
            class_rows = [rows[replica] for replica in replicas]
            kind, texts, compares = run.operator.call, texts_per_row(run.operator), run.operator.compares_responses
            assert kind is not None, f"{run.operator.name} is no model call"
            call = self._maker.call(kind, model, self.shape(model), class_rows, texts, compares)
            yield call, self.mesh(model, device)

    def mesh(self, model: PlacedModel, device: DeviceClass) -> Mesh:
        """Return the mesh of ``model``, with all replicas on devices of one class.

        The stages of a rollout engine work in turn, each on its share: as long as one stage on all.
        """
        layout, works_in_turn = model.layout, model.rollout is not None
        return Mesh(
            device=device,
            links=self.links(model.ranks),
            dp=layout.dp,
            tp=layout.tp,
            pp=1 if works_in_turn else layout.pp,
            per_node=self._per_node(model),
            zero=model.settings.zero,
            stages_spread=True,
            sharded_over=model.sharded_over,
        )

    def _move(self, move: Move) -> Cost:
        """Return the seconds of the source and destination that take longest."""
        batch, lengths = self.plan.batch, self.plan.lengths
        chunks = 1 if move.chunk is None else batch.num_chunks
        size = batch.num_rows // chunks * sum(map(lengths.row_bytes, move.columns))
        pairs = (self.model_link(source, to) for source in move.sources for to in move.destinations)
        return max((pair.rows_cost(self.costs, size) for pair in pairs), key=lambda cost: cost.seconds)

    def rows_cost(self, writer: Run, reader: Run) -> Cost:
        """Return the seconds in which what ``reader`` reads of ``writer`` moves from the one's ranks to the other's."""
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
        return ModelLink(self._side(first), self._side(second), relation, links, self.plan.cluster.num_nodes > 1)

    def _side(self, model: PlacedModel) -> MeshSide:
        return side_of(model, self._per_node(model))

    def _per_node(self, model: PlacedModel) -> int:
        """Return the most devices that ``model`` has in one node."""
        return max(Counter(self.plan.cluster.devices[rank].node for rank in model.ranks).values())

    def _sync(self, sync: Sync) -> Cost:
        return self.model_link(sync.source, sync.destination).sync_cost(self.costs, self.sync_weights(sync))

    def sync_weights(self, sync: Sync) -> SyncWeights:
        """Return the weights that ``sync`` sends."""
        destination = self.plan.placement[sync.destination]
        return synced_weights(destination, self.shape(destination), self.plan.spec, sync.overlaps)

    def _switch(self, instruction: Offload | Reload) -> Cost:
        """Return the seconds of the first rank of a stage, which has most where shards are uneven."""
        if instruction.is_refilled:
            return self.costs.switch(0, self.device(instruction.ranks[0]))
        model = self.plan.placement[instruction.model]
        states = [self.plan.state(model, rank) for rank in model.layout.pp_set(instruction.ranks[0])]
        slowest = min((self.device(rank) for rank in instruction.ranks), key=lambda device: device.host_gb_s)
        return self.costs.switch(max(0 if state is None else state.offloaded for state in states), slowest)

    def _copy(self, instruction: Checkpoint) -> Cost:
        """Return the seconds of the first rank of a model's stage that copies most to host memory; files are written
        meanwhile."""
        models = [self.plan.placement[name] for name in instruction.models]
        sizes: dict[int, int] = defaultdict(int)
        firsts = {rank for each in models for rank in each.layout.pp_set(each.ranks[0])}
        for model in models:
            for rank in firsts & set(model.ranks):
                sizes[rank] += copied_bytes(model, self.shape(model), rank)
        slowest = min((self.device(rank) for rank in instruction.ranks), key=lambda device: device.host_gb_s)
        return self.costs.switch(max(sizes.values()), slowest)

    def _eval(self, instruction: Eval) -> Cost:
        """Return the seconds of one batch, one operator after the other; the number of evaluation prompts is not known
        without the data."""
        inner = replace(self, plan=replace(self.plan, batch=instruction.batch))
        parts: dict[str, float] = {}
        for each in instruction.instructions:
            name = each.operator.name if isinstance(each, Run) else "moves"
            parts[name] = parts.get(name, 0.0) + inner.price(each).seconds
        return Cost(parts)


def source_section(operator: Operator) -> str:
    """Return the section of the YAML whose sources ``operator`` calls, ``RETOKENIZED`` where it encodes texts;
    empty for another one."""
    if operator.kind == "retokenize":
        return RETOKENIZED
    return operator.function if operator.kind == "score" else ""


def texts_per_row(operator: Operator) -> int:
    """Return the texts of a row; a pretraining text (``ptx``) is counted as long as the row."""
    return 2 if operator.extra_loss else 1


def side_of(model: PlacedModel, per_node: int) -> MeshSide:
    """Return the layout of ``model`` as one end of an exchange."""
    shards = max(map(len, model.gather_sets))
    layout = model.layout
    return MeshSide(len(model.ranks), per_node, layout.dp, layout.tp, model.settings.zero, shards, layout.pp)


def engine_of(model: PlacedModel) -> str:
    """Return the name of the engine profile that a call of ``model`` runs on."""
    return model.engine if model.rollout is None else model.rollout.engine


def reads_prompts_once(model: PlacedModel) -> bool:
    """Whether generation reads a prompt once for all of its samples."""
    rollout = model.rollout
    return rollout.prefix_caching if rollout is not None and model.has_cache else model.settings.share_prompts


def replica_ranks(layout: Layout) -> list[tuple[int, ...]]:
    """Return the ranks of each replica."""
    return list(layout.replica_sets)


def replica_rows(batch: BatchShape, layout: Layout, mini_batches: range) -> Mapping[int, tuple[int, ...]]:
    """Return each replica's rows of each of ``mini_batches``."""
    return _replica_rows(batch, layout.dp, layout.row_shares, mini_batches)


@lru_cache(maxsize=1024)
def _replica_rows(
    batch: BatchShape, dp: int, row_shares: tuple[Fraction, ...], mini_batches: range
) -> Mapping[int, tuple[int, ...]]:
    layout = Layout(tuple(range(dp)), row_shares=row_shares)
    samples = batch.samples_per_prompt
    return {
        replica: tuple(samples * len(layout.slice(batch.prompts(m), replica, turn=m)) for m in mini_batches)
        for replica in range(layout.dp)
    }


@lru_cache(maxsize=1024)
def row_patterns(batch: BatchShape, layout: Layout, mini_batches: range) -> tuple[tuple[int, ...], ...]:
    """Return the distinct rows that replicas have of ``mini_batches``: ten thousand replicas differ by rounding."""
    return tuple(dict.fromkeys(replica_rows(batch, layout, mini_batches).values()))


def rows_bytes(batch: BatchShape, lengths: Lengths, writer: Run, reader: Run) -> int:
    """Return the padded bytes of all rows of the columns that ``writer`` writes and ``reader`` reads."""
    common = common_range(writer.mini_batches, reader.mini_batches)
    num_rows = batch.samples_per_prompt * sum(len(batch.prompts(m)) for m in common)
    columns = (column for column in writer.operator.writes if column in reader.operator.reads)
    return num_rows * sum(map(lengths.row_bytes, columns))


def synced_weights(destination: PlacedModel, shape: ModelShape, spec: Spec, overlaps: bool = False) -> SyncWeights:
    """Return what a Sync sends to ``destination``; adapters that are merged there are gathered in
    float32."""
    sent = shape_of(destination, shape).trained
    # where shards are uneven the first rank of a stage has most
    firsts = destination.layout.pp_set(destination.ranks[0])
    stages = ((rank, shape_on(destination, shape, rank).trained) for rank in firsts)
    item = DTYPE_BYTES[sent_dtype(destination, spec.sync.dtype)]
    part = item * max(elements_on_rank(destination, stage, rank) for rank, stage in stages)
    adapters = 4 * count_elements(shape.trained) if is_merged(destination, shape) else 0
    return SyncWeights(part, adapters, -(-NUM_BUCKETS * part // spec.sync.bucket_bytes), len(sent), overlaps)


def _speed(device: DeviceClass) -> float:
    return device.tflops
