"""Pipeline stage of a decoder on this rank, with the heads of the last stage, and its parameters under their names.

Megatron's own attention assumes one sequence a row, with positions from 0. Here it takes the sequences of a pass, and
each part of a fused projection is contiguous, so that a parameter under its Hugging Face name is rows of the fused
weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from flexrlhf.api import Head, LoraSpec, ParameterName, Sizes
from flexrlhf.api.engine import LanguageHead, SharedAttention
from flexrlhf.engines.megatron.adapters import Adapter
from flexrlhf.engines.megatron.experts import RoutedExperts


@dataclass(frozen=True)
class StageShape:
    """Shape of a model's stages.

    sizes:           of the whole model.
    head:            of its last stage.
    is_tied:         whether the embedding is also the language head.
    padding_token:   whose embedding is not trained, as in transformers; None: all are.
    chunk_elements:  logits that exist at a time.
    blocks:          transformers' blocks of the layers with experts, by number.
    float32_routers: whether their routers compute in float32.
    """

    sizes: Sizes
    head: Head
    is_tied: bool
    padding_token: int | None
    chunk_elements: int
    blocks: Mapping[int, nn.Module]
    float32_routers: bool


class Stage(GPTModel):
    """Consecutive layers of a decoder; the first stage has the embedding, the last one the final norm and the head.

    frequencies:  of rotary embeddings, (head size / 2,).
    """

    frequencies: Tensor

    def __init__(
        self, config: TransformerConfig, shape: StageShape, frequencies: Tensor, groups: ProcessGroupCollection
    ) -> None:
        number, count = groups.pp.rank(), groups.pp.size()
        layers = config.num_layers // count
        super().__init__(
            config,
            layers_spec(config, range(number * layers, (number + 1) * layers), shape.blocks),
            vocab_size=shape.sizes.vocabulary,
            max_sequence_length=1,  # of learned positions, which there are none of
            pre_process=number == 0,
            post_process=number == count - 1,
            share_embeddings_and_output_weights=shape.is_tied,
            position_embedding_type="none",
            pg_collection=groups,
        )
        for layer in self.decoder.layers:
            if block := shape.blocks.get(layer.layer_number - 1):
                layer.mlp = RoutedExperts(block, self.tp_group, config.params_dtype, shape.float32_routers)
        self.register_buffer("frequencies", frequencies.float(), persistent=False)
        self.head: LanguageHead | None = None
        self._padding_token = shape.padding_token
        if self.post_process:
            self.output_layer = self._head(shape)

    def _head(self, shape: StageShape) -> nn.Module:
        """Return the module that replaces Megatron's projection to logits, of which log-probs need a part at a time."""
        if shape.head == "scalar":
            options = {"device": torch.cuda.current_device(), "dtype": self.config.params_dtype}
            return nn.Linear(self.config.hidden_size, 1, bias=False, **options)
        weight: Any = self.shared_embedding_or_output_weight() if shape.is_tied else self.output_layer.weight
        self.head = LanguageHead(weight, shape.chunk_elements, self.tp_group if self.tp_group.size() > 1 else None)
        return self.head

    def forward(self, tokens: Tensor, positions: Tensor, attended: SharedAttention) -> Tensor:
        """Return what the stage computes of sequences: on the last one the head's output, float32.

        tokens:     int64 (m, W), of which context-parallel ranks have a part each; under sequence parallelism W is a
                    multiple of the tensor-parallel ranks.
        positions:  int64 (m, W).
        attended:   the tokens that attend to each other.
        """
        # the one argument that Megatron passes to the attention of each layer as it is, also when it computes it again
        output: Tensor = super().forward(tokens, positions, None, extra_block_kwargs={"attention_bias": attended})
        return output

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> tuple[Any, ...]:
        """Return the embedded tokens (W, m, hidden), on the first stage, and the angles of rotary embeddings."""
        embedded = self._embedded(input_ids) if self.pre_process else None
        return embedded, self._angles(position_ids), None, None, None, None

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Return the embedding (W, m, hidden) of ``tokens``; under sequence parallelism this rank's part of W."""
        embedded: Tensor = self.embedding(tokens, None)
        if self.config.recompute_granularity and not embedded.requires_grad and torch.is_grad_enabled():
            # recomputing gives no gradients to adapters behind a frozen embedding
            return embedded.requires_grad_()
        if self._padding_token is not None and embedded.requires_grad:
            is_padding = (tokens == self._padding_token).t()[..., None]
            if self.config.sequence_parallel:
                is_padding = is_padding.chunk(self.tp_group.size())[self.tp_group.rank()]
            embedded.register_hook(lambda gradient: gradient.masked_fill(is_padding, 0))
        return embedded

    def _angles(self, positions: Tensor) -> Tensor:
        """Return the angle of each pair of features at each position: float32 (W, m, 1, head size)."""
        half = positions.t()[:, :, None, None].float() * self.frequencies
        return torch.cat([half, half], -1)

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Return the hidden states (W, m, hidden) for the next stage; of the last one the output of the head."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # each rank computes the head's gradient of all positions
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.tp_group
            )
        output: Tensor = self.output_layer(hidden_states.transpose(0, 1))
        return output if self.head is not None else output.squeeze(-1).float()


