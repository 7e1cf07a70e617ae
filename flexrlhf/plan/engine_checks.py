"""Checks of operators and settings against the facts of their engines, which planning makes before a rank starts."""

from __future__ import annotations

from collections.abc import Callable

from flexrlhf.config.engines import TORCH, EngineFacts
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import RolloutSpec
from flexrlhf.errors import SettingError, UserError, either
from flexrlhf.operators.columns import Column
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.placement import Placement


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


def check_replayed_passes(model: PlacedModel) -> None:
    """Raise UserError for a model that generates with CUDA graphs if its passes call libraries of collectives, or are
    another engine's."""
    if model.engine != TORCH.name or model.layout.tp > 1 or model.split != "whole":
        raise model.refusal(
            "cuda_graphs",
            f"true is for engine torch with tp 1 and whole weights on each rank, found "
            f"engine {model.engine}, tp {model.layout.tp}, zero {model.settings.zero}; use false",
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
                _check_routers(trained)
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
    """Raise UserError for a setting that the engine of a model, its role or its dtype rules out."""
    _check_sharding(model)
    _check_routers(model)
    _check_offload(model)
    _check_role(model)
    if model.settings.attention == "flash_attention_2" and model.settings.dtype == "float32":
        raise model.refusal(
            "attention", "flash_attention_2 computes in 16 bits, found dtype float32; use sdpa, or dtype bfloat16"
        )
    if model.settings.config:
        lacks = f"engine {model.engine} has no settings of its own; use {{}}"
        _require(model, "config", lambda each: each.config, lacks)
    if model.facts.check_config and model.rollout is None:
        model.facts.part(model.facts.check_config)(f"models.{model.role}", model.settings.config)
    _check_computation(model)
    if model.rollout is not None and model.rollout.process == "child":
        _check_child(model.rollout)


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


def _check_child(rollout: RolloutSpec) -> None:
    """Raise UserError for an engine in a child process that has several ranks."""
    for name in ("tp", "pp"):
        if (degree := getattr(rollout, name)) > 1:
            raise SettingError.of(
                "rollout", "process", f"a child process serves one rank, found {name} {degree}; use inline, or {name} 1"
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


def _check_sharding(model: PlacedModel) -> None:
    """Raise UserError for a ZeRO stage or tensor parallelism that the engine or the dtype rules out."""
    facts, settings, engine = model.facts, model.settings, f"engine {model.engine}"
    # a copy may inherit a stage of training, which has no effect without an optimizer
    if not model.follows:
        lacks = f"{engine} has no stage {settings.zero}; use {either(facts.zero)}"
        _require(model, "zero", lambda each: settings.zero in each.zero, lacks)
    if model.trained and settings.dtype != "float32" and settings.zero < facts.least_16_bit_zero:
        stages = either(stage for stage in facts.zero if stage >= facts.least_16_bit_zero)
        lacks = f"{settings.zero} in {settings.dtype} has no float32 gradients in {model.engine}; use zero {stages}, "
        _require(model, "zero", lambda each: not each.least_16_bit_zero, f"{lacks}dtype float32")
    if settings.shard == "node":
        lacks = f"{engine} shards over all ranks of a model, found node; use all"
        _require(model, "shard", lambda each: each.node, lacks)
    if settings.shard == "node" and settings.zero == 0 and not model.follows:
        raise model.refusal("shard", "node needs zero 2 or 3, found 0; use zero 3, or shard all")
    if settings.tp > 1:
        lacks = f"{engine} has no tensor parallel, found tp {settings.tp}; use 1"
        _require(model, "tp", lambda each: each.tp, lacks, 1)
    if settings.pp > 1:
        lacks = f"{engine} has no pipeline stages, found pp {settings.pp}; use 1"
        _require(model, "pp", lambda each: each.pp, lacks, 1)
    if settings.cp > 1:
        lacks = f"engine {model.engine} has no context parallel, found cp {settings.cp}; use 1"
        _require(model, "cp", lambda each: each.cp, lacks, 1)
        _check_context_parallel(model)
    if settings.ep > 1:
        lacks = f"engine {model.engine} has no expert parallel, found ep {settings.ep}; use 1"
        _require(model, "ep", lambda each: each.ep, lacks, 1)


def _check_routers(model: PlacedModel) -> None:
    """Raise UserError for an engine or a kernel whose experts are not recorded."""
    value = model.settings.router_replay
    if value != "none":
        lacks = f"engine {model.engine} records no experts, found {value}; use none"
        _require(model, "router_replay", lambda each: each.routers, lacks)
        if model.settings.compile:
            raise model.refusal("router_replay", "goes with compile false, found true; use false, or none")
    for name in ModelSpec.OF_ROUTERS:
        found = getattr(model.settings, name)
        if found and model.trained:
            lacks = f"engine {model.engine} does not count tokens of experts, found {found:g}; use 0"
            _require(model, name, lambda each: each.transformers_modules, lacks)
            if model.settings.compile:
                raise model.refusal(name, "goes with compile false, found true; use false, or 0")


def _check_context_parallel(model: PlacedModel) -> None:
    """Raise UserError for kernels that do not compute a part of a row."""
    settings = model.settings
    if settings.attention != "auto":
        raise model.refusal("cp", f"goes with attention auto, found {settings.attention}; use auto, or cp 1")
    if settings.compile:
        raise model.refusal("cp", "goes with compile false, found true; use false, or cp 1")


def _check_computation(model: PlacedModel) -> None:
    """Raise UserError for a dtype, a kernel, an optimizer or a head that the engine does not have."""
    facts, settings = model.facts, model.settings
    if settings.dtype == "float16":
        lacks = f"{model.engine} computes in bfloat16 and float32 here, found float16; use bfloat16"
        _require(model, "dtype", lambda each: each.float16, lacks)
    if settings.attention not in ("auto", "sdpa"):
        lacks = f"engine {model.engine} has attention of its own, found {settings.attention}; use auto"
        _require(model, "attention", lambda each: each.transformers_modules, lacks)
    lacks = f"engine {model.engine} has none, found true; use false"
    for name in ("liger", "tiled_mlp", "compile"):
        if getattr(settings, name):
            _require(model, name, lambda each: each.transformers_modules, lacks)
    if settings.tiled_mlp and settings.compile:
        raise model.refusal("compile", "a layer with tiled_mlp is not compiled, found both; use false")
    optimizers = facts.sharded_optimizers
    if model.trained and settings.zero and optimizers and settings.optimizer.name not in optimizers:
        raise model.refusal(
            "zero",
            f"{settings.zero} of engine {model.engine} has no {settings.optimizer.name}; use 0, "
            f"or optimizer.name {either(optimizers)}",
        )
    if model.head == "both" and not facts.both_heads:
        raise model.refusal(
            "engine",
            f"{model.engine} puts one head on a trunk, and {model.role} has policy and values "
            f"on one; use {engines_with(lambda other: other.both_heads)}, or a separate critic",
        )


def _check_offload(model: PlacedModel) -> None:
    settings = model.settings
    lacks = f"engine {model.engine} has none, found true; use false"
    for name in ("offload_optimizer", "offload_parameters"):
        if getattr(settings, name):
            _require(model, name, lambda each: each.offload, lacks)
    if settings.offload_activations:
        _require(model, "offload_activations", lambda each: each.transformers_modules, lacks)
        if model.trained and not settings.activation_checkpointing:
            raise model.refusal(
                "offload_activations",
                "offloads the inputs of checkpointed layers, found true without "
                "activation_checkpointing; set that too, or use false",
            )
    if settings.offload_optimizer and settings.zero == 0:
        raise model.refusal("offload_optimizer", "needs zero 1, 2 or 3, found 0; use zero 1")
    if settings.offload_parameters and settings.zero != 3:
        raise model.refusal(
            "offload_parameters", f"needs zero 3, found {settings.zero}; use zero 3 or offload_optimizer"
        )


def _check_role(model: PlacedModel) -> None:
    """Raise UserError for settings of training on a model that is not trained."""
    settings = model.settings
    if model.trained or model.follows:
        return
    for name in ("optimizer", "offload_optimizer"):
        if getattr(settings, name) != getattr(ModelSpec(), name):
            raise model.refusal(name, f"{model.role} is not trained, so it has no optimizer; remove it")
    for name in ("activation_checkpointing", "offload_activations", *ModelSpec.OF_ROUTERS):
        if getattr(settings, name):
            raise model.refusal(name, f"{model.role} is not trained; remove it")
    if settings.shadow is not None:
        raise model.refusal("shadow", f"{model.role} is not trained, so it has no shadow; remove it")
    if settings.lora is not None:
        raise model.refusal("lora", f"{model.role} is not trained, so its adapters have no effect; remove it")


def _require(
    model: PlacedModel, name: str, supports: Callable[[EngineFacts], bool], lacks: str, only: object = None
) -> None:
    """Raise UserError for setting ``name`` if the model's engine does not support it: with ``lacks``, and the engines
    that do. ``only``: the one value that this engine supports; None: others may be."""
    if not supports(model.facts):
        engines = engines_with(supports)
        raise model.refusal(name, lacks + f", or {engines}" * bool(engines), only)


def engines_with(supports: Callable[[EngineFacts], bool]) -> str:
    """Return the engines of ``models`` that support a setting; those that do not generate if no other has it."""
    names = [name for name in EngineFacts.full_engines() if supports(EngineFacts.of(name))]
    names = names or [name for name in EngineFacts.model_engines() if supports(EngineFacts.of(name))]
    return f"engine {' or '.join(names)}" if names else ""
