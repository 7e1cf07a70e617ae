"""Families of models that cannot serve as a policy or as a model of scores here, by their ``model_type``.

A policy reads a text from left to right and decodes with a cache of keys and values; scores come from a scalar head at
every token. Which families decode as they compute log-probs was measured on small models of each.
"""

from __future__ import annotations

from typing import Any

from flexrlhf.config.spec import Head
from flexrlhf.errors import UserError

_ENCODER_DECODERS = """
bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100 marian mbart mt5 mvp nllb-moe
pegasus pegasus_x plbart prophetnet switch_transformers t5 t5gemma t5gemma2 umt5 xlm-prophetnet
"""
_ENCODERS = """
albert bert bert-generation big_bird camembert canine convbert data2vec-text deberta deberta-v2 distilbert electra ernie
esm eurobert flaubert fnet funnel ibert longformer luke megatron-bert mobilebert modernbert mpnet mra nystromformer
rembert roberta roberta-prelayernorm roc_bert roformer squeezebert xlm xlm-roberta xlm-roberta-xl xlnet xmod yoso
"""
# their state is not in the cache that decoding keeps; hybrids such as jamba and bamba store theirs there
_RECURRENT = "falcon_mamba mamba mamba2 minimax recurrent_gemma rwkv xlstm"
# padding changes what they compute
_UNMASKED = "rwkv"


def check_family(role: str, config: dict[str, Any], head: Head, is_sampled: bool) -> None:
    """Raise UserError for a family that cannot serve as ``role``.

    ``is_sampled``: whether it is a policy whose sampled log-probs have to be those that it is trained with.
    """
    kind = str(config["model_type"])
    if kind in _ENCODER_DECODERS.split() or config.get("is_encoder_decoder"):
        raise UserError(f"models.{role}: {kind} is an encoder-decoder; use a decoder, such as llama")
    if kind in _ENCODERS.split() and not config.get("is_decoder"):
        purpose = "of scores at every token" if head == "scalar" else "that writes from left to right"
        raise UserError(f"models.{role}: {kind} reads in both directions; use a model {purpose}, such as llama")
    if kind in _UNMASKED.split():
        raise UserError(f"models.{role}: {kind} reads padding as text; use a model with attention, such as llama")
    if kind in _RECURRENT.split() and is_sampled:
        raise UserError(
            f"models.{role}: {kind} has a recurrent state, which decoding here does not keep, so it would sample from "
            f"another distribution than it is trained on; use a model with attention, such as llama, or "
            f"guards.sampled_logprobs: warn"
        )