class RmsNorm(nn.RMSNorm):
    """Root-mean-square norm whose gradient Megatron sums over tensor-parallel ranks under sequence parallelism."""

    weight: Any

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class SequencesAttention(nn.Module):
    """Attention of grouped queries within the sequences of a pass."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: None, *, attention_bias: SharedAttention, **_: Any
    ) -> Tensor:
        """Return (W, m, heads x head size) of queries, keys and values (W, m, heads, head size)."""
        states = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        return attention_bias.attend(states[0], states[1], states[2], None).transpose(0, 1).flatten(2)


class ContiguousAttention(SelfAttention):
    """Self-attention whose fused projection has all queries of a rank first, then its keys, then its values.

    Megatron interleaves them by group, and a part would be no view that can be written to.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (W, m, heads, head size)."""
        fused, _bias = self.linear_qkv(hidden_states)
        heads = self.num_attention_heads_per_partition, *[self.num_query_groups_per_partition] * 2
        size = self.hidden_size_per_attention_head
        parts = fused.split([count * size for count in heads], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, size)) for part in parts)
        return self.q_layernorm(query), self.k_layernorm(key), value


def layers_spec(config: TransformerConfig, layers: range, without: Collection[int]) -> TransformerBlockSubmodules:
    """Return the modules of ``layers`` and the norm behind the last. ``without``: those that get another MLP."""
    of_heads = RmsNorm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=SequencesAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=of_heads,
        k_layernorm=of_heads,
    )
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    layer = TransformerLayerSubmodules(
        input_layernorm=RmsNorm,
        self_attention=ModuleSpec(ContiguousAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RmsNorm,
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
    )
    bare = replace(layer, mlp=IdentityOp)
    each = [ModuleSpec(TransformerLayer, submodules=bare if number in without else layer) for number in layers]
    return TransformerBlockSubmodules(each, RmsNorm)


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


def rows_by_name(stage: Stage) -> Named:
    """Return the parameters of ``stage`` by their Hugging Face names."""
    named: Named = {}
    if stage.pre_process:
        named[f"{PREFIX}{ParameterName.EMBEDDING}"] = _all(stage.embedding.word_embeddings.weight)
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
        return {} if stage.pre_process else {f"{PREFIX}{ParameterName.EMBEDDING}": _all(weight)}
    return {ParameterName.LANGUAGE_HEAD: _all(weight)}


def _of_layer(layer: TransformerLayer) -> Iterator[tuple[str, Rows]]:
    attention = layer.self_attention
    yield "input_layernorm.weight", _all(layer.input_layernorm.weight)
    yield "post_attention_layernorm.weight", _all(layer.pre_mlp_layernorm.weight)
    for name in ("q", "k"):
        norm = getattr(attention, f"{name}_layernorm")
        if isinstance(norm, nn.RMSNorm):
            yield f"self_attn.{name}_norm.weight", _all(norm.weight)
    for prefix, linear, outputs in _linears(layer):
        yield from _split(prefix, linear, outputs)
    if isinstance(layer.mlp, RoutedExperts):
        for name, parameter in layer.mlp.block.named_parameters():
            yield f"mlp.{name}", _all(parameter)


def _linears(layer: TransformerLayer) -> Iterator[tuple[str, nn.Module, dict[str, int]]]:
    """Yield the linear layers of a layer: where their parts are, and the outputs of each part, in order."""
    attention, mlp = layer.self_attention, layer.mlp
    size = attention.hidden_size_per_attention_head
    keys = attention.num_query_groups_per_partition * size
    queries = attention.num_attention_heads_per_partition * size
    yield "self_attn", attention.linear_qkv, {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    yield "self_attn", attention.linear_proj, {"o_proj": len(attention.linear_proj.weight)}
    if isinstance(mlp, RoutedExperts):
        return
    features = len(mlp.linear_fc1.weight) // 2
    yield "mlp", mlp.linear_fc1, {"gate_proj": features, "up_proj": features}
    yield "mlp", mlp.linear_fc2, {"down_proj": len(mlp.linear_fc2.weight)}


def add_adapters(stage: Stage, lora: LoraSpec, keeps_start: bool) -> None:
    """Add adapters, which alone are trained, with the scalar head; their values are not read yet."""
    stage.requires_grad_(False)
    for layer in stage.decoder.layers:
        for _, linear, outputs in _linears(layer):
            if lora.targets is None or not outputs.keys().isdisjoint(lora.targets):
                Adapter(linear, outputs, lora, stage.tp_group, stage.config.sequence_parallel, keeps_start)
    if stage.post_process and stage.head is None:
        stage.output_layer.requires_grad_(True)


def _split(prefix: str, linear: nn.Module, outputs: dict[str, int]) -> Iterator[tuple[str, Rows]]:
    """Yield the parts of a linear layer, of which ``outputs`` has the rows in order, and their adapters."""
    adapter: Adapter | None = getattr(linear, "adapter", None)
    targets = () if adapter is None else adapter.targets
    for kind in ("weight", "bias"):
        for name, rows in _ranges(outputs) if (parameter := getattr(linear, kind)) is not None else ():
            yield f"{prefix}.{name}{ParameterName.BASE if name in targets else '.'}{kind}", Rows(parameter, rows)
    if adapter is not None:
        rows_of_a, rows_of_b = dict.fromkeys(targets, adapter.rank), {name: outputs[name] for name in targets}
        pairs = {ParameterName.ADAPTER: (adapter.a, adapter.b)}
        if len(adapter.start):
            pairs[ParameterName.START] = tuple(adapter.start)
        for which, (a, b) in pairs.items():
            for name, rows in _ranges(rows_of_a):
                yield f"{prefix}.{name}.lora_A.{which}.weight", Rows(a, rows)
            for name, rows in _ranges(rows_of_b):
                yield f"{prefix}.{name}.lora_B.{which}.weight", Rows(b, rows)


def _ranges(counts: Mapping[str, int]) -> Iterator[tuple[str, range]]:
    """Yield ranges of so many rows, one behind the other."""
    ends = accumulate(counts.values())
    return ((name, range(end - count, end)) for (name, count), end in zip(counts.items(), ends, strict=True))


def _all(parameter: nn.Parameter) -> Rows:
    return Rows(parameter, range(len(parameter)))
