"""Checks of operators and settings against the facts of their engines, which planning makes before a rank starts."""

from __future__ import annotations

from flexrlhf.config.engines import EngineFacts
from flexrlhf.config.spec import RolloutSpec
from flexrlhf.errors import SettingError, UserError, either
from flexrlhf.operators.columns import Column
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.placement import Placement
from flexrlhf.plan.engine_rules import ENGINE_RULES
from flexrlhf.plan.model_view import ModelView


def check_operators(graph: Graph, placement: Placement, is_evaluated: bool = False) -> None:
    """Raise UserError if the engine of a placed model cannot serve an operator of its role, or if settings of two
    copies of a role do not go together. Degrees and devices of the models are of no account.

    is_evaluated: whether the operators of evaluations run, too.
    """
    # shadows last: the settings that they inherit from their role are then checked already
    for model in sorted(placement.models, key=lambda model: model.follows):
        EngineFacts.check_name(model.key("engine"), model.engine)
        for operator in graph.operators:
            if placement.copy_for(operator) == model and not _serves(model, operator):
                raise model.refusal(
                    "engine", f"engine {model.engine} does not support {operator.kind}; " + _instead(model, operator)
                )
        for operator in graph.evaluated if is_evaluated else ():
            if placement.copy_for(operator) == model and not _serves(model, operator):
                raise model.refusal(
                    "engine",
                    f"engine {model.engine} does not support {operator.kind}, which an "
                    f"evaluation does on this copy; use {either(EngineFacts.full_engines())}, or remove eval",
                )
        if not model.facts.trains and model.rollout is None:
            remedy = f"set rollout.engine: {model.engine}, and remove it here" if model.operator else _elsewhere(model)
            raise model.refusal("engine", f"{model.engine} is for rollout.engine alone; {remedy}")
        if model.rollout is not None:
            _check_rollout(model.rollout, placement[model.role], is_apart=model in placement.shadows)
    _check_idle_graphs(graph, placement, is_evaluated)
    _check_recording(graph, placement)
    _check_free_rows(graph, placement)


def check_ring(placement: Placement) -> None:
    """Raise UserError for a way of context parallelism where no model has context-parallel ranks."""
    if all(model.settings.cp == 1 for model in placement.models):
        for model in placement.models:
            if (way := model.settings.context_parallel) != "auto":
                raise model.refusal(
                    "context_parallel", f"{way} is for a cp above 1, and all models have cp 1; use auto, or give cp"
                )


def _check_idle_graphs(graph: Graph, placement: Placement, is_evaluated: bool) -> None:
    """Raise UserError for graphs of a role whose responses come from another engine, or which has none."""
    operators = [*graph.operators, *(graph.evaluated if is_evaluated else ())]
    copies = [placement.copy_for(operator) for operator in operators if operator.kind == "generate"]
    for model in placement.models:
        own = [copy for copy in copies if copy.role == model.role]
        if model.settings.cuda_graphs and not any(copy.settings.cuda_graphs for copy in own):
            remedy = f"use false, and rollout.cuda_graphs for {own[0].engine}" if own else "use false"
            raise model.refusal(
                "cuda_graphs",
                f"true is for roles that generate with engine torch, which {model.role} does not; {remedy}",
            )


def _check_free_rows(graph: Graph, placement: Placement) -> None:
    """Raise UserError for rows that go on one by one where ranks have to call a model together."""
    for operator in graph.operators:
        model = placement.copy_for(operator)
        if operator.is_free and (model.in_lockstep or len(model.layout.replica_sets[0]) > 1):
            raise UserError(
                f"rollout.order: free has each rank go on when its rows have replies, and the ranks of {model.name} "
                f"compute its passes together; use planned, or whole weights on each rank"
            )


def _check_recording(graph: Graph, placement: Placement) -> None:
    """Raise UserError if experts are to be replayed that the engine which generates does not return."""
    for operator in graph.operators:
        if operator.samples_responses and Column.EXPERTS in operator.writes:
            copy = placement.copy_for(operator)
            if not copy.facts.routers:
                trained = placement[copy.role]
                # an engine that trains and records none is named first
                ENGINE_RULES.about("router_replay").check(ModelView(trained))
                raise trained.refusal(
                    "router_replay",
                    f"{trained.settings.router_replay} needs the experts that generation chose, which {copy.engine} "
                    f"does not return here; use none, or rollout.engine: transformers",
                )


def _serves(model: PlacedModel, operator: Operator) -> bool:
    return operator.call is None or operator.kind in model.facts.kinds


def _instead(model: PlacedModel, operator: Operator) -> str:
    """Return the remedy for an engine without a kind of calls: one that generates alone, or one that does not."""
    if not model.facts.trains:
        return _elsewhere(model)
    if model.operator:
        return f"use {either(EngineFacts.full_engines())} for {operator.name}"
    return f"set rollout.engine: vllm, or use {either(EngineFacts.full_engines())} here"


def _elsewhere(model: PlacedModel) -> str:
    """Return the remedy for an engine that generates alone, which placed operators cannot have."""
    use = f"use {either(EngineFacts.full_engines())}"
    return use if model.operator else f"{use} here, and rollout.engine: {model.engine} to generate with it"


def check_settings(model: PlacedModel) -> None:
    """Raise UserError for a setting that the engine of a model, its role or another setting rules out."""
    ENGINE_RULES.check(ModelView(model))
    check_engine_config(model)


def check_engine_config(model: PlacedModel) -> None:
    """Raise UserError for further settings of an engine's library that the engine itself refuses."""
    if model.facts.check_config and model.rollout is None:
        model.facts.part(model.facts.check_config)(f"models.{model.role}", model.settings.config)


def _check_rollout(rollout: RolloutSpec, trained: PlacedModel, is_apart: bool) -> None:
    """Raise UserError for settings of a rollout engine that cannot work.

    ``trained``: the copy that it follows; ``is_apart``: whether the two share no rank.
    """
    if is_apart and trained.settings.shadow is not None:
        raise trained.refusal("shadow", "the rollout engine replaces this copy; set rollout instead, and remove this")
    facts = rollout.facts
    if facts.check_config:
        facts.part(facts.check_config)("rollout", rollout.config)
    if rollout.adapters == "separate":
        _check_separate(trained)
    if rollout.process == "child" and not is_apart:
        raise SettingError.of(
            "rollout",
            "process",
            "a child keeps its memory while its rank trains the actor; use inline, or a placement with shadows",
        )


def _check_separate(trained: PlacedModel) -> None:
    """Raise UserError if the actor has no adapters that vLLM could add by itself."""
    lora = trained.settings.lora
    if lora is None:
        raise SettingError.of(
            "rollout",
            "adapters",
            f"separate sends the adapters of models.{trained.role}, which has none; set "
            f"{trained.key('lora')}, or use merged",
        )
    lora.rank_in_vllm(trained.role)
