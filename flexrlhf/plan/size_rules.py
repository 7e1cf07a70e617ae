"""Rules of placed models that sizes, families and devices decide: which settings go with which of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flexrlhf.config.axes import AXES
from flexrlhf.config.model_families import Families
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.rules import NO, YES, Rule, RuleTable, but, listed_by, made_by, with_item
from flexrlhf.memory.packed_rows import TextPacking
from flexrlhf.plan.engine_rules import ENGINE_RULES
from flexrlhf.plan.model_view import PlacedView, SizedView
from flexrlhf.plan.size_facts import KEY_HEADS

HOST_ROPES = ("dynamic", "longrope")
"""Rotary embeddings for which transformers reads the longest position on the host in each pass."""
ON_GPUS = ("flash_attention_2", "flex_attention")
"""Kernels of attention that have a backward pass on GPUs alone."""


def parts(size: int, tp: int = 1) -> list[int]:
    """Return the numbers of ranks, on each of ``tp`` tensor-parallel ones, that have equal parts of ``size`` things."""
    return [number for number in range(1, size + 1) if size % (number * tp) == 0] or [1]


def shares(size: int, tp: int) -> list[int]:
    """Return the numbers of several ranks that have equal parts."""
    return parts(size, tp)[1:]


def head_parts(split: Mapping[str, int], copies_keys: bool) -> list[int]:
    """Return the numbers of ranks with equal parts of all that is ``split``, or each with a copy of a key-value head.

    ``copies_keys``: whether ranks may have such copies.
    """

    def is_even(tp: int) -> bool:
        copies = copies_keys and tp % split[KEY_HEADS] == 0
        return not any(size % tp for name, size in split.items() if not (copies and name == KEY_HEADS))

    return [tp for tp in range(1, split["heads"] + 1) if is_even(tp)] or [1]


def even_parts(split: Mapping[str, int], copies_keys: bool, vocabulary: int) -> list[int]:
    """Return the numbers of ranks with equal parts of heads, features and the vocabulary."""
    return [tp for tp in head_parts(split, copies_keys) if vocabulary % tp == 0]


def stages_with_experts(layers: int, mixed: Iterable[int]) -> list[int]:
    """Return the numbers of stages each of which has one of the ``mixed`` layers, those with experts."""
    each = [pp for pp in range(1, layers + 1) if len({layer * pp // layers for layer in mixed}) == pp]
    return each or [1]


_EXPERTS, _OWN = {"sizes.have_experts": YES}, {"role.is_rollout": NO}
_SERVED = {"role.is_rollout": YES, "engine.transformers_modules": NO}
_MAPPED = {"role.is_rollout": NO, "engine.transformers_modules": NO}
_ELSEWHERE = "place {role.placed} on another class with `on:`"
_LLAMA_LIKE = ", ".join(Families.LLAMA_LIKE)
_ATTENTION_FAMILIES = Families.LLAMA_LIKE + Families.WITH_EXPERTS

_DEVICES = (
    Rule(
        "engine",
        {"devices.without_engine": ("",)},
        when={"engine": but(), "engine.least_capability": but(0), "run.on_gpus": YES},
        reason="{devices.without_engine} has no {engine}, which needs compute capability {facts.least_capability}",
        instead=("transformers",),
        further=(_ELSEWHERE,),
    ),
    Rule(
        "attention",
        {"devices.without_flash": ("",)},
        when={"attention": ("flash_attention_2",), "engine.transformers_modules": YES, "run.on_gpus": YES},
        reason="{devices.without_flash} has no {attention}, which needs compute capability 8.0",
        instead=("sdpa",),
        further=(_ELSEWHERE,),
    ),
    Rule(
        "dtype",
        {"devices.without_bfloat16": ("",)},
        when={"dtype": ("bfloat16",)},
        reason="{devices.without_bfloat16} has no bfloat16",
        instead=("float16", "float32"),
        further=("there alone with models.{role.name}.fallback_dtype", _ELSEWHERE),
    ),
)
_ROLLOUT = (
    Rule(
        "engine",
        {"decoder.family": Families.SERVED + Families.LATENT},
        when={"engine": but(), **_SERVED},
        reason=f"{{engine}} supports only {', '.join(Families.SERVED)} models here, and models.{{role.name}} is of "
        "another family",
        instead=("transformers",),
    ),
    Rule(
        "rollout.adapters",
        {"sizes.have_experts": NO},
        when=_SERVED,
        reason="separate is for models without experts, and models.{role.name} has {sizes.experts}",
    ),
    Rule(
        "engine",
        {"sizes.unserved": ("",)},
        when={"engine": but(), **_SERVED},
        reason="{engine} computes gpt_oss models with {sizes.unserved}",
        instead=("transformers",),
    ),
    Rule(
        "pp",
        {"pp": made_by(stages_with_experts, "decoder.layers", "sizes.mixed_layers")},
        when={**_SERVED, **_EXPERTS},
        reason="{engine} needs a layer with experts in each stage, and of {pp} stages of models.{role.name} only "
        "{sizes.mixed_stages} would have one",
    ),
)
_FAMILIES = (
    Rule(
        "attention",
        {"decoder.family": but(*Families.WITH_SINKS)},
        when={"attention": ("sdpa", "flash_attention_2"), **_OWN},
        reason="{attention} has no sinks, which {decoder.family} models have",
    ),
    *(
        Rule(
            name,
            {"decoder.family": Families.LLAMA_LIKE},
            when=_OWN,
            reason=f"only {_LLAMA_LIKE} models have these {kind} here, found {{decoder.family}}",
        )
        for name, kind in (("liger", "kernels"), ("tiled_mlp", "tiles"))
    ),
    Rule(
        "engine",
        {"decoder.family": Families.STAGED},
        when={"engine": but(), **_MAPPED},
        reason=f"{{engine}} maps {', '.join(Families.STAGED)} models, found {{decoder.family}}",
    ),
    Rule(
        "lora",
        {"sizes.adapted_experts": ("",)},
        when=_MAPPED,
        reason="{engine} has no adapters of experts, found targets {sizes.adapted_experts}",
        words="targets of attention",
    ),
    Rule(
        "engine",
        {"sizes.unmapped": ("",)},
        when={"engine": but(), **_MAPPED},
        reason="{engine} has no {sizes.unmapped}",
    ),
)
_GRAPHS = (
    Rule(
        "cuda_graphs",
        {"engine.plain_modules": YES, "tp": (1,), "role.split": ("whole",)},
        when={"run.generates": YES},
        reason="true is for engine torch with tp 1 and whole weights on each rank, found engine {engine}, tp {tp}, "
        "zero {zero}",
    ),
    Rule(
        "cuda_graphs",
        {"sizes.in_slots": YES},
        reason=f"true is for {', '.join(sorted(TextPacking.FAMILIES))} models with attention auto, sdpa or eager and "
        "no window of less than {sizes.longest} tokens, found another",
    ),
    Rule(
        "cuda_graphs",
        {"sizes.rope": but(*HOST_ROPES)},
        reason="true is for rotary embeddings that do not change with the longest row, found {sizes.rope}",
    ),
)
_ROUTERS = (
    *(
        Rule(name, _EXPERTS, reason="{found} is for models with experts, and models.{role.name} has none")
        for name in ("router_replay", *ModelSpec.OF_ROUTERS)
    ),
    Rule(
        "router_bias_update_rate",
        {"decoder.family": Families.SIGMOID_ROUTED},
        reason=f"{{found}} is for {' or '.join(Families.SIGMOID_ROUTED)} models, whose routers have biases, and "
        "models.{role.name} is of {decoder.family}",
        further=("router_aux_loss_coef",),
    ),
    Rule(
        "router_bias_update_rate",
        {"lora": (None,)},
        reason="{found} goes with lora null, since adapters alone are synced and saved",
    ),
)
_UNKNOWN = (
    Rule(
        name,
        {"sizes.are_known": YES},
        reason="needs parameter shapes before loading, which are unknown for this architecture",
        further=("a path with safetensors weights", f"a model of {_LLAMA_LIKE}"),
    )
    for name in ("zero", *(axis.name for axis in AXES), "lora")
)
_TOKENS_READ = "how many tokens a rank's experts have is read there, so it goes with {other} false, found true"
_SPLITS = (
    Rule(
        "tp",
        {"decoder.family": listed_by("sizes.tensor_families")},
        reason="only {sizes.tensor_families_text} models have a tensor-parallel plan in {engine}",
    ),
    Rule(
        "tp",
        {"tp": made_by(head_parts, "sizes.split", "engine.copies_keys")},
        reason="{tp} does not divide its {sizes.split_text}",
    ),
    Rule(
        "tp",
        {"tp": made_by(even_parts, "sizes.split", "engine.copies_keys", "sizes.vocabulary")},
        when={"engine.vocabulary_multiple": but(0)},
        reason="{tp} does not divide its vocabulary of {sizes.vocabulary}, which is {sizes.padding}",
    ),
    Rule("ep", _EXPERTS, reason="{ep} is for models with experts, and models.{role.name} has none"),
    Rule(
        "ep",
        {"ep": made_by(parts, "sizes.experts", "tp")},
        reason="{ep} does not divide its {sizes.experts} experts{sizes.on_each}",
    ),
    Rule("ep", {"compile": NO, "cuda_graphs": NO}, when=_EXPERTS, reason=_TOKENS_READ),
    Rule(
        "tp", {"compile": NO, "cuda_graphs": NO}, when={"engine.axes": with_item("ep"), **_EXPERTS}, reason=_TOKENS_READ
    ),
    Rule(
        "lora",
        {"compile": NO, "cuda_graphs": NO},
        when={"sizes.adapt_experts": YES},
        reason=_TOKENS_READ,
        words="targets of attention alone",
    ),
    Rule(
        "cp",
        {"decoder.family": _ATTENTION_FAMILIES},
        reason=f"only {', '.join(_ATTENTION_FAMILIES)} models compute parts of a row",
    ),
    Rule(
        "cp",
        {"sizes.slide": NO},
        reason="sliding attention, of {sizes.window} tokens in this model, is not shared by ranks, and texts have up "
        "to {sizes.longest}",
    ),
    Rule(
        "cp",
        {"cp": made_by(shares, "decoder.heads", "tp")},
        when={"context_parallel": ("ulysses",)},
        reason="{cp} does not divide its {sizes.own_heads} heads{sizes.on_each}, which ulysses distributes",
        also={"context_parallel": ("ring",)},
    ),
    Rule("pp", {"pp": made_by(parts, "decoder.layers")}, reason="{pp} does not divide its {decoder.layers} layers"),
)

MODEL_RULES = RuleTable(
    PlacedView,
    (*ENGINE_RULES.rules, *_DEVICES, *_ROLLOUT, *_FAMILIES, *_GRAPHS, *_ROUTERS, *_UNKNOWN, *_SPLITS),
)
"""All rules of one placed model."""
CPU_RULES = RuleTable(
    SizedView,
    (
        Rule(
            "engine",
            {"decoder.head_dim": listed_by("engine.cpu_head_dims")},
            when={"engine": but(), "engine.cpu_head_dims": but(()), "decoder.head_dim": but(0)},
            reason="{engine} on CPU ranks has no attention for head dimension {decoder.head_dim} (models.{role.name})",
            instead=("transformers",),
            further=("a model with head dimension {sizes.cpu_head_dims_text}",),
        ),
        Rule(
            "dtype",
            {"engine.cpu_float16": YES},
            when={"dtype": ("float16",)},
            reason="{engine} has no float16 on CPU ranks",
            instead=("bfloat16", "float32"),
        ),
        Rule(
            "attention",
            {"attention": ("sdpa",)},
            when={"attention": ON_GPUS},
            reason="{attention} runs on GPUs alone, and the ranks are on CPUs",
        ),
        *(
            Rule(name, {name: NO}, reason="true is for GPUs alone, and the ranks are on CPUs")
            for name in ("liger", "compile", "cuda_graphs")
        ),
    ),
)
"""Rules of a placed model on ranks that turn out to be CPUs."""
