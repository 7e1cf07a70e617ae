"""Bytes of the states of placed models on a rank, and of what one piece of work needs in addition, before a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

from flexrlhf.config.model_families import Families
from flexrlhf.config.model_settings import Head
from flexrlhf.config.output_settings import SaveSpec
from flexrlhf.config.spec import SyncSpec
from flexrlhf.memory.activations import CACHE, Blocks, larger
from flexrlhf.memory.engine_bytes import gathered_bytes, model_state, new_gradient_bytes, update_bytes
from flexrlhf.memory.packed_rows import (
    PassSize,
    TextPacking,
    largest_pass,
)
from flexrlhf.memory.rollout_bytes import on_gpu
from flexrlhf.memory.states import State
from flexrlhf.memory.transfer_bytes import (
    UNDER_WAY,
    WeightSync,
    copied_bytes,
    is_loaded_whole,
    loading_bytes,
    saved_bytes,
    saved_model,
    saving_parts,
    sync_parts,
    writing_bytes,
)
from flexrlhf.operators.columns import Lengths
from flexrlhf.operators.graph import CallKind
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.placement.placement import Placement
from flexrlhf.placement.rollout import PagedCache
from flexrlhf.weights.decoder_sizes import Sizes
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.reuse import Reuse
from flexrlhf.weights.shards import part_elements
from flexrlhf.weights.sync_volumes import SyncVolumes
from flexrlhf.weights.transfers import NodeOf


@dataclass(frozen=True)
class Compute:
    """A model call.

    rows:      rows of the largest call on this rank; None: as many as its settings allow.
    samples:   samples of a prompt; None: as in a step.
    texts:     sequences of a row, each in passes of its own.
    compares:  whether all sequences of a prompt are in one pass, because the loss compares them.
    block:     most rows that passes are composed of; None: all of them.
    tokens:    computed tokens of a pass; None: as in the settings of the model.
    carries:   whether it generates rows that the next step goes on with.
    """

    kind: CallKind
    model: ModelName
    rows: int | None
    samples: int | None = None
    texts: int = 1
    compares: bool = False
    block: int | None = None
    tokens: int | None = None
    carries: bool = False


@dataclass(frozen=True)
class Saving:
    """A Save: ``ranks`` gather the model, and write its files in turns from host memory, tensor by tensor."""

    model: ModelName
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Copying:
    """A Checkpoint: this rank copies its pieces of ``models`` to host memory."""

    models: tuple[ModelName, ...]


@dataclass(frozen=True)
class Releasing:
    """A Release of a copy, which returns weights that its source has lent."""

    model: ModelName


Work = Compute | WeightSync | Saving | Copying | Releasing
PhaseKind = CallKind | Literal["load", "resume", "update", "sync", "save", "checkpoint", "release"]
NamedBytes = Mapping[str, int | None]
"""Bytes by name; None where they are known only once the model is loaded."""


@dataclass(frozen=True)
class Phase:
    """Bytes on a rank during one kind of work on one model.

    parts:   bytes by name in addition to the states.
    states:  bytes of the models on the device, with the gradients of the one that trains.
    host:    bytes in host memory.
    """

    kind: PhaseKind
    model: str
    parts: NamedBytes
    states: int = 0
    host: int = 0

    @property
    def part_bytes(self) -> int:
        """Bytes of all known parts."""
        return sum(size or 0 for size in self.parts.values())

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.states + self.part_bytes

    @property
    def trains(self) -> bool:
        """Whether the model's gradients exist during the phase."""
        return self.kind in ("train", "update")

    @property
    def label(self) -> str:
        words = {"sync": "to"} | dict.fromkeys(("load", "resume", "save", "checkpoint", "release"), "of")
        return f"{self.kind} {words.get(self.kind, 'on')} {self.model}"


