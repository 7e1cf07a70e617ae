"""Order of a step before models have devices: the strategy's own schedule, with each model on a rank of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

from flexrlhf.api import (
    BatchShape,
    Graph,
    Head,
    Instruction,
    Layout,
    ModelName,
    ModelSpec,
    OperatorKind,
    PlacedModel,
    Placement,
    ResolvedSpec,
    Run,
    Strategy,
    Sync,
    UserError,
    check_operators,
)
from flexrlhf.guideline.simulation.calls import texts_per_row
from flexrlhf.guideline.simulation.model_free_costs import source_section
from flexrlhf.guideline.simulation.timed_instructions import ColumnWriters

PlacedCallKind = OperatorKind | Literal["switch"]
"""OperatorKind of an operator, or "switch": a transfer of the model's tensors to or from host memory."""


@dataclass(frozen=True)
class PlacedCall:
    """One call of a placed model, with all that its time depends on.

    kind:          kind of work.
    mini_batches:  the mini-batches whose rows it computes.
    score_source:  section of the YAML with the sources of a score.
    texts:         texts in a row.
    compares:      whether all texts of a prompt are in one pass.
    is_attempt:    whether its rows are those of one attempt of dynamic sampling.
    tokens:        computed tokens of its passes; None: as in the settings of its model.
    """

    kind: PlacedCallKind
    mini_batches: range
    score_source: str = ""
    texts: int = 1
    compares: bool = False
    is_attempt: bool = False
    tokens: int | None = None

    @classmethod
    def of(cls, run: Run) -> Self:
        """Return the call of ``run``."""
        operator, texts, compares = run.operator, texts_per_row(run.operator), run.operator.compares_responses
        section, is_attempt = source_section(operator), run.attempt is not None
        return cls(operator.kind, run.mini_batches, section, texts, compares, is_attempt)

    def shape(self, batch: BatchShape) -> BatchShape:
        """Return the shape of its rows, as of every attempt of a step if it is one."""
        return batch.of_attempt if self.is_attempt else batch


@dataclass(frozen=True)
class CopySync:
    """A transfer of weights between a model and another copy.

    partner:   the other copy.
    overlaps:  whether it proceeds while both compute.
    """

    partner: ModelName
    overlaps: bool


@dataclass(frozen=True)
class SearchModel:
    """A placed model before it has a mesh.

    name:     role and copy.
    trained:  whether its weights are trained.
    calls:    in schedule order.
    head:     its computation on top of the hidden states.
    switches: transfers to or from host memory next to each call, 0 of a copy that is released after its calls; empty:
              it stays on the device between calls.
    is_lean:  whether MLPs in tiles and activations in host memory are tried.
    operator: the operator that it is a further copy for, where operators are placed; else nothing.
    syncs:    with each copy that it sends its weights to, or receives them from.
    rare:     calls that most steps skip: their time does not count, but their memory does.
    """

    name: ModelName
    trained: bool
    calls: tuple[PlacedCall, ...]
    head: Head = "causal"
    switches: tuple[int, ...] = ()
    is_lean: bool = False
    operator: str = ""
    syncs: tuple[CopySync, ...] = ()
    rare: tuple[PlacedCall, ...] = ()

    @property
    def role(self) -> str:
        return self.name.role

    @cached_property
    def kinds(self) -> tuple[PlacedCallKind, ...]:
        """Kinds of the calls that the model itself computes."""
        free = ("combine", "score", "retokenize")
        return tuple(dict.fromkeys(call.kind for call in self.calls if call.kind not in free))

    @property
    def is_offloaded(self) -> bool:
        """Whether it is in host memory while other models compute."""
        return "switch" in self.kinds

    @property
    def is_rollout(self) -> bool:
        return self.name.is_rollout

    @property
    def is_shadow(self) -> bool:
        return bool(self.name.copy)


