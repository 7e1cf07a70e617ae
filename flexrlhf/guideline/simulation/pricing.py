"""What the instructions of a plan cost: each as a question to the cost model.

A Run has one cost, that of its slowest replicas: those with most rows; on a cluster of several classes the slowest of
what the classes take for theirs. Replicas of equal share differ by a prompt at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import ceil

from flexrlhf.config.spec import Head, Spec
from flexrlhf.errors import UserError
from flexrlhf.guideline.costs.cost_model import Call, Cost, CostModel, Kind, Links, Mesh
from flexrlhf.guideline.costs.exchange import Between, Side, Weights, relation_of
from flexrlhf.guideline.costs.transformer import Transformer, transformer_of
from flexrlhf.guideline.simulation.scoring_time import cost_beside
from flexrlhf.memory.budget import SequenceLengths
from flexrlhf.memory.states import elements_on_rank, item_bytes
from flexrlhf.memory.transfers import saved_bytes
from flexrlhf.operators.columns import Lengths
from flexrlhf.operators.graph import Operator
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.plan import Plan, bucket_bytes
from flexrlhf.strategies.instructions import Eval, Instruction, Move, Offload, Reload, Run, Save, Sync
from flexrlhf.weights.lora import gathered_names, is_merged, shape_of
from flexrlhf.weights.shapes import LANGUAGE_HEAD, ModelShape, Sizes, count_elements

OWN_DECODING = "torch"
"""The decode profile of ``engines/decoding.py``, by which all but rollout engines generate."""
UNKNOWN = DeviceClass("any", tflops=0.1, memory_gb=16, memory_gb_s=20, link_gb_s=1, host_gb_s=10, node_gb_s=1)
"""About a CPU: stands for a class without figures, beside a cost model that was measured on the device itself."""


@dataclass(frozen=True)
class TextLengths:
    """Tokens of prompts (the longest, to which a pass is padded) and of answers (a sample of them)."""

    prompt: float
    responses: tuple[float, ...]

    @property
    def mean_response(self) -> float:
        return sum(self.responses) / len(self.responses)

    @property
    def width(self) -> float:
        """Tokens of a padded row: engines cut what is padding in all rows of a pass."""
        return self.prompt + max(self.responses)


def longest_texts(plan: Plan) -> TextLengths:
    """Every prompt and every answer as long as it may be."""
    return TextLengths(plan.lengths.prompt, (plan.lengths.response,))


def check_figures(cluster: Cluster, device: str, profile: object) -> None:
    """Raise UserError where nobody says how fast the devices are. ``profile``: where measurements were looked for."""
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
    """Model calls of runs with ``batch``. ``longest``: texts that room is kept for; ``lengths``: as they come to be."""

    batch: BatchShape
    longest: Lengths
    lengths: TextLengths
    epochs: int

    def call(
        self, kind: Kind, model: PlacedModel, shape: ModelShape, rows: Sequence[Sequence[int]], texts: int = 1
    ) -> Call:
        """``rows``: of the replicas, by mini-batch. ``texts``: of a row, each in passes of its own (``texts_of``)."""
        settings, trains = model.settings, kind == "train"
        epochs = self.epochs if trains else 1
        # replicas wait for each other at every update, else at the end
        most = sum(map(max, zip(*rows, strict=True))) if trains else max(map(sum, rows))
        at_once = max(map(max, rows)) if trains else most
        return Call(
            kind=kind,
            model=transformer_of_shape(shape, model.head, is_adapted=settings.lora is not None),
            engine=engine_of(model, kind),
            rows=epochs * most * texts,
            prompt=self.lengths.prompt,
            responses=self.lengths.responses,
            width=self.lengths.width,
            updates=epochs * len(rows[0]),
            micro_rows=max(1, self._texts.rows_within(settings.micro_batch_tokens, at_once)),
            decode_rows=max(1, self._room.rows_decoded(settings.generate_tokens, at_once)),
            item=item_bytes(model),
            cache_item=item_bytes(model),
            recompute="full" if trains and settings.activation_checkpointing else "none",
            offload_optimizer=settings.offload_optimizer,
        )

    @property
    def _room(self) -> SequenceLengths:
        """Decoding keeps it for answers of full length, whatever they come to."""
        return SequenceLengths(self.longest.prompt, self.longest.response)

    @property
    def _texts(self) -> SequenceLengths:
        """Widths of passes in whole tokens."""
        return SequenceLengths(
            ceil(self.lengths.prompt), ceil(max(self.lengths.responses)), self.batch.samples_per_prompt
        )


@dataclass(frozen=True)
class Pricer:
    """Asks ``costs`` about the instructions of ``plan``."""

    plan: Plan
    costs: CostModel
    lengths: TextLengths
    _figures: dict[object, DeviceClass] = field(default_factory=dict)
    _between: dict[tuple[str, str], Between] = field(default_factory=dict)

    def price(self, instruction: Instruction) -> Cost:
        match instruction:
            case Run():
                return self._operator(instruction.operator, self.plan.placement[instruction.model], instruction)
            case Move():
                return self._move(instruction)
            case Sync():
                return self._sync(instruction)
            case Offload() | Reload():
                return self._switch(instruction)
            case Save():
                model = self.plan.placement[instruction.model]
                return self.costs.save(saved_bytes(model, self.shape(model)))
            case Eval():
                return self._eval(instruction)
        raise AssertionError(f"{instruction} has no price")

    def shape(self, model: PlacedModel) -> ModelShape:
        shape = self.plan.shapes.get(model.role)
        if shape is None or shape.sizes is None:
            raise UserError(
                f"models.{model.role}: the config does not tell the sizes of this family of models, and seconds follow "
                f"from them; simulate with one that does"
            )
        return shape

    def links(self, ranks: Iterable[int]) -> Links:
        """The slowest of the classes among ``ranks``."""
        classes = {self.device(rank) for rank in ranks}
        return Links(min(each.link_gb_s for each in classes), min(each.node_gb_s for each in classes))

    def device(self, rank: int) -> DeviceClass:
        device = replace(self.plan.cluster.devices[rank], rank=0, node=0)
        if device not in self._figures:
            self._figures[device] = self.plan.cluster.figures(rank) or UNKNOWN
        return self._figures[device]

    @cached_property
    def _maker(self) -> CallMaker:
        plan = self.plan
        return CallMaker(plan.batch, plan.lengths, self.lengths, plan.spec.algorithm.epochs)

    def _operator(self, operator: Operator, model: PlacedModel, run: Run) -> Cost:
        if operator.call is None:
            most = max(sum(rows) for rows in replica_rows(self.plan.batch, model.layout, run.mini_batches).values())
            return cost_beside(self.costs, self.plan.spec, asked_by(operator), most, self.lengths.width)
        found = [self.costs.call(*question) for question in self.questions(run)]
        return max(found, key=lambda cost: cost.seconds, default=Cost())

    def questions(self, run: Run) -> Iterator[tuple[Call, Mesh]]:
        """What is asked about a Run: one call on one mesh for each device class among the replicas that have rows."""
        model = self.plan.placement[run.model]
        rows = replica_rows(self.plan.batch, model.layout, run.mini_batches)
        homes: dict[DeviceClass, list[int]] = {}
        for replica, ranks in enumerate(replica_ranks(model.layout)):
            if any(rows[replica]):
                homes.setdefault(min((self.device(rank) for rank in ranks), key=_speed), []).append(replica)
        for device, replicas in homes.items():
            found = [rows[replica] for replica in replicas]
            kind, texts = run.operator.call, texts_of(run.operator)
            assert kind is not None, f"{run.operator.name} is no model call"
            yield self._maker.call(kind, model, self.shape(model), found, texts), self.mesh(model, device)

    def mesh(self, model: PlacedModel, device: DeviceClass) -> Mesh:
        layout = model.layout
        return Mesh(
            device=device,
            links=self.links(model.ranks),
            dp=layout.dp,
            tp=layout.tp,
            pp=layout.pp,
            per_node=self._per_node(model),
            zero=model.settings.zero,
        )

    def _move(self, move: Move) -> Cost:
        """From the source to the destination that take longest."""
        batch, lengths = self.plan.batch, self.plan.lengths
        chunks = 1 if move.chunk is None else batch.num_chunks
        size = batch.num_rows // chunks * sum(map(lengths.row_bytes, move.columns))
        pairs = (self.between(source, to) for source in move.sources for to in move.destinations)
        return max((pair.rows_cost(self.costs, size) for pair in pairs), key=lambda cost: cost.seconds)

    def rows_cost(self, writer: Run, reader: Run) -> Cost:
        """Of what ``reader`` reads of ``writer``, from the one's ranks to the other's."""
        first, second = writer.mini_batches, reader.mini_batches
        common = range(max(first.start, second.start), min(first.stop, second.stop))
        size = rows_bytes(self.plan.batch, self.plan.lengths, writer.operator, reader.operator, common)
        return self.between(writer.model, reader.model).rows_cost(self.costs, size)

    def between(self, source: str, destination: str) -> Between:
        """Two placed models."""
        if (source, destination) not in self._between:
            self._between[source, destination] = self._make_between(source, destination)
        return self._between[source, destination]

    def _make_between(self, source: str, destination: str) -> Between:
        first, second = self.plan.placement[source], self.plan.placement[destination]
        relation = relation_of(first.ranks, second.ranks)
        links = self.links((*first.ranks, *second.ranks))
        return Between(self._side(first), self._side(second), relation, links, self.plan.cluster.num_nodes > 1)

    def _side(self, model: PlacedModel) -> Side:
        return side_of(model, self._per_node(model))

    def _per_node(self, model: PlacedModel) -> int:
        """The most devices that ``model`` has in one node."""
        return max(Counter(self.plan.cluster.devices[rank].node for rank in model.ranks).values())

    def _sync(self, sync: Sync) -> Cost:
        return self.between(sync.source, sync.destination).sync_cost(self.costs, self.weights(sync))

    def weights(self, sync: Sync) -> Weights:
        destination = self.plan.placement[sync.destination]
        return synced_weights(destination, self.shape(destination), self.plan.spec)

    def _switch(self, instruction: Offload | Reload) -> Cost:
        """Where shards are uneven the first rank holds most."""
        state = self.plan.state(self.plan.placement[instruction.model], instruction.ranks[0])
        slowest = min((self.device(rank) for rank in instruction.ranks), key=lambda device: device.host_gb_s)
        return self.costs.switch(0 if state is None else state.offloaded, slowest)

    def _eval(self, instruction: Eval) -> Cost:
        """Of one batch, one operator after the other: how many held-out prompts there are only the data can tell."""
        inner = replace(self, plan=replace(self.plan, batch=instruction.batch))
        parts: dict[str, float] = {}
        for each in instruction.instructions:
            name = each.operator.name if isinstance(each, Run) else "moves"
            parts[name] = parts.get(name, 0.0) + inner.price(each).seconds
        return Cost(parts)


def asked_by(operator: Operator) -> str:
    """The section of the YAML whose sources are asked, where ``operator`` asks."""
    return operator.function if operator.kind == "score" else ""


def texts_of(operator: Operator) -> int:
    """Of a row: what is trained on beside an answer (``ptx``) is taken to be as long."""
    return 2 if operator.extra_loss else 1


def side_of(model: PlacedModel, per_node: int) -> Side:
    """How ``model`` lies, as what is exchanged with it sees it."""
    cut = max(map(len, model.gather_sets))
    return Side(len(model.ranks), per_node, model.layout.dp, model.layout.tp, model.settings.zero, cut)


def engine_of(model: PlacedModel, kind: str) -> str:
    """The name of what computes."""
    if model.rollout is not None:
        return model.rollout.engine
    return OWN_DECODING if kind == "generate" else model.engine


def replica_ranks(layout: Layout) -> list[tuple[int, ...]]:
    """Ranks of each replica (tensor-parallel ranks beside each other, then replicas, then stages)."""
    assert layout.pp == 1, "no engine has pipeline stages yet"
    return list(layout.tp_sets)


def replica_rows(batch: BatchShape, layout: Layout, mini_batches: range) -> Mapping[int, tuple[int, ...]]:
    """Replica → its rows of each of ``mini_batches``."""
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
    """What replicas have of ``mini_batches``, each once: ten thousand of them differ by roundings alone."""
    return tuple(dict.fromkeys(replica_rows(batch, layout, mini_batches).values()))


def rows_bytes(batch: BatchShape, lengths: Lengths, writer: Operator, reader: Operator, mini_batches: range) -> int:
    """Of all rows of the columns that ``reader`` reads of what ``writer`` writes, padded."""
    num_rows = batch.samples_per_prompt * sum(len(batch.prompts(m)) for m in mini_batches)
    return num_rows * sum(lengths.row_bytes(column) for column in writer.writes if column in reader.reads)


def synced_weights(destination: PlacedModel, shape: ModelShape, spec: Spec) -> Weights:
    """What a Sync sends to ``destination``: in its type; what is merged there is gathered in float32, with adapters."""
    item = item_bytes(destination)
    is_sum = is_merged(destination, shape)
    sent = shape_of(destination, shape).trained
    size = item * count_elements(sent)
    names = set(gathered_names([name for name, _ in sent])) if is_sum else set()
    whole = 4 * count_elements(tuple(each for each in shape.parameters if each[0] in names)) if is_sum else size
    # where shards are uneven the first rank holds most
    part = item * elements_on_rank(destination, sent, destination.ranks[0])
    return Weights(part, whole, -(-size // bucket_bytes(spec)), len(sent))


def transformer_of_shape(shape: ModelShape, head: Head, is_adapted: bool) -> Transformer:
    sizes = shape.sizes
    assert isinstance(sizes, Sizes), "shapes without sizes are refused"
    adapters = count_elements(shape.trained) if is_adapted and shape.adapters else 0
    is_scorer = head == "scalar"
    tied = not is_scorer and LANGUAGE_HEAD not in shape.names
    return transformer_of(sizes, is_scorer, tied, adapters)


def _speed(device: DeviceClass) -> float:
    return device.tflops
