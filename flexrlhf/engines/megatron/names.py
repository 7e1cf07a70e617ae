"""Parameters of a stage under Hugging Face names: rows of Megatron's tensors, as live views."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from flexrlhf.engines.megatron.stage import Stage
from flexrlhf.weights.shapes import LANGUAGE_HEAD
from flexrlhf.weights.shards import EMBEDDING

SCORE = "score.weight"
PREFIX = "model"


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a parameter, which are one parameter under a name of its own."""

    parameter: nn.Parameter
    rows: range

    @property
    def live(self) -> Tensor:
        """The rows, in the memory of the parameter."""
        return self.parameter.detach()[self.rows.start : self.rows.stop]

    @property
    def flat(self) -> range:
        """Range of the rows in the flattened parameter."""
        size = self.parameter.numel() // len(self.parameter)
        return range(self.rows.start * size, self.rows.stop * size)


Named = dict[str, Rows]


def named_rows(stage: Stage) -> Named:
    """Return the parameters of ``stage`` by their Hugging Face names."""
    named: Named = {}
    if stage.pre_process:
        named[f"{PREFIX}{EMBEDDING}"] = _all(stage.embedding.word_embeddings.weight)
    for layer in stage.decoder.layers:
        prefix = f"{PREFIX}.layers.{layer.layer_number - 1}"
        named |= {f"{prefix}.{name}": rows for name, rows in _of_layer(layer)}
    if stage.post_process:
        named[f"{PREFIX}.norm.weight"] = _all(stage.decoder.final_layernorm.weight)
        named |= _of_head(stage)
    return named


def _of_head(stage: Stage) -> Named:
    """Return the head's parameter; where it is tied, the embedding, which the last of several stages has a copy of."""
    weight: Any = stage.output_layer.weight
    if stage.head is None:
        return {SCORE: _all(weight)}
    if stage.share_embeddings_and_output_weights:
        return {} if stage.pre_process else {f"{PREFIX}{EMBEDDING}": _all(weight)}
    return {LANGUAGE_HEAD: _all(weight)}


def _of_layer(layer: TransformerLayer) -> Iterator[tuple[str, Rows]]:
    attention, mlp = layer.self_attention, layer.mlp
    yield "input_layernorm.weight", _all(layer.input_layernorm.weight)
    yield "post_attention_layernorm.weight", _all(layer.pre_mlp_layernorm.weight)
    size = attention.hidden_size_per_attention_head
    keys = attention.num_query_groups_per_partition * size
    counts = {"q_proj": attention.num_attention_heads_per_partition * size, "k_proj": keys, "v_proj": keys}
    yield from _split("self_attn", attention.linear_qkv, counts)
    yield "self_attn.o_proj.weight", _all(attention.linear_proj.weight)
    for name in ("q", "k"):
        norm = getattr(attention, f"{name}_layernorm")
        if isinstance(norm, nn.RMSNorm):
            yield f"self_attn.{name}_norm.weight", _all(norm.weight)
    features = len(mlp.linear_fc1.weight) // 2
    yield from _split("mlp", mlp.linear_fc1, {"gate_proj": features, "up_proj": features})
    yield "mlp.down_proj.weight", _all(mlp.linear_fc2.weight)


def _split(prefix: str, linear: nn.Module, counts: dict[str, int]) -> Iterator[tuple[str, Rows]]:
    """Yield the parts of a fused projection, of which ``counts`` has the rows in order."""
    for kind in ("weight", "bias"):
        parameter, start = getattr(linear, kind), 0
        for name, count in counts.items() if parameter is not None else ():
            yield f"{prefix}.{name}.{kind}", Rows(parameter, range(start, start + count))
            start += count


def _all(parameter: nn.Parameter) -> Rows:
    return Rows(parameter, range(len(parameter)))