@dataclass(frozen=True)
class Sketch(ResolvedSpec):
    """Step of ``spec`` on a placement that has no devices yet.

    has_shadows:  whether inference has copies of its own.
    """

    has_shadows: bool = False

    @cached_property
    def names(self) -> tuple[ModelName, ...]:
        """Names of the placed models, in vector order."""
        if self.has_shadows:
            return self.roles.with_shadows
        engine = () if self.roles.rollout is None else (ModelName.rollout_of(self.roles.rollout),)
        return self.roles.without_shadows + engine

    @cached_property
    def placement(self) -> Placement:
        """Placement that the order of calls follows from: each model on a rank of its own.

        Without shadows a rollout engine has the rank of the trained copy.
        """
        rank_of = {name: number for number, name in enumerate(self.names)}
        if not self.has_shadows and self.roles.rollout is not None:
            rank_of[ModelName.rollout_of(self.roles.rollout)] = rank_of[ModelName(self.roles.rollout)]
        return Placement(tuple(self._sketched(name, rank_of[name]) for name in self.names), len(self.names))

    def _sketched(self, name: ModelName, rank: int) -> PlacedModel:
        settings = self.spec.models.of(name.role)
        assert settings is not None, f"{name.role} is resolved"
        rollout = self.spec.rollout if name.is_rollout else None
        own = settings.of_shadow if name.is_shadow else settings
        if rollout is not None:
            lora = rollout.own_adapters(settings)
            own = ModelSpec(engine=rollout.engine, dtype=rollout.dtype or settings.dtype, lora=lora)
        return PlacedModel(name, Layout((rank,)), name in self.roles.trained, own, rollout, self.head(name))

    def head(self, name: ModelName) -> Head:
        """Head of a placed model; a rollout engine only generates."""
        return "causal" if name.is_rollout else self.roles.heads[name.role]

    @cached_property
    def whole_graph(self) -> Graph:
        """Graph that runs, with the operators of the rollout engine."""
        return self.run_graph(self.placement)

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """Instructions of a usual step."""
        return tuple(each for each in self._ordered if not each.is_rare)

    @cached_property
    def _ordered(self) -> tuple[Instruction, ...]:
        """All instructions as the strategy orders them for the sketch, with a prompt in each mini-batch."""
        strategy = next(each for each in Strategy.ALL.values() if each.matches(self.placement))
        batch = BatchShape.of(self.spec)
        prompts = batch.num_mini_batches * batch.attempts
        batch = replace(batch, num_prompts=prompts, samples_per_prompt=1, segments=1, sequences=1)
        return tuple(strategy.order(self.whole_graph, self.placement, batch, self.spec))

    @cached_property
    def refusal(self) -> str:
        """Why no plan of this kind is possible, whatever devices and settings its models have; else empty."""
        try:
            check_operators(self.whole_graph, self.placement, is_evaluated=self.spec.eval is not None)
        except UserError as error:
            return str(error)
        return ""

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(each for each in self.instructions if isinstance(each, Run))

    def rare_calls(self, name: ModelName) -> tuple[PlacedCall, ...]:
        """Return the calls of a placed model that most steps skip."""
        return tuple(PlacedCall.of(run) for run in self._rare_runs if run.model == name)

    @cached_property
    def _rare_runs(self) -> tuple[Run, ...]:
        return tuple(each for each in self._ordered if isinstance(each, Run) and each.is_rare)

    @cached_property
    def columns(self) -> dict[str, frozenset[str]]:
        """Placed model → the columns of a step that it reads and writes."""
        columns: dict[str, frozenset[str]] = {}
        for run in (*self.runs, *self._rare_runs):
            own = (*run.operator.reads, *run.operator.stored_columns)
            columns[run.model] = columns.get(run.model, frozenset()).union(own)
        return columns

    @property
    def sleeper(self) -> str | None:
        """Rollout engine on the ranks of the trained copy, if it is offloaded after its last call until weights are
        sent."""
        return next(iter(self.placement.sleepers), None)

    def models(self, offloaded: Collection[str], is_lean: bool) -> Iterator[SearchModel]:
        """Yield the placed models with their calls, in vector order.

        offloaded:  models in host memory when idle.
        is_lean:    whether settings are tried with which activations take least memory.
        """
        calls: dict[str, list[PlacedCall]] = {name: [] for name in self.names}
        for run in self.runs:
            calls[run.model].append(PlacedCall.of(run))
        if self.sleeper is not None:
            calls[self.sleeper] += [PlacedCall("switch", BatchShape.of(self.spec).mini_batches)] * 2
        for name in self.names:
            switches = self.switches(name) if name in offloaded else ()
            trained, head = name in self.roles.trained, self.head(name)
            own = tuple(calls[name]), head, switches, is_lean
            yield SearchModel(name, trained, *own, syncs=self.syncs_of(name), rare=self.rare_calls(name))

    def syncs_of(self, name: ModelName) -> tuple[CopySync, ...]:
        """Return the syncs of a placed model, one with each other copy."""
        found: dict[ModelName, CopySync] = {}
        for each in self._syncs:
            if name in each.touches:
                partner = each.destination if name == each.source else each.source
                found[partner] = CopySync(partner, each.overlaps)
        return tuple(found.values())

    @cached_property
    def _syncs(self) -> tuple[Sync, ...]:
        return tuple(each for each in self.instructions if isinstance(each, Sync))

    def last_training(self, model: ModelName) -> str:
        """Return the task that ends the training of ``model``."""
        return [name_of(run) for run in self.runs if run.model == model and run.operator.kind == "train"][-1]

    @cached_property
    def _writers(self) -> ColumnWriters:
        return ColumnWriters(self.runs)

    def writers(self, reader: Run) -> list[Run]:
        """Return the runs whose columns ``reader`` reads."""
        return list(self._writers.of(reader).values())

    def separate(self, reader: Run) -> Iterator[Run]:
        """Yield ancestors of ``reader`` on models that must not share a device with its own: one of each such model.

        Only models that send it no rows. With shadows training waits for all inference: advantages follow from it.
        """
        if not self.has_shadows or reader.operator.kind != "train":
            return
        writers = {run.model for run in self.writers(reader)}
        others = {run.model: run for run in self._ancestors[name_of(reader)].values()}
        for name, run in others.items():
            if name not in writers and self.must_be_disjoint(name, reader.model):
                yield run

    @cached_property
    def _ancestors(self) -> dict[str, dict[str, Run]]:
        """Task → all runs that it waits for, by name."""
        ancestors: dict[str, dict[str, Run]] = {}
        for run in self.runs:
            mine = ancestors[name_of(run)] = {}
            for writer in self.writers(run):
                mine |= ancestors[name_of(writer)] | {name_of(writer): writer}
        return ancestors

    def must_be_disjoint(self, first: ModelName, second: ModelName) -> bool:
        """Whether two models must not share a device: with shadows, one for training and one for inference."""
        return self.has_shadows and (first in self.roles.trained) != (second in self.roles.trained)

    def switches(self, name: str) -> tuple[int, ...]:
        """Transfers to or from host memory next to each call of a model that is offloaded while others compute; to it
        only if the model has changed.

        Those at a weight sync are counted next to the last call before it.
        """
        listed = [each for each in self.instructions if isinstance(each, Run | Sync)]
        counts: list[int] = []
        is_changed = False
        for index, each in enumerate(listed):
            if isinstance(each, Run) and each.model == name:
                counts.append(0)
            if name in each.touches:
                comes, leaves = (name not in listed[at % len(listed)].touches for at in (index - 1, index + 1))
                trains = isinstance(each, Run) and each.operator.kind == "train"
                is_changed = trains or name in each.fills or (is_changed and not comes)
                if counts:
                    counts[-1] += comes + (leaves and is_changed)
        return tuple(counts)


def name_of(run: Run) -> str:
    """Return the name of a run in the search problem."""
    return run.operator.name if run.chunk is None else f"{run.operator.name}.{run.chunk}"
