"""Rules of placed models: which settings go with which engine, role and with each other."""

from __future__ import annotations

from collections.abc import Iterable

from flexrlhf.config.axes import AXES
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.rules import NO, YES, Rule, RuleTable, but, listed_by, made_by, with_item
from flexrlhf.config.spec import RolloutSpec
from flexrlhf.plan.model_view import ModelView


def _stages_of_16_bits(stages: Iterable[int], least: int) -> list[int]:
    """Return the ZeRO stages of an engine at which it trains weights of 16 bits."""
    return [stage for stage in stages if stage >= least]


SIXTEEN_BITS = ("bfloat16", "float16")
_TRAINED, _LEADS = {"role.trained": YES}, {"role.follows": NO}
_MODULES = {"engine.transformers_modules": YES}
_OF_16_BITS = made_by(_stages_of_16_bits, "engine.zero", "engine.least_16_bit_zero")
_NOT_TRAINED = "{role.name} is not trained"

_DEGREES = (
    *(Rule(axis.name, {"engine.axes": with_item(axis.name)}, lacks=axis.words) for axis in AXES),
    *(Rule(axis.name, axis.goes_with) for axis in AXES if axis.goes_with),
)
_SHARDS = (
    # a copy may inherit a stage of training, which has no effect without an optimizer
    Rule(
        "zero",
        {"zero": listed_by("engine.zero")},
        when={"zero": but(), **_LEADS},
        reason="engine {engine} has no stage {zero}",
    ),
    Rule(
        "zero",
        {"zero": _OF_16_BITS},
        when={"zero": but(), "dtype": but("float32"), **_TRAINED},
        reason="{zero} in {dtype} has no float32 gradients in {engine}",
        also={"dtype": ("float32",)},
    ),
    Rule("shard", {"engine.node": YES}, reason="engine {engine} shards over all ranks of a model, found {shard}"),
    Rule("shard", {"zero": (2, 3)}, when=_LEADS),
)
_ROUTERS = (
    Rule("router_replay", {"engine.routers": YES}, reason="engine {engine} records no experts, found {found}"),
    Rule("router_replay", {"compile": NO}),
    *(
        rule
        for name in ModelSpec.OF_ROUTERS
        for rule in (
            Rule(
                name,
                _MODULES,
                when=_TRAINED,
                reason="engine {engine} does not count tokens of experts, found {found}",
            ),
            Rule(name, {"compile": NO}, when=_TRAINED),
        )
    ),
)
_OFFLOADS = (
    Rule("offload_optimizer", {"engine.offload": YES}),
    Rule("offload_parameters", {"engine.offload": YES}),
    Rule("offload_activations", _MODULES),
    Rule(
        "offload_activations",
        {"activation_checkpointing": YES},
        when=_TRAINED,
        reason="offloads the inputs of checkpointed layers, found true without activation_checkpointing",
    ),
    Rule("offload_optimizer", {"zero": (1, 2, 3)}),
    Rule("offload_parameters", {"zero": (3,)}),
)
_OF_TRAINING = {
    **dict.fromkeys(("optimizer", "offload_optimizer"), f"{_NOT_TRAINED}, so it has no optimizer"),
    **dict.fromkeys(("activation_checkpointing", "offload_activations", *ModelSpec.OF_ROUTERS), _NOT_TRAINED),
    "shadow": f"{_NOT_TRAINED}, so it has no shadow",
    "lora": f"{_NOT_TRAINED}, so its adapters have no effect",
}
"""Settings of a model that is trained → why another one cannot have them."""
_ROLES = (Rule(name, _TRAINED, when=_LEADS, reason=reason, words="remove it") for name, reason in _OF_TRAINING.items())
_COMPUTATION = (
    Rule(
        "attention",
        {"dtype": SIXTEEN_BITS},
        when={"attention": ("flash_attention_2",)},
        reason="flash_attention_2 computes in 16 bits, found dtype {dtype}",
        instead=("sdpa",),
    ),
    Rule("config", {"engine.config": YES}, reason="engine {engine} has no settings of its own"),
    Rule(
        "dtype",
        {"engine.float16": YES},
        when={"dtype": ("float16",)},
        reason="{engine} computes in bfloat16 and float32 here, found float16",
        instead=("bfloat16",),
    ),
    Rule(
        "attention",
        _MODULES,
        when={"attention": but("auto", "sdpa")},
        reason="engine {engine} has attention of its own, found {found}",
    ),
    *(Rule(name, _MODULES) for name in ("liger", "tiled_mlp", "compile")),
    Rule("compile", {"tiled_mlp": NO}, reason="a layer with tiled_mlp is not compiled, found both"),
    Rule(
        "zero",
        {"optimizer.name": listed_by("engine.sharded_optimizers")},
        when={"engine.sharded_optimizers": but(()), **_TRAINED},
        reason="{zero} of engine {engine} has no {optimizer.name}",
    ),
    Rule(
        "engine",
        {"engine.both_heads": YES},
        when={"engine": but(), "role.head": ("both",)},
        reason="{engine} puts one head on a trunk, and {role.name} has policy and values on one",
        further=("a separate critic",),
    ),
)
_CHILD = Rule("rollout.process", dict.fromkeys(RolloutSpec.AXES, (1,)))

ENGINE_RULES = RuleTable(ModelView, (*_SHARDS, *_DEGREES, *_ROUTERS, *_OFFLOADS, *_ROLES, *_COMPUTATION, _CHILD))
"""Rules of one placed model that its engine, role and settings decide."""
