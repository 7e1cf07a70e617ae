"""Options of one placed model on a mesh: its settings, each with the time of its calls and its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product

from flexrlhf.api import BatchShape, EngineFacts, ModelShape, ModelSpec, PlacedModel, Spec, TextPacking
from flexrlhf.guideline.advice.allowed_settings import CHOSEN, AllowedSettings
from flexrlhf.guideline.advice.call_figures import CallFigures, ShardedModel, total
from flexrlhf.guideline.advice.figure_maker import FigureMaker
from flexrlhf.guideline.advice.memo import Memo
from flexrlhf.guideline.advice.request_changes import SIZES
from flexrlhf.guideline.advice.sketch import SearchModel, Sketch
from flexrlhf.guideline.advice.tried_settings import TriedSettings
from flexrlhf.guideline.advice.uniform_mesh import UniformMesh, changed, layout_of, on_mesh, with_settings
from flexrlhf.guideline.costs.cost_model import CostModel
from flexrlhf.guideline.search.problem import Option
from flexrlhf.guideline.simulation.calls import CallMaker

STEP = 1.25
"""Factor from one number of rows to the next, where sizes between those that are tried are looked at."""


@dataclass(frozen=True)
class _Figures:
    """A model with some settings, wherever it is between its calls.

    settings: the settings
    seconds:  time of each call
    most:     most bytes that a call needs in addition to the resting ones
    """

    settings: ModelSpec
    seconds: tuple[float, ...]
    most: int


@dataclass(frozen=True)
class OptionEnumerator:
    """Enumerates the options of the models of a spec.

    spec:    the spec, its models resolved.
    shapes:  role → sizes of its model.
    batch:   rows of a step.
    costs:   cost model of calls and transfers.
    maker:   makes the calls that ``costs`` prices.
    refusals: name of a model → why a plan refuses the last of its settings that are tried and not allowed.
    memo:    results that its options share.
    """

    spec: Spec
    shapes: Mapping[str, ModelShape]
    batch: BatchShape
    costs: CostModel
    maker: CallMaker
    refusals: dict[str, str] = field(default_factory=dict, compare=False)
    _options: dict[object, tuple[Option, ...]] = field(default_factory=dict)
    _all_figures: dict[object, tuple[tuple[ShardedModel, tuple[_Figures, ...]], ...]] = field(default_factory=dict)
    memo: Memo = field(default_factory=Memo)
    _sketches: list[Sketch] = field(default_factory=list)

    @cached_property
    def tried(self) -> TriedSettings:
        return TriedSettings(self.spec, self.shapes, self.batch)

    @cached_property
    def _allowed(self) -> AllowedSettings:
        return AllowedSettings(self.tried, self.refusals, self.memo)

    @cached_property
    def _figure_maker(self) -> FigureMaker:
        return FigureMaker(self.spec, self.shapes, self.batch, self.costs, self.maker, self.memo)

    def of(self, spec: Spec) -> OptionEnumerator:
        """Return an enumerator of the models of ``spec``, which has the shapes and rows of this one's."""
        return OptionEnumerator(spec, self.shapes, self.batch, self.costs, self.maker)

    def is_like(self, other: OptionEnumerator) -> bool:
        """Whether the options are those of ``other``, on any mesh: its spec may differ in the nodes of the cluster, and
        in the schedule, of which calls depend by the rows alone."""
        whole, others = (
            each.spec.with_defaults("schedule").model_copy(
                update={"cluster": each.spec.cluster.model_copy(update={"nodes": ()})}
            )
            for each in (self, other)
        )
        own, theirs = (
            (each.shapes, each.batch, each.costs, each.maker, each._figure_maker.most_memory) for each in (self, other)
        )
        return own == theirs and whole == others

    def sketch(self, sketch: Sketch) -> Sketch:
        """Return the first sketch that equals the given one, so that spaces share its instructions."""
        found = next((each for each in self._sketches if each == sketch), None)
        if found is None:
            self._sketches.append(found := sketch)
        return found

    def options(self, model: SearchModel, mesh: UniformMesh) -> tuple[Option, ...]:
        """Options of a model on a mesh; none if the engine lacks a kind of call, or the devices all that is tried."""
        base = self.spec.models.of(model.role)
        if base is not None and not EngineFacts.ALL_KINDS & set(model.kinds) <= self.tried.facts(model, base).kinds:
            return ()
        if (model, mesh) not in self._options:
            figures = self._figures(_by_itself(model), mesh)
            self._options[model, mesh] = tuple(
                option for sharded, each in figures for option in self._options_of(model, mesh, sharded, each)
            )
        return self._options[model, mesh]

    def option(self, model: SearchModel, mesh: UniformMesh, settings: ModelSpec) -> Option:
        """Option of a model with ``settings``, taken from an option with other calls."""
        chosen = (getattr(settings, name) for name in (*CHOSEN, *SIZES))
        return self.memo.cached(("option", model, mesh, *chosen), partial(self._option_with, model, mesh, settings))

    def _option_with(self, model: SearchModel, mesh: UniformMesh, settings: ModelSpec) -> Option:
        sharded = self._figure_maker.sharded(self._placed_with(model, mesh, settings), mesh)
        (option,) = self._options_of(model, mesh, sharded, self._figures_of(model, mesh, sharded, [settings]))
        return option

    def _options_of(
        self, model: SearchModel, mesh: UniformMesh, sharded: ShardedModel, figures: Sequence[_Figures]
    ) -> Iterator[Option]:
        """Yield the options of a model with each of the settings of its passes."""
        state, side = sharded.state, sharded.side
        key = "transfers", self._figure_maker.transfer_key(sharded, mesh), model.syncs
        transfers = self.memo.cached(key, partial(self._figure_maker.transfers, model, sharded.placed))
        resting = state.resting + transfers.under_way
        if model.is_offloaded:
            # it has no cache while weights arrive
            for each in figures:
                most = max(each.most, transfers.most - state.cache)
                yield Option(each.seconds, state.resting - state.freed, state.freed + most, side, each.settings)
            return
        if not model.switches:
            for each in figures:
                yield Option(each.seconds, resting, max(each.most, transfers.most), side, each.settings)
            return
        moved = self.costs.switch(state.offloaded, mesh.device).seconds
        added = [number * moved for number in model.switches]
        for each in figures:
            seconds = tuple(taken + more for taken, more in zip(each.seconds, added, strict=True))
            most = max(each.most, transfers.most)
            yield Option(seconds, resting - state.freed, state.freed + most, side, each.settings)

    def _placed_with(self, model: SearchModel, mesh: UniformMesh, settings: ModelSpec) -> PlacedModel:
        """Place the model with ``settings``."""
        rollout = self.spec.rollout.with_dims(settings.dims) if model.is_rollout else None
        return on_mesh(model, mesh, layout_of(mesh, settings), settings, rollout)

    def faster(self, model: SearchModel, mesh: UniformMesh, chosen: ModelSpec, most: float) -> Iterator[ModelSpec]:
        """Yield the settings of ``between`` whose calls take less than ``most`` seconds."""
        calls: list[CallFigures] = []
        for settings in self.between(model, mesh, chosen):
            if model.is_rollout or not calls:
                sharded = self._figure_maker.sharded(self._placed_with(model, mesh, settings), mesh)
                calls = [*self._figure_maker.calls(model, mesh, sharded)]
            if sum(call.seconds(settings) for call in calls) < most:
                yield settings

    def between(self, model: SearchModel, mesh: UniformMesh, chosen: ModelSpec) -> Iterator[ModelSpec]:
        """Yield settings of a model between those of its options: with any number of rows in a pass or in a cache.

        ``chosen``: of an option, or as returned here.
        """
        if model.is_rollout:
            if self.spec.rollout.kv_tokens is None:
                yield from self._caches(model, mesh)
            return
        layout, fixed, texts = layout_of(mesh, chosen), self.tried.fixed(model), self.spec.data
        row = texts.max_prompt_tokens + texts.max_response_tokens
        rows = _spread(max(1, self.tried.most_rows(layout)))
        passes = [row * number for number in rows] if "micro_batch_tokens" not in fixed else [chosen.micro_batch_tokens]
        recomputes = {chosen.activation_checkpointing}
        if model.trained and "activation_checkpointing" not in fixed and not chosen.offload_activations:
            recomputes = {False, True}
        for tokens, recompute in product(passes, sorted(recomputes)):
            yield chosen.model_copy(update={"micro_batch_tokens": tokens, "activation_checkpointing": recompute})
        if len(self.tried.decodes(model, on_mesh(model, mesh, layout, chosen))) > 1:
            yield from (chosen.model_copy(update={"generate_tokens": row * number}) for number in rows)

    def _caches(self, model: SearchModel, mesh: UniformMesh) -> Iterator[ModelSpec]:
        """Yield the settings of a rollout engine with room for any number of rows, in each of its splits."""
        figures = self._figures(_by_itself(model), mesh)
        found = (sharded.placed.settings for sharded, _ in figures)
        splits = {settings.dims: settings for settings in found}
        for settings in splits.values():
            row, most = self.spec.padded_row, max(1, self.tried.most_rows(layout_of(mesh, settings)))
            yield from (settings.model_copy(update={"generate_tokens": row * number}) for number in _spread(most))

    def _figures(self, model: SearchModel, mesh: UniformMesh) -> tuple[tuple[ShardedModel, tuple[_Figures, ...]], ...]:
        """Return the figures of the model with each of its settings, by layout and ZeRO stage."""
        if (model, mesh) not in self._all_figures:
            self._all_figures[model, mesh] = tuple(
                (sharded, self._figures_of(model, mesh, sharded, settings))
                for sharded, settings in self._sharded(model, mesh)
            )
        return self._all_figures[model, mesh]

    def _figures_of(
        self, model: SearchModel, mesh: UniformMesh, sharded: ShardedModel, settings: Sequence[ModelSpec]
    ) -> tuple[_Figures, ...]:
        calls = list(self._figure_maker.calls(model, mesh, sharded))
        sized = calls + list(self._figure_maker.calls(replace(model, calls=model.rare), mesh, sharded))
        return tuple(
            _Figures(each, tuple(call.seconds(each) for call in calls), max(call.most_bytes(each) for call in sized))
            for each in settings
        )

    def _sharded(self, model: SearchModel, mesh: UniformMesh) -> Iterator[tuple[ShardedModel, Sequence[ModelSpec]]]:
        """Place the model on the first devices, once with each layout and ZeRO stage; with the settings of its
        passes."""
        placed, maker = list(self._allowed.laid_out(model, mesh)), self._figure_maker
        # replicas without a row only where there is no other way
        most = max(self.batch.num_prompts, min((each.layout.dp for each in placed), default=0))
        for each in placed:
            if each.layout.dp > most:
                continue
            if each.rollout is not None:
                rollouts = self.tried.rollouts(self.tried.base(model, mesh), each.layout, each.rollout)
                caches = [maker.sharded(replace(each, settings=settings), mesh) for settings in rollouts]
                fitting = (cache for cache in caches if cache is caches[0] or maker.may_fit(cache))
                yield from ((cache, [cache.placed.settings]) for cache in fitting)
                continue
            for change in self.tried.offloads(model):
                variant = with_settings(each, change)
                if self._allowed.is_allowed(model, mesh, variant):
                    sharded = maker.sharded(variant, mesh)
                    sized = self._with_batch_sizes if maker.may_fit(sharded) else self._leanest
                    yield sharded, [*sized(model, mesh, sharded)]

    def _leanest(self, model: SearchModel, mesh: UniformMesh, sharded: ShardedModel) -> Iterator[ModelSpec]:
        """Settings of ``sharded``, which fits no device, with the passes and the decoding that need least memory."""
        tried = self._allowed.passes(model, mesh, sharded.placed)
        least = min(each.micro_batch_tokens for each in tried)
        # those with which passes need less come later
        leanest = [each for each in tried if each.micro_batch_tokens == least][-1]
        yield changed(leanest, self.tried.decodes(model, sharded.placed)[0])

    def _with_batch_sizes(self, model: SearchModel, mesh: UniformMesh, sharded: ShardedModel) -> Iterator[ModelSpec]:
        """Settings of ``sharded`` with pairs of batch sizes for passes and for decoding: the fastest that fit into the
        same bytes.

        Each call has all memory in addition to the states, so a smaller size than fits is slower for nothing.
        """
        passes, changes = self._allowed.passes(model, mesh, sharded.placed), self.tried.decodes(model, sharded.placed)
        if len(changes) < 2:
            yield from (changed(settings, change) for settings in passes for change in changes)
            return
        shape, data = self.shapes[model.role], self.spec.data
        in_slots = TextPacking.of(sharded.placed, shape, data.max_prompt_tokens + data.max_response_tokens).in_slots
        calls = [*self._figure_maker.calls(model, mesh, sharded)]
        decoding, others = (
            [call for call in calls if call.kind in kinds] for kinds in (("generate",), ("forward", "train"))
        )
        of_decodes: dict[int, list[tuple[float, int]]] = {}
        figures: dict[tuple[int, int], tuple[float, int]] = {}
        for index, settings in enumerate(passes):
            # slots read prompts in passes of the same tokens
            read = settings.micro_batch_tokens if in_slots else 0
            if read not in of_decodes:
                of_decodes[read] = [total(decoding, changed(settings, change)) for change in changes]
            seconds, size = total(others, settings)
            for number, (taken, needed) in enumerate(of_decodes[read]):
                figures[index, number] = seconds + taken, max(size, needed)
        rooms = sorted({size for _, size in figures.values()})
        for index, number in dict.fromkeys(_fastest_within(figures, room) for room in rooms):
            yield changed(passes[index], changes[number])


def _by_itself(model: SearchModel) -> SearchModel:
    """Return ``model`` without what its calls do not depend on: where it is between them, its syncs, and of a copy
    lean passes, which are not tried."""
    return replace(model, switches=(), syncs=(), is_lean=model.is_lean and not model.is_shadow)


def _fastest_within(figures: Mapping[tuple[int, int], tuple[float, int]], room: int) -> tuple[int, int]:
    """Return the fastest pair whose bytes fit into ``room``. ``figures``: pair → (seconds, bytes)."""
    return min((pair for pair, (_, size) in figures.items() if size <= room), key=lambda pair: figures[pair][0])


def _spread(most: int) -> list[int]:
    """Return numbers up to ``most``, each at most ``STEP`` times the one before."""
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, int(STEP * found[-1]))))
    return found
