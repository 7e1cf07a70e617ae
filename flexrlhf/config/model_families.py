"""Families of decoders (``model_type`` of a Hugging Face config): one description of each, read without torch.

Sizes, parameters, files, attention, experts and the engines that compute a family follow from it. Other families may be
trained as transformers loads them; some cannot serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Attention = Literal["llama", "latent", "sinks"]
"""Built as Llama's; keys and values made from a latent; heads with a sink, a logit next to those of keys."""
HeadNorms = Literal["", "each head", "all heads", "use_qk_norm"]
"""Norms of queries and keys: none, of each head, one over all heads, or of each head where the setting has them."""
GROUPS = ("n_group", "topk_group")
"""Settings with the groups of experts of a layer, and how many of them a token's experts are in."""
LATENT_SIZES: Mapping[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
"""Sizes of latent attention, with transformers' defaults."""


@dataclass(frozen=True)
class ExpertLayout:
    """Experts of a family.

    number:       setting with the number of routed experts.
    other:        second name of it that transformers reads; empty: none.
    ffn:          setting with the inner size of one.
    matrices:     names of gate, up and down of one expert in files.
    block:        name of an MLP in files, of which transformers' modules have ``mlp``.
    in_files:     whether files have a tensor for each expert and matrix; else the tensors of transformers' modules.
    router_bias:  whether they are chosen by the sigmoid of logits plus a bias, which may balance them.
    gates_shared: whether a gate weights the output of the shared expert.
    float32_sum:  whether outputs are weighted in float32.
    splits:       whether tensor-parallel ranks of torch may share them.
    """

    number: str
    other: str = ""
    ffn: str = "moe_intermediate_size"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    block: str = "mlp"
    in_files: bool = True
    router_bias: bool = False
    gates_shared: bool = False
    float32_sum: bool = False
    splits: bool = False


@dataclass(frozen=True)
class ModelFamily:
    """A family whose parameters follow from its sizes.

    sizes:        transformers' defaults for what a config leaves out, other than Llama's.
    attention:    how it is built.
    experts:      None: it has none.
    window:       tokens of sliding attention where a config leaves it out; None: it has none.
    has_switch:   whether there is a window only where ``use_sliding_window`` is set.
    bias:         setting by which attention has biases; empty: none changes it.
    is_biased:    whether it has them where the setting is left out, or there is none.
    output_bias:  whether the output of attention has one then, too.
    mlp_bias:     whether MLPs have biases where ``mlp_bias`` is set.
    even_heads:   whether the hidden size is a multiple of the number of heads.
    head_norms:   norms of queries and keys.
    served:       whether its tensors are mapped to the ones in files and in a rollout engine.
    staged:       whether Megatron-Core's stages compute it.
    """

    sizes: Mapping[str, Any] = field(default_factory=dict)
    attention: Attention = "llama"
    experts: ExpertLayout | None = None
    window: int | None = None
    has_switch: bool = False
    bias: str = ""
    is_biased: bool = False
    output_bias: bool = True
    mlp_bias: bool = False
    even_heads: bool = False
    head_norms: HeadNorms = ""
    served: bool = True
    staged: bool = False

    @classmethod
    def of(cls, model_type: str) -> ModelFamily:
        """Return the family of that name; of an unknown one, a family without properties."""
        return FAMILIES.get(model_type) or cls(served=False)

    @property
    def is_llama_like(self) -> bool:
        """Whether it is built as Llama is, without experts."""
        return self.attention == "llama" and self.experts is None


_QWEN: dict[str, Any] = {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_QWEN_EXPERTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
FAMILIES: Mapping[str, ModelFamily] = {
    "llama": ModelFamily(bias="attention_bias", mlp_bias=True, even_heads=True, staged=True),
    "mistral": ModelFamily({"intermediate_size": 14336, "num_key_value_heads": 8}, window=4096, staged=True),
    "qwen2": ModelFamily(_QWEN, window=4096, has_switch=True, is_biased=True, output_bias=False, staged=True),
    "qwen3": ModelFamily(
        {**_QWEN, "head_dim": 128},
        window=4096,
        has_switch=True,
        bias="attention_bias",
        head_norms="each head",
        staged=True,
    ),
    "mixtral": ModelFamily(
        {"intermediate_size": 14336, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        experts=ExpertLayout(
            *("num_local_experts", "num_experts", "intermediate_size", ("w1", "w3", "w2"), "block_sparse_moe"),
            float32_sum=True,
            splits=True,
        ),
        staged=True,
    ),
    "qwen2_moe": ModelFamily(
        _QWEN_EXPERTS
        | {"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16}
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
        | {"num_experts": 60, "num_experts_per_tok": 4},
        experts=ExpertLayout("num_experts", gates_shared=True, splits=True),
        window=4096,
        has_switch=True,
        bias="qkv_bias",
        is_biased=True,
        output_bias=False,
    ),
    "qwen3_moe": ModelFamily(
        _QWEN_EXPERTS
        | {"intermediate_size": 6144, "num_key_value_heads": 4, "moe_intermediate_size": 768}
        | {"num_experts": 128, "num_experts_per_tok": 8},
        experts=ExpertLayout("num_experts", "num_local_experts", splits=True),
        window=4096,
        has_switch=True,
        bias="attention_bias",
        head_norms="each head",
        staged=True,
    ),
    "olmoe": ModelFamily(
        {"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16}
        | {"num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8},
        experts=ExpertLayout("num_experts", "num_local_experts", "intermediate_size"),
        bias="attention_bias",
        head_norms="all heads",
    ),
    "glm4_moe": ModelFamily(
        {"vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96}
        | {"num_key_value_heads": 8, "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1}
        | {"num_experts_per_tok": 8, "first_k_dense_replace": 1, **dict.fromkeys(GROUPS, 1)},
        experts=ExpertLayout("n_routed_experts", "num_local_experts", router_bias=True),
        bias="attention_bias",
        output_bias=False,
        head_norms="use_qk_norm",
        served=False,
    ),
    "deepseek_v2": ModelFamily(
        {**LATENT_SIZES, "vocab_size": 102400, "moe_intermediate_size": 1407, "n_routed_experts": 64}
        | {"n_shared_experts": 2, "first_k_dense_replace": 0},
        "latent",
        ExpertLayout("n_routed_experts", "num_experts"),
        mlp_bias=True,
        even_heads=True,
        served=False,
    ),
    "deepseek_v3": ModelFamily(
        {**LATENT_SIZES, "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432}
        | {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128}
        | {"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}
        | {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
        "latent",
        ExpertLayout("n_routed_experts", "num_local_experts", router_bias=True),
        served=False,
    ),
    "gpt_oss": ModelFamily(
        {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True}
        | {"num_local_experts": 128, "num_experts_per_tok": 4},
        "sinks",
        ExpertLayout("num_local_experts", "num_experts", "intermediate_size", in_files=False),
        window=128,
        bias="attention_bias",
    ),
}
"""By ``model_type``; attention as Llama's first, dense families before others."""


class Families:
    """Names of families by what they have in common."""

    LLAMA_LIKE: ClassVar = tuple(name for name, each in FAMILIES.items() if each.is_llama_like)
    """Dense families that are built as Llama is."""
    WITH_EXPERTS: ClassVar = tuple(
        name for name, each in FAMILIES.items() if each.attention == "llama" and each.experts is not None
    )
    """Families with experts whose attention is built as Llama's is."""
    SERVED: ClassVar = tuple(name for name, each in FAMILIES.items() if each.served)
    """Families whose tensors are mapped to the ones in files and in a rollout engine."""
    STAGED: ClassVar = tuple(name for name, each in FAMILIES.items() if each.staged)
    """Families that Megatron-Core's stages compute."""
    SIGMOID_ROUTED: ClassVar = tuple(
        name for name, each in FAMILIES.items() if each.experts is not None and each.experts.router_bias
    )
    """Families whose experts are chosen by the sigmoid of logits plus a bias, which may balance them."""
    WITH_SPLIT_EXPERTS: ClassVar = tuple(
        name for name, each in FAMILIES.items() if each.experts is not None and each.experts.splits
    )
    """Families with experts that tensor-parallel ranks of torch share; OLMoE has norms over all heads."""
    LATENT: ClassVar = tuple(name for name, each in FAMILIES.items() if each.attention == "latent")
    """Families with experts whose keys and values are made from a latent (multi-head latent attention)."""
    WITH_SINKS: ClassVar = tuple(name for name, each in FAMILIES.items() if each.attention == "sinks")
    """Families with experts whose heads have a sink, which takes a part of the attention."""
    KNOWN: ClassVar = tuple(FAMILIES)
    """Families whose parameters follow from their sizes."""


# which families decode as they compute log-probs was measured on small models of each
ENCODER_DECODERS = """
bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100 marian mbart mt5 mvp nllb-moe
pegasus pegasus_x plbart prophetnet switch_transformers t5 t5gemma t5gemma2 umt5 xlm-prophetnet
"""
ENCODERS = """
albert bert bert-generation big_bird camembert canine convbert data2vec-text deberta deberta-v2 distilbert electra ernie
esm eurobert flaubert fnet funnel ibert longformer luke megatron-bert mobilebert modernbert mpnet mra nystromformer
rembert roberta roberta-prelayernorm roc_bert roformer squeezebert xlm xlm-roberta xlm-roberta-xl xlnet xmod yoso
"""
# their state is not in the cache that decoding keeps; hybrids such as jamba and bamba store theirs there
RECURRENT = "falcon_mamba mamba mamba2 minimax recurrent_gemma rwkv xlstm"
# padding changes what they compute
UNMASKED = "rwkv"
WITHOUT_EXPERTS = ("granitemoe", "granitemoehybrid", "granitemoeshared")
"""Families with experts that may have none."""
EXPERT_NUMBERS = tuple(dict.fromkeys(each.experts.number for each in FAMILIES.values() if each.experts is not None))
"""Settings with the number of routed experts."""