@dataclass(frozen=True)
class SequenceLengths:
    """Padded tokens of a row, the number of rows of one prompt, and of one episode, each with its own prompt."""

    prompt: int
    response: int
    samples_per_prompt: int = 1
    sequences: int = 1

    @property
    def width(self) -> int:
        return self.prompt + self.response

    def of_own_tokenizers(self, lengths: Lengths) -> dict[str, SequenceLengths]:
        """Return these with the ``lengths`` of each role that has a tokenizer of its own."""
        own = {role: lengths.of_role(role) for role, _ in lengths.texts}
        return {role: replace(self, prompt=each.prompt, response=each.response) for role, each in own.items()}

    def rows_decoded(self, model: PlacedModel, rows: int | None) -> int:
        """Return the rows that are decoded together, of ``rows`` in all."""
        tokens = model.settings.generate_tokens
        whole = max(1, tokens // self.width)
        fitting = PagedCache.of(model, self.prompt, self.response).most_rows if model.has_cache else whole
        return fitting if rows is None else min(fitting, rows)


@dataclass(frozen=True)
class Sizing:
    """Inputs of a memory plan.

    placement:     the placed models.
    shapes:        by role; a role is absent when its shape is known only once it is loaded.
    texts:         lengths of the rows.
    sync:          settings of weight syncs.
    own_texts:     lengths by role, for models with a tokenizer of their own.
    node_of:       node of a rank; None: all are on one.
    reusing:       copies that exist only during their calls and have their source's weights meanwhile, each with an
                   instruction that uses the source in that time; empty if none does.
    slots:         whether rows are decoded in slots where a family can.
    on_gpus:       whether all devices are GPUs of known classes, on which vLLM has graphs and buffers.
    save:          settings of saved models.
    has_episodes:  whether generated rows have turns, between which slots keep their keys and values.
    kept_slots:    slots, by placed model, whose rows keep their keys and values from step to step, on each rank.
    """

    placement: Placement
    shapes: Mapping[str, ModelShape]
    texts: SequenceLengths
    sync: SyncSpec
    own_texts: Mapping[str, SequenceLengths] = field(default_factory=dict)
    node_of: NodeOf | None = None
    reusing: Mapping[ModelName, str] = field(default_factory=dict)
    slots: bool = True
    on_gpus: bool = False
    save: SaveSpec = field(default_factory=SaveSpec)
    has_episodes: bool = False
    kept_slots: Mapping[ModelName, int] = field(default_factory=dict)

    def texts_of(self, role: str) -> SequenceLengths:
        """Return the lengths of the rows that the models of ``role`` read."""
        return self.own_texts.get(role, self.texts)

    def state(self, model: PlacedModel, rank: int) -> State | None:
        """Return the state of ``model`` on ``rank``; None before an unknown architecture is loaded."""
        reuse = self.reuse(model, rank)
        key = model.name, model.position(rank), None if reuse is None else id(reuse)
        if key not in self._states:
            state = self.own_state(model, rank)
            self._states[key] = state if state is None or reuse is None else _reusing(state, model, reuse)
        return self._states[key]

    def own_state(self, model: PlacedModel, rank: int) -> State | None:
        """Return the state of a model that stores all of its weights by itself, wherever other models are."""
        shape = self.shapes.get(model.role)
        if shape is None:
            return None
        state = model_state(model, shape, rank)
        if self.on_gpus and model.has_cache:
            return on_gpu(state, model, shape, self.texts.rows_decoded(model, None))
        if model.name in self.kept_slots and shape.sizes is not None:
            # it stays on the device when the weights leave it
            slots, of_token = self.kept_slots[model.name], layers_on_rank(model, shape.sizes, rank).kv_bytes_per_token()
            return replace(state, buffers=state.buffers + slots * self.texts.width * of_token)
        return state

    def reuse(self, model: PlacedModel, rank: int) -> Reuse | None:
        """Return the weights of a copy on ``rank`` that are stored once; None if it stores all by itself."""
        shape = self.shapes.get(model.role)
        if model.name not in self.reusing or shape is None:
            return None
        source = self.placement[model.role]
        if rank not in source.ranks or model.obstacle_to_reuse(source, self.sync.dtype):
            return None
        key = model.name, model.position(rank), source.position(rank)
        if key not in self._reused:
            self._reused[key] = Reuse.of(source, model, shape, rank, lends=not self.reusing[model.name])
        return self._reused[key]

    def kv_bytes(self, model: PlacedModel) -> int:
        """Return the bytes of a rollout engine's KV cache on each of its ranks; other engines allocate theirs per
        call.
        """
        state = self.state(model, model.ranks[0])
        return 0 if state is None else state.cache

    def phases(self, work: Work, rank: int) -> tuple[Phase, ...]:
        """Return the phases of ``work`` on ``rank``, without states. Training ends in the optimizer step, its own
        phase.
        """
        where = self._place(work, rank)
        if (work, where) not in self._phases:
            self._phases[work, where] = self._phases_of(work, rank)
        return self._phases[work, where]

    def _place(self, work: Work, rank: int) -> object:
        """Return all that the phases of ``work`` on ``rank`` depend on: ranks with equal ones share them."""
        match work:
            case Compute():
                return self.placement[work.model].position(rank)
            case WeightSync():
                models = source, destination = self.placement[work.source], self.placement[work.destination]
                shape = self.shapes.get(source.role)
                crossing = shape and SyncVolumes.of(source, destination, shape, self.node_of).on(rank, work.overlaps)
                return crossing, *(each.position(rank) if rank in each.layout.places else None for each in models)
        return rank

    def take_over(self, other: Sizing) -> None:
        """Take the states and calls that ``other`` has computed of models that are the same here."""
        alike = "texts", "own_texts", "slots", "on_gpus", "has_episodes", "kept_slots"
        if any(getattr(self, name) != getattr(other, name) for name in alike):
            return
        same = {
            model.name
            for model in self.placement.models
            if model.name in other.placement
            and model == other.placement[model.name]
            and self.shapes.get(model.role) == other.shapes.get(model.role)
        }
        computed = other._phases.items()
        self._phases.update(
            {
                (work, where): found
                for (work, where), found in computed
                if isinstance(work, Compute) and work.model in same
            }
        )
        # but for states of copies that reuse weights, which depend on their sources
        self._states.update({key: state for key, state in other._states.items() if key[0] in same and key[2] is None})

    @cached_property
    def _states(self) -> dict[tuple[ModelName, object, int | None], State | None]:
        """States computed so far, by model and position: a schedule needs the same ones many times."""
        return {}

    @cached_property
    def _reused(self) -> dict[object, Reuse]:
        return {}

    @cached_property
    def _phases(self) -> dict[tuple[Work, object], tuple[Phase, ...]]:
        return {}

    def _phases_of(self, work: Work, rank: int) -> tuple[Phase, ...]:
        match work:
            case Compute():
                return self.call_phases(work, self.placement[work.model], rank)
            case WeightSync():
                source, destination = self.placement[work.source], self.placement[work.destination]
                parts: NamedBytes = {"buckets": None}
                if source.role in self.shapes:
                    shape = self.shapes[source.role]
                    parts = sync_parts(source, destination, shape, self.sync, rank, work.overlaps, self.node_of)
                return (Phase("sync", destination.name, {**parts, **self._lending(destination, rank, parts)}),)
            case Releasing():
                copy = self.placement[work.model]
                return (Phase("release", copy.name, self._lending(copy, rank, {})),)
            case Saving():
                return (self._save(work, self.placement[work.model], rank),)
            case Copying():
                return (self._copy(work, rank),)

    def _lending(self, copy: PlacedModel, rank: int, parts: NamedBytes) -> NamedBytes:
        """Return the bytes of weights that move at a time between ``copy`` and its source, beyond later ``parts``."""
        reuse = self.reuse(copy, rank) if rank in copy.ranks else None
        largest = 0 if reuse is None else copy.item_bytes * reuse.most_moved
        known = sum(size or 0 for size in parts.values())
        return {"lent": largest - known} if largest > known else {}

    def loading_bytes(self, rank: int) -> int:
        """Return the host memory while models are loaded, one by one."""
        return max((loading_bytes(model, shape) for model, shape in self._loaded(rank)), default=0)

    def loads_whole(self, rank: int) -> bool:
        """Whether one of the models is loaded whole and in float32 before it is sharded."""
        return any(is_loaded_whole(model, shape) for model, shape in self._loaded(rank))

    def _loaded(self, rank: int) -> list[tuple[PlacedModel, ModelShape]]:
        """Return the models on ``rank`` whose shapes are known."""
        models = self.placement.on_rank(rank)
        return [(model, self.shapes[model.role]) for model in models if model.role in self.shapes]

    def call_phases(self, work: Compute, model: PlacedModel, rank: int) -> tuple[Phase, ...]:
        """Return the ``phases`` of a call of ``model``, wherever other models are."""
        shape = self.shapes.get(model.role)
        if shape is None:
            return (Phase(work.kind, work.model, {"activations": None}),)
        parts = dict(self._pass_parts(work, model, shape, rank))
        parts["gathered"] = gathered_bytes(model, shape, rank, activations=sum(size or 0 for size in parts.values()))
        if work.kind != "train":
            return (Phase(work.kind, work.model, parts),)
        parts["new gradients"] = new_gradient_bytes(model, shape, rank)
        update = {"working space": update_bytes(model, shape, rank)}
        host = self._offloaded_activations(work, model, shape, rank)
        return Phase("train", work.model, parts, host=host), Phase("update", work.model, update)

    def _offloaded_activations(self, work: Compute, model: PlacedModel, shape: ModelShape, rank: int) -> int:
        """Return the bytes of activations in host memory, none of a model whose sizes are unknown."""
        if shape.sizes is None or not model.settings.offload_activations:
            return 0
        size = self.pass_size(model, work).of_part(model.layout.dims.row_parts)
        return layers_on_rank(model, shape.sizes, rank).host_bytes(size.tokens)

    def pass_size(self, model: PlacedModel, work: Compute) -> PassSize:
        """Return bounds of the largest forward or training pass of ``work`` on ``model``."""
        settings, texts = model.with_passes(work.tokens).settings, self.texts_of(model.role)
        samples = work.samples or texts.samples_per_prompt
        packing = TextPacking.of(model, self.shapes.get(model.role), texts.width)
        budget, shares = settings.micro_batch_tokens, settings.shares_in_passes
        rows, packs, compares, masks = work.rows, packing.packs, work.compares, packing.masks

        def largest(shares: bool) -> PassSize:
            return largest_pass(
                texts.prompt, texts.response, samples, budget, rows, packs, shares, compares, work.block, masks
            )

        # further sequences have prompts of their own: a prompt may be shared by any of its rows, or by none
        return largest(shares) if texts.sequences == 1 else largest(shares).or_larger(largest(False))

    def _pass_parts(self, work: Compute, model: PlacedModel, shape: ModelShape, rank: int) -> NamedBytes:
        """Return the bytes of activations, logits and caches, and of tensors between pipeline stages."""
        if shape.sizes is None:
            return {"activations": None}
        settings, texts = model.with_passes(work.tokens).settings, self.texts_of(model.role)
        blocks = layers_on_rank(model, shape.sizes, rank)
        if work.kind == "generate":
            rows = texts.rows_decoded(model, work.rows and -(-work.rows // model.layout.dims.row_parts))
            if not model.has_cache:
                in_slots = self.slots and TextPacking.of(model, shape, texts.width).in_slots
                read = settings.micro_batch_tokens if in_slots else None
                is_kept = work.carries and model.name in self.kept_slots
                keeps = in_slots and (is_kept or (self.has_episodes and model.keeps_slots))
                found = blocks.decode_bytes(rows, texts.prompt, texts.response, read, settings.cuda_graphs, keeps)
                if is_kept:
                    del found[CACHE]
                return found
            most = PagedCache.of(model, texts.prompt, texts.response).most_step_tokens
            step = min(most, max(texts.prompt, rows * texts.width))
            # a stage of vLLM keeps a place for hidden states that it receives
            received = {"between stages": blocks.received_bytes(most)} if blocks.stage else {}
            return {**blocks.paged_decode_bytes(rows, step), **received}
        size, train = self.pass_size(model, work).of_part(model.layout.dims.row_parts), work.kind == "train"
        recompute, chunk = settings.activation_checkpointing, 4 * settings.logits_at_a_time
        return _passes_parts(blocks, size, train, work.texts, model.head, recompute, chunk)

    def _save(self, work: Saving, model: PlacedModel, rank: int) -> Phase:
        shape = self.shapes.get(model.role)
        if shape is None:
            return Phase("save", work.model, {"gathered": None})
        saved = saved_model(model, shape, self.sync.bucket_bytes, self.save.shard_bytes)
        number = len(work.ranks)
        host = writing_bytes(model, shape, saved, number) if rank in work.ranks[: saved.files] else 0
        return Phase("save", work.model, saving_parts(saved, number), host=host)

    def _copy(self, work: Copying, rank: int) -> Phase:
        sizes = []
        for model in (self.placement[name] for name in work.models):
            shape = self.shapes.get(model.role)
            if shape is not None and rank in model.ranks:
                sizes.append(copied_bytes(model, shape, rank))
        return Phase("checkpoint", ", ".join(work.models), {}, host=sum(sizes))

    def copied_bytes(self, model: PlacedModel, rank: int) -> int:
        """Return the host memory of the pieces of ``model``, of a known shape, that ``rank`` copies for a
        checkpoint."""
        return copied_bytes(model, self.shapes[model.role], rank)

    def saved_bytes(self, model: PlacedModel) -> int:
        """Return the bytes of a saved ``model``, of a known shape: all trained weights, whole."""
        return saved_bytes(model, self.shapes[model.role])

    def saving_bytes(self, model: PlacedModel, num_ranks: int) -> int:
        """Return the bytes on each of ``num_ranks`` that gather the trained weights to save them bucket by bucket."""
        saved = saved_model(model, self.shapes[model.role], self.sync.bucket_bytes, self.save.shard_bytes)
        return sum(size or 0 for size in saving_parts(saved, num_ranks).values())

    def syncing_bytes(self, source: PlacedModel, copy: PlacedModel, rank: int, overlaps: bool) -> tuple[int, int]:
        """Return two sizes on ``rank``: bytes that a Sync allocates while it runs, and bytes of the weights that are
        still on the way after it if it ``overlaps`` other work."""
        parts = dict(sync_parts(source, copy, self.shapes[source.role], self.sync, rank, overlaps))
        under_way = parts.pop(UNDER_WAY, 0) or 0
        return sum(size or 0 for size in parts.values()), under_way


@lru_cache(maxsize=16384)
def _passes_parts(
    blocks: Blocks, size: PassSize, train: bool, texts: int, head: Head, recompute: bool, chunk: int
) -> NamedBytes:
    """Return the bytes of activations and logits of passes, and of tensors between pipeline stages.

    texts:      sequences of a row, each in passes of its own.
    recompute:  whether activations are checkpointed.
    chunk:      bytes of the logits that our heads compute at a time.
    """
    # a stage begins as many micro-batches as there are stages from it on before the first one returns
    in_flight = size.in_flight(blocks.dims.pp - blocks.stage, texts)
    between = blocks.stage_bytes(size.tokens, in_flight if train else 0)
    stages: dict[str, int | None] = {"between stages": between} if between else {}
    logits = 0
    if head != "scalar" and blocks.is_last:
        # a head that may do more than multiply gives all logits at once, from the shortest prompt on
        is_ours = blocks.sizes.family in Families.KNOWN
        logits = blocks.head_bytes(size.responses if is_ours else size.tokens, chunk if is_ours else sys.maxsize, train)
    if not train:
        activations = blocks.forward_bytes(size.tokens, size.width, size.packed, size.masks)
        return {**larger(activations=activations, logits=logits), **stages}
    if head == "both":
        logits += blocks.value_bytes(size.tokens)
    activations = blocks.train_bytes(size.tokens, size.width, recompute, size.packed, in_flight, size.masks)
    # logits are freed before a layer computes its gradients
    logits = max(
        0, logits - blocks.backward_bytes(size.tokens, 0 if size.packed else size.width, recompute, size.masks)
    )
    return {"activations": activations, **({"logits": logits} if logits else {}), **stages}


def _reusing(state: State, copy: PlacedModel, reuse: Reuse) -> State:
    """Return the state of ``copy``, whose own one is ``state``, without views, which it has memory for as it is
    loaded."""
    views = copy.item_bytes * part_elements(reuse.parts, sorted(reuse.views))
    lent, viewed = (copy.item_bytes * reuse.source_elements(names) for names in (reuse.lent, reuse.views))
    return replace(state, weights=state.weights - views, at_load=views, lent=lent, viewed=viewed)


def layers_on_rank(model: PlacedModel, sizes: Sizes, rank: int) -> Blocks:
    """Return the layers of ``model`` on ``rank``."""
    settings, layout = model.settings, model.layout
    return Blocks(
        sizes,
        model.item_bytes,
        layout.dims,
        settings.lora,
        fused=model.facts.fused_layers,
        sharers=settings.tp if model.facts.sequence_parallel else 1,
        stage=layout.index("pp", rank),
        tiled=settings.tiled_mlp,
        offloads=settings.offload_activations,
        expert_tp=settings.tp if "ep" in model.facts.axes else 1,
        is_ring=layout.dims.cp > 1 and settings.is_ring(sizes.heads),
    )
