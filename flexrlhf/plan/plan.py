"""A run as data: everything that the ranks will do, fixed before a process starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from os.path import realpath
from pathlib import Path
from typing import Any

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import Spec
from flexrlhf.memory.budget import SequenceLengths, Sizing
from flexrlhf.memory.rank_memory import RankMemory, Start
from flexrlhf.memory.states import State
from flexrlhf.operators.columns import Lengths
from flexrlhf.operators.graph import Graph
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.groups import Group
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.placement.placement import Placement
from flexrlhf.placement.rollout import KeptSlots
from flexrlhf.plan.alike_ranks import first_alike
from flexrlhf.plan.episode_processes import EpisodeProcesses
from flexrlhf.plan.kept_caches import kept_slots
from flexrlhf.plan.largest_batch import BatchLimits
from flexrlhf.plan.node_traffic import PlanTraffic
from flexrlhf.plan.reused_copies import copies_that_reuse
from flexrlhf.plan.run_data import DataFiles
from flexrlhf.plan.run_tokenizer import RunTokenizer
from flexrlhf.plan.stored_columns import StoredColumns, stored_columns
from flexrlhf.strategies.calls import CalledStep
from flexrlhf.strategies.instructions import Offload, Run
from flexrlhf.strategies.residency import DeviceMemory
from flexrlhf.strategies.schedule import Schedule
from flexrlhf.strategies.workload import workload
from flexrlhf.weights.model_shape import ModelShape


@dataclass(frozen=True)
class Plan:
    """Everything that the ranks of one run do, with its bytes.

    spec:       resolved: no model and no limit is left open.
    cluster:    devices by rank.
    graph:      the operators that run (``ResolvedSpec.run_graph``).
    placement:  the placed models.
    strategy:   ``co-located``, ``interleaving`` or ``disaggregated``.
    schedule:   the instructions of one step.
    batch:      prompts, mini-batches and chunks of a step.
    lengths:    the longest prompt and response, in tokens.
    shapes:     parameter shapes by role; a role is absent when only loading the model reveals them.
    groups:     process groups, in the order in which every rank creates them.
    offloaded:  rank → placed models that are in host memory when the run starts.
    choice:     engine that ``rollout.engine: auto`` is, and why; empty if one is written, or transformers is
                the only candidate.
    cache:      size of a rollout engine's cache that is not written; empty if it is.
    """

    spec: Spec
    cluster: Cluster
    graph: Graph
    placement: Placement
    strategy: str
    schedule: Schedule
    batch: BatchShape
    lengths: Lengths
    shapes: dict[str, ModelShape]
    groups: tuple[Group, ...]
    offloaded: Mapping[int, tuple[ModelName, ...]] = field(default_factory=dict)
    choice: str = ""
    cache: str = ""

    def with_residency(self, only: int | None = None) -> Plan:
        """Return this plan with Offload and Reload where models fit a device one after the other, but not together.

        ``only``: the rank whose memory is wanted; models of others stay on their devices.
        """
        memory = DeviceMemory(
            self.sizing,
            self.cluster,
            self.batch,
            self.most_communicators,
            self.row_bytes_in_flight,
            self.spec.debug.prefetched_reloads,
        )
        instructions, offloaded = memory.with_residency(self.schedule.instructions, self.alike, only)
        plan = replace(self, schedule=replace(self.schedule, instructions=instructions), offloaded=offloaded)
        # it depends on no instruction, and has computed most of the new plan's phases
        vars(plan)["sizing"] = self.sizing
        if only is None:
            # ranks that are alike offload alike
            vars(plan)["alike"] = self.alike
        return plan

    @cached_property
    def alike(self) -> Mapping[int, int]:
        """Rank → first rank with the same work on the same kind of device."""
        return first_alike(self.schedule.instructions, self.placement, self.batch, self.cluster)

    @property
    def data(self) -> DataFiles:
        """Data files."""
        return DataFiles(self)

    @property
    def tokenizer(self) -> RunTokenizer:
        """Tokenizer of the rows."""
        return RunTokenizer(self)

    @property
    def traffic(self) -> PlanTraffic:
        """Bytes between ranks and between nodes."""
        return PlanTraffic(self)

    @property
    def processes(self) -> EpisodeProcesses:
        """Processes of the environment."""
        return EpisodeProcesses(self)

    @property
    def limits(self) -> BatchLimits:
        """Largest batch and longest text at these settings."""
        return BatchLimits(self)

    def model(self, role: str) -> ModelSpec:
        """Return the resolved settings of a role of the graph."""
        model = self.spec.models.of(role)
        assert model is not None, f"{role} is resolved"
        return model

    @property
    def temperature(self) -> float:
        """Temperature of the sampling distribution; 1, so the logits as they are, for algorithms without generation."""
        return self.spec.algorithm.temperature

    @property
    def sampled_from(self) -> dict[str, float]:
        """Settings of the sampling distribution by name: temperature, top_p and top_k."""
        algorithm = self.spec.algorithm
        return {"temperature": algorithm.temperature, "top_p": algorithm.top_p, "top_k": algorithm.top_k}

    @property
    def outputs(self) -> dict[Path, str]:
        """Absolute directories of the models that the run writes, and the role of each."""
        names = {role: role for role in self.graph.trained}
        if self.spec.save.best is not None:
            names |= {f"{role}-best": role for role in self.graph.trained}
        return {Path(realpath(self.spec.directory / name)): role for name, role in names.items()}

    def num_updates(self, role: str) -> int:
        """Return the optimizer steps of a trained model in the whole run."""
        algorithm = self.spec.algorithm
        steps = max(0, self.spec.steps - self.graph.first_step(role))
        return steps * algorithm.num_mini_batches * algorithm.epochs

    def steps_in_flight(self, next_step: int, generated: int = 0) -> range:
        """Return the steps whose rows exist before ``next_step`` is trained on (``schedule.lag``).

        ``generated``: first step without rows at the start of the run.
        """
        return range(next_step, max(min(next_step + self.schedule.lag, self.spec.steps), generated))

    def rows_in_flight(self, next_step: int, generated: int = 0) -> int:
        """Return the number of rows that are taken from the data and have no outcome before ``next_step``."""
        return len(self.steps_in_flight(next_step, generated)) * self.batch.num_taken

    @property
    def num_steps_kept(self) -> int:
        """Steps before the newest whose rows are kept: they are not trained on yet, or some are carried on."""
        runs = (each for each in self.schedule.instructions if isinstance(each, Run) and each.operator.carries)
        return max([self.schedule.lag, *(run.lag + 1 for run in runs)])

    def ahead(self, run: Run) -> list[range]:
        """Return the mini-batches of later chunks that the model of a generate ``run`` may start with; else none."""
        return self.schedule.later_chunks(run) if run.operator.kind == "generate" else []

    @cached_property
    def sampled_ids(self) -> int | None:
        """Number of ids that generation chooses from: tokens that each model which reads them has an embedding for.

        None: all of the actor's. Vocabularies of one tokenizer are padded to different sizes.
        """
        if self.graph.generated is None:
            return None
        sizes = {role: shape.sizes.vocabulary for role, shape in self.shapes.items() if shape.sizes is not None}
        readers = [size for role, size in sizes.items() if not self.model(role).retokenize]
        own = sizes.get(self.graph.generated)
        return min(readers) if own is not None and min(readers) < own else None

    def state(self, model: PlacedModel, rank: int) -> State | None:
        """Return the bytes of ``model`` on ``rank``; None before an unknown architecture is loaded."""
        return self.sizing.state(model, rank)

    def device_bytes(self, rank: int) -> int | None:
        """Return the bytes of a rank's device that models and calls can fill; None for one of unknown size."""
        return self.cluster.memory_bytes(rank, self.most_communicators)

    @cached_property
    def most_communicators(self) -> int:
        """Communicators of the rank that has most."""
        return max(self._communicators.values(), default=0)

    def communicators(self, rank: int) -> int:
        """Return how many a rank has: of groups, of which the ones of one rank need none, and on known GPUs of vLLM."""
        return self._communicators[rank]

    def outside_bytes(self, rank: int, only_of_groups: bool = False) -> int:
        """Return the bytes of a GPU outside torch: its context and the communicators of a rank, or those of groups."""
        made = self.communicators_of_groups(rank) if only_of_groups else self.communicators(rank)
        return DeviceClass.context_bytes(made)

    def communicators_of_groups(self, rank: int) -> int:
        """Return how many a rank has once ranks are connected."""
        return self._communicators_of_groups[rank]

    @cached_property
    def _communicators(self) -> Counter[int]:
        counts = Counter(self._communicators_of_groups)
        for model in self.placement.models:
            if model.has_cache and self.cluster.has_known_classes:
                counts += Counter(dict.fromkeys(model.ranks, model.own_communicators(self._has_experts(model.role))))
        return counts

    @cached_property
    def _communicators_of_groups(self) -> Counter[int]:
        several = dict.fromkeys(each.communicator for each in self.groups if len(each.ranks) > 1)
        return Counter(rank for _, ranks in several for rank in ranks)

    def _has_experts(self, role: str) -> bool:
        shape = self.shapes.get(role)
        return shape is not None and shape.sizes is not None and shape.sizes.experts is not None

    def as_called(self, steps: Iterable[Iterable[Mapping[str, Any]]], step: int) -> Plan:
        """Return this plan with ``step`` as a program called it. ``steps``: messages of the calls of a run's steps, of
        which that one is the last. Raises UserError for calls that the plan cannot have."""
        called = CalledStep.again(steps, self.graph, self.placement, self.batch)
        return replace(self, schedule=self.schedule.as_called(called, step))

    def loaded_on(self, rank: int) -> list[PlacedModel]:
        """Return the models of ``rank`` as they are loaded, all ranks in one order: first models that start in host
        memory anywhere, or released, and need a device for a moment.
        """
        away = {name for names in self.offloaded.values() for name in names}
        away |= {model.name for model in self.placement.models if model.is_transient}
        return sorted(self.placement.on_rank(rank), key=lambda model: model.name not in away)

    @cached_property
    def sizing(self) -> Sizing:
        """Inputs of the memory plan."""
        of_rows = self.batch.samples_per_prompt, self.batch.sequences
        texts = SequenceLengths(self.lengths.prompt, self.lengths.response, *of_rows)
        node_of = self.cluster.node_of if self.cluster.num_nodes > 1 else None
        debug, reusing = self.spec.debug, dict[ModelName, str]()
        if debug.reused_weights:
            reusing = copies_that_reuse(self.schedule.instructions, self.placement)
        return Sizing(
            self.placement,
            self.shapes,
            texts,
            self.spec.sync,
            texts.of_own_tokenizers(self.lengths),
            node_of,
            reusing,
            debug.slots,
            self.cluster.has_known_classes,
            self.spec.save,
            self.spec.environment is not None,
            {name: slots.rows for name, slots in self.kept_slots.items()},
        )

    @cached_property
    def kept_slots(self) -> dict[ModelName, KeptSlots]:
        """Slots of each placed model whose rows keep their keys and values from step to step."""
        return kept_slots(self.spec, self.graph, self.placement, self.batch)

    def memory(self, rank: int) -> RankMemory:
        """Return the memory of ``rank`` by model and phase."""
        return self.memory_of(rank, self.batch, self.row_bytes_in_flight(rank))

    def memory_of(self, rank: int, batch: BatchShape, in_flight: int) -> RankMemory:
        """Return the memory of ``rank`` by the instructions of this plan for a ``batch`` of another size.

        in_flight:  bytes of the rows that are kept.
        """
        work = workload(self.schedule.for_rank(rank), self.placement, batch, rank)
        return RankMemory.of(self.sizing, rank, work, self._start(rank), in_flight)

    def most_loading_bytes(self, rank: int) -> int:
        """Return the most bytes on ``rank`` while models are loaded, in whatever order; 0 if it offloads none."""
        start = self._start(rank)
        states = {model.name: self.sizing.state(model, rank) for model in self.placement.on_rank(rank)}
        return 0 if start is None else start.most_loading_bytes(states)

    def row_bytes_in_flight(self, rank: int) -> int:
        """Return the bytes on ``rank`` of the rows of earlier steps than the newest, which it keeps."""
        return self.row_bytes(rank, self.num_steps_kept)

    def row_bytes(self, rank: int, num_kept: int, lengths: Lengths | None = None) -> int:
        """Return the bytes on ``rank`` of the columns of ``num_kept`` batches. ``lengths``: in place of the plan's."""
        if not num_kept:
            return 0
        if rank not in self._columns:
            instructions, inputs = self.schedule.instructions, self.graph.inputs
            self._columns[rank] = stored_columns(instructions, self.batch, inputs, rank)
        return self.batch.samples_per_prompt * self._columns[rank].row_bytes(lengths or self.lengths, num_kept)

    @cached_property
    def _columns(self) -> dict[int, StoredColumns]:
        """Columns of the ranks that were computed so far."""
        return {}

    @property
    def checkpointed(self) -> tuple[PlacedModel, ...]:
        """Placed models whose tensors a checkpoint contains."""
        return tuple(self.placement[name] for name in self.placement.checkpointed(self.spec))

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint; a model of an architecture yet unknown counts nothing."""
        return sum(
            self.sizing.copied_bytes(model, rank)
            for model in self.checkpointed
            if model.role in self.shapes
            for rank in model.ranks
        )

    def _start(self, rank: int) -> Start | None:
        """Return how models come onto a rank that offloads some; None for another one."""
        offloads = [each for each in self.schedule.for_rank(rank) if isinstance(each, Offload)]
        movable = frozenset(each.model for each in offloads)
        if not movable:
            return None
        discards = self.spec.debug.sleep_level_2
        offloaded = self.offloaded.get(rank, ())
        kept = {each.model for each in offloads if not (discards and each.is_refilled)}.union(offloaded)
        models = self.placement.on_rank(rank)
        away = {model.name for model in models if model.is_transient}.union(offloaded)
        read = {model.name for model in models if model.trained}.union(model.name for model in self.checkpointed)
        loaded = [model.name for model in self.loaded_on(rank)]
        return Start(loaded, frozenset(away), movable, frozenset(kept), frozenset(read))

    @cached_property
    def tried_peaks(self) -> dict[object, int | None]:
        """Peaks of ranks with changes of settings that were tried; None if they are refused. The suggestions of a
        command's choice, its text and its check are the same ones."""
        return {}

    @cached_property
    def memories(self) -> tuple[RankMemory, ...]:
        """Memory of every rank; ranks with the same work share one computation."""
        computed = {rank: self.memory(rank) for rank in set(self.alike.values())}
        return tuple(computed[first].on(rank) for rank, first in sorted(self.alike.items()))

    @cached_property
    def tightest_rank(self) -> int:
        """Rank that lacks most memory; among devices of unknown size the one that needs most."""
        sizes = [self.device_bytes(rank) for rank in range(self.placement.num_ranks)]
        lacking = [
            (size is not None, each.peak_bytes - (size or 0)) for size, each in zip(sizes, self.memories, strict=True)
        ]
        return lacking.index(max(lacking))
