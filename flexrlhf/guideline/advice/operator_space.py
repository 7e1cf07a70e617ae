"""Space of one placement for each operator (ReaL: Mei et al., MLSys 2025): from a search to ``placement.operators``.

Every model call of a step is a part of the search problem, with a mesh, degrees, a ZeRO stage and passes of its own.
The copy that trains keeps its memory; a further one takes it while its call runs, unless it has adapters, and is filled
by a Sync unless it is the copy that trains. A copy that two calls could share is counted for each of them. Counted too
low are the buffers of syncs alone that depend on both ends: to tensor-parallel parts, and to copies on some of the
source's nodes.
Rows decoded together are as in the YAML; recomputation, which concerns the one training of a role, is searched. A
placement that is found is planned; one that the plan rejects is searched again without what was rejected. With
``schedule.lag`` or ``sync.every`` further copies of trained models are shadows, which keep their memory, on devices
that train nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from math import inf
from typing import Any

from flexrlhf.api import (
    OF_PARTS,
    RARE,
    EngineFacts,
    Layout,
    ModelName,
    ModelSpec,
    Operator,
    PlacedModel,
    Placement,
    PlacementMap,
    Plan,
    Run,
    Spec,
    Sync,
    UserError,
    shown,
)
from flexrlhf.guideline.advice.advise import LEAST_SHARE, PROPOSALS
from flexrlhf.guideline.advice.candidates import Candidate, RejectedCandidate, check
from flexrlhf.guideline.advice.model_options import OptionEnumerator
from flexrlhf.guideline.advice.searched_step import is_allowed
from flexrlhf.guideline.advice.sketch import CopySync, PlacedCall, SearchModel, Sketch, name_of
from flexrlhf.guideline.advice.space import GAP, Space, lies_in_nodes, make_space
from flexrlhf.guideline.costs.cost_model import CostModel
from flexrlhf.guideline.costs.relations import Relation
from flexrlhf.guideline.search.branch_and_bound import search
from flexrlhf.guideline.search.problem import (
    Assignment,
    Choice,
    LinkEnd,
    MeshShape,
    Option,
    SearchPart,
    SearchProblem,
    SearchSync,
    SearchTask,
    meshes_of,
)
from flexrlhf.guideline.search.result import SearchResult
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.simulate import Simulation

SHARED_SETTINGS = ("generate_tokens", "offload_optimizer")
"""Settings of a role that its operators share."""


@dataclass(frozen=True)
class OperatorSketch(Sketch):
    """Step of ``spec`` with each model call on a rank of its own."""

    @cached_property
    def operators(self) -> dict[str, Operator]:
        """Model calls of a step by name, trainings first."""
        graph = self.placeable_graph(self.roles.trained if self.has_shadows else ())
        calls = [each for each in graph.operators if each.call is not None and not each.is_rare]
        return {each.name: each for each in sorted(calls, key=lambda each: each.kind != "train")}

    def own_part(self, role: str) -> str:
        """Return the part that has the weights of ``role`` all the time: its training, else its first call."""
        return next(name for name, operator in self.operators.items() if operator.role == role)

    def part_of(self, model: ModelName) -> str:
        """Return the operator whose copy a model is."""
        return model.copy or self.own_part(model.role)

    def is_of_rollout(self, part: str) -> bool:
        """Whether a rollout engine computes a part."""
        operator = self.operators[part]
        return operator.kind == "generate" and operator.role == self.roles.rollout

    def is_kept(self, part: str) -> bool:
        """Whether a part is computed by a shadow."""
        operator = self.operators[part]
        return self.has_shadows and operator.role in self.roles.trained and not self.roles.needs_trained(operator)

    def must_be_disjoint(self, first: ModelName, second: ModelName) -> bool:
        """Whether two models must not share a device: with shadows, one that computes with trained weights and one for
        inference."""
        return self.has_shadows and self._is_late(first) != self._is_late(second)

    def _is_late(self, model: ModelName) -> bool:
        return self.roles.needs_trained(self.operators[self.part_of(model)])

    @cached_property
    def placement(self) -> Placement:
        names = {name: self._copy_of(each) for name, each in self.operators.items()}
        models = tuple(self._sketched_copy(name, rank) for rank, name in enumerate(names.values()))
        return Placement(models, len(models), operators=names)

    def _copy_of(self, operator: Operator) -> ModelName:
        is_own = operator.name == self.own_part(operator.role)
        return ModelName(operator.role) if is_own else ModelName.of(operator.role, operator.name)

    def _sketched_copy(self, name: ModelName, rank: int) -> PlacedModel:
        settings, trained = self.spec.models.of(name.role), not name.copy and name.role in self.roles.trained
        assert settings is not None, f"{name.role} is resolved"
        part = self.part_of(name)
        is_rollout, is_kept = self.is_of_rollout(part), self.is_kept(part)
        rollout = self.spec.rollout if is_rollout else None
        if rollout is not None:
            lora = rollout.own_adapters(settings)
            settings = ModelSpec(engine=rollout.engine, dtype=rollout.dtype or settings.dtype, lora=lora)
        return PlacedModel(
            name,
            Layout((rank,)),
            trained,
            settings,
            rollout,
            "causal" if is_rollout else self.roles.heads[name.role],
            operator=name.copy,
            is_hybrid=is_rollout and not is_kept,
            is_kept=is_kept,
        )


@dataclass(frozen=True)
class OperatorSpace(Space):
    """Placements of the operators of ``spec``, in one chunk.

    variants:  (engine, ZeRO stage, whether passes are as in the spec) → enumerator of the options of models with them,
               filled on use.
    """

    variants: dict[tuple[str, int | None, bool], OptionEnumerator] = field(default_factory=dict, compare=False)

    @cached_property
    def sketch(self) -> OperatorSketch:
        return OperatorSketch(self.spec, self.graph, self.cluster, has_shadows=self.has_shadows)

    @property
    def placed_operators(self) -> dict[str, Operator]:
        """Model calls of a step by name, trainings first: a part of the problem each."""
        return self.sketch.operators

    @cached_property
    def problem(self) -> SearchProblem:
        """The space as a search problem."""
        parts = tuple(SearchPart(name, partial(self._options_of, name)) for name in self.placed_operators)
        return SearchProblem(self.pool, parts, tuple(self._calls()), tuple(self._rows()), meshes_of(self.cluster))

    @cached_property
    def _models_by_part(self) -> dict[str, SearchModel]:
        calls: dict[str, list[PlacedCall]] = {name: [] for name in self.placed_operators}
        for run in self.sketch.runs:
            calls[self.sketch.part_of(run.model)].append(PlacedCall.of(run))
        return {
            name: SearchModel(
                ModelName.rollout_of(each.role) if self.sketch.is_of_rollout(name) else ModelName(each.role),
                each.kind == "train",
                tuple(calls[name]),
                "causal" if self.sketch.is_of_rollout(name) else self.roles.heads[each.role],
                operator="" if name == self.sketch.own_part(each.role) else name,
                switches=(0,) * len(calls[name]) if self._copy_for(name).is_transient else (),
                syncs=tuple(self._syncs_of(name)),
                rare=tuple(self._rare_calls(name)),
            )
            for name, each in self.placed_operators.items()
        }

    def _rare_calls(self, part: str) -> Iterator[PlacedCall]:
        """Yield the calls of a part that most steps skip; their passes are those of the role."""
        settings = self.spec.models.of(self.placed_operators[part].role)
        assert settings is not None, "models are resolved"
        for call in self.sketch.rare_calls(self.sketch.placement.operators[part]):
            yield replace(call, tokens=settings.micro_batch_tokens)

    def _copy_for(self, part: str) -> PlacedModel:
        return self.sketch.placement[self.sketch.placement.operators[part]]

    def _syncs_of(self, part: str) -> Iterator[CopySync]:
        """Yield the syncs of a part, with partners named as copies of a role are where ratios place them."""
        for sync in self.sketch.syncs_of(self.sketch.placement.operators[part]):
            role, is_rollout = sync.partner.role, self.sketch.is_of_rollout(self.sketch.part_of(sync.partner))
            copy = ModelName.rollout_of(role) if is_rollout else ModelName.shadow_of(role)
            yield replace(sync, partner=copy if sync.partner.copy else ModelName(role))

    def _options_of(self, part: str, shape: MeshShape) -> tuple[Option, ...]:
        """Return the options of an operator on a mesh."""
        if len(shape.kinds) > 1:
            return ()
        model, mesh = self._models_by_part[part], self._mesh(shape)
        found = (each for variant in self._variants_of(part) for each in variant.options(model, mesh))
        options = self.allowed(part, tuple(each for each in found if lies_in_nodes(each, model, shape)))
        if not self.sketch.is_of_rollout(part):
            options = tuple(_worth_their_memory(options))
        name = self.sketch.placement.operators[part]
        return tuple(self._with_further_bytes(name, mesh, each) for each in options)

    def _variants_of(self, part: str) -> Iterator[OptionEnumerator]:
        """Yield enumerators of the options of an operator: with another engine if the engine of its role does not serve
        it, and also in the ZeRO stages of the copy that trains, which it may share. How many tokens of prompts it reads
        at a time changes no predicted time of generation, so that its passes are as in the spec.
        """
        operator = self.placed_operators[part]
        settings = self.spec.models.of(operator.role)
        assert settings is not None, f"{operator.role} is resolved"
        serves = operator.kind in settings.facts.kinds
        is_of_rollout = self.sketch.is_of_rollout(part)
        engine = settings.engine if serves or is_of_rollout else EngineFacts.full_engines()[0]
        generates = operator.kind == "generate" and not is_of_rollout
        yield self._variant(engine, None, generates)
        follows = operator.kind != "train" and operator.role in self.roles.trained
        if serves and follows and not is_of_rollout and "zero" not in settings.model_fields_set:
            yield from (
                self._variant(engine, zero, generates) for zero in (1, 2) if zero in EngineFacts.of(engine).zero
            )

    def _variant(self, engine: str, zero: int | None, keeps_passes: bool) -> OptionEnumerator:
        """Return an enumerator of models on ``engine``. ``zero``: their stage; None: it is open."""
        key = engine, zero, keeps_passes
        if key not in self.variants:
            changes, kept = {} if zero is None else {"zero": zero}, ("micro_batch_tokens",) * keeps_passes
            models = {role: _on_engine(self.spec.models.of(role), engine, changes) for role in self.roles.all}
            spec = self.spec.with_models({role: _with_given(model, kept) for role, model in models.items()})
            self.variants[key] = self.enumerator.of(spec)
        return self.variants[key]

    def _calls(self) -> Iterator[SearchTask | SearchSync]:
        """Tasks and refills of copies in the order of the trainer's list.

        Refills are right before the first call of their copy: plans have them earlier only past calls on other ranks.
        """
        sketch, refills = self.sketch, dict[str, SearchSync]()
        for each in sketch.instructions:
            match each:
                case Run():
                    reads = tuple(map(name_of, (*sketch.writers(each), *sketch.separate(each))))
                    part = sketch.part_of(each.model)
                    if part in refills:
                        yield refills.pop(part)
                    yield SearchTask(name_of(each), part, reads, each.lag)
                case Sync():
                    part, task = sketch.part_of(each.destination), sketch.own_part(each.source.role)
                    if sketch.is_kept(part):
                        yield self._sync(each, task, part)
                    else:
                        refills[part] = SearchSync(task, part, partial(self._refill_seconds, each.destination))

    def _refill_seconds(self, name: ModelName, source: LinkEnd, to: LinkEnd, relation: Relation) -> float:
        """Return the time of filling a copy; 0 where it is the copy that trains."""
        copy = self.sketch.placement[name]
        if relation == "same" and source.layout == to.layout and copy.rollout is None:
            return 0.0
        weights = self._weights(copy, to)
        return self._between(source, to, relation).sync_cost(self.costs, weights).seconds

    def spec_of(self, assignment: Assignment) -> Spec:
        """Return the spec with the placement of ``assignment``."""
        entries = {choice.part: self._entry(choice) for choice in assignment}
        names = [operator.name for operator in self.sketch.whole_graph.operators if operator.name in entries]
        placement = PlacementMap.model_validate({"operators": {name: entries[name] for name in names}})
        caches = [
            choice.option.settings.generate_tokens
            for choice in assignment
            if self.sketch.is_of_rollout(choice.part) and isinstance(choice.option.settings, ModelSpec)
        ]
        rollout = self.spec.rollout.model_copy(update={"kv_tokens": min(caches)}) if caches else self.spec.rollout
        spec = self.spec.with_models(dict(self._recomputing(assignment)))
        return spec.model_copy(update={"placement": placement, "rollout": rollout})

    def _recomputing(self, assignment: Assignment) -> Iterator[tuple[str, ModelSpec]]:
        """Yield the settings of trained models by role, with the recomputation that was chosen for their training."""
        for choice in assignment:
            operator, chosen = self.placed_operators[choice.part], choice.option.settings
            model = self.spec.models.of(operator.role)
            assert isinstance(chosen, ModelSpec) and model is not None, "options of a Space have settings"
            if operator.kind == "train":
                changes = {"activation_checkpointing": chosen.activation_checkpointing}
                yield operator.role, model.model_copy(update=changes)

    def _entry(self, choice: Choice) -> dict[str, Any]:
        settings, model = choice.option.settings, self.spec.models.of(self.placed_operators[choice.part].role)
        assert isinstance(settings, ModelSpec) and model is not None, "options of a Space have settings"
        is_kept = self.sketch.is_kept(choice.part)
        own: dict[str, Any] = {"ranks": choice.ranks, "shadow": is_kept, "tp": settings.tp}
        if self.sketch.is_of_rollout(choice.part):
            stages = (axis.name for axis in OF_PARTS if axis.is_outer)
            own |= {name: _unless(getattr(self.spec.rollout, name), getattr(settings, name)) for name in stages}
            return own
        own |= {axis.name: settings.dims.of(axis) for axis in OF_PARTS if axis.name in settings.facts.axes}
        own["zero"] = settings.zero
        for name in ("engine", "shard", *(axis.name for axis in RARE)):
            own[name] = _unless(getattr(model, name), getattr(settings, name))
        tokens = (model.of_shadow if is_kept else model).micro_batch_tokens
        own["micro_batch_tokens"] = _unless(tokens, settings.micro_batch_tokens)
        return own


def _unless(usual: object, value: object) -> object:
    """Return ``value``; None if it is the usual one."""
    return None if value == usual else value


@dataclass(frozen=True)
class OperatorCandidate(Candidate):
    """A placement of each operator, which a plan may reject."""

    @cached_property
    def spec(self) -> Spec:
        assert isinstance(self.space, OperatorSpace) and self.assignment is not None, "a placement of operators"
        return self.space.spec_of(self.assignment)


@dataclass(frozen=True)
class OperatorAdvice:
    """Outcome of ``advise_operators``.

    spec:        with the placement that was found.
    result:      of the search.
    simulation:  of its plan.
    """

    spec: Spec
    result: SearchResult
    simulation: Simulation

    @property
    def plan(self) -> Plan:
        return self.simulation.plan


def advise_operators(
    spec: Spec, costs: CostModel, lengths: TextLengths | None = None, seconds_limit: float = 60.0
) -> OperatorAdvice:
    """Find the fastest placement of every operator of ``spec``, whose own placement is ignored, that has a plan.

    Raises UserError for a hybrid engine, which has no place of its own, and where nothing fits.
    """
    if spec.rollout.is_hybrid:
        raise UserError(
            f"rollout.engine: {spec.rollout.engine} generates on the ranks that train the actor, so its operator has "
            f"no place of its own; use transformers or vllm"
        )
    space = make_operator_space(spec, costs, lengths)
    found = _planned(space, seconds_limit)
    if isinstance(found, OperatorAdvice):
        return found
    raise UserError(f"no placement of these operators fits the devices{found}; {_help(space, seconds_limit)}")


def _planned(space: OperatorSpace, seconds_limit: float) -> OperatorAdvice | str:
    """Return the fastest placement that has a plan, or why the last one that was found has none; nothing: none was."""
    left, reason = seconds_limit, ""
    for _ in range(PROPOSALS):
        result = search(space.problem, max(left, LEAST_SHARE * seconds_limit), GAP)
        if not result.is_feasible or not is_allowed(result.seconds):
            break
        left -= result.work
        checked = check(OperatorCandidate("search", "operators", space, result.assignment))
        if not isinstance(checked, RejectedCandidate):
            return OperatorAdvice(checked.candidate.spec, result, checked.simulation)
        space, reason = replace(space, limits=checked.limits), f" ({checked.reason})"
    return reason


def _help(space: OperatorSpace, seconds_limit: float) -> str:
    """Return the end of a refusal: settings of models with which a placement fits, if any do."""
    row = space.spec.data.max_prompt_tokens + space.spec.data.max_response_tokens
    checkpointing = list(_changed_models(space, "activation_checkpointing", True, space.roles.trained))
    sizes = ("micro_batch_tokens", "generate_tokens")
    smallest = [change for name in sizes for change in _changed_models(space, name, row, space.roles.all)]
    for changes in filter(None, (checkpointing, smallest and [*checkpointing, *smallest])):
        models = dict(space.spec.models)
        for role, name, value in changes:
            model = models[role]
            assert model is not None, f"{role} is resolved"
            models[role] = model.model_copy(update={name: value})
        changed = make_operator_space(space.spec.with_models(models), space.costs, space.lengths)
        if isinstance(_planned(changed, LEAST_SHARE * seconds_limit), OperatorAdvice):
            names = (f"models.{role}.{name}: {shown(value)}" for role, name, value in changes)
            return f"one does with {', '.join(names)}"
    return "use more devices or larger ones"


def _changed_models(
    space: OperatorSpace, name: str, value: bool | int, roles: Iterable[str]
) -> Iterator[tuple[str, str, bool | int]]:
    """Yield (role, ``name``, ``value``) of each of ``roles`` that has another value, which the search keeps."""
    for role in roles:
        model = space.spec.models.of(role)
        if model is not None and name in model.model_fields_set and getattr(model, name) != value:
            yield role, name, value


def make_operator_space(spec: Spec, costs: CostModel, lengths: TextLengths | None) -> OperatorSpace:
    """Return the space of ``spec``. Raises UserError for models or devices that no plan could have."""
    schedule = spec.schedule.model_copy(update={"num_chunks": 1})
    plain = spec.model_copy(update={"placement": None, "schedule": schedule})
    base = make_space(plain, costs, lengths, of_operators=True)
    models = {role: _with_given(base.spec.models.of(role), SHARED_SETTINGS) for role in base.roles.all}
    whole = base.spec.with_models(models)
    enumerator = base.enumerator.of(whole)
    kept = {each.name: getattr(base, each.name) for each in fields(base)}
    return OperatorSpace(**{**kept, "spec": whole, "enumerator": enumerator, "has_shadows": base.must_have_shadows})


def _worth_their_memory(options: Sequence[Option]) -> Iterator[Option]:
    """Yield the options of an operator but for those that are hardly faster than one of their layout with less memory,
    such as most larger passes: each option multiplies the placements to search."""
    by_layout: dict[Hashable, list[Option]] = {}
    for each in options:
        by_layout.setdefault(each.layout, []).append(each)
    for alike in by_layout.values():
        fastest = inf
        for each in sorted(alike, key=lambda each: (each.resting + each.active, sum(each.seconds))):
            if sum(each.seconds) < (1 - GAP) * fastest:
                fastest = sum(each.seconds)
                yield each


def _on_engine(model: ModelSpec | None, engine: str, changes: dict[str, int]) -> ModelSpec:
    assert model is not None, "models are resolved"
    other = model if model.engine == engine else model.of_copy({"engine": engine})
    return other.model_copy(update=changes)


def _with_given(model: ModelSpec | None, names: Iterable[str]) -> ModelSpec:
    """Return ``model`` with the settings ``names`` marked as given, so that a search keeps them."""
    assert model is not None, "models are resolved"
    return model.model_copy(update={name: getattr(model, name) for name in names})
